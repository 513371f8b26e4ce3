"""Continuous batching with chunked prefill and prefix caching. Pure bookkeeping; core thread only.

A sequence is WAITING (for a place in the batch), PARKED (for KV that somebody else brings: it costs
nothing until it is woken), RUNNING, or gone. Each step takes running sequences first, then waiting
ones, within a budget of tokens; when blocks run out the youngest running sequence is preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pd_control.reference.blocks import BlockHash, BlockPool, chain_hashes
from pd_control.reference.sampling import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request inside the engine. ``num_computed`` counts tokens whose KV a *scheduled* step writes."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    num_prompt: int = 0
    salt: bytes = b""
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_registered: int = 0
    num_planned_blocks: int = 0
    finish_reason: str | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt


@dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a step: ``num_tokens`` from ``first_token`` on; ``samples`` if it ends there."""

    sequence: Sequence
    first_token: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. ``preempted`` lost their blocks while it was planned."""

    step: int
    scheduled: list[Scheduled]
    preempted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Decides what the next step computes, over a :class:`BlockPool`.

    Args:
        max_step_tokens: tokens a step computes at most; longer prompts are chunked.
        max_running: sequences in a step at most.
        split_last_token: compute the last prompt token in a step of its own, as an engine does that got
            the KV before it from elsewhere; makes two engines comparable bit for bit.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_step_tokens: int = 2048,
        max_running: int = 64,
        eos_token_id: int | None = None,
        split_last_token: bool = False,
    ) -> None:
        if max_step_tokens < 1 or max_running < 1:
            raise ValueError("max_step_tokens and max_running must be at least 1")
        self.pool = pool
        self.max_step_tokens, self.max_running = max_step_tokens, max_running
        self.eos_token_id, self.split_last_token = eos_token_id, split_last_token
        self.sequences: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: OrderedDict[str, Sequence] = OrderedDict()
        self._step = 0
        self._num_short = 0
        self._in_flight: StepPlan | None = None
        self._late: list[int] = []  # blocks of ended sequences that the step in flight still writes
        #: Called before a sequence's references go: what else must know of its end or preemption.
        self.before_finish: Callable[[Sequence, str], None] = lambda sequence, reason: None
        self.before_preempt: Callable[[Sequence], None] = lambda sequence: None

    # -- entering and leaving -------------------------------------------------------------------

    def add(self, sequence: Sequence, *, parked: bool = False) -> None:
        """Take a sequence in; a parked one waits for :meth:`admit`."""
        if sequence.request_id in self.sequences:
            raise ValueError(f"request {sequence.request_id!r} is already here")
        longest = self.pool.num_blocks * self.pool.block_tokens
        if len(sequence.token_ids) + sequence.sampling.max_tokens > longest:
            raise ValueError(
                f"request {sequence.request_id!r} may need "
                f"{len(sequence.token_ids) + sequence.sampling.max_tokens} tokens; "
                f"the pool holds {longest}"
            )
        self.sequences[sequence.request_id] = sequence
        sequence.hashes = chain_hashes(
            sequence.token_ids, self.pool.block_tokens, sequence.salt, sequence.hashes
        )
        if parked:
            sequence.status = Status.PARKED
        else:
            self.waiting.append(sequence)

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that still leaves a token to compute; not acquired."""
        most = (len(sequence.token_ids) - 1) // self.pool.block_tokens
        return self.pool.lookup(sequence.hashes[:most])

    def claim_prompt_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a parked sequence its cached prefix and blocks for ``num_tokens``; False: no room."""
        hits = self.cached_prefix(sequence)
        need = -(-num_tokens // self.pool.block_tokens) - len(hits)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(max(0, need))
        if fresh is None:
            self.pool.release(hits)
            return False
        sequence.block_ids = [*hits, *fresh]
        sequence.num_cached = len(hits) * self.pool.block_tokens
        sequence.num_registered = len(hits)
        return True

    def admit(self, request_id: str, num_computed: int) -> None:
        """A parked sequence may run on: its first ``num_computed`` tokens are in its blocks."""
        sequence = self.sequences[request_id]
        if sequence.status is not Status.PARKED:
            raise RuntimeError(f"request {request_id!r} is {sequence.status.value}, not parked")
        sequence.num_computed = min(num_computed, len(sequence.token_ids) - 1)
        self._register(sequence, num_computed)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        """Take a sequence out and drop the engine's reference on its blocks; None if it is not here."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return None
        self.running.pop(request_id, None)
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self.before_finish(sequence, reason)
        if self._in_flight is not None and any(
            part.sequence is sequence for part in self._in_flight.scheduled
        ):
            self._late += reversed(sequence.block_ids)
            sequence.block_ids = []
        self._drop_blocks(sequence)
        return sequence

    def recompute(self, request_id: str) -> None:
        """A parked sequence whose KV does not come is computed here, in blocks allocated anew."""
        sequence = self.sequences[request_id]
        if sequence.status is not Status.PARKED:
            raise RuntimeError(f"request {request_id!r} is {sequence.status.value}, not parked")
        self._restart(sequence)

    @property
    def num_blocks_missing(self) -> int:
        """How many more free blocks are needed by who could not go on in the last :meth:`plan`, or by
        the first waiting sequence for its whole prompt."""
        if not self.waiting or self.waiting[0].block_ids:
            return self._num_short
        return max(self._num_short, self.num_missing_for(len(self.waiting[0].token_ids)))

    def num_missing_for(self, num_tokens: int, num_blocks: int = 0) -> int:
        """How many more free blocks it takes to hold so many tokens, ``num_blocks`` being there."""
        need = -(-num_tokens // self.pool.block_tokens) - num_blocks
        return max(0, need - self.pool.num_free)

    # -- steps ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""
        budget = self.max_step_tokens
        scheduled: list[Scheduled] = []
        preempted: list[Sequence] = []
        self._num_short = 0
        for sequence in list(self.running.values()):
            if budget == 0 or sequence.status is not Status.RUNNING:
                continue
            part = self._take(sequence, budget, preempted, scheduled)
            if part is not None:
                scheduled.append(part)
                budget -= part.num_tokens
        while self.waiting and budget and len(self.running) < self.max_running and not preempted:
            sequence = self.waiting[0]
            if not sequence.block_ids:
                hits = self.cached_prefix(sequence)
                self.pool.acquire(hits)
                sequence.block_ids = list(hits)
                sequence.num_computed = sequence.num_cached = len(hits) * self.pool.block_tokens
                sequence.num_registered = len(hits)
            part = self._take(sequence, budget, None, scheduled)
            if part is None:
                if sequence.num_computed == sequence.num_cached:
                    self._drop_blocks(sequence)
                break
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running[sequence.request_id] = sequence
            scheduled.append(part)
            budget -= part.num_tokens
        if not scheduled:
            return None
        self._step += 1
        self._in_flight = StepPlan(self._step, scheduled, preempted)
        return self._in_flight

    def commit(self, plan: StepPlan, sampled: dict[str, int]) -> list[tuple[Sequence, int, bool]]:
        """The step is computed: append samples. Returns (sequence, new token, finished?) per sample."""
        self._in_flight = None
        self.pool.release(self._late)
        self._late = []
        news = []
        for part in plan.scheduled:
            sequence = part.sequence
            if sequence.status is Status.FINISHED:
                continue
            self._register(sequence, part.first_token + part.num_tokens)
            if not part.samples or sequence.status is not Status.RUNNING:
                continue
            token = sampled[sequence.request_id]
            sequence.token_ids.append(token)
            reason = self.reason_to_end(sequence)
            news.append((sequence, token, reason is not None))
            if reason is not None:
                self.finish(sequence.request_id, reason)
        return news

    def reason_to_end(self, sequence: Sequence) -> str | None:
        """``stop`` or ``length`` if its newest token was its last."""
        limits = sequence.sampling
        if sequence.token_ids[-1] == self.eos_token_id and not limits.ignore_eos:
            return "stop"
        return "length" if sequence.num_output >= limits.max_tokens else None

    def _take(
        self,
        sequence: Sequence,
        budget: int,
        preempted: list[Sequence] | None,
        scheduled: list[Scheduled],
    ) -> Scheduled | None:
        """Blocks and budget for a sequence's next tokens; None if there is no room or nothing to do."""
        known = len(sequence.token_ids)
        count = min(budget, known - sequence.num_computed)
        last_prompt = sequence.num_prompt - 1
        if self.split_last_token and sequence.num_computed < last_prompt:
            count = min(count, last_prompt - sequence.num_computed)
        if count < 1:
            return None
        end = sequence.num_computed + count
        need = -(-end // self.pool.block_tokens) - len(sequence.block_ids)
        while need > 0:
            fresh = self.pool.allocate(need)
            if fresh is not None:
                sequence.block_ids += fresh
                break
            victim = None if preempted is None else self._victim(sequence, scheduled)
            if victim is None or preempted is None:
                missing = self.num_missing_for(known, len(sequence.block_ids))
                self._num_short = max(self._num_short, missing)
                return None
            self._preempt(victim)
            preempted.append(victim)
        first = sequence.num_computed
        sequence.num_computed = end
        return Scheduled(sequence, first, count, samples=end == known)

    def _victim(self, keep: Sequence, scheduled: list[Scheduled]) -> Sequence | None:
        """Who gives its blocks back: one that waits but holds some, else the youngest running one that
        this step does not already compute."""
        taken = {id(s.sequence) for s in scheduled}
        for sequence in (*reversed(self.waiting), *reversed(self.running.values())):
            if sequence is not keep and sequence.block_ids and id(sequence) not in taken:
                return sequence
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.before_preempt(sequence)
        sequence.num_preemptions += 1
        if self.running.pop(sequence.request_id, None) is None:
            self.waiting.remove(sequence)
        self._restart(sequence)

    def _restart(self, sequence: Sequence) -> None:
        """Back to the head of the queue with nothing computed."""
        self._drop_blocks(sequence)
        sequence.num_computed = sequence.num_cached = sequence.num_planned_blocks = 0
        sequence.status = Status.WAITING
        sequence.hashes = chain_hashes(
            sequence.token_ids, self.pool.block_tokens, sequence.salt, sequence.hashes
        )
        self.waiting.appendleft(sequence)

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks full up to ``num_tokens`` are complete: later prompts may take them as a prefix."""
        full = num_tokens // self.pool.block_tokens
        if full <= sequence.num_registered or not sequence.block_ids:
            return
        sequence.hashes = chain_hashes(
            sequence.token_ids, self.pool.block_tokens, sequence.salt, sequence.hashes
        )
        for i in range(sequence.num_registered, min(full, len(sequence.hashes))):
            self.pool.register(sequence.block_ids[i], sequence.hashes[i])
        sequence.num_registered = min(full, len(sequence.hashes))

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.block_ids))
        sequence.block_ids = []
        sequence.num_registered = 0
