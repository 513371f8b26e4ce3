"""Rules broken on purpose, one at a time: the simulation must find each within a bounded number of seeds.

If one of these ever passes unnoticed, the simulation has gone blind, and a green run says less than it seems
to.
Five and more break the life of a request, five and more the life of a substep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.protocol import decode_tries, prefill_steps
from pd_control.protocol.d_request import DRequestInput, DRequestState
from pd_control.protocol.effects import RequestLoaded
from pd_control.protocol.planner import StepPlanner
from pd_control.protocol.prefill_requests import RequestLayer
from pd_control.protocol.prefill_state import PRequest, PTransfer
from pd_control.protocol.prefill_steps import StepLayer
from pd_control.protocol.prefill_transfers import TransferLayer
from pd_control.protocol.tombstones import TimedTable
from pd_control.testing.sim_run import run_scenario
from pd_control.testing.sim_scenario import Scenario, draw_scenario

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
Where = Callable[[Scenario], bool]

#: Each must be found within so many seeds, counted from 0 (most need fewer than ten).
MAX_SEEDS = 2000
#: Crowded seeds would only cost time here.
MAX_REQUESTS = 60

TryLayer = decode_tries.TryLayer


# -- requests ------------------------------------------------------------------------------------


def ready_on_the_first_load_done(patch: Patch) -> None:
    """D runs when one rank's slice has landed."""
    report = TryLayer._report

    def broken(self: Any, request: Any, member: Any, tokens: int, code: Code, detail: str) -> None:
        report(self, request, member, tokens, code, detail)
        if code is Code.OK and request.state is DRequestState.LOADING:
            self._loaded(request)

    patch.setattr(TryLayer, "_report", broken)


def ready_on_final(patch: Patch) -> None:
    """P's word is taken for D's own."""

    def broken(self: Any, request: Any) -> None:
        if request.state is not DRequestState.LOADING:
            self._started(request)
        if self._input(request, DRequestInput.LOADED):
            self._ready(request, request.wanted_end)

    patch.setattr(TryLayer, "_all_sent", broken)


def closing_is_not_final(patch: Patch) -> None:
    """A load that becomes whole while its grants are being closed still makes D run."""
    report = TryLayer._report

    def broken(self: Any, request: Any, member: Any, tokens: int, code: Code, detail: str) -> None:
        report(self, request, member, tokens, code, detail)
        if request.state is DRequestState.CLOSING and request.completion.whole:
            self._emit(RequestLoaded(request.request_id, request.wanted_end, None))

    patch.setattr(TryLayer, "_report", broken)


def lease_returned_before_the_grants_are_closed(patch: Patch) -> None:
    """D gives the blocks back when it decides, not when every rank has acknowledged."""
    check = TryLayer._check_closed

    def broken(self: Any, request: Any) -> None:
        request.grants = frozenset()
        check(self, request)

    patch.setattr(TryLayer, "_check_closed", broken)


def lease_returned_on_a_timer(patch: Patch) -> None:
    """The close deadline releases the blocks instead of declaring the worker lost."""

    def broken(self: Any, request: Any) -> None:
        request.grants = frozenset()
        self._check_closed(request)

    patch.setattr(TryLayer, "_on_close_due", broken)


def message_leaves_before_the_grants_are_open(patch: Patch) -> None:
    """P is told while a rank may still refuse its bytes."""
    linked = TryLayer._linked

    def broken(self: Any, request: Any) -> None:
        linked(self, request)
        if request.state is DRequestState.GRANTING:
            self._granted(request)

    patch.setattr(TryLayer, "_linked", broken)


def hold_released_on_the_first_send_done(patch: Patch) -> None:
    """P takes one rank's SEND_DONE for all."""

    def broken(self: PTransfer) -> bool:
        untouched = len(self.completion.missing()) == len(self.completion.expected)
        return untouched and bool(self.submitted or self.tentative)

    patch.setattr(PTransfer, "has_readers", property(broken))


def digest_is_not_compared(patch: Patch) -> None:
    """A reference to somebody else's request is served (F07)."""
    patch.setattr(TransferLayer, "_content_problem", staticmethod(lambda transfer, request: None))


def tombstones_are_ignored(patch: Patch) -> None:
    """What is over is taken for new."""
    patch.setattr(TimedTable, "get", lambda self, key, now_s: None)


def a_dead_rank_is_ignored_on_p(patch: Patch) -> None:
    """P goes on serving KV of which a restarted rank has lost its slice (F08)."""

    def broken(self: Any, rank: int, reason: str) -> None:
        del self._workers[rank]

    patch.setattr(RequestLayer, "_worker_lost", broken)


# -- steps and substeps ----------------------------------------------------------------------------


def _with_ack(change: Callable[[int | None], int | None]) -> Mutation:
    def mutation(patch: Patch) -> None:
        settle = StepLayer._settle

        def broken(self: Any, record: Any, rank: int, ack: int | None) -> None:
            settle(self, record, rank, change(ack))

        patch.setattr(StepLayer, "_settle", broken)

    return mutation


ack_is_one_too_high = _with_ack(lambda ack: None if ack is None else ack + 1)
ack_is_one_too_low = _with_ack(lambda ack: ack - 1 if ack else ack)
lost_ack_is_taken_for_refusal = _with_ack(lambda ack: ack or 0)


def one_ack_speaks_for_all_ranks(patch: Patch) -> None:
    """The first rank's acknowledgement settles the journal of every rank."""
    settle = StepLayer._settle

    def broken(self: Any, record: Any, rank: int, ack: int | None) -> None:
        for other in range(self.topology.num_ranks):
            settle(self, record, other, ack)

    patch.setattr(StepLayer, "_settle", broken)


def refused_substep_is_not_planned_again(patch: Patch) -> None:
    patch.setattr(
        StepLayer, "_repair", lambda self, transfer: setattr(transfer, "repair", frozenset())
    )


def refusal_is_repaired_before_it_is_known(patch: Patch) -> None:
    """Ranks that got the substep are sent a frozen copy as well."""
    push = StepLayer._push_substep

    def broken(self: Any, record: Any, transfers: Any) -> None:
        push(self, record, transfers)
        for transfer in transfers:
            transfer.repair |= transfer.tentative

    patch.setattr(StepLayer, "_push_substep", broken)


def planned_is_taken_for_complete(patch: Patch) -> None:
    """KV is sent frozen once its step is planned, not when every rank has ended it."""
    patch.setattr(PRequest, "waiting_for", lambda self, end_token: set())


def joins_the_first_step_instead_of_the_last(patch: Patch) -> None:
    patch.setattr(prefill_steps, "max", min, raising=False)


def prefix_hits_do_not_inherit_their_step(patch: Patch) -> None:
    patch.setattr(StepPlanner, "_writers_of_hits", lambda self, running, first_token: ())


def planner_takes_no_lease_on_later_blocks(patch: Patch) -> None:
    """The lease covers the first chunk of a chunked prefill only."""

    def broken(self: Any, lease_id: int, block_ids: Any) -> None:
        self._live(lease_id, "extend")

    patch.setattr("pd_control.protocol.leases.LeaseTable.extend", broken)


# -- where to look -----------------------------------------------------------------------------------


def anywhere(scenario: Scenario) -> bool:
    return True


def calm(scenario: Scenario) -> bool:
    return scenario.is_calm


def substeps(scenario: Scenario) -> bool:
    """Several ranks on a P, and substeps in use."""
    several = any(i.prefill and i.tp > 1 for i in scenario.instances)
    return scenario.generation == "substep" and several


def calm_substeps(scenario: Scenario) -> bool:
    return scenario.is_calm and substeps(scenario)


def lost_acks(scenario: Scenario) -> bool:
    return scenario.lose_ack_rate > 0 and scenario.generation == "substep"


def pauses(scenario: Scenario) -> bool:
    return any(f.kind == "pause" and f.target.startswith("d") for f in scenario.faults)


def dead_ranks(scenario: Scenario) -> bool:
    return any(f.kind == "kill_worker" and f.target.startswith("p") for f in scenario.faults)


def slow_cancels(scenario: Scenario) -> bool:
    """Reads take long, and so does the way to the workers."""
    several = any(i.prefill and i.tp > 1 for i in scenario.instances)
    return several and scenario.read_delay_s > 0.001 and scenario.stall_rate > 0


def hot_prefixes(scenario: Scenario) -> bool:
    same = len({r.prefix for r in scenario.requests}) == 1
    return same and any(i.prefill and i.steps_in_flight > 1 for i in scenario.instances)


REQUESTS: list[tuple[Mutation, Where]] = [
    (ready_on_the_first_load_done, anywhere),
    (ready_on_final, anywhere),
    (closing_is_not_final, anywhere),
    (lease_returned_before_the_grants_are_closed, anywhere),
    (lease_returned_on_a_timer, pauses),
    (message_leaves_before_the_grants_are_open, calm),
    (hold_released_on_the_first_send_done, slow_cancels),
    (digest_is_not_compared, anywhere),
    (tombstones_are_ignored, anywhere),
    (a_dead_rank_is_ignored_on_p, dead_ranks),
]
SUBSTEPS: list[tuple[Mutation, Where]] = [
    (ack_is_one_too_high, calm_substeps),
    (ack_is_one_too_low, substeps),
    (lost_ack_is_taken_for_refusal, lost_acks),
    (one_ack_speaks_for_all_ranks, calm_substeps),
    (refused_substep_is_not_planned_again, calm_substeps),
    (refusal_is_repaired_before_it_is_known, substeps),
    (planned_is_taken_for_complete, anywhere),
    (joins_the_first_step_instead_of_the_last, substeps),
    (prefix_hits_do_not_inherit_their_step, hot_prefixes),
    (planner_takes_no_lease_on_later_blocks, anywhere),
]


def _name(value: Any) -> str:
    for name, known in globals().items():
        if value is known:
            return name
    return "where"


@pytest.mark.parametrize(("mutation", "where"), REQUESTS + SUBSTEPS, ids=_name)
def test_the_simulation_finds_it(
    mutation: Mutation, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    tried = 0
    for seed in range(MAX_SEEDS):
        scenario = draw_scenario(seed)
        if len(scenario.requests) > MAX_REQUESTS or not where(scenario):
            continue
        tried += 1
        if run_scenario(scenario).failure:
            return
    pytest.fail(f"nothing found in {tried} of {MAX_SEEDS} seeds")
