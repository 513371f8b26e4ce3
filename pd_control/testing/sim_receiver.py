"""Simulated ``kvt`` of a D worker: grants, coverage, completions."""

from __future__ import annotations

from collections.abc import Callable

from pd_control.codes import Code
from pd_control.messages import Grant, Send
from pd_control.testing.sim_clock import Timer
from pd_control.testing.sim_kvt import DataConnection, Slice
from pd_control.testing.sim_memory import Piece, RankMemory
from pd_control.testing.sim_net import Network, Process
from pd_control.testing.sim_trace import Trace, Violation


class OpenGrant:
    """What D allows: one transfer, one sender, into these blocks, these tokens."""

    __slots__ = ("covered", "ended", "grant", "last_byte_s", "open", "timer", "unconfirmed")

    def __init__(self, grant: Grant, num_layers: int) -> None:
        self.grant = grant
        self.open = True
        self.covered = {source: [0] * num_layers for source in grant.source_ranks}
        self.ended: dict[int, bool] = dict.fromkeys(grant.source_ranks, False)
        self.last_byte_s = 0.0
        self.timer: Timer | None = None  # progress, once P said that it began
        self.unconfirmed: dict[int, int] = {}  # cma: source -> reads without a confirmation


class SimReceiver:
    """The receiving half of one D worker.

    ``report(key, source_rank, tokens, code, detail)`` is the LOAD_DONE of one slice.
    """

    def __init__(
        self,
        net: Network,
        process: Process,
        memory: RankMemory,
        instance: str,
        rank: int,
        report: Callable[[bytes, int, int, Code, str], None],
    ) -> None:
        self.net = net
        self.process = process
        self.memory = memory
        self.instance = instance
        self.rank = rank
        self.trace: Trace = net.trace
        self.report = report
        self.progress_s = 10.0
        self.num_layers = len(memory.layers)
        self.grants: dict[bytes, OpenGrant] = {}
        self.marks: dict[bytes, None] = {}
        self.granted: dict[int, int] = {}  # block -> open grants that cover it

    # -- the scheduler's stream ----------------------------------------------------------------

    def open_grant(self, grant: Grant) -> tuple[Code, str]:
        """Take an open; refused with ABORTED where the close came first."""
        if grant.key in self.marks:
            self.trace.count("grant.open_after_close")
            return Code.ABORTED, "closed before"
        if grant.key in self.grants:
            return Code.OK, "already open"
        self.grants[grant.key] = opened = OpenGrant(grant, self.num_layers)
        if not grant.source_ranks:
            opened.open = False
            return Code.OK, ""
        for block in self._span(grant):
            self.granted[block] = self.granted.get(block, 0) + 1
        return Code.OK, ""

    def close_grant(self, key: bytes) -> None:
        """Once this returns no byte of ``key`` can land (R4). Idempotent; leaves a mark."""
        self.marks[key] = None
        opened = self.grants.pop(key, None)
        if opened is not None:
            self._shut(opened)

    def start_clock(self, key: bytes) -> None:
        """P began: from now on a silence of ``progress_s`` ends every source that is still owed."""
        opened = self.grants.get(key)
        if opened is not None and opened.open and opened.timer is None:
            opened.last_byte_s = self.net.queue.now_s
            opened.timer = self.process.after(self.progress_s, self._check_progress, opened)

    def _check_progress(self, opened: OpenGrant) -> None:
        if not opened.open:
            return
        due_s = opened.last_byte_s + self.progress_s
        if self.net.queue.now_s < due_s - 1e-9:
            opened.timer = self.process.at(due_s, self._check_progress, opened)
            return
        self.trace.count("grant.progress_timeouts")
        for source in list(opened.ended):
            self._end_source(opened, source, Code.TIMEOUT, f"no byte for {self.progress_s:g} s")

    def close_all(self) -> None:
        """A new scheduler incarnation: grants of the old one end."""
        for opened in self.grants.values():
            self._shut(opened)
        self.grants.clear()
        self.marks.clear()

    def _span(self, grant: Grant) -> tuple[int, ...]:
        size = self.memory.block_size
        return grant.block_ids[0][grant.first_token // size : -(-grant.end_token // size)]

    def _shut(self, opened: OpenGrant) -> None:
        if not opened.open:
            return
        opened.open = False
        if opened.timer is not None:
            opened.timer.cancel()
        for block in self._span(opened.grant):
            left = self.granted[block] - 1
            if left:
                self.granted[block] = left
            else:
                del self.granted[block]

    # -- data ----------------------------------------------------------------------------------

    def on_data(
        self,
        connection: DataConnection,
        send: Send,
        piece: Slice,
        layer: int,
        final: bool,
        pieces: list[Piece],
    ) -> None:
        """Check one payload against its grant and place it, or drain it to nowhere and count."""
        opened = self.grants.get(send.key)
        sender = connection.sender
        final = final and sender.reads_remotely
        if opened is None or not opened.open:
            self.trace.count("data.drained_no_grant")
            if final:
                self._let_go(connection, send, piece)
            return
        grant = opened.grant
        if (
            sender.instance != grant.sender_instance
            or connection.sender_owner != grant.sender_incarnation
            or sender.rank not in opened.ended
        ):
            self.trace.count("data.drained_wrong_sender")
            return
        if opened.ended[sender.rank]:
            self.trace.count("data.drained_ended_source")
            if final:
                self._let_go(connection, send, piece)
            return
        first, end = send.first_token, send.end_token
        if not grant.first_token <= first < end <= grant.end_token:
            text = f"range [{first}, {end}) is not granted"
            self._end_source(opened, sender.rank, Code.BAD_REQUEST, text)
            return
        layers = opened.covered[sender.rank]
        mask = ((1 << (end - first)) - 1) << (first - grant.first_token)
        if layers[layer] & mask:
            text = f"rank {sender.rank} sent [{first}, {end}) of layer {layer} twice"
            raise Violation("coverage", text, send.key.hex())
        layers[layer] |= mask
        lo, hi = connection.atoms()
        self.memory.place(layer, grant.block_ids[0], pieces, lo, hi)
        opened.last_byte_s = self.net.queue.now_s
        if final:
            # The reads are over; what was read counts only if the lease held all the while.
            opened.unconfirmed[sender.rank] = opened.unconfirmed.get(sender.rank, 0) + 1
            self._ask(connection, send, piece, opened)
        self._maybe_complete(opened, sender.rank)

    def _maybe_complete(self, opened: OpenGrant, source: int) -> None:
        if opened.unconfirmed.get(source):
            return
        full = (1 << (opened.grant.end_token - opened.grant.first_token)) - 1
        if all(covered == full for covered in opened.covered[source]):
            self._end_source(opened, source, Code.OK, "")

    def _ask(self, connection: DataConnection, send: Send, piece: Slice, opened: OpenGrant) -> None:
        net = self.net
        s, r = connection.sender.process, self.process

        def at_sender() -> None:
            held = connection.alive and connection.sender.read_through(send, piece)
            r.after(net.latency_s(s, r), answered, held)

        def answered(held: bool) -> None:
            opened.unconfirmed[connection.sender.rank] -= 1
            if not opened.open or opened.ended[connection.sender.rank]:
                return
            if held:
                self._maybe_complete(opened, connection.sender.rank)
            else:
                self.trace.count("data.unconfirmed_reads")
                text = "the sender let go of the blocks while they were read"
                self._end_source(opened, connection.sender.rank, Code.ABORTED, text)

        s.after(net.latency_s(r, s), at_sender)

    def _let_go(self, connection: DataConnection, send: Send, piece: Slice) -> None:
        """Nothing was read, nothing will be: tell a sender that waits for it."""
        s = connection.sender.process
        s.after(self.net.latency_s(self.process, s), connection.sender.let_go, send, piece)

    def _end_source(self, opened: OpenGrant, source: int, code: Code, detail: str) -> None:
        if opened.ended[source]:
            return
        opened.ended[source] = True
        if all(opened.ended.values()):
            self._shut(opened)  # before the completion leaves
        grant = opened.grant
        tokens = grant.end_token if code is Code.OK else self._contiguous(opened, source)
        self.report(grant.key, source, tokens, code, detail)

    def _contiguous(self, opened: OpenGrant, source: int) -> int:
        common = -1
        for covered in opened.covered[source]:
            common &= covered
        count = 0
        while common >> count & 1:
            count += 1
        return opened.grant.first_token + count

    def on_connection_end(self, connection: DataConnection, reason: str) -> None:
        sender = connection.sender
        for opened in list(self.grants.values()):
            if (
                opened.open
                and opened.grant.sender_instance == sender.instance
                and opened.grant.sender_incarnation == connection.sender_owner
                and sender.rank in opened.ended
            ):
                self._end_source(opened, sender.rank, Code.PEER_LOST, reason)
