"""The planner forgets every request: the driver's own, the engine's own, those that were stopped."""

from __future__ import annotations

from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.protocol.effects import ForgetRequest
from pd_control.protocol.errors import EngineContractError
from pd_control.protocol.events import RequestFinished
from pd_control.protocol.planner import ScheduledRequest, StepPlanner


class Refs:
    def hold(self, block_ids: Any) -> None: ...

    def release(self, block_ids: Any) -> None: ...


def planner_with_step(*request_ids: str, tracked: bool) -> StepPlanner:
    planner = StepPlanner(Refs(), 4)
    if tracked:
        for request_id in request_ids:
            planner.add_request(request_id)
    parts = [ScheduledRequest(r, 0, 4, ((i,),)) for i, r in enumerate(request_ids)]
    planner.plan_step(1, parts)
    planner.step_finished(1)
    return planner


def test_the_engine_s_own_requests_go_with_their_end() -> None:
    planner = planner_with_step("a", "b", tracked=False)
    assert planner.num_requests == 2
    assert planner.finish_request("a") is None
    assert planner.preempt("b") is None
    assert planner.num_requests == 0
    assert planner.is_idle()


def test_a_request_that_was_stopped_is_over_with_the_driver_s_word() -> None:
    planner = planner_with_step("a", tracked=True)
    assert planner.stopped("a") == RequestFinished("a", Code.ABORTED, None)
    assert planner.stopped("a") is None
    planner.apply(ForgetRequest("a", 1, True))
    assert planner.num_requests == 0
    assert planner.is_idle()


def test_stopped_and_forgotten_in_the_other_order() -> None:
    planner = planner_with_step("a", tracked=True)
    planner.apply(ForgetRequest("a", 1, True))
    assert planner.stopped("a") is None
    assert planner.num_requests == 0


def test_an_end_that_was_reported_is_not_reported_again_for_being_stopped() -> None:
    planner = planner_with_step("a", tracked=True)
    assert planner.finish_request("a", Code.OK, 7) == RequestFinished("a", Code.OK, 7)
    assert planner.stopped("a") is None
    with pytest.raises(EngineContractError, match="twice"):
        planner.finish_request("a")
