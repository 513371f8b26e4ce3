"""A simulated engine scheduler: paged blocks, chunked prefill, prefix cache, preemption, steps in flight.

It follows vLLM's shape: one core thread takes requests from a waiting queue, gives each a share of the step's
token budget, advances ``num_computed`` when a step is *scheduled*, and registers full blocks in the prefix
cache then, too. A step in flight holds a reference of its own on the blocks it reads and writes, so that
blocks freed by an abort are not handed to a remote load while the step still uses them: the engine's side of
the lease contract.

What the engine asks of its driver is in :class:`EngineHooks`; all of it is called on the core thread.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol

from pd_control.codes import Code
from pd_control.testing.sim_blocks import BlockPool
from pd_control.testing.sim_memory import Content
from pd_control.testing.sim_trace import Trace, Violation

#: Requests without room that one scheduling pass looks past.
MAX_SKIPPED = 3

WAITING, RUNNING, REMOTE, FINISHED = "waiting", "running", "remote", "finished"


class SimRequest:
    """One request inside one engine (the same client request is another object on the other side)."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "content",
        "max_new_tokens",
        "num_computed",
        "num_outputs",
        "num_placeholders",
        "num_planned_blocks",
        "num_preemptions",
        "remote",
        "request_id",
        "state",
        "trace_id",
    )

    def __init__(
        self, request_id: str, content: Content, max_new_tokens: int, remote: bool, trace_id: str
    ) -> None:
        self.request_id = request_id
        self.content = content
        self.max_new_tokens = max_new_tokens
        self.remote = remote  # its KV is to come from elsewhere
        self.trace_id = trace_id
        self.blocks: list[int] = []
        self.cached_tokens = 0
        self.num_computed = 0
        self.num_outputs = 0  # tokens that really came out
        self.num_placeholders = 0  # tokens scheduled to come out, not yet seen
        self.num_planned_blocks = 0  # how many of blocks the step planner has been told
        self.num_preemptions = 0
        self.state = WAITING

    @property
    def num_tokens(self) -> int:
        return self.content.num_prompt_tokens + self.num_outputs + self.num_placeholders

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.state} {self.num_computed}/{self.num_tokens}>"


class Item:
    """One request's part of one step."""

    __slots__ = ("blocks", "end", "first", "produces", "request", "run")

    def __init__(self, request: SimRequest, first: int, end: int, produces: bool) -> None:
        self.request = request
        self.first = first
        self.end = end
        self.produces = produces  # a token comes out
        self.blocks = list(request.blocks)
        self.run = request.num_preemptions  # outputs of an earlier run are thrown away


class SimStep:
    """One scheduled step. It owns one reference on every block its items read or write."""

    __slots__ = (
        "acks",
        "code",
        "codes",
        "failed",
        "items",
        "preempted",
        "refs",
        "step",
        "waiting_ranks",
    )

    def __init__(
        self, step: int, items: list[Item], preempted: list[SimRequest], ranks: int
    ) -> None:
        self.step = step
        self.items = items
        self.preempted = preempted
        self.refs: list[int] = []
        self.waiting_ranks: dict[int, None] = dict.fromkeys(range(ranks))
        self.acks: dict[int, int | None] = {}
        self.codes: dict[int, Code] = {}
        self.failed = False  # a rank died with it
        self.code = Code.OK  # another code: a rank's forward failed


class EngineHooks(Protocol):
    """What the driver and the world are told, on the core thread."""

    def want_remote(self, request: SimRequest) -> bool:
        """Blocks of a remote request are allocated; False: run it locally after all."""
        ...

    def on_rank_output(self, step: SimStep, rank: int, code: Code, ack: int | None) -> None:
        """One rank's end of a step; a rank that died with it is reported, too."""
        ...

    def on_step_done(self, step: SimStep) -> None:
        """No rank is owed any more. Before any request of it is finished."""
        ...

    def on_finished(self, request: SimRequest, reason: str) -> None: ...

    def on_preempted(self, request: SimRequest) -> None: ...

    def on_token(self, request: SimRequest, position: int, token: int) -> None: ...


class SimScheduler:
    """The core thread's state. Every method runs on it."""

    def __init__(
        self,
        hooks: EngineHooks,
        pool: BlockPool,
        rng: random.Random,
        trace: Trace,
        block_size: int,
        num_ranks: int,
        max_batched_tokens: int,
        max_running: int,
        steps_in_flight: int,
    ) -> None:
        self.hooks = hooks
        self.pool = pool
        self.rng = rng
        self.trace = trace
        self.block_size = block_size
        self.num_ranks = num_ranks
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.max_in_flight = steps_in_flight
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.requests: dict[str, SimRequest] = {}
        self.steps: dict[int, SimStep] = {}
        self.num_steps = 0
        self.blocks_missing = 0  # how many the first request that waits for blocks lacks

    # -- what the client and the driver do -----------------------------------------------------

    def add(self, request: SimRequest) -> None:
        if request.request_id in self.requests:
            raise Violation("engine", f"request id {request.request_id} reused")
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str, reason: str) -> bool:
        """Drop a request in any state; blocks in use by a step in flight follow it later."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        """LOADED(n): KV of the first n tokens is in the blocks; the request goes on from there."""
        request = self.requests.get(request_id)
        if request is None:
            return  # aborted meanwhile
        if request.state != REMOTE:
            raise Violation("engine", f"LOADED for {request}", request.trace_id)
        for index in range(num_tokens // self.block_size):
            self.pool.register(request.blocks[index], request.content.block_hash(index))
        request.state = RUNNING
        request.remote = False
        self.running.append(request)
        if first_token is not None:
            position = request.content.num_prompt_tokens
            request.num_outputs = 1
            self.hooks.on_token(request, position, first_token)
            if request.max_new_tokens == 1:
                self._finish(request, "finished")
                return
        request.num_computed = min(num_tokens, request.num_tokens - 1)

    def run_locally(self, request_id: str) -> None:
        """The remote KV will not come: start over here, with fresh blocks."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.state not in (REMOTE, WAITING) or not request.remote:
            raise Violation("engine", f"RECOMPUTE for {request}", request.trace_id)
        request.remote = False
        if request.state == REMOTE:
            self._drop_blocks(request)
            request.state = WAITING
            self.waiting.appendleft(request)

    def can_schedule(self) -> bool:
        return len(self.steps) < self.max_in_flight and bool(self.waiting or self.running)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self) -> SimStep | None:
        """The next step, or None when nothing can run now."""
        budget = self.max_batched_tokens
        self.blocks_missing = 0
        items: list[Item] = []
        preempted: list[SimRequest] = []
        for request in list(self.running):
            if request.state != RUNNING:
                continue
            count = min(self._pending_tokens(request), budget)
            if count <= 0:
                continue
            if not self._grow(request, count, preempted):
                continue
            budget -= count
            items.append(self._item(request, count))
        if not preempted:
            budget = self._admit(budget, items)
        items = [item for item in items if item.request.state == RUNNING]
        if not items and not preempted:
            return None
        self.num_steps += 1
        step = SimStep(self.num_steps, items, preempted, self.num_ranks)
        for item in items:
            request = item.request
            size = self.block_size
            touched = item.blocks[: -(-item.end // size)]
            self.pool.hold(touched)
            step.refs += touched
            request.num_computed = item.end
            if item.produces:
                request.num_placeholders += 1
            for index in range(item.first // size, item.end // size):
                self.pool.register(item.blocks[index], request.content.block_hash(index))
        self.steps[step.step] = step
        return step

    def empty_step(self) -> SimStep:
        """A step in which nothing is computed."""
        self.num_steps += 1
        step = self.steps[self.num_steps] = SimStep(self.num_steps, [], [], self.num_ranks)
        return step

    def _pending_tokens(self, request: SimRequest) -> int:
        if request.num_outputs + request.num_placeholders >= request.max_new_tokens:
            return 0
        return request.num_tokens - request.num_computed

    def _item(self, request: SimRequest, count: int) -> Item:
        first = request.num_computed
        return Item(request, first, first + count, first + count == request.num_tokens)

    def _grow(self, request: SimRequest, count: int, preempted: list[SimRequest]) -> bool:
        """Blocks for ``count`` more tokens, preempting the youngest where needed. False: it waits.

        A victim's blocks may stay referenced by steps in flight or by leases, so one victim a pass is
        enough while there are any; the oldest never is one, so somebody always gets on.
        """
        while True:
            need = -(-(request.num_computed + count) // self.block_size) - len(request.blocks)
            if need <= 0:
                return True
            blocks = self.pool.allocate(need)
            if blocks is not None:
                request.blocks += blocks
                return True
            self.blocks_missing = self.blocks_missing or need - self.pool.num_free
            victim = self.running[-1]
            if victim is request or (preempted and self.steps):
                return False
            self._preempt(victim, preempted)

    def _preempt(self, request: SimRequest, preempted: list[SimRequest]) -> None:
        self.trace.count("engine.preemptions")
        self.running.remove(request)
        self._drop_blocks(request)
        self._reset_run(request)
        request.state = WAITING
        self.waiting.appendleft(request)
        preempted.append(request)
        self.hooks.on_preempted(request)

    def _reset_run(self, request: SimRequest) -> None:
        request.num_computed = 0
        request.num_placeholders = 0
        request.num_preemptions += 1

    def _admit(self, budget: int, items: list[Item]) -> int:
        skipped: list[SimRequest] = []
        while (
            self.waiting
            and budget > 0
            and len(self.running) < self.max_running
            and len(skipped) < MAX_SKIPPED
        ):
            request = self.waiting.popleft()
            size = self.block_size
            limit = (request.num_tokens - 1) // size  # at least one token is computed here
            hits = self.pool.lookup(request.content.block_hash(i) for i in range(limit))
            cached = len(hits) * size
            if request.remote:
                target = request.content.num_prompt_tokens
            else:
                target = min(request.num_tokens, cached + budget)
            need = -(-target // size) - len(hits)
            self.pool.touch(hits)
            fresh = self.pool.allocate(need)
            if fresh is None:
                self.pool.release(hits)
                if not self.blocks_missing:
                    self.blocks_missing = need - self.pool.num_free
                skipped.append(request)
                if request.remote:
                    continue  # it waits for blocks; others may go on
                break
            request.blocks = hits + fresh
            request.cached_tokens = cached
            if hits:
                self.trace.count("engine.prefix_hits")
            if request.remote:
                request.state = REMOTE
                if self.hooks.want_remote(request):
                    continue
                request.remote = False
            request.state = RUNNING
            request.num_computed = cached
            self.running.append(request)
            count = min(self._pending_tokens(request), budget)
            if count > 0 and self._grow(request, count, []):
                budget -= count
                items.append(self._item(request, count))
        self.waiting.extendleft(reversed(skipped))
        return budget

    # -- outputs -------------------------------------------------------------------------------

    def on_output(self, number: int, rank: int, code: Code, ack: int | None) -> None:
        """One rank finished one step (``ack``: highest substep taken, None: it did not say)."""
        step = self.steps.get(number)
        if step is None or rank not in step.waiting_ranks:
            return
        del step.waiting_ranks[rank]
        if code is not Code.OK:
            step.code = code
        self.hooks.on_rank_output(step, rank, code, ack)
        self._maybe_complete(step)

    def _maybe_complete(self, step: SimStep) -> None:
        if step.waiting_ranks:
            return
        del self.steps[step.step]
        # The driver's own references are taken and its events made before the step's go away.
        self.hooks.on_step_done(step)
        if step.failed:
            pass
        elif step.code is not Code.OK:
            self.trace.count("engine.steps_failed")
            self.start_over()
        else:
            self._take_tokens(step)
        self.pool.release(step.refs)

    def _take_tokens(self, step: SimStep) -> None:
        for item in step.items:
            request = item.request
            stale = request.state == FINISHED or item.run != request.num_preemptions
            if stale or not item.produces:
                continue
            request.num_placeholders -= 1
            position = request.content.num_prompt_tokens + request.num_outputs
            request.num_outputs += 1
            self.hooks.on_token(request, position, request.content.next_token(position))
            if request.num_outputs >= request.max_new_tokens:
                self._finish(request, "finished")

    def worker_lost(self, rank: int) -> None:
        """A rank's memory is gone: no step in flight counts, no block keeps its content."""
        for step in list(self.steps.values()):
            if not step.failed:
                step.failed = True
                self.trace.count("engine.steps_failed")
            if rank in step.waiting_ranks:
                del step.waiting_ranks[rank]
                self.hooks.on_rank_output(step, rank, Code.PEER_LOST, None)
                self._maybe_complete(step)
        self.start_over()

    def start_over(self) -> None:
        """Nothing in the pool is to be trusted: whatever runs is computed again. What waits for a load
        has lost its prefix hits and what had landed; the driver knows that of what is told later."""
        self.pool.drop_cache()
        for request in list(reversed(self.running)):
            self.running.remove(request)
            self._drop_blocks(request)
            self._reset_run(request)
            request.state = WAITING
            self.waiting.appendleft(request)
            self.hooks.on_preempted(request)

    # -- inside --------------------------------------------------------------------------------

    def _drop_blocks(self, request: SimRequest) -> None:
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.num_planned_blocks = 0

    def _finish(self, request: SimRequest, reason: str) -> None:
        if request.state == RUNNING:
            self.running.remove(request)
        elif request.state == WAITING:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.state = FINISHED
        self.hooks.on_finished(request, reason)
        self._drop_blocks(request)
