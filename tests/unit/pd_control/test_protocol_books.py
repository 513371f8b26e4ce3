"""P's counters add up, and what a transfer's way was is remembered; a miscount would be noticed."""

from __future__ import annotations

from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.messages import Topology
from pd_control.protocol import events as ev
from pd_control.protocol.books import EQUATIONS, imbalances
from pd_control.protocol.planner import ScheduledRequest
from pd_control.protocol.prefill_steps import StepLayer
from pd_control.protocol.settings import Generation, Settings
from pd_control.testing.pair import Pair, content
from pd_control.testing.sim_checks import books_problem
from pd_control.testing.sim_run import run_scenario
from pd_control.testing.sim_scenario import draw_scenario

PROMPT = content(16)


def make(p_tp: int, num_takers: int = 1) -> Pair:
    settings = Settings(generation=Generation.SUBSTEP, on_failure=ev.OnFailure.FAIL)
    pair = Pair(Topology(p_tp, num_kv_heads=4), Topology(1, num_kv_heads=4), settings)
    pair.add_p_request("p-r", PROMPT, num_takers)
    return pair


def want(pair: Pair) -> bytes:
    pair.add_d_request("d-r", PROMPT, remote_request_id="p-r")
    pair.allocate("d-r", 16, 0)
    pair.pump()
    return pair.key("d-r")


def deliver(pair: Pair, key: bytes) -> dict[str, Any]:
    """All ranks send and D has it; returns what P remembers."""
    pair.sent(key, 15)
    pair.landed(key, 15)
    pair.pump()
    assert pair.outcomes["d-r"][0].kind == "loaded"
    ended = pair.p.ended(key, pair.now_s)
    assert ended is not None
    assert (ended["key"], ended["code"]) == (key.hex(), "OK")
    return ended


def test_the_main_step_a_chunk_at_a_time() -> None:
    pair = make(2)
    key = want(pair)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.plan(ScheduledRequest("p-r", 8, 16, pair.blocks_for(8)))
    for step in (1, 2):
        pair.finish_step(step)
    pair.pump()
    ended = deliver(pair, key)
    assert ended["ways"] == ["step 1", "step 2"]
    assert pair.p.counters["ways.step"] == 1
    assert books_problem(pair.p, pair.now_s) == ""


@pytest.mark.parametrize(
    ("acks", "refusals", "ways"),
    [
        ((1, 1), [], ["substep 1.1"]),
        ((0, 1), ["substep 1.1 by rank 0"], ["substep 1.1", "repair of rank 0"]),
        (
            (0, 0),
            ["substep 1.1 by rank 0", "substep 1.1 by rank 1"],
            ["substep 1.1", "repair of rank 0,1"],
        ),
    ],
)
def test_a_substep_and_what_was_refused_and_repaired(
    acks: tuple[int, int], refusals: list[str], ways: list[str]
) -> None:
    pair = make(2)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    for rank in (0, 1):
        pair.to_p(ev.StepFinished(1, rank, Code.OK, acks[rank]))
    pair.pump()
    view = pair.p.inspect("p-r", pair.now_s)
    assert view is not None
    live = view["transfers"][0]
    assert (live["refusals"], live["ways"]) == (refusals, ways)
    ended = deliver(pair, key)
    assert (ended["refusals"], ended["ways"]) == (refusals, ways)
    counters = pair.p.counters
    assert (counters["ways.substep"], counters["substeps.pushed"]) == (1, 2)
    assert counters.get("substeps.refused", 0) == counters.get("sends.repaired", 0) == len(refusals)
    assert books_problem(pair.p, pair.now_s) == ""


def test_a_rank_that_had_frozen_already_is_missed_not_refused() -> None:
    pair = make(2)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 0))
    key = want(pair)
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 1))
    pair.pump()
    ended = deliver(pair, key)
    assert (ended["refusals"], ended["ways"]) == ([], ["substep 1.1", "repair of rank 0"])
    counters = pair.p.counters
    assert (counters["substeps.missed"], counters["substeps.pushed"]) == (1, 1)
    assert books_problem(pair.p, pair.now_s) == ""


def test_complete_kv_goes_frozen() -> None:
    pair = make(1)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.finish_step(1)
    pair.pump()
    assert deliver(pair, want(pair))["ways"] == ["frozen"]
    assert pair.p.counters["ways.frozen"] == 1
    assert books_problem(pair.p, pair.now_s) == ""


def test_a_lost_report_is_unknown_and_the_transfer_fails() -> None:
    pair = make(2)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    key = want(pair)
    pair.to_p(ev.StepFinished(1, 0, Code.OK, None))
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 1))
    pair.pump()
    counters = pair.p.counters
    assert (counters["substeps.unknown"], counters["p_transfer.failed.TIMEOUT"]) == (1, 1)
    for rank in (0, 1):
        pair.to_p(ev.SendDone(rank, pair.p._workers[rank], key, None, 0, Code.ABORTED))
    pair.pump()
    ended = pair.p.ended(key, pair.now_s)
    assert ended is not None
    assert "rank 0 did not say whether it took substep 1.1" in ended["message"]
    assert books_problem(pair.p, pair.now_s) == ""


def test_an_unknown_transfer_is_not_remembered_and_an_old_one_is_forgotten() -> None:
    pair = make(1)
    pair.plan(ScheduledRequest("p-r", 0, 16, pair.blocks_for(16)))
    pair.finish_step(1)
    key = want(pair)
    deliver(pair, key)
    assert pair.p.ended(b"x" * 16, pair.now_s) is None
    later_s = pair.now_s + Settings().deadlines.tombstone_s + 1
    assert pair.p.ended(key, later_s) is None


@pytest.mark.parametrize("equation", range(len(EQUATIONS)))
def test_each_equation_can_fail(equation: int) -> None:
    left, _ = EQUATIONS[equation]
    problems = imbalances({left[0]: 3})
    assert any(f"{left[0]} 3" in problem for problem in problems)


def test_what_is_under_way_balances() -> None:
    counters = {
        "p_transfer.opened": 4,
        "p_transfer.ok": 1,
        "ways.frozen": 1,
        "p_transfer.failed.GONE": 1,
        "substeps.pushed": 3,
        "substeps.refused": 2,
    }
    assert imbalances(counters, transfers_open=2, tentative=1, owed=2) == []
    assert len(imbalances(counters)) == 3


def test_the_simulation_notices_a_repair_that_is_not_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repair = StepLayer._repair

    def broken(self: Any, transfer: Any) -> None:
        before = self.counters.get("sends.repaired", 0)
        repair(self, transfer)
        if before:
            self.counters["sends.repaired"] = before

    monkeypatch.setattr(StepLayer, "_repair", broken)
    for seed in range(300):
        scenario = draw_scenario(seed)
        if scenario.generation == "substep" and len(scenario.requests) < 60:
            result = run_scenario(scenario)
            if result.failure:
                assert result.rule == "books", result.failure
                assert "sends.repaired" in result.failure
                return
    pytest.fail("nobody noticed")


def test_send_done_that_overtakes_its_plan_is_a_step_whose_number_comes_later() -> None:
    pair = make(1, num_takers=2)  # the request stays, so its plan is not after its end
    key = want(pair)  # the core thread has the offer
    plan = pair.planner.plan_step(1, [ScheduledRequest("p-r", 0, 16, pair.blocks_for(16))])
    assert [send.key for send in plan.sends] == [key]
    assert deliver(pair, key)["ways"] == []
    assert pair.p.counters["ways.step"] == 1
    pair.to_p(plan.event)
    pair.pump()
    ended = pair.p.ended(key, pair.now_s)
    assert ended is not None
    assert ended["ways"] == ["step 1"]
    assert pair.p.counters["sends.step"] == 1
    assert books_problem(pair.p, pair.now_s) == ""
