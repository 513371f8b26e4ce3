"""The scheduler's view of its workers: registration, news both ways, and the proof of a death.

A worker process registers over a Unix socket (REGISTER_WORKER), then opens a channel of kind
"worker" on it, which from then on carries everything: grants, substeps and cancels out, completions
in. It counts as there when both have happened.

A lost channel proves nothing. Death is known from the process itself: a pidfd that becomes
readable, or a new incarnation that registers for the same rank. A worker whose channel is lost and
that neither dies nor comes back within the grant deadline is fatal for its engine, because nobody
could close its grants any more. (Workers that are threads of this very process end with their
channel: closing it is how they stop.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.runtime import wire
from pd_control.trace import Stage, Trace
from simple_rpc import Identity, RpcError
from simple_rpc.channel import Channel

log = logging.getLogger(__name__)

WORKER_STAGES = (Stage.BOUND, Stage.LAYERS_READY, Stage.SUBMITTED)
Posts = tuple[Callable[[Any], None], ...]


@dataclass(slots=True)
class _Worker:
    info: m.RegisterWorker
    pid: int
    pidfd: int = -1
    channel: Channel | None = None
    grace: asyncio.TimerHandle | None = None
    is_dead: bool = False


class Workers:
    """All ranks of one engine. Loop thread only.

    `post_decode` and `post_prefill` feed the cores (None: this process does not have that side).
    `changed` is called when a rank has become available.
    """

    def __init__(
        self,
        topology: m.Topology,
        instance: str,
        *,
        post_decode: Callable[[Any], None] | None,
        post_prefill: Callable[[Any], None] | None,
        fail: Callable[[str, BaseException | None], None],
        grace_s: float,
        progress_s: float,
        trace: Trace,
        changed: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._instance = instance
        self._post_decode = post_decode
        self._post_prefill = post_prefill
        self._posts: Posts = tuple(p for p in (post_decode, post_prefill) if p is not None)
        self._fail = fail
        self._grace_s = grace_s
        self._grant_options = {"progress_ms": int(progress_s * 1000)}
        self._trace = trace
        self._changed = changed
        self._pending: dict[bytes, _Worker] = {}  # registered, channel not there yet
        self._workers: dict[int, _Worker] = {}
        self.num_ignored = 0  # news that named another rank than its sender's
        self._is_closed = False

    # -- coming ------------------------------------------------------------------------------------

    def register(self, identity: Identity, info: m.RegisterWorker) -> None:
        """REGISTER_WORKER. Raises RpcError with what does not fit."""
        if identity.role != wire.worker_role(info.rank) or identity.instance != self._instance:
            raise RpcError(
                Code.BAD_REQUEST, f"expected rank {info.rank} of {self._instance!r}, got {identity}"
            )
        if identity.incarnation != info.incarnation:
            raise RpcError(Code.BAD_REQUEST, "incarnation: expected that of HELLO")
        if not 0 <= info.rank < self._topology.num_ranks:
            raise RpcError(
                Code.INCOMPATIBLE,
                f"rank: expected 0 to {self._topology.num_ranks - 1}, got {info.rank}",
            )
        pid = identity.attributes.get("pid")
        if type(pid) is not int:
            raise RpcError(Code.BAD_REQUEST, "attributes.pid: expected the worker's process id")
        self._pending[info.incarnation] = _Worker(info, pid)

    def accept(self, identity: Identity, channel: Channel) -> None:
        """The channel of a registered worker. It is there from now on."""
        worker = self._pending.pop(identity.incarnation, None)
        if worker is None:
            raise RpcError(Code.NOT_FOUND, f"{identity} has not registered")
        worker.channel = channel
        worker.pidfd = self._watch(worker)
        rank = worker.info.rank
        old = self._workers.get(rank)
        if old is not None:
            self._drop(old, f"rank {rank} was taken over by a new process")
        self._workers[rank] = worker
        if self._post_decode is not None:
            channel.on(wire.LOAD_DONE.head, lambda items: self._on_load_done(worker, items))
            channel.on(wire.GRANT_ACK.head, lambda items: self._on_grant_ack(worker, items))
        if self._post_prefill is not None:
            channel.on(wire.SEND_DONE.head, lambda items: self._on_send_done(worker, items))
        channel.on_lost = lambda error: self._channel_lost(worker, error)
        info = worker.info
        for post in self._posts:
            post(ev.WorkerRegistered(rank, info.incarnation, info.data_address, info.fingerprint))
        self._changed()

    def _watch(self, worker: _Worker) -> int:
        """A pidfd that tells the death of the process; -1 for a thread of this one."""
        if worker.pid == os.getpid():
            return -1
        try:
            pidfd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            raise RpcError(Code.PEER_LOST, f"process {worker.pid} is gone already") from None
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._process_ended, worker)
        return pidfd

    # -- going -------------------------------------------------------------------------------------

    def _process_ended(self, worker: _Worker) -> None:
        self._died(worker, f"process {worker.pid} of rank {worker.info.rank} ended")

    def _died(self, worker: _Worker, reason: str) -> None:
        """The proof is there."""
        if worker.is_dead:
            return
        self._drop(worker, reason)
        for post in self._posts:
            post(ev.WorkerDied(worker.info.rank, worker.info.incarnation, reason))

    def _drop(self, worker: _Worker, reason: str) -> None:
        worker.is_dead = True
        if self._workers.get(worker.info.rank) is worker:
            del self._workers[worker.info.rank]
        if worker.grace is not None:
            worker.grace.cancel()
            worker.grace = None
        if worker.channel is not None:
            worker.channel.close(message=reason)
            worker.channel = None
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1

    def _channel_lost(self, worker: _Worker, error: RpcError) -> None:
        worker.channel = None
        if worker.is_dead or self._is_closed:
            return
        if worker.pidfd < 0:
            self._died(worker, f"rank {worker.info.rank} closed its channel: {error}")
            return
        log.warning("the channel of rank %d is lost: %s", worker.info.rank, error)
        loop = asyncio.get_running_loop()
        worker.grace = loop.call_later(self._grace_s, self._unreachable, worker, error)

    def _unreachable(self, worker: _Worker, error: RpcError) -> None:
        if not worker.is_dead:
            self._fail(
                f"rank {worker.info.rank} (process {worker.pid}) lives but cannot be reached: "
                f"{error}",
                error,
            )

    # -- news --------------------------------------------------------------------------------------

    def send(self, effect: fx.WorkerNews) -> None:
        """`WorkerNews`. A worker that is gone drops it: its death was or will be an event."""
        worker = self._workers.get(effect.rank)
        if (
            worker is not None
            and worker.channel is not None
            and worker.info.incarnation == effect.incarnation
        ):
            item = effect.item
            head, encode = wire.WORKER_ITEMS[type(item)]
            fields = encode(item)
            if isinstance(item, m.Grant) and item.op == m.GrantOp.OPEN:
                fields = (*fields[:-1], {**item.options, **self._grant_options})
            worker.channel.publish(head, fields)
            if isinstance(item, (m.Substep, m.FrozenSends)):
                for send in item.sends:
                    self._trace.record(
                        Stage.PLANNED, key=send.key, rank=effect.rank, value=send.end_token
                    )

    def _is_own(self, worker: _Worker, rank: int) -> bool:
        if worker.is_dead:
            return False
        if rank != worker.info.rank:
            self.num_ignored += 1
            return False
        return True

    def _on_load_done(self, worker: _Worker, items: list[Any]) -> None:
        assert self._post_decode is not None
        for fields in items:
            item = wire.LOAD_DONE.decode(fields)
            if self._is_own(worker, item.rank):
                self._trace.record(Stage.PLACED, key=item.key, rank=item.rank, value=item.tokens)
                self._post_decode(
                    ev.LoadDone(
                        item.rank,
                        worker.info.incarnation,
                        item.key,
                        item.source_rank,
                        item.tokens,
                        Code.from_wire(item.code),
                        item.detail,
                    )
                )

    def _on_grant_ack(self, worker: _Worker, items: list[Any]) -> None:
        assert self._post_decode is not None
        for fields in items:
            item = wire.GRANT_ACK.decode(fields)
            if self._is_own(worker, item.rank):
                self._post_decode(
                    ev.GrantAcked(
                        item.rank,
                        worker.info.incarnation,
                        item.key,
                        item.op,
                        Code.from_wire(item.code),
                        item.detail,
                    )
                )

    def _on_send_done(self, worker: _Worker, items: list[Any]) -> None:
        assert self._post_prefill is not None
        for fields in items:
            item = wire.SEND_DONE.decode(fields)
            if self._is_own(worker, item.rank):
                self._record_stamps(item, fields)
                self._trace.record(Stage.SEND_DONE, key=item.key, rank=item.rank, value=item.tokens)
                self._post_prefill(
                    ev.SendDone(
                        item.rank,
                        worker.info.incarnation,
                        item.key,
                        item.target_rank,
                        item.tokens,
                        Code.from_wire(item.code),
                        item.detail,
                    )
                )

    def _record_stamps(self, item: m.SendDoneItem, fields: list[Any]) -> None:
        """A data plane may add when its rank bound, saw ready and submitted the transfer, and when it
        handed over the first layer."""
        stamps = fields[6] if len(fields) > 6 else ()
        if not isinstance(stamps, list) or not all(type(at_ns) is int for at_ns in stamps):
            return
        if len(stamps) not in (len(WORKER_STAGES), len(WORKER_STAGES) + 1):
            return
        first_ns = stamps[len(WORKER_STAGES)] if len(stamps) > len(WORKER_STAGES) else 0
        for stage, at_ns in zip(WORKER_STAGES, stamps, strict=False):
            value = item.tokens
            if stage is Stage.BOUND:
                value = max(0, (first_ns - at_ns) // 1000) if first_ns else 0
            if at_ns > 0:
                self._trace.record(stage, key=item.key, rank=item.rank, value=value, at_ns=at_ns)

    # -- what others ask -----------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Every rank is there."""
        return len(self._workers) == self._topology.num_ranks

    def missing(self) -> list[int]:
        return [r for r in range(self._topology.num_ranks) if r not in self._workers]

    def rank_infos(self) -> tuple[m.RankInfo, ...]:
        """All ranks in order. Raises RpcError(BUSY) while one is missing."""
        if not self.is_complete:
            raise RpcError(Code.BUSY, f"ranks {self.missing()} have not registered yet")
        tp = self._topology.tp_size
        return tuple(
            m.RankInfo(
                rank,
                rank // tp,
                rank % tp,
                w.info.incarnation,
                w.info.data_address,
                w.info.fingerprint,
            )
            for rank, w in sorted(self._workers.items())
        )

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "incarnation": w.info.incarnation.hex(),
                "pid": w.pid,
                "data_address": w.info.data_address,
                "fingerprint": w.info.fingerprint,
                "is_connected": w.channel is not None,
                "unacked_news": w.channel.sender.num_unacked if w.channel is not None else 0,
            }
            for rank, w in sorted(self._workers.items())
        ]

    def close(self) -> None:
        self._is_closed = True
        for worker in [*self._workers.values(), *self._pending.values()]:
            with contextlib.suppress(RuntimeError):
                self._drop(worker, "the scheduler is closing")
        self._pending.clear()
