"""A data plane that copies between the caches of fake engines in one process.

It obeys the rules of the native one: bytes land only inside an open grant of the named sender;
completion is by coverage of (layer, source rank, token), never by count; a close leaves a mark, and
no byte lands after it is acknowledged; each (transfer, target) submitted ends in exactly one
SEND_DONE; steps take substeps contiguously until they are frozen. "Native" work is done on one
thread a plane. What it lacks is the network: senders find receivers in a `Hub`.

Tests can hold it up (`Hub.gate`) and break it (`Hub.fail_next`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.runtime import wire
from pd_control.runtime.plane import WorkerHost
from pd_control.testing.fake_model import CacheShard
from simple_rpc import Deadline, RpcError
from simple_rpc.channel import Channel
from simple_rpc.handoff import DetachedSocket
from simple_rpc.link import open_channel

ATTACH_S = 10.0
MAX_MARKS = 65_536


class Hub:
    """Where the planes of one process find each other, by worker incarnation. Any thread."""

    def __init__(self) -> None:
        self._planes: dict[bytes, LoopbackPlane] = {}
        self.gate = threading.Event()  # cleared: no byte moves until it is set again
        self.gate.set()
        self._fail: list[Code] = []

    def add(self, incarnation: bytes, plane: LoopbackPlane) -> None:
        self._planes[incarnation] = plane

    def remove(self, incarnation: bytes) -> None:
        self._planes.pop(incarnation, None)

    def find(self, incarnation: bytes) -> LoopbackPlane | None:
        return self._planes.get(incarnation)

    def fail_next(self, code: Code) -> None:
        """The next piece that any sender wants to move fails with this code."""
        self._fail.append(code)

    def failure(self) -> Code | None:
        return self._fail.pop(0) if self._fail else None


@dataclass(slots=True)
class _Grant:
    item: m.Grant
    missing: dict[int, int]  # source rank → (layer, token) cells not placed
    placed: dict[int, set[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Transfer:
    """A sender's view of one transfer: its open targets and what was asked of it."""

    targets: dict[int, m.Target]  # those that have not ended
    num_outstanding: int = 0  # sends not fully moved
    last_end: int | None = None
    bound_ns: int = 0
    ready_ns: int = 0


@dataclass(slots=True)
class _Step:
    sends: list[m.Send] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    taken: int = 0
    is_started: bool = False
    is_frozen: bool = False
    kept: dict[int, tuple[m.Send, ...]] = field(default_factory=dict)


def _remember(keys: dict[bytes, None], key: bytes) -> None:
    keys[key] = None
    if len(keys) > MAX_MARKS:
        del keys[next(iter(keys))]


class LoopbackPlane:
    """One rank's plane over its `CacheShard`. See the module."""

    def __init__(self, shard: CacheShard, hub: Hub) -> None:
        self._shard = shard
        self._hub = hub
        self._lock = threading.RLock()
        self._host: WorkerHost | None = None
        self._channel: Channel | None = None
        self._grants: dict[bytes, _Grant] = {}
        self._marks: dict[bytes, None] = {}
        self._transfers: dict[bytes, _Transfer] = {}
        self._cancelled: dict[bytes, int] = {}
        self._ended: dict[bytes, None] = {}  # transfers whose every target has had its SEND_DONE
        self._steps: dict[int, _Step] = {}
        self._frozen_upto = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="loopback-plane", daemon=True)
        self.num_refused = 0  # pieces that no grant allowed

    @property
    def fingerprint(self) -> str:
        g = self._shard.geometry
        return (
            f"{g.name}:layers={g.num_layers},heads={g.num_heads},dim={g.head_dim},"
            f"block={g.block_size_tokens}"
        )

    # -- life --------------------------------------------------------------------------------------

    async def attach(self, host: WorkerHost) -> None:
        self._host = host
        self._hub.add(host.identity.incarnation, self)
        self._thread.start()
        self._channel = await open_channel(
            host.scheduler_client,
            host.scheduler_address,
            kind=wire.KIND_WORKER,
            deadline=Deadline.after(ATTACH_S),
            handlers={
                m.Grant.HEAD: self._on_grants,
                m.Substep.HEAD: self._on_substeps,
                m.FrozenSends.HEAD: self._on_frozen,
                m.CancelSend.HEAD: self._on_cancels,
            },
            on_lost=lambda error: host.lost(str(error)),
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._grants.clear()
            if self._host is not None:
                self._hub.remove(self._host.identity.incarnation)
                self._host.call(self._close_channel)
        self._work.put(None)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close(message="the worker is closing")

    def data_accepted(self, sock: DetachedSocket) -> None:
        sock.close()
        raise RpcError(Code.INCOMPATIBLE, "this plane has no data connections")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._hub.gate.wait()
            work()

    def _publish(self, head: str, fields: Any) -> None:
        """Any thread."""
        host = self._host
        assert host is not None
        host.call(self._publish_on_loop, head, fields)

    def _publish_on_loop(self, head: str, fields: Any) -> None:
        if self._channel is not None:
            self._channel.publish(head, fields)

    # -- receiving ---------------------------------------------------------------------------------

    def _on_grants(self, items: list[Any]) -> None:
        for fields in items:
            item = wire.GRANT.decode(fields)
            if item.op == m.GrantOp.OPEN:
                code, detail = self._open_grant(item)
            elif item.op == m.GrantOp.CLOSE:
                code, detail = self._close_grant(item.key, Code.ABORTED)
            else:
                continue  # START: this plane has no progress clock
            assert self._host is not None
            ack = m.GrantAck(self._host.rank, item.key, item.op, int(code), detail)
            self._publish(wire.GRANT_ACK.head, wire.GRANT_ACK.encode(ack))

    def _open_grant(self, item: m.Grant) -> tuple[Code, str]:
        with self._lock:
            if item.key in self._marks:
                return Code.ABORTED, "closed before it was opened"
            if item.key in self._grants:
                return Code.BAD_REQUEST, "open already"
            size = self._shard.geometry.block_size_tokens
            if len(item.block_ids) != 1 or len(item.block_ids[0]) * size < item.end_token:
                return Code.BAD_REQUEST, f"expected blocks for {item.end_token} tokens"
            cells = self._shard.geometry.num_layers * (item.end_token - item.first_token)
            self._grants[item.key] = _Grant(item, dict.fromkeys(item.source_ranks, cells))
            return Code.OK, ""

    def _close_grant(self, key: bytes, code: Code) -> tuple[Code, str]:
        with self._lock:
            self._mark(key)
            grant = self._grants.pop(key, None)
            if grant is not None:
                for source in list(grant.missing):
                    self._load_done(grant, source, code, "closed by the scheduler")
            return Code.OK, ""

    def _mark(self, key: bytes) -> None:
        _remember(self._marks, key)

    def _load_done(self, grant: _Grant, source: int, code: Code, detail: str = "") -> None:
        del grant.missing[source]
        assert self._host is not None
        tokens = grant.item.end_token if code is Code.OK else grant.item.first_token
        done = m.LoadDoneItem(self._host.rank, grant.item.key, source, tokens, int(code), detail)
        self._publish(wire.LOAD_DONE.head, wire.LOAD_DONE.encode(done))

    def place(
        self,
        send: m.Send,
        sender_instance: str,
        source_rank: int,
        source: CacheShard,
        layers: Sequence[int],
    ) -> tuple[Code, str]:
        """Called on the sender's thread: copy these layers of the send's tokens, if allowed."""
        with self._lock:
            grant = self._grants.get(send.key)
            if self._is_closed or grant is None:
                self.num_refused += 1
                return Code.GONE, "no grant is open"
            item = grant.item
            if item.sender_instance != sender_instance or source_rank not in grant.missing:
                self.num_refused += 1
                return Code.UNAUTHORIZED, f"no grant for rank {source_rank} of {sender_instance}"
            first = max(send.first_token, item.first_token)
            end = min(send.end_token, item.end_token)
            done = grant.placed.setdefault(source_rank, set())
            for layer in layers:
                self._copy(send, item, source, layer, first, end)
                fresh = {(layer, token) for token in range(first, end)} - done
                done |= fresh
                grant.missing[source_rank] -= len(fresh)
            if grant.missing[source_rank] == 0:
                self._load_done(grant, source_rank, Code.OK)
                if not grant.missing:
                    del self._grants[send.key]
                    self._mark(send.key)
            return Code.OK, ""

    def _copy(
        self, send: m.Send, item: m.Grant, source: CacheShard, layer: int, first: int, end: int
    ) -> None:
        mine, theirs = self._shard.heads, source.heads
        low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if low >= high or first >= end:
            return
        positions = np.arange(first, end)
        src_size, dst_size = (
            source.geometry.block_size_tokens,
            self._shard.geometry.block_size_tokens,
        )
        src_blocks = np.asarray(send.src_block_ids[0])[positions // src_size]
        dst_blocks = np.asarray(item.block_ids[0])[positions // dst_size]
        src = source.layers[layer][
            :, src_blocks, positions % src_size, low - theirs.start : high - theirs.start
        ]
        self._shard.layers[layer][
            :, dst_blocks, positions % dst_size, low - mine.start : high - mine.start
        ] = src

    # -- sending -----------------------------------------------------------------------------------

    def start_step(self, step: int, sends: Sequence[m.Send]) -> None:
        with self._lock:
            state = self._steps.setdefault(step, _Step())
            state.is_started = True
            for send in sends:
                self._attach(state, send)
            self._take_kept(state)

    def record_event(self, step: int, layer: int, stream: int) -> None:
        with self._lock:
            state = self._steps[step]
            state.recorded.add(layer)
            for send in state.sends:
                self._move(send, [layer], is_end=False)

    def freeze_step(self, step: int) -> int:
        with self._lock:
            state = self._steps.pop(step)
            state.is_frozen = True
            self._frozen_upto = max(self._frozen_upto, step)
            missing = set(range(self._shard.geometry.num_layers)) - state.recorded
            for send in state.sends:
                if missing:
                    self._fail_all(
                        send.key, Code.INTERNAL, f"layers {sorted(missing)} not recorded"
                    )
                self._move(send, [], is_end=True)
            return state.taken

    def _attach(self, state: _Step, send: m.Send) -> None:
        if self._begin(send):
            state.sends.append(send)
            self._move(send, sorted(state.recorded), is_end=False)

    def _take_kept(self, state: _Step) -> None:
        while state.taken + 1 in state.kept:
            state.taken += 1
            for send in state.kept.pop(state.taken):
                self._attach(state, send)

    def _on_substeps(self, items: list[Any]) -> None:
        for fields in items:
            item = wire.SUBSTEP.decode(fields)
            with self._lock:
                if item.step <= self._frozen_upto:
                    continue  # late: the scheduler repairs it from what freeze_step returned
                state = self._steps.setdefault(item.step, _Step())
                state.kept[item.substep] = item.sends
                if state.is_started:
                    self._take_kept(state)

    def _on_frozen(self, items: list[Any]) -> None:
        layers = list(range(self._shard.geometry.num_layers))
        for fields in items:
            for send_fields in fields:
                send = wire.SEND.decode(send_fields)
                with self._lock:
                    if self._begin(send):
                        self._move(send, layers, is_end=True)

    def _begin(self, send: m.Send) -> bool:
        """Take responsibility for a send: each of its targets is owed one SEND_DONE."""
        reason = self._cancelled.get(send.key)
        if reason is not None:
            for target in send.targets:
                self._send_done(send.key, target.rank, send.first_token, Code(reason), "cancelled")
            return False
        if send.key in self._ended:
            return False  # it failed before its last part was submitted
        transfer = self._transfers.get(send.key)
        if transfer is None:
            transfer = _Transfer({t.rank: t for t in send.targets}, bound_ns=time.monotonic_ns())
            self._transfers[send.key] = transfer
        transfer.num_outstanding += 1
        if send.last:
            transfer.last_end = send.end_token
        return True

    def _move(self, send: m.Send, layers: list[int], *, is_end: bool) -> None:
        self._work.put(lambda: self._move_now(send, layers, is_end))

    def _move_now(self, send: m.Send, layers: list[int], is_end: bool) -> None:
        """On the plane's thread. Not under our lock while the receiver's is taken."""
        with self._lock:
            transfer = self._transfers.get(send.key)
            if transfer is None or self._is_closed:
                return
            targets = list(transfer.targets.values())
        assert self._host is not None
        if layers:
            transfer.ready_ns = time.monotonic_ns()
            for target in targets:
                code, detail = self._place_at(target, send, layers)
                if code is not Code.OK:
                    with self._lock:
                        self._end_target(send.key, target.rank, send.first_token, code, detail)
        if is_end:
            with self._lock:
                transfer.num_outstanding -= 1
                if transfer.num_outstanding == 0 and transfer.last_end is not None:
                    for rank in list(transfer.targets):
                        self._end_target(send.key, rank, transfer.last_end, Code.OK, "")

    def _place_at(self, target: m.Target, send: m.Send, layers: list[int]) -> tuple[Code, str]:
        failure = self._hub.failure()
        if failure is not None:
            return failure, "as the test wished"
        plane = self._hub.find(target.incarnation)
        if plane is None:
            return Code.PEER_LOST, f"rank {target.rank} is gone"
        assert self._host is not None
        return plane.place(send, self._host.identity.instance, self._host.rank, self._shard, layers)

    def _end_target(self, key: bytes, rank: int, tokens: int, code: Code, detail: str) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or transfer.targets.pop(rank, None) is None:
            return
        stamps = [transfer.bound_ns, transfer.ready_ns, time.monotonic_ns()]
        self._send_done(key, rank, tokens, code, detail, stamps)
        if not transfer.targets:
            del self._transfers[key]
            _remember(self._ended, key)

    def _send_done(
        self,
        key: bytes,
        target_rank: int | None,
        tokens: int,
        code: Code,
        detail: str,
        stamps_ns: list[int] | None = None,
    ) -> None:
        assert self._host is not None
        item = m.SendDoneItem(self._host.rank, key, target_rank, tokens, int(code), detail)
        fields = wire.SEND_DONE.encode(item)
        self._publish(wire.SEND_DONE.head, (*fields, stamps_ns) if stamps_ns else fields)

    def _fail_all(self, key: bytes, code: Code, detail: str) -> None:
        transfer = self._transfers.get(key)
        for rank in list(transfer.targets) if transfer is not None else ():
            self._end_target(key, rank, 0, code, detail)

    def _on_cancels(self, items: list[Any]) -> None:
        for fields in items:
            item = wire.CANCEL_SEND.decode(fields)
            # Behind what is being moved now: after the answer nothing is read any more.
            self._work.put(lambda item=item: self._cancel(item))  # type: ignore[misc]

    def _cancel(self, item: m.CancelSend) -> None:
        with self._lock:
            self._cancelled[item.key] = item.code
            if len(self._cancelled) > MAX_MARKS:
                del self._cancelled[next(iter(self._cancelled))]
            if item.key in self._transfers:
                self._fail_all(item.key, Code.from_wire(item.code), "cancelled")
            else:
                self._send_done(item.key, None, 0, Code.from_wire(item.code), "cancelled")
