"""Native part of kvt_bindings; import kvt_bindings instead."""

from collections.abc import Sequence
from typing import Any


class KvtError(RuntimeError):
    """
    A call into kvt that failed; `code` is one of the stable outcome codes.
    """

    code: int = 14

IPC_BLOCK_BYTES: int = 30

def code_name(code: int) -> str:
    """The name of an outcome code; what names none is INTERNAL."""

class View:
    """What some bytes of a layer mean, by named dimensions."""

    def __init__(self, *, name: str, dtype: str, item_bytes: int, kv: tuple[int, int] = (1, 0), block: tuple[int, int] = (1, 0), token: tuple[int, int] = (1, 0), head: tuple[int, int] = (1, 0), dim: tuple[int, int] = (1, 0), heads_total: int = 1, tensor: int = 0, offset: int = 0, kv_begin: int = 0, granularity: str = 'tokens', cell: str = '') -> None:
        """Axes are (size, stride in bytes); an absent dimension is (1, 0)."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def cell(self) -> str: ...

    @property
    def item_bytes(self) -> int: ...

    @property
    def tensor(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def kv_begin(self) -> int: ...

    @property
    def heads_total(self) -> int: ...

    @property
    def granularity(self) -> str: ...

    @property
    def kv(self) -> tuple[int, int]: ...

    @property
    def block(self) -> tuple[int, int]: ...

    @property
    def token(self) -> tuple[int, int]: ...

    @property
    def head(self) -> tuple[int, int]: ...

    @property
    def dim(self) -> tuple[int, int]: ...

class Layout:
    """How the cache of one instance lies in memory; immutable."""

    def __init__(self, *, model: str, groups: Sequence[int], patterns: Sequence[tuple[Sequence[int], Sequence[View]]], layers: Sequence[tuple[int, int, int, int]], tp_size: int = 1, pp_size: int = 1, scales: str = '') -> None:
        """
        groups: tokens per block of each; patterns: (tensor bytes, views); layers: (layer, group, pattern, stage), ascending. Raises KvtError(BAD_REQUEST) naming the field.
        """

    @staticmethod
    def parse(data: bytes) -> Layout:
        """
        From a peer's bytes: bounded and validated. Raises KvtError(BAD_REQUEST).
        """

    def serialize(self) -> bytes:
        """Canonical bytes: equal layouts, equal bytes."""

    @staticmethod
    def merge_stages(stages: Sequence[Layout]) -> Layout:
        """
        One layout of those of the pipeline stages. Raises KvtError(INCOMPATIBLE).
        """

    @property
    def fingerprint(self) -> int: ...

    @property
    def model(self) -> str: ...

    @property
    def scales(self) -> str: ...

    @property
    def tp_size(self) -> int: ...

    @property
    def pp_size(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def block_tokens(self) -> list[int]: ...

    @property
    def layers(self) -> list[tuple[int, int, int, int]]: ...

    @property
    def patterns(self) -> list[tuple[list[int], list[View]]]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def incompatibilities(source: Layout, target: Layout) -> list[str]:
    """Every reason why they do not fit, each naming both values."""

def check_compatible(source: Layout, target: Layout) -> None:
    """Raises KvtError(INCOMPATIBLE) with all reasons."""

NO_BLOCK: int = 4294967295

class PlanPart:
    """The same runs for each of some layers."""

    @property
    def layers(self) -> list[int]: ...

    @property
    def bytes_per_layer(self) -> int: ...

    @property
    def num_runs(self) -> int: ...

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(src_offset, dst_offset, length) of each"""

    def runs_bytes(self) -> bytes:
        """The same as native-endian u64 triples."""

class PairPlanner:
    """Plans from one layout to another. Any thread."""

    def __init__(self, source: Layout, target: Layout) -> None:
        """Raises KvtError(INCOMPATIBLE)."""

    def sources_of(self, target_rank: int) -> list[int]: ...

    def targets_of(self, source_rank: int) -> list[int]: ...

    def plan(self, source_rank: int, target_rank: int, source_blocks: Sequence[Sequence[int]], target_blocks: Sequence[Sequence[int]], first_token: int, end_token: int, last: bool) -> list[PlanPart]:
        """What moves for tokens [first, end)."""

    def expected(self, source_rank: int, target_rank: int, target_blocks: Sequence[Sequence[int]], first_token: int, end_token: int) -> list[PlanPart]:
        """Where a whole transfer from one source rank lands; src_offset is 0."""

class RankCache:
    """Where one rank's layers lie in this process."""

    def __init__(self, layout: Layout, rank: int, memory: Sequence[tuple[int, Sequence[tuple[int, int]]]], cuda_device: int | None = None) -> None:
        """
        memory: (layer, [(address, bytes) of each tensor]); the caller keeps it alive.
        """

    @property
    def layout(self) -> Layout: ...

    @property
    def rank(self) -> int: ...

    @property
    def cuda_device(self) -> int | None: ...

    def resolve(self, layer: int, offset: int, length: int) -> list[tuple[int, int]]:
        """(address, bytes) of each piece."""

def dlpack_info(array: object) -> tuple[int, list[int], list[int], int, int, int, int]:
    """
    (address, shape, strides in elements, bits, dtype code, device type, device id) of anything that speaks DLPack.
    """

def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC32C of bytes."""

class CompletionSink:
    """Where Sender and Receiver deliver completions."""

class CompletionQueue(CompletionSink):
    """Completions for a loop in this process, with one wake-up descriptor."""

    def __init__(self, max_reserved: int = 65536) -> None: ...

    @property
    def wake_fd(self) -> int:
        """
        Readable while completions wait; for loop.add_reader. Owned by the queue.
        """

    def reserve(self, n: int = 1) -> bool: ...

    def release(self, n: int = 1) -> None: ...

    def push(self, *, is_load: bool, key: bytes, rank: int, other_rank: int, tokens: int, code: int = 0, detail: str = '') -> None:
        """What native threads do; here for tests of consumers."""

    def drain(self, max_items: int = 4096) -> list[tuple[str, bytes, int, int, int, int, str]]:
        """
        A batch, in order: ("send" or "load", key, rank, other rank, tokens, code, detail).
        """

    def close(self) -> None: ...

    def stats(self) -> dict[str, int]: ...

class NewsInbox:
    """News that Python takes itself; see NewsChannel.inbox."""

    @property
    def wake_fd(self) -> int:
        """Readable while items wait."""

    def take(self) -> list[tuple[str, bytes]]:
        """All that waits: (head, packed item), in order."""

class NewsChannel(CompletionSink):
    """
    The worker's end of its channel to the scheduler, on a native thread, without the GIL.
    """

    def __init__(self, *, kind: str = 'worker', rank: int, heartbeat_ms: int = 1000, attributes: bytes = ..., max_slots: int = 65536, link_timeout_ms: int = 3000, ack_timeout_ms: int = 30000) -> None:
        """attributes: a packed msgpack map that LINK carries."""

    def inbox(self, heads: Sequence[str]) -> NewsInbox:
        """Take news of these heads in Python; before start()."""

    def start(self) -> None: ...

    def attach(self, fd: int, peer_incarnation: bytes) -> None:
        """A connection after HELLO; the descriptor is the channel's from now on."""

    def end_peer(self, detail: str) -> None:
        """The scheduler is gone for good: its grants close, its news is dropped."""

    def publish(self, head: str, item: bytes) -> None:
        """One packed item; never blocks."""

    def reserve(self, n: int = 1) -> bool: ...

    def release(self, n: int = 1) -> None: ...

    def flush(self, timeout_ms: int) -> bool:
        """True once all that was published is acknowledged."""

    def stop(self) -> None:
        """FAIL to the scheduler, close, join. Idempotent."""

    @property
    def event_fd(self) -> int:
        """Readable while events wait; owned by the channel."""

    def take_events(self) -> list[tuple[str, bytes, bool, int, int, str]]:
        """
        ("attached" or "detached", peer incarnation, new peer, dropped items, code, detail)
        """

    def stats(self) -> dict[str, bool | bytes | int]: ...

class HostStream:
    """
    A stream of work on the host, for engines that compute on threads of their own: work is announced, and later reported done, in order. Any thread.
    """

    def __init__(self) -> None: ...

    @property
    def handle(self) -> int:
        """For Sender.record_event."""

    def submit(self) -> int:
        """Announces one more piece of work; its number."""

    def complete(self, work: int) -> None:
        """All work up to this number is done and its writes are visible."""

    def fail(self, why: str) -> None:
        """Events recorded after unfinished work fail."""

class Send:
    """Tokens of one request, to the ranks of one receiver."""

    def __init__(self, *, key: bytes, target_instance: str, target_incarnation: bytes, targets: Sequence[tuple[int, bytes, str]], src_blocks: Sequence[Sequence[int]], dst_blocks: Sequence[Sequence[int]], first_token: int, end_token: int, last: bool = True, transfer_end_token: int = 0) -> None:
        """
        targets: (rank, worker incarnation, address of its server). Block lists begin at token 0 of the request, one per group. `last`: the transfer ends with this send. transfer_end_token: the end of the whole transfer if it is known to be later.
        """

    @staticmethod
    def unpack(item: bytes) -> Send:
        """
        From the packed form that SUBS and FRZN carry. Raises KvtError(BAD_REQUEST).
        """

    @property
    def key(self) -> bytes: ...

    @property
    def first_token(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    @property
    def last(self) -> bool: ...

class Sender:
    """
    The sender of one rank: along the engine's steps, or at once, never waiting for a byte. The cache memory must live until close(). `scheduler`: an incarnation; None: the last begun.
    """

    def __init__(self, cache: RankCache, sink: CompletionSink, connections: SendConnections, *, crc: bool = False, whole_s: float = 120.0, early_s: float = 5.0, max_open_steps: int = 64, event_wait: str = 'block', cuda_library: str = '') -> None:
        """
        crc: a CRC32C with every chunk. whole_s: deadline of a transfer. early_s: how long a substep waits for its step while none runs. event_wait: "block" or "query", for CUDA. Raises KvtError if the cache is on a device and the driver cannot be had.
        """

    def begin_scheduler(self, scheduler: bytes) -> None:
        """
        This incarnation speaks from now on; all of the one before ends (ABORTED).
        """

    def end_scheduler(self, scheduler: bytes) -> None:
        """
        That incarnation is gone; nothing happens if it is not the current one.
        """

    def submit_send(self, step: int, send: Send, *, scheduler: bytes | None = None) -> None:
        """A send that rides `step`; before its start_step."""

    def submit_delta(self, step: int, key: bytes, *, src_blocks: Sequence[Sequence[int]], dst_blocks: Sequence[Sequence[int]], first_token: int, end_token: int, last: bool, scheduler: bytes | None = None) -> None:
        """
        More tokens of a transfer that a send opened; the lists hold only what is new.
        """

    def start_step(self, step: int, sched_tokens: int = 0, *, records_per_layer: int = 1, scheduler: bytes | None = None) -> None:
        """Before the forward. Steps ascend; several may be open."""

    def record_event(self, step: int, layer: int, stream: int = 0) -> None:
        """
        After the layer's attention was put on `stream`: a CUDA stream's handle, a HostStream.handle, or 0: the default stream, or work that is done already.
        """

    def freeze_step(self, step: int) -> int:
        """The highest contiguous substep taken, for ever the same."""

    def flush_step(self, step: int) -> None:
        """
        No more records. Waits for no byte; unrecorded layers fail their sends.
        """

    def start_substep(self, step: int, substep: int, sends: Sequence[Send], *, scheduler: bytes | None = None) -> str:
        """
        Any thread. "taken", "kept" (early, or behind a gap), or refused: "late", "duplicate", "stale", "full".
        """

    def send_frozen(self, sends: Sequence[Send], *, scheduler: bytes | None = None) -> None:
        """Complete KV: at once. Any thread."""

    def cancel(self, key: bytes, code: int = 5, detail: str = 'cancelled by the scheduler') -> None:
        """
        Its open targets complete with `code`; one that is not open yet is marked.
        """

    def drop_peer(self, worker_incarnation: bytes, detail: str = 'the peer is gone') -> None:
        """What was on its way to that worker completes with PEER_LOST."""

    def serve(self, channel: NewsChannel) -> None:
        """
        Takes SUBS, FRZN and ABRT from the scheduler natively; before channel.start().
        """

    def snapshot(self) -> dict[str, Any]:
        """What is open and why, and counters."""

    def close(self) -> None:
        """
        Everything open completes with ABORTED; closes the connections, joins. Idempotent.
        """

class DataPeer:
    """Whom a data connection leads to."""

    def __init__(self, *, instance: str, scheduler_incarnation: bytes, worker_incarnation: bytes, rank: int, address: str) -> None: ...

class SendConnections:
    """Where a Sender gets its data connections from."""

class DataClient(SendConnections):
    """
    The sender rank's data connections, dialled on demand: Python serves the dial requests, everything else is native. The cache memory must live until close(). Any thread.
    """

    def __init__(self, cache: RankCache, *, transports: Sequence[str] = ['cma', 'tcp'], connect_timeout_ms: int = 3000, progress_timeout_ms: int = 30000, cuda_library: str = '') -> None:
        """transports: offered; the receiver chooses. One alone is forced."""

    @property
    def dial_fd(self) -> int:
        """
        Readable while dial requests wait; for loop.add_reader. Owned by the client.
        """

    def take_dials(self) -> list[tuple[int, str, bytes, bytes, int, str]]:
        """
        (id, instance, scheduler incarnation, worker incarnation, rank, address): connect, authenticate, call DATA, read GO, then adopt(id, fd); or dial_failed(id, ...).
        """

    def adopt(self, id: int, fd: int) -> None:
        """
        Takes the socket over, whatever happens. Raises NOT_FOUND if the request is over.
        """

    def dial_failed(self, id: int, code: int, detail: str) -> None: ...

    def drop_peer(self, worker_incarnation: bytes, code: int = 9, detail: str = 'the peer is gone') -> None: ...

    def snapshot(self) -> list[dict[str, Any]]: ...

    def close(self) -> None:
        """Ends all connections (ABORTED). Idempotent."""

class DataConnection:
    """A data connection driven by hand: for tests and measurements."""

    def __init__(self, client: DataClient, peer: DataPeer) -> None: ...

    def wait_ready(self, timeout_s: float) -> bool:
        """False after the timeout; raises KvtError if the connection was lost."""

    def wait_lost(self, timeout_s: float) -> tuple[int, str] | None:
        """(code, detail), or None after the timeout."""

    def open(self, key: bytes, *, sender_incarnation: bytes, first_token: int = 0, end_token: int = 0, crc: bool = False) -> int: ...

    def send_runs(self, transfer: int, layers: Sequence[int], *, first_token: int, end_token: int, runs: bytes) -> None:
        """
        runs: (src_offset, dst_offset, length) as native u64, as PlanPart.runs_bytes().
        """

    def end(self, arg: int, /) -> None: ...

    def cancel(self, transfer: int, code: int = 5, detail: str = '') -> None: ...

    def close(self, code: int = 5, detail: str = 'closed') -> None: ...

    def wait_result(self, transfer: int, timeout_s: float) -> tuple[int, int, str] | None:
        """(code, tokens, detail), or None after the timeout."""

    def is_released(self, transfer: int) -> bool:
        """Nothing reads the source for it any more."""

    @property
    def transport(self) -> str: ...

    @property
    def peer_layout(self) -> bytes: ...

class Receiver:
    """
    The only code that writes KV into this rank's cache, and only inside open grants. The cache memory must live until close(). Any thread.
    """

    def __init__(self, cache: RankCache, sink: CompletionSink, *, transports: Sequence[str] = ['cma', 'tcp'], handshake_timeout_ms: int = 3000, max_connections: int = 4096, max_open_per_connection: int = 65536, max_marks: int = 65536, cuda_library: str = '') -> None:
        """transports: accepted, in order of preference; one alone is forced."""

    def adopt(self, fd: int, *, instance: str, worker_incarnation: bytes, address: str = '') -> None:
        """
        Takes an authenticated socket over (and closes it whatever happens): sends GO and serves it on a thread of its own.
        """

    def open_grant(self, key: bytes, *, scheduler_incarnation: bytes, sender_instance: str, sender_incarnation: bytes, block_ids: Sequence[Sequence[int]], first_token: int, end_token: int, source_ranks: Sequence[int], progress_timeout_ms: int = 10000) -> None:
        """
        Raises KvtError: BAD_REQUEST (blocks, tokens or ranks that do not fit; open already), ABORTED (closed before it came), BUSY. Then nothing is owed; else each source rank owes one completion.
        """

    def close_grant(self, key: bytes, code: int = 5, detail: str = 'closed by the scheduler') -> None:
        """
        When it returns no byte of the transfer can land any more, and a later open of the key is not taken.
        """

    def start_progress(self, key: bytes) -> None:
        """The sender has started: the progress clock runs. Raises NOT_FOUND."""

    def end_scheduler(self, incarnation: bytes) -> None:
        """Closes every grant of that scheduler incarnation, for good."""

    def drop_peer(self, worker_incarnation: bytes) -> None:
        """Ends its connections; what they carried fails PEER_LOST."""

    def serve(self, channel: NewsChannel, rank: int) -> None:
        """
        Takes GRNT news from the scheduler and answers GACK, natively; before channel.start().
        """

    def snapshot(self) -> dict[str, Any]:
        """Open grants with their sources, connections, and counters."""

    def close(self) -> None:
        """
        Closes all grants (ABORTED) and connections, joins the threads. Idempotent.
        """
