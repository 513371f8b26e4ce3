"""Substeps with per-rank acknowledgements: every order of plan, push, start, attach, freeze and ack.

A prefill runs in chunks over several steps in flight on two or three ranks, each at its own pace, while
TRANSFER_KVs arrive for one or two takers. Pushed substeps reach each rank early, in time or late; ranks
acknowledge differently; an acknowledgement may be lost. Aborts, preemption and the end of the request may
fall anywhere in between.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pd_control.codes import Code
from pd_control.protocol.errors import InvariantError
from pd_control.protocol.events import DecodeRequest, Mode, OnFailure
from pd_control.protocol.settings import Generation, Settings
from pd_control.testing.sim_pair import Pair
from pd_control.testing.sim_trace import Violation
from tests.property import test_mutations as mutations

NUM_TAKERS = 2


class SubstepMachine(RuleBasedStateMachine):
    pair: Pair

    @initialize(
        tp=st.sampled_from([(2, 1), (2, 2), (3, 1), (2, 4)]),
        num_tokens=st.integers(3, 9),
        policy=st.sampled_from([OnFailure.FAIL, OnFailure.RETRY]),
        disruptions=st.integers(0, 3),
        first_chunk=st.integers(0, 9),
        loses_acks=st.sampled_from([None, None, 0, 1]),
    )
    def begin(
        self,
        tp: tuple[int, int],
        num_tokens: int,
        policy: OnFailure,
        disruptions: int,
        first_chunk: int,
        loses_acks: int | None,
    ) -> None:
        self.left = self.disruptions = disruptions
        self.pair = Pair(*tp, Settings(generation=Generation.SUBSTEP), num_tokens)
        if loses_acks is not None:
            self.disruptions += 1
            self.pair.lose_acks = {loses_acks: None}
        self.pair.p_add("r", NUM_TAKERS)
        for index in range(NUM_TAKERS):
            self.pair.d_add(
                DecodeRequest(
                    request_id=f"d{index}",
                    content=self.pair.content,
                    mode=Mode.DUAL,
                    peer_instance="p",
                    peer_address="tcp://p",
                    remote_request_id="r",
                    payload=0,
                    on_failure=policy,
                )
            )
            self.pair.step("d.loop")
            self.pair.d_allocate(f"d{index}", 0)
        # Blocks are granted at every rank and the link stands: what is left are the two calls.
        while names := [n for n in self.pair.ready() if not n.startswith("call")]:
            self.pair.step(names[0])
        if first_chunk:  # a step that TRANSFER_KV meets
            self.pair.p_schedule("r", first_chunk)

    @rule(count=st.integers(1, 9))
    def p_plans_a_step(self, count: int) -> None:
        names = self.pair.can_schedule()
        self.pair.p_schedule(names[0] if names else None, count)

    @precondition(lambda self: any(n.startswith("call") for n in self.pair.ready()))
    @rule(which=st.integers(0, 3))
    def transfer_kv_arrives(self, which: int) -> None:
        names = [n for n in self.pair.ready() if n.startswith("call")]
        self.pair.step(names[which % len(names)])

    @precondition(lambda self: any(n.startswith("call") for n in self.pair.ready()))
    @rule(which=st.integers(0, 3), but=st.integers(0, 2))
    def transfer_kv_is_pushed_at_once(self, which: int, but: int) -> None:
        """To every rank but, perhaps, one, in the step where each is."""
        self.transfer_kv_arrives(which)
        while names := [n for n in self.heads("p.worker") if n != f"p.worker{but}"]:
            self.pair.step(names[0])

    def heads(self, *prefixes: str) -> list[str]:
        return [n for n in self.pair.ready() if n.startswith(prefixes)]

    @precondition(lambda self: self.heads("p.exec"))
    @rule(which=st.integers(0, 5))
    def a_rank_starts_or_freezes(self, which: int) -> None:
        names = self.heads("p.exec")
        self.pair.step(names[which % len(names)])

    @rule(rank=st.integers(0, 2))
    def a_rank_reports_all_its_steps(self, rank: int) -> None:
        """While the others are wherever they are."""
        while names := self.heads(f"p.exec{rank}", f"p.out{rank}", "p.loop"):
            self.pair.step(names[0])

    @precondition(lambda self: self.heads("p.worker"))
    @rule(which=st.integers(0, 5))
    def a_push_reaches_a_rank(self, which: int) -> None:
        names = self.heads("p.worker")
        self.pair.step(names[which % len(names)])

    @precondition(lambda self: self.heads("p.out", "p.loop", "p.core"))
    @rule(which=st.integers(0, 5))
    def a_thread_of_p_goes_on(self, which: int) -> None:
        names = self.heads("p.out", "p.loop", "p.core")
        self.pair.step(names[which % len(names)])

    @precondition(lambda self: self.heads("p.read", "p.report", "data", "d.", "link", "answer"))
    @rule(which=st.integers(0, 10))
    def bytes_and_news_move(self, which: int) -> None:
        names = self.heads("p.read", "p.report", "data", "d.", "link", "answer")
        self.pair.step(names[which % len(names)])

    @precondition(lambda self: self.left)
    @rule(rank=st.integers(0, 2))
    def acks_of_a_rank_get_lost(self, rank: int) -> None:
        self.left -= 1
        self.pair.lose_acks = {} if self.pair.lose_acks else {rank: None}

    @precondition(lambda self: self.left)
    @rule(which=st.integers(0, NUM_TAKERS - 1))
    def d_withdraws(self, which: int) -> None:
        self.left -= 1
        self.pair.d_abort(f"d{which}")

    @precondition(lambda self: self.left)
    @rule()
    def p_aborts(self) -> None:
        self.left -= 1
        self.pair.p_finish("r", Code.ABORTED)

    @precondition(lambda self: self.left)
    @rule()
    def p_preempts(self) -> None:
        self.left -= 1
        self.pair.p_preempt("r")

    @rule()
    def strangers_use_what_is_free(self) -> None:
        self.pair.strangers_use_free_blocks()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()
            assert len(self.pair.outcomes) == NUM_TAKERS
            if self.left == self.disruptions:
                assert set(self.pair.outcomes.values()) == {"loaded"}, "nothing broke, and still"
            MET.update(self.pair.p.counters)


#: What P counted over all examples of a run.
MET: Counter[str] = Counter()
SETTINGS = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
#: Each of these must have happened, or the machine proves less than it says.
RACES = (
    *("ways.step", "ways.substep", "ways.frozen", "substeps.pushed", "substeps.missed"),
    *("substeps.taken", "substeps.refused", "substeps.unknown"),
    *("sends.repaired", "repairs.dropped", "p_transfer.failed.ABORTED"),
    *("p_transfer.failed.TIMEOUT", "send_done.unknown"),
)


def test_substeps_in_every_order() -> None:
    MET.clear()
    run_state_machine_as_test(SubstepMachine, settings=SETTINGS)
    assert [race for race in RACES if not MET[race]] == []


@pytest.mark.parametrize(
    "mistake",
    [
        mutations.ack_is_one_too_high,
        mutations.one_ack_speaks_for_all_ranks,
        mutations.refused_substep_is_not_planned_again,
        mutations.refusal_is_repaired_before_it_is_known,
        mutations.planned_is_taken_for_complete,
        mutations.lost_ack_is_taken_for_refusal,
    ],
    ids=lambda mistake: getattr(mistake, "__name__", "ack"),
)
def test_planted_mistakes_are_caught(
    mistake: mutations.Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    first_only = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((Violation, AssertionError, InvariantError, FlakyFailure)):
        run_state_machine_as_test(SubstepMachine, settings=first_only)
