"""Continuous batching: budgets, chunks, prefix hits, preemption, parking; blocks always come back."""

from __future__ import annotations

import random

import pytest

from pd_control.reference.blocks import BlockPool
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.scheduler import Scheduler, Sequence, Status


def sequence(name: str, num_prompt: int, max_tokens: int = 4, first: int = 1) -> Sequence:
    tokens = [first + i % 50 for i in range(num_prompt)]
    return Sequence(name, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def run(scheduler: Scheduler, max_steps: int = 1000) -> list[list[tuple[str, int, int, bool]]]:
    """Steps until nothing can be computed; every sample is token 1."""
    log = []
    for _ in range(max_steps):
        plan = scheduler.plan()
        if plan is None:
            return log
        log.append(
            [
                (s.sequence.request_id, s.first_token, s.num_tokens, s.samples)
                for s in plan.scheduled
            ]
        )
        sampled = {s.sequence.request_id: 1 for s in plan.scheduled if s.samples}
        scheduler.commit(plan, sampled)
    raise AssertionError("does not come to rest")


def test_a_long_prompt_is_chunked_by_the_budget() -> None:
    scheduler = Scheduler(BlockPool(32, 4), max_step_tokens=8)
    scheduler.add(sequence("a", 19, max_tokens=2))
    assert run(scheduler) == [
        [("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 3, True)], [("a", 19, 1, True)],
    ]  # fmt: skip
    assert scheduler.pool.num_held == 0


def test_the_last_prompt_token_can_have_a_step_of_its_own() -> None:
    scheduler = Scheduler(BlockPool(32, 4), split_last_token=True)
    scheduler.add(sequence("a", 6, max_tokens=2))
    assert run(scheduler) == [[("a", 0, 5, False)], [("a", 5, 1, True)], [("a", 6, 1, True)]]


def test_running_sequences_go_first_and_new_ones_join() -> None:
    scheduler = Scheduler(BlockPool(32, 4), max_step_tokens=8)
    scheduler.add(sequence("a", 5))
    first = scheduler.plan()
    assert first is not None
    scheduler.commit(first, {"a": 1})
    scheduler.add(sequence("b", 20, first=100))
    second = scheduler.plan()
    assert second is not None
    assert [(s.sequence.request_id, s.num_tokens) for s in second.scheduled] == [("a", 1), ("b", 7)]


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = Scheduler(BlockPool(32, 4))
    scheduler.add(sequence("a", 12, max_tokens=1))
    run(scheduler)
    scheduler.add(sequence("b", 12, max_tokens=1))
    assert run(scheduler) == [[("b", 8, 4, True)]], "the last block holds the token to compute"


def test_when_blocks_run_out_the_youngest_starts_again() -> None:
    scheduler = Scheduler(BlockPool(6, 4, prefix_caching=False))
    scheduler.add(sequence("old", 8, max_tokens=12))
    scheduler.add(sequence("young", 8, max_tokens=8, first=100))
    log = run(scheduler)
    restarts = [row for step in log for row in step if row[0] == "young" and row[1] == 0]
    assert len(restarts) >= 2
    assert scheduler.pool.num_held == 0
    assert not scheduler.sequences


def test_a_parked_sequence_costs_no_step_until_it_is_admitted() -> None:
    scheduler = Scheduler(BlockPool(32, 4))
    parked = sequence("a", 10, max_tokens=1)
    scheduler.add(parked, parked=True)
    assert scheduler.claim_prompt_blocks(parked, 10)
    assert scheduler.plan() is None
    scheduler.admit("a", 9)
    assert run(scheduler) == [[("a", 9, 1, True)]]
    assert scheduler.pool.num_held == 0


def test_parked_blocks_that_do_not_fit_are_refused_without_a_trace() -> None:
    scheduler = Scheduler(BlockPool(4, 4))
    big = sequence("a", 12, max_tokens=1)
    scheduler.add(big, parked=True)
    held = scheduler.pool.allocate(2)
    assert held is not None
    assert not scheduler.claim_prompt_blocks(big, 12)
    assert scheduler.pool.num_held == 2


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = Scheduler(BlockPool(2, 4))
    with pytest.raises(ValueError, match="the pool holds 8"):
        scheduler.add(sequence("a", 8, max_tokens=1))


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_ends_with_every_block_back(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(24, 4), max_step_tokens=rng.choice([7, 16, 64]), max_running=5)
    for i in range(200):
        if rng.random() < 0.4 and len(scheduler.sequences) < 12:
            item = sequence(f"r{i}", rng.randint(1, 40), rng.randint(1, 20), rng.choice([1, 100]))
            scheduler.add(item)
        if rng.random() < 0.1 and scheduler.sequences:
            scheduler.finish(rng.choice(sorted(scheduler.sequences)), "abort")
        plan = scheduler.plan()
        if plan is not None:
            assert plan.num_tokens <= scheduler.max_step_tokens
            if rng.random() < 0.2 and plan.scheduled:  # an abort while the step is computed
                scheduler.finish(rng.choice(plan.scheduled).sequence.request_id, "abort")
            scheduler.commit(plan, {s.sequence.request_id: 1 for s in plan.scheduled if s.samples})
        held = {b for s in scheduler.sequences.values() for b in s.block_ids}
        assert len(held) == scheduler.pool.num_held
        assert all(s.block_ids for s in scheduler.running.values())
    run(scheduler)
    assert scheduler.pool.num_held == 0
    assert not scheduler.running
    assert all(s.status is not Status.RUNNING for s in scheduler.sequences.values())
