"""Every order of what can happen to one request: two real cores, Hypothesis chooses what comes next.

The pair has no clock and no network of its own. Each rule is one thing that the world may do; the invariants
are those of the simulation: one outcome, no lease lost or released twice, no block given away under an open
grant, no wrong token, no wait without a deadline, and in the end empty tables.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_control.codes import Code
from pd_control.protocol.events import DecodeRequest, Mode, OnFailure
from pd_control.protocol.settings import Generation, Settings
from pd_control.testing.sim_pair import Pair

WORKER_QUEUES = ("p.worker", "d.worker", "p.report", "d.report", "p.read", "data")


class RequestMachine(RuleBasedStateMachine):
    """One prompt, one or two takers."""

    pair: Pair

    @initialize(
        tp=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)]),
        dual=st.booleans(),
        generation=st.sampled_from(list(Generation)),
        num_takers=st.integers(1, 2),
        policy=st.sampled_from(list(OnFailure)),
        tail=st.integers(0, 2),
        num_tokens=st.integers(2, 9),
        disruptions=st.integers(0, 3),
    )
    def begin(
        self,
        tp: tuple[int, int],
        dual: bool,
        generation: Generation,
        num_takers: int,
        policy: OnFailure,
        tail: int,
        num_tokens: int,
        disruptions: int,
    ) -> None:
        # A few disruptions a run: with more, hardly anything would ever get far enough to be disrupted.
        self.left = disruptions
        self.pair = Pair(*tp, Settings(generation=generation), num_tokens)
        self.dual = dual
        self.num_takers = num_takers
        self.policy = policy
        self.tail = tail
        self.on_p = False
        self.on_d = 0

    # -- clients -----------------------------------------------------------------------------

    @precondition(lambda self: self.dual and not self.on_p)
    @rule()
    def router_gives_it_to_p(self) -> None:
        self.on_p = True
        self.pair.p_add("r", self.num_takers)

    @precondition(lambda self: self.on_d < (self.num_takers if self.dual else 1))
    @rule(want_first_token=st.booleans())
    def router_gives_it_to_d(self, want_first_token: bool) -> None:
        request = DecodeRequest(
            request_id=f"d{self.on_d}",
            content=self.pair.content,
            mode=Mode.DUAL if self.dual else Mode.SINGLE,
            peer_instance="p",
            peer_address="tcp://p",
            remote_request_id="r" if self.dual else "",
            payload=0,
            want_first_token=want_first_token,
            recompute_tail_tokens=0 if want_first_token else self.tail,
            on_failure=self.policy,
        )
        self.on_d += 1
        self.pair.d_add(request)

    @precondition(lambda self: self.pair.d_waiting)
    @rule(cached_blocks=st.integers(0, 5))
    def d_has_blocks(self, cached_blocks: int) -> None:
        limit = (self.pair.content.num_tokens - 1) // 2
        self.pair.d_allocate(next(iter(self.pair.d_waiting)), 2 * min(cached_blocks, limit))

    @precondition(lambda self: self.left and (self.on_d))
    @rule(which=st.integers(0, 1))
    def client_leaves_d(self, which: int) -> None:
        self.left -= 1
        self.pair.d_abort(f"d{which % self.on_d}")

    @precondition(lambda self: self.left and (self.pair.runs))
    @rule(which=st.integers(0, 3))
    def client_leaves_p(self, which: int) -> None:
        self.left -= 1
        names = list(self.pair.runs)
        self.pair.p_finish(names[which % len(names)], Code.ABORTED)

    # -- P's engine ----------------------------------------------------------------------------

    @rule(which=st.integers(0, 3), count=st.integers(1, 9))
    def p_plans_a_step(self, which: int, count: int) -> None:
        names = self.pair.can_schedule()
        self.pair.p_schedule(names[which % len(names)] if names else None, count)

    @precondition(lambda self: self.left and (self.pair.runs))
    @rule(which=st.integers(0, 3))
    def p_preempts(self, which: int) -> None:
        self.left -= 1
        names = list(self.pair.runs)
        self.pair.p_preempt(names[which % len(names)])

    # -- the world -----------------------------------------------------------------------------

    @precondition(lambda self: self.pair.ready())
    @rule(which=st.integers(0, 20), times=st.integers(1, 4))
    def something_arrives(self, which: int, times: int) -> None:
        names = self.pair.ready()
        name = names[which % len(names)]
        for _ in range(times):
            if name in self.pair.queues:
                self.pair.step(name)

    @precondition(lambda self: self.calls())
    @rule(which=st.integers(0, 3))
    def a_call_is_repeated(self, which: int) -> None:
        self.pair.duplicate_call(self.calls()[which % len(self.calls())])

    @precondition(lambda self: self.left and (self.calls() + self.answers()))
    @rule(which=st.integers(0, 3))
    def a_call_or_answer_is_lost(self, which: int) -> None:
        self.left -= 1
        names = self.calls() + self.answers()
        self.pair.lose(names[which % len(names)])

    def calls(self) -> list[str]:
        return [n for n in self.pair.ready() if n.startswith("call")]

    def answers(self) -> list[str]:
        return [n for n in self.pair.ready() if n.startswith("answer")]

    @precondition(lambda self: self.left and (self.pair.link_up))
    @rule()
    def the_link_is_lost(self) -> None:
        self.left -= 1
        self.pair.break_link()

    @precondition(lambda self: self.left)
    @rule(which=st.integers(0, 5))
    def a_data_connection_breaks(self, which: int) -> None:
        self.left -= 1
        self.pair.fail_send(which)

    @rule()
    def strangers_use_what_is_free(self) -> None:
        self.pair.strangers_use_free_blocks()

    # Workers that answer late are fatal by rule (R3); here they answer before time passes.
    @precondition(
        lambda self: self.left and not any(n.startswith(WORKER_QUEUES) for n in self.pair.ready())
    )
    @rule()
    def time_passes(self) -> None:
        self.left -= 1
        self.pair.let_time_pass()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def no_more_outcomes_than_requests(self) -> None:
        if hasattr(self, "pair"):
            assert len(self.pair.outcomes) <= self.on_d

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()
            assert len(self.pair.outcomes) == self.on_d


TestRequestMachine = RequestMachine.TestCase
TestRequestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
