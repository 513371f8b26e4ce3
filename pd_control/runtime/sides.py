"""The core-thread half of the runtime: what an engine's scheduler calls (`pd_control.engine`).

Each side owns what only the core thread may touch (leases, the step planner) and one mailbox. What
happens here is posted to the loop thread as events, in the order in which it happened; what the
loop thread decides arrives in the mailbox as `CoreCommand`s and is executed by `drain`.

After the runtime has closed, calls still work and change only what is here: events go nowhere and
are counted, so an engine that shuts down need not care about the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pd_control.codes import Code
from pd_control.engine import Engine, RankReport
from pd_control.ids import Content
from pd_control.messages import BlockIds
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.leases import LeaseKind, LeaseTable
from pd_control.protocol.planner import PlannerCommand, ScheduledRequest, StepPlanner
from pd_control.runtime.wire import pack_plan
from pd_control.trace import Stage, Trace
from simple_rpc.mailbox import Mailbox

log = logging.getLogger(__name__)
E = TypeVar("E")

Post = Callable[[Any], None]
"""Hands an event to the loop thread; never blocks, never raises."""

Fail = Callable[[str, BaseException], None]
"""Reports a failure of the whole process."""


class EngineRefs:
    """The engine's block references, as the lease table and the planner call them."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def hold(self, block_ids: BlockIds) -> None:
        self._engine.hold_blocks(block_ids)

    def release(self, block_ids: BlockIds) -> None:
        self._engine.release_blocks(block_ids)


class _Side:
    """The mailbox and its draining."""

    def __init__(self, engine: Engine, post: Post, fail: Fail, trace: Trace) -> None:
        self._engine = engine
        self._post = post
        self._fail = fail
        self._trace = trace
        self.mailbox: Mailbox[fx.CoreCommand] = Mailbox(engine.wake)

    def drain(self) -> int:
        """Core thread. See `pd_control.engine.DecodeDriver.drain`."""
        commands = self._take()
        for command in commands:
            try:
                self._execute(command)
            except Exception as error:
                # The others must not suffer: leases are among them.
                log.exception("executing %s", command)
                self._fail(f"executing {type(command).__name__} on the core thread raised", error)
        return len(commands)

    def _take(self) -> list[fx.CoreCommand]:
        return self.mailbox.take_all()

    def _execute(self, command: fx.CoreCommand) -> None:
        raise NotImplementedError


class DecodeSide(_Side):
    """D's `DecodeDriver`. Core thread; `mailbox.put` from the loop thread."""

    def __init__(self, engine: Engine, post: Post, fail: Fail, trace: Trace) -> None:
        super().__init__(engine, post, fail, trace)
        self.leases = LeaseTable(EngineRefs(engine))
        # Taken over and without an outcome; what arrives for others comes too late.
        self._open: set[str] = set()
        # Of these: blocks allocated; and, since then, a rank died, so that hits and what had landed
        # are gone there. The loop cannot know it of an allocation that was on its way to it.
        self._allocated: set[str] = set()
        self._void: set[str] = set()

    def add(self, request: ev.DecodeRequest) -> None:
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} was added before")
        self._open.add(request.request_id)
        self._trace.record(Stage.TAKEN_OVER, request.request_id)
        self._post(ev.DecodeRequestAdded(request))

    def blocks_allocated(self, request_id: str, block_ids: BlockIds, cached_tokens: int) -> bool:
        if request_id not in self._open:
            return False
        lease_id = self.leases.acquire(LeaseKind.LOAD, request_id, block_ids)
        self._allocated.add(request_id)
        self._trace.record(Stage.BLOCKS_LEASED, request_id, value=sum(map(len, block_ids)))
        self._post(ev.BlocksAllocated(request_id, block_ids, cached_tokens, lease_id))
        return True

    def abort(self, request_id: str, reason: str = "") -> None:
        if self._close(request_id):
            self._post(ev.AbortRequested(request_id, reason))

    def _execute(self, command: fx.CoreCommand) -> None:
        if isinstance(command, fx.ReleaseLease):
            self.leases.release(command.lease_id)
        elif isinstance(command, fx.RequestLoaded):
            self._loaded(command)
        elif isinstance(command, fx.RequestFailed):
            if self._close(command.request_id):
                self._engine.request_failed(command.request_id, command.code, command.message)
        elif isinstance(command, fx.RecomputeRequest):
            if self._close(command.request_id):
                self._engine.recompute_request(command.request_id, command.code, command.message)
        elif isinstance(command, fx.VoidRankKv):
            self._void |= self._allocated
            self._engine.void_rank(command.rank)
        else:
            raise TypeError(f"not a command for D: {command!r}")

    def _loaded(self, command: fx.RequestLoaded) -> None:
        request_id = command.request_id
        is_void = request_id in self._void
        if not self._close(request_id):
            return
        if is_void:
            why = "a rank died while the request waited for its KV"
            self._engine.recompute_request(request_id, Code.PEER_LOST, why)
        else:
            self._trace.record(Stage.ADMITTED, request_id, value=command.num_tokens)
            self._engine.request_loaded(request_id, command.num_tokens, command.first_token)

    def _close(self, request_id: str) -> bool:
        """True for the first outcome of a request that the engine has not aborted."""
        if request_id not in self._open:
            return False
        for table in (self._open, self._allocated, self._void):
            table.discard(request_id)
        return True


class PrefillSide(_Side):
    """P's `PrefillDriver`. Core thread; `mailbox.put` from the loop thread."""

    def __init__(
        self,
        engine: Engine,
        block_size_tokens: int | Sequence[int],
        post: Post,
        fail: Fail,
        trace: Trace,
    ) -> None:
        super().__init__(engine, post, fail, trace)
        self.planner = StepPlanner(EngineRefs(engine), block_size_tokens)
        # Commands for the engine that arrived while it was in the middle of a scheduling pass.
        self._postponed: list[fx.CoreCommand] = []

    @property
    def leases(self) -> LeaseTable:
        return self.planner.leases

    def add(self, request_id: str, content: Content, num_takers: int = 1) -> None:
        self.planner.add_request(request_id)
        self._post(ev.RequestAdded(request_id, content, num_takers))

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> bytes:
        # Offers that have arrived since the last drain can still ride this step. Calls on the
        # engine cannot be made now: it is in the middle of its pass.
        for command in self.mailbox.take_all():
            if isinstance(command, PlannerCommand):
                self._execute(command)
            else:
                self._postponed.append(command)
        plan = self.planner.plan_step(step, scheduled)
        self._post(plan.event)
        for request in plan.event.requests:
            for key in request.carried_keys:
                self._trace.record(
                    Stage.PLANNED, request.request_id, key=key, value=request.end_token
                )
        return pack_plan(plan.sends)

    def step_finished(self, step: int, reports: Sequence[RankReport]) -> None:
        self.planner.step_finished(step)
        for r in reports:
            self._post(ev.StepFinished(step, r.rank, r.code, r.ack_substep, r.detail))

    def first_token(self, request_id: str, token: int) -> None:
        self._post(ev.FirstToken(request_id, token))

    def preempted(self, request_id: str) -> None:
        self._post_if(self.planner.preempt(request_id))

    def finished(
        self, request_id: str, code: Code = Code.OK, first_token: int | None = None
    ) -> None:
        self._post_if(self.planner.finish_request(request_id, code, first_token))

    def blocks_wanted(self, num_blocks: int) -> None:
        self._post_if(self.planner.want_blocks(num_blocks))

    def _post_if(self, event: ev.PrefillEvent | None) -> None:
        if event is not None:
            self._post(event)

    def _take(self) -> list[fx.CoreCommand]:
        postponed, self._postponed = self._postponed, []
        return postponed + self.mailbox.take_all()

    def _execute(self, command: fx.CoreCommand) -> None:
        if isinstance(command, PlannerCommand):
            self._post_if(self.planner.apply(command))
        elif isinstance(command, fx.AdmitRequest):
            refusal = self._engine.admit_request(
                command.request_id, command.content, command.payload
            )
            if refusal is None:
                self.add(command.request_id, command.content)
            else:
                self._post(ev.RequestRefused(command.request_id, refusal.code, refusal.message))
        elif isinstance(command, fx.AbortRequest):
            self._engine.abort_request(command.request_id, command.code, command.message)
            self._post_if(self.planner.stopped(command.request_id))
        elif isinstance(command, fx.VoidRankKv):
            self._engine.void_rank(command.rank)
        else:
            raise TypeError(f"not a command for P: {command!r}")
