"""What the fake engine computes next: batching, chunking, preemption, steps in flight.

The half of `FakeEngine` that has nothing to do with clients or drivers' commands. Core thread only.
"""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pd_control.codes import Code
from pd_control.engine import (
    DecodeDriver,
    DecodeRequest,
    PrefillDriver,
    RankReport,
    ScheduledRequest,
)
from pd_control.testing.fake_blocks import BlockPool, block_hashes
from pd_control.testing.fake_model import Geometry, chain, token_of
from pd_control.testing.fake_worker import WorkerHandle


class EngineError(RuntimeError):
    """A request's bad end; `code` is a code's name (`ABORTED`, `PEER_LOST`, …)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class State(enum.Enum):
    WAITING = "waiting"  # for blocks
    WAITING_KV = "waiting for KV"  # it has blocks; somebody else fills them
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Shape and limits of a fake engine."""

    geometry: Geometry = field(default_factory=Geometry)
    tp_size: int = 1
    num_blocks: int = 256
    max_step_tokens: int = 64  # longer prompts are prefilled in chunks of this
    max_steps_in_flight: int = 1
    layer_delay_s: float = 0.0
    workers: Literal["thread", "process"] = "thread"
    restart_lost_workers: bool = False  # else the engine ends with the first worker that dies


@dataclass(slots=True)
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_prompt: int
    max_new_tokens: int
    salt: str
    future: concurrent.futures.Future[list[int]]
    remote: DecodeRequest | None = None  # D: KV comes from elsewhere
    is_prefill_half: bool = False  # P: the prompt and one token, then handed over
    num_takers: int = 1
    on_token: Callable[[int], None] | None = None
    state: State = State.WAITING
    states: list[int] = field(default_factory=list)  # chain of `tokens`
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # scheduled, as engines count: proves nothing before the step ends
    num_registered: int = 0
    num_planned_blocks: int = 0  # blocks that P's driver was told of
    generation: int = 0  # counts preemptions, so that results of a former life are recognised
    num_preemptions: int = 0

    def extend(self, token: int) -> None:
        self.tokens.append(token)
        self.states += chain([token], self.states[-1])


@dataclass(slots=True)
class Step:
    parts: list[tuple[FakeRequest, int, int, bool]]  # request, generation, tokens, samples
    reports: list[RankReport] = field(default_factory=list)
    folds: collections.Counter[str] = field(default_factory=collections.Counter)
    pending: set[int] = field(default_factory=set)  # ranks that have not reported
    blocks: list[int] = field(default_factory=list)  # what it writes; referenced until its end
    failed: str = ""


class Batching:
    """Scheduling state and decisions; `FakeEngine` adds life, clients and the driver's calls."""

    spec: EngineSpec
    pool: BlockPool
    _prefill: PrefillDriver | None
    _decode: DecodeDriver | None
    _workers: list[WorkerHandle]
    _ready: set[int]

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.pool = BlockPool(spec.num_blocks)
        self._prefill = None
        self._decode = None
        self._workers = []
        self._ready = set()
        self._requests: dict[str, FakeRequest] = {}
        self._waiting: collections.deque[FakeRequest] = collections.deque()
        self._running: dict[str, FakeRequest] = {}
        self._steps: dict[int, Step] = {}
        self._step_numbers = itertools.count(1)
        self.num_steps = 0

    # -- leaving ------------------------------------------------------------------------------------

    def _end(self, request: FakeRequest, error: EngineError | None = None) -> None:
        """The request leaves; the engine's own references go back."""
        del self._requests[request.request_id]
        self._running.pop(request.request_id, None)
        if request in self._waiting:
            self._waiting.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.state = State.FINISHED
        request.generation += 1
        if not request.future.set_running_or_notify_cancel():
            return
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(request.tokens[request.num_prompt :])

    # -- scheduling ----------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return self.spec.geometry.num_blocks_for(num_tokens)

    def _runnable(self) -> bool:
        """Whether a scheduling pass could achieve anything; else the core thread sleeps."""
        if len(self._ready) < self.spec.tp_size:
            return False
        if self._waiting and self._fits(self._waiting[0]):
            return True
        if len(self._steps) >= self.spec.max_steps_in_flight:
            return False
        return any(self._schedulable(r) for r in self._running.values())

    def _schedulable(self, request: FakeRequest) -> bool:
        # A token that is still being computed cannot be fed back yet.
        return request.num_computed < len(request.tokens)

    def _fits(self, request: FakeRequest) -> bool:
        # An upper bound of the need (hits are not looked up here), so admission cannot fail after.
        return self.pool.num_free >= self._blocks_for(len(request.tokens))

    def _admit(self) -> None:
        """Waiting requests in order, as far as blocks for their whole prompt are free."""
        size = self.spec.geometry.block_size_tokens
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            # The last token is always computed here: its logits are needed.
            most = (len(request.tokens) - 1) // size
            hits = self.pool.hit(request.hashes[:most])
            fresh = self.pool.allocate(self._blocks_for(len(request.tokens)) - len(hits))
            assert fresh is not None
            request.blocks = hits + fresh
            request.num_computed = len(hits) * size
            request.num_registered = len(hits)
            if request.remote is not None and self._decode is not None:
                request.state = State.WAITING_KV
                # False: it has ended; request_failed is in the queue and frees the blocks.
                self._decode.blocks_allocated(
                    request.request_id, (tuple(request.blocks),), request.num_computed
                )
            else:
                request.state = State.RUNNING
                self._running[request.request_id] = request
        self._tell_wanted()

    def _tell_wanted(self) -> None:
        """P's driver hears after each pass how many blocks are missing."""
        missing = 0
        if self._waiting:
            missing = max(0, self._blocks_for(len(self._waiting[0].tokens)) - self.pool.num_free)
        if self._prefill is not None:
            self._prefill.blocks_wanted(missing)

    def _schedule(self) -> None:
        """One pass: admit what fits, then start a step if there is something to compute."""
        if len(self._ready) < self.spec.tp_size:
            return
        self._admit()
        if len(self._steps) < self.spec.max_steps_in_flight:
            self._start_step()

    def _start_step(self) -> None:
        budget = self.spec.max_step_tokens
        parts: list[tuple[FakeRequest, int, int, bool]] = []
        written: list[list[int]] = []
        messages: list[list[Any]] = []
        scheduled: list[ScheduledRequest] = []
        for request in list(self._running.values()):
            if budget == 0:
                break
            if request.state is not State.RUNNING or not self._schedulable(request):
                continue
            count = min(budget, len(request.tokens) - request.num_computed)
            if not self._grow(request, request.num_computed + count):
                continue
            first = request.num_computed
            samples = first + count == len(request.tokens)
            scheduled.append(
                ScheduledRequest(
                    request.request_id,
                    first,
                    first + count,
                    (tuple(request.blocks[request.num_planned_blocks :]),),
                )
            )
            request.num_planned_blocks = len(request.blocks)
            messages.append(
                [
                    request.request_id,
                    list(request.blocks),
                    first,
                    request.states[first : first + count],
                    first + count if samples else 0,
                ]
            )
            parts.append((request, request.generation, count, samples))
            size = self.spec.geometry.block_size_tokens
            written.append(request.blocks[first // size : self._blocks_for(first + count)])
            request.num_computed += count
            self._register(request)
            budget -= count
        # A preemption of a later victim may have taken back what was scheduled just now.
        alive = [i for i, (r, generation, _, _) in enumerate(parts) if r.generation == generation]
        if not alive:
            return
        step = next(self._step_numbers)
        plan = b""
        if self._prefill is not None:
            plan = self._prefill.plan_step(step, [scheduled[i] for i in alive])
        # A request may be aborted while the step runs: its blocks must not become somebody else's
        # destination before the last rank has written them.
        blocks = [block for i in alive for block in written[i]]
        self._hold_written(blocks)
        self._steps[step] = Step(
            [parts[i] for i in alive], pending=set(range(self.spec.tp_size)), blocks=blocks
        )
        for worker in self._workers:
            worker.send(["step", step, plan, [messages[i] for i in alive]])
        self.num_steps += 1

    def _grow(self, request: FakeRequest, num_tokens: int) -> bool:
        """Blocks for `num_tokens`; preempts the youngest running request while there are too few."""
        while (need := self._blocks_for(num_tokens) - len(request.blocks)) > 0:
            fresh = self.pool.allocate(need)
            if fresh is not None:
                request.blocks += fresh
                return True
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: FakeRequest) -> None:
        del self._running[request.request_id]
        if self._prefill is not None:
            self._prefill.preempted(request.request_id)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = request.num_registered = request.num_planned_blocks = 0
        request.generation += 1
        request.num_preemptions += 1
        request.state = State.WAITING
        request.remote = None  # what was loaded is lost: this engine computes it itself now
        self._waiting.appendleft(request)

    def _register(self, request: FakeRequest) -> None:
        """Full blocks can be hit as soon as the step that writes them is scheduled, as in vLLM."""
        full = request.num_computed // self.spec.geometry.block_size_tokens
        for i in range(request.num_registered, min(full, len(request.hashes))):
            self.pool.register(request.blocks[i], request.hashes[i])
        request.num_registered = max(request.num_registered, full)

    # -- workers -------------------------------------------------------------------------------------

    def _worker_said(self, rank: int, message: list[Any]) -> None:
        kind = message[0]
        if kind == "ready":
            self._ready.add(rank)
            if len(self._ready) == self.spec.tp_size:
                self._workers_ready()
        elif kind == "lost":
            self._worker_lost(rank, message[2])
        elif message[1] in self._steps:
            step = self._steps[message[1]]
            if kind == "failed":
                step.failed = step.failed or f"rank {rank}: {message[3]}"
                report = RankReport(rank, None, Code.INTERNAL, message[3])
            else:
                report = RankReport(rank, message[3])
                for request_id, fold in message[4]:
                    step.folds[request_id] += fold
            self._rank_done(message[1], report)

    def _rank_done(self, number: int, report: RankReport) -> None:
        step = self._steps[number]
        step.pending.discard(report.rank)
        step.reports.append(report)
        if not step.pending:
            del self._steps[number]
            self._drop_written(step.blocks)
            self._step_done(number, step)

    def _hold_written(self, blocks: list[int]) -> None:
        self.pool.touch(blocks)

    def _drop_written(self, blocks: list[int]) -> None:
        self.pool.release(blocks)

    def _step_done(self, number: int, step: Step) -> None:
        if self._prefill is not None:
            self._prefill.step_finished(number, step.reports)
        if step.failed:
            # What it wrote is void: its requests start again, and their blocks are not hit.
            for request, generation, _, _ in step.parts:
                if request.generation == generation:
                    self.pool.evict(request.blocks)
                    self._preempt(request)
            return
        for request, generation, _, samples in step.parts:
            if samples and request.generation == generation:
                token = token_of(step.folds[request.request_id], self.spec.geometry)
                self._emit(request, token)

    def _emit(self, request: FakeRequest, token: int) -> None:
        request.extend(token)
        if request.on_token is not None:
            request.on_token(token)
        if len(request.tokens) - request.num_prompt >= request.max_new_tokens:
            if self._prefill is not None:
                self._prefill.finished(request.request_id, Code.OK, token)
            self._end(request)
        elif len(request.tokens) // self.spec.geometry.block_size_tokens > len(request.hashes):
            request.hashes = block_hashes(
                request.tokens, self.spec.geometry.block_size_tokens, request.salt
            )

    def _workers_ready(self) -> None:
        raise NotImplementedError

    def _worker_lost(self, rank: int, reason: str) -> None:
        raise NotImplementedError
