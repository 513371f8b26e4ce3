"""P's sends: which way each goes, what a rank refuses, what a preemption leaves, what may not be read."""

from __future__ import annotations

import pytest

from pd_control.codes import Code
from pd_control.messages import BlockIds, CancelSend, FrozenSends, Send, Substep, Topology
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.errors import EngineContractError, InvariantError
from pd_control.protocol.p_request import PRequestState
from pd_control.protocol.planner import ScheduledRequest
from pd_control.protocol.settings import Generation, Settings
from pd_control.testing.pair import Pair, content

PROMPT = content(16)


def make(p_tp: int = 1, generation: Generation = Generation.SUBSTEP) -> Pair:
    settings = Settings(generation=generation, on_failure=ev.OnFailure.FAIL)
    return Pair(Topology(p_tp, num_kv_heads=4), Topology(1, num_kv_heads=4), settings)


def want(pair: Pair, name: str = "d-r", cached_tokens: int = 0) -> bytes:
    pair.add_d_request(name, PROMPT, remote_request_id="p-r")
    pair.allocate(name, 16, cached_tokens)
    pair.pump()
    return pair.key(name)


def items(pair: Pair, kind: type) -> list[tuple[int, object]]:
    return [
        (e.rank, e.item)
        for side, e in pair.delivered
        if side == "p" and isinstance(e, fx.WorkerNews) and isinstance(e.item, kind)
    ]


def frozen(pair: Pair) -> list[tuple[int, Send]]:
    return [(rank, s) for rank, item in items(pair, FrozenSends) for s in item.sends]  # type: ignore[attr-defined]


def finish(pair: Pair, key: bytes, name: str = "d-r", tokens: int = 15) -> None:
    pair.sent(key, tokens)
    pair.landed(key, tokens)
    pair.pump()
    assert pair.outcomes[name][0].kind == "loaded"


def end(pair: Pair) -> None:
    if pair.planner._running:
        pair.finish_p_request("p-r")
    for step in list(pair.p._steps):
        pair.finish_step(step)
    pair.pump()
    pair.advance(500)
    pair.assert_clean()


# --- ranks that acknowledge differently ------------------------------------------------------------


@pytest.mark.parametrize("acks", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_each_rank_is_repaired_on_its_own(acks: tuple[int, int]) -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    assert [rank for rank, _ in items(pair, Substep)] == [0, 1]
    pair.to_p(ev.StepFinished(1, 0, Code.OK, acks[0]))
    pair.pump()
    assert not frozen(pair), "nothing is complete before every rank has said so"
    pair.to_p(ev.StepFinished(1, 1, Code.OK, acks[1]))
    pair.pump()
    refused = [rank for rank in (0, 1) if acks[rank] == 0]
    assert [rank for rank, _ in frozen(pair)] == refused
    assert all(s.key == key and (s.first_token, s.end_token) == (0, 15) for _, s in frozen(pair))
    assert pair.p.counters.get("sends.repaired", 0) == len(refused)
    finish(pair, key)
    end(pair)


def test_substeps_are_numbered_and_acknowledged_up_to_the_highest_contiguous_one() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT, num_takers=3)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    keys = [want(pair, f"d{n}") for n in range(3)]
    numbers = [item.substep for rank, item in items(pair, Substep) if rank == 0]  # type: ignore[attr-defined]
    assert numbers == [1, 2, 3]
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 2))
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 1))
    pair.pump()
    assert {(rank, s.key) for rank, s in frozen(pair)} == {(1, keys[1]), (0, keys[2]), (1, keys[2])}
    for n, key in enumerate(keys):
        finish(pair, key, f"d{n}")
    end(pair)


def test_a_rank_that_had_finished_is_not_asked_and_is_repaired() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 0))
    key = want(pair)
    assert [rank for rank, _ in items(pair, Substep)] == [1]
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 1))
    pair.pump()
    assert [rank for rank, _ in frozen(pair)] == [0]
    finish(pair, key)
    end(pair)


def test_an_unknown_ack_fails_the_transfer_and_a_new_attempt_gets_it() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.add_d_request(
        "d-r", PROMPT, remote_request_id="p-r", on_failure=ev.OnFailure.RETRY, max_attempts=2
    )
    pair.allocate("d-r", 16)
    pair.pump()
    first = pair.key("d-r")
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 1))
    pair.to_p(ev.StepFinished(1, 1, Code.OK, None))
    pair.pump()
    second = pair.key("d-r")
    assert second != first
    assert {rank for rank, item in items(pair, CancelSend)} == {0, 1}
    assert [(rank, s.key) for rank, s in frozen(pair)] == [(0, second), (1, second)]
    finish(pair, second)
    end(pair)


def test_a_failed_transfer_is_not_repaired() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    want(pair)
    pair.to_d(ev.AbortRequested("d-r"))
    pair.pump()
    pair.finish_step(1, {0: 0, 1: 0})
    pair.pump()
    assert not frozen(pair)
    end(pair)


def test_send_done_before_the_ack_counts_as_taken() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    pair.sent(key, 15)  # every rank, before the step has ended
    pair.landed(key, 15)
    pair.pump()
    assert pair.outcomes["d-r"][0].kind == "loaded"
    pair.finish_step(1, {0: 1, 1: 1})
    end(pair)


# --- generations -----------------------------------------------------------------------------------


def test_generation_bypass_waits_for_complete_kv() -> None:
    pair = make(generation=Generation.BYPASS)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    assert not items(pair, Substep)
    pair.finish_step(1)
    pair.pump()
    assert [rank for rank, _ in frozen(pair)] == [0]
    finish(pair, key)
    end(pair)


def test_generation_step_waits_for_the_next_step_or_for_idleness() -> None:
    pair = make(generation=Generation.STEP)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    pair.plan()  # a long step of others is running
    key = want(pair)
    assert not frozen(pair)
    pair.plan()
    pair.pump()
    assert len(frozen(pair)) == 1
    finish(pair, key)
    pair.finish_step(2)
    pair.finish_step(3)
    pair.pump()
    pair.assert_clean()


def test_generation_step_sends_when_no_step_follows() -> None:
    pair = make(generation=Generation.STEP)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    pair.finish_step(1)
    pair.pump()
    assert len(frozen(pair)) == 1
    finish(pair, key)
    end(pair)


# --- who plans ---------------------------------------------------------------------------------------


def test_a_destination_mid_chunk_joins_from_the_next_main_step() -> None:
    pair = make()
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    key = want(pair, cached_tokens=4)
    assert not items(pair, Substep), "substeps only close requests"
    plan = pair.plan(ScheduledRequest("p-r", 8, 16, pair.blocks_for(8)))
    assert [(s.first_token, s.end_token, s.last) for s in plan.sends] == [(4, 15, True)]
    pair.pump()
    pair.finish_step(1)
    pair.finish_step(2)
    assert not frozen(pair)
    finish(pair, key)
    end(pair)


@pytest.mark.parametrize("none", [(), ((),)])
def test_a_chunk_that_ends_in_the_block_where_it_began_adds_none(none: BlockIds) -> None:
    """Crowded schedulers hand out chunks smaller than a block."""
    pair = make()
    pair.add_p_request("p-r", PROMPT)
    key = want(pair)
    pair.plan(ScheduledRequest("p-r", 0, 5, pair.blocks_for(5)))
    pair.plan(ScheduledRequest("p-r", 5, 7, none))
    plan = pair.plan(ScheduledRequest("p-r", 7, 16, pair.blocks_for(8)))
    assert [(s.first_token, s.end_token, s.last) for s in plan.sends] == [(7, 15, True)]
    assert [len(group) for group in plan.sends[0].src_block_ids] == [4]
    pair.pump()
    for step in (1, 2, 3):
        pair.finish_step(step)
    finish(pair, key)
    end(pair)


def test_an_offer_that_comes_too_late_for_the_last_chunk_becomes_a_substep_of_it() -> None:
    """The core thread plans the last chunk before the offer has reached it: nobody sends twice."""
    pair = make()
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.pump()
    pair.add_d_request("d-r", PROMPT, remote_request_id="p-r")
    pair.allocate("d-r", 16)
    pair.pump_until(fx.OfferTransfer)
    (offer,) = pair.take(fx.OfferTransfer)
    plan = pair.plan(ScheduledRequest("p-r", 8, 16, pair.blocks_for(8)))
    assert not plan.sends
    pair.deliver("p", offer)  # now it arrives
    pair.pump()
    ((_, substep),) = items(pair, Substep)
    assert isinstance(substep, Substep)
    assert [(s.first_token, s.end_token) for s in substep.sends] == [(0, 15)]
    key = pair.key("d-r")
    later = pair.plan(ScheduledRequest("p-r", 16, 17, pair.blocks_for(1)))
    assert not later.sends, "a step that computes nothing that is wanted carries nothing"
    pair.finish_step(1)
    pair.finish_step(2, {0: 1})
    pair.finish_step(3)
    finish(pair, key)
    end(pair)


def test_a_plan_that_crosses_an_abort_is_drained_before_the_lease_goes() -> None:
    pair = make()
    pair.add_d_request("d-r", PROMPT)
    pair.allocate("d-r", 16)
    pair.pump()
    request_id = pair.admitted[0].request_id
    plan = pair.planner.plan_step(1, [ScheduledRequest(request_id, 0, 16, pair.blocks_for(16))])
    assert plan.sends
    pair.to_d(ev.AbortRequested("d-r"))  # the loop has not seen the plan yet
    pair.pump_until(fx.WithdrawTransfer)
    pair.step = 1
    pair.to_p(plan.event)  # it sees it now: it must cancel, and the release must be refused
    cancels = pair.take(fx.WorkerNews, lambda e: isinstance(e.item, CancelSend))
    assert [c.rank for c in cancels] == [0]
    pair.pump()
    assert pair.p_refs.counts, "a rank may still read"
    for cancel in cancels:
        pair.deliver("p", cancel)
    pair.pump()
    assert not pair.p_refs.counts
    pair.finish_step(1)
    end(pair)


# --- prefix hits -------------------------------------------------------------------------------------


def test_a_prefix_hit_inherits_the_step_of_the_block_it_hits() -> None:
    pair = make()
    other_blocks = pair.blocks_for(16)
    pair.add_p_request("other", content(16, seed=2))
    pair.plan(ScheduledRequest("other", 0, 16, other_blocks))  # runs
    pair.add_p_request("p-r", PROMPT)
    own = pair.blocks_for(8)
    blocks = ((*other_blocks[0][:2], *own[0]),)
    pair.plan(ScheduledRequest("p-r", 8, 16, blocks))  # hits the first two while they are written
    pair.finish_step(2)
    pair.pump()
    assert pair.p._requests["p-r"].state is PRequestState.PREFILLING
    view = pair.p.inspect("p-r", pair.now_s)
    assert view is not None
    assert view["waits_for_steps"] == [1]
    pair.finish_step(1)
    pair.pump()
    assert pair.p._requests["p-r"].state is PRequestState.HELD
    pair.finish_p_request("other")
    end(pair)


def test_a_failed_step_voids_those_that_hit_its_blocks() -> None:
    pair = make()
    other_blocks = pair.blocks_for(16)
    pair.add_p_request("other", content(16, seed=2))
    pair.plan(ScheduledRequest("other", 0, 16, other_blocks))
    pair.add_p_request("p-r", PROMPT)
    blocks = ((*other_blocks[0][:2], *pair.blocks_for(8)[0]),)
    pair.plan(ScheduledRequest("p-r", 8, 16, blocks))
    want(pair)
    pair.finish_step(2)
    pair.finish_step(1, code=Code.INTERNAL)
    pair.pump()
    assert [(o.kind, o.code) for o in pair.outcomes["d-r"]] == [("failed", Code.INTERNAL)]
    end(pair)


def test_a_hit_on_finished_steps_waits_for_nothing() -> None:
    pair = make()
    other_blocks = pair.blocks_for(16)
    pair.add_p_request("other", content(16, seed=2))
    pair.plan(ScheduledRequest("other", 0, 16, other_blocks))
    pair.finish_step(1)
    pair.add_p_request("p-r", PROMPT)
    blocks = ((*other_blocks[0][:2], *pair.blocks_for(8)[0]),)
    plan = pair.plan(ScheduledRequest("p-r", 8, 16, blocks))
    assert plan.event.requests[0].waits_for_steps == ()
    pair.finish_p_request("other")
    end(pair)


# --- preemption ----------------------------------------------------------------------------------------


def test_preempted_between_chunks_what_was_sent_stays_sent() -> None:
    pair = make()
    pair.add_p_request("p-r", PROMPT)
    pair.pump()
    key = want(pair)
    first_blocks = pair.blocks_for(8)
    plan = pair.plan(ScheduledRequest("p-r", 0, 8, first_blocks))
    assert [(s.first_token, s.end_token) for s in plan.sends] == [(0, 8)]
    pair.pump()
    pair.finish_step(1)
    pair.preempt_p_request("p-r")
    pair.pump()
    assert set(pair.p_refs.counts) == {(0, b) for b in first_blocks[0]}, "may still be read"
    new_blocks = pair.blocks_for(16)
    plan = pair.plan(ScheduledRequest("p-r", 0, 16, new_blocks))
    (send,) = plan.sends
    assert (send.first_token, send.end_token, send.last) == (8, 15, True)
    assert send.src_block_ids == new_blocks
    pair.pump()
    pair.finish_step(2)
    finish(pair, key)
    end(pair)


def test_preempted_without_a_reader_gives_the_blocks_back_at_once() -> None:
    pair = make()
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.finish_step(1)
    pair.preempt_p_request("p-r")
    pair.pump()
    assert not pair.p_refs.counts
    end(pair)


def test_preempted_under_a_substep_the_old_blocks_are_repaired_from() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    old = pair.blocks_for(16)
    pair.plan(ScheduledRequest("p-r", 0, 16, old))
    key = want(pair)
    pair.preempt_p_request("p-r")
    pair.pump()
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.pump()
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 1))
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 0))
    pair.planner.step_finished(1)
    pair.pump()
    assert [(rank, s.src_block_ids) for rank, s in frozen(pair)] == [(1, old)]
    finish(pair, key)
    pair.finish_step(2)
    end(pair)


# --- death of a rank ---------------------------------------------------------------------------------


def test_a_dead_rank_voids_what_touches_it_and_the_engine_is_told() -> None:
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    want(pair)
    pair.to_p(ev.WorkerRegistered(1, b"N" * 16))
    voids = pair.take(fx.VoidRankKv)
    assert [(v.rank, v.incarnation) for v in voids] == [(1, pair.p_workers[1])]
    pair.pump()
    assert [(o.kind, o.code) for o in pair.outcomes["d-r"]] == [("failed", Code.PEER_LOST)]
    pair.advance(100)
    pair.assert_clean()


# --- contracts -----------------------------------------------------------------------------------------


def test_steps_must_go_up() -> None:
    pair = make()
    pair.plan()
    with pytest.raises(EngineContractError, match="step 1 after step 1"):
        pair.planner.plan_step(1, [])
    with pytest.raises(InvariantError, match="step 1 planned after step 1"):
        pair.p.handle(ev.StepPlanned(1, ()), pair.now_s)


def test_request_ids_are_unique_per_try() -> None:
    pair = make()
    pair.planner.add_request("p-r")
    with pytest.raises(EngineContractError, match="unique per try"):
        pair.planner.add_request("p-r")


def test_an_event_of_the_other_side_is_a_type_error() -> None:
    pair = make()
    with pytest.raises(TypeError, match="expected an event of P"):
        pair.p.handle(ev.PeerGone("x"), 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an event of D"):
        pair.d.handle(ev.BlocksWanted(1), 0.0)  # type: ignore[arg-type]


def test_a_repair_to_come_keeps_the_old_blocks_leased() -> None:
    """Rank 0 refused, rank 1 is done before it has reported the step, and then comes a preemption:
    nobody reads at that moment, and rank 0 will."""
    pair = make(2)
    pair.add_p_request("p-r", PROMPT)
    old = pair.blocks_for(16)
    pair.plan(ScheduledRequest("p-r", 0, 16, old))
    key = want(pair)
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 0))
    pair.sent(key, 15, ranks=[1])
    pair.preempt_p_request("p-r")
    pair.pump()
    assert set(pair.p_refs.counts) == {(0, b) for b in old[0]}
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 1))
    pair.planner.step_finished(1)
    pair.pump()
    assert [(rank, s.src_block_ids) for rank, s in frozen(pair)] == [(0, old)]
    pair.sent(key, 15, ranks=[0])
    pair.landed(key, 15)
    pair.pump()
    assert pair.outcomes["d-r"][0].kind == "loaded"
    end(pair)
