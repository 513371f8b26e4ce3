"""One seed: the cluster, its clients, its faults, and what must hold meanwhile and afterwards."""

from __future__ import annotations

import random
from typing import Any

from pd_control.ids import Content as RequestContent
from pd_control.ids import TransferId
from pd_control.messages import Target
from pd_control.protocol.events import DecodeRequest, Mode, OnFailure, PeerFound, PeerGone
from pd_control.protocol.ranks import rank_pairs
from pd_control.protocol.settings import Deadlines, Generation, Limits, Settings
from pd_control.testing.sim_checks import books_problem
from pd_control.testing.sim_clock import EventQueue
from pd_control.testing.sim_decode import SimDecode
from pd_control.testing.sim_engine import SimRequest
from pd_control.testing.sim_instance import SimInstance
from pd_control.testing.sim_kvt import DataConnection, SimSender
from pd_control.testing.sim_memory import Content, make_tags
from pd_control.testing.sim_net import Network
from pd_control.testing.sim_prefill import SimPrefill
from pd_control.testing.sim_scenario import ClientRequest, Fault, Scenario, Taker
from pd_control.testing.sim_trace import FAULTS, Trace, Violation
from pd_control.testing.sim_wire import WireChannel
from pd_control.testing.sim_worker import SimWorker

#: A run that takes more events than this goes round in circles.
MAX_EVENTS = 5_000_000
#: What hand-offs between threads may add to a deadline.
SLACK_S = 1.0
#: Nothing in a scenario needs more virtual time.
MAX_VIRTUAL_S = 50_000.0

#: What no core may ever count where nothing breaks: these deadlines are for faults only.
CALM_NEVER = (
    *(f"p.deadline.{name}" for name in ("ack", "drain", "queue", "send")),
    *(f"d.deadline.{name}" for name in ("call", "connect", "grant_close", "grant_open")),
    *(f"d.deadline.{name}" for name in ("load", "progress")),
    *(f"p.p_transfer.failed.{name}" for name in ("CORRUPT", "INTERNAL", "PEER_LOST", "TIMEOUT")),
    *(f"d.d_request.failure.{name}" for name in ("CORRUPT", "INTERNAL", "PEER_LOST")),
    "fatal.workers",
    "load_done.TIMEOUT",
)

#: Tables of a core that outlive its requests: peers, and what is remembered for a time or a number.
MAY_REMAIN = ("marks", "peers", "tombstones")

_POLICY = {
    "fail": OnFailure.FAIL,
    "recompute": OnFailure.RECOMPUTE,
    "retry": OnFailure.RETRY,
}


class World:
    """Builds the scenario's cluster and runs it to quiescence. ``run`` raises :class:`Violation`."""

    def __init__(self, scenario: Scenario, trace: bool = False) -> None:
        self.scenario = scenario
        self.queue = EventQueue()
        self.rng = random.Random(f"run {scenario.seed}")
        self.trace = Trace(trace)
        self.net = Network(self.queue, self.rng, self.trace)
        net = self.net
        if scenario.real_wire:
            net.channel_class = WireChannel
        net.base_latency_s = scenario.latency_s
        net.spike_rate, net.spike_s = scenario.spike_rate, scenario.spike_s
        net.lose_call_rate = scenario.lose_call_rate
        net.duplicate_call_rate = scenario.duplicate_call_rate
        net.break_channel_rate = scenario.break_channel_rate
        net.break_data_rate = scenario.break_data_rate
        self.settings = self._settings()
        self.word_bound_s = self._word_bound_s()
        self.outcome_bound_s = self._outcome_bound_s()
        self.refuse_rate = scenario.refuse_rate
        self.prefill_names = [i.name for i in scenario.instances if i.prefill]
        self.instances: dict[str, SimInstance] = {}
        self.workers: dict[str, SimWorker] = {}
        for spec in scenario.instances:
            instance = SimPrefill(self, spec) if spec.prefill else SimDecode(self, spec)
            self.instances[spec.name] = instance
            for worker in instance.workers:
                self.workers[worker.name] = worker
        self.data_connections: dict[DataConnection, None] = {}
        self.contents: list[Content] = []
        self.outcomes: dict[str, str] = {}
        self.outcome_s: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.takers_at: dict[str, str] = {}  # live D request -> instance
        self.prefill_live: dict[tuple[str, str], None] = {}
        self.keys: dict[bytes, str] = {}  # transfer key -> client request (for the trace)
        self.nobody_comes = {r.request_id: 0.0 for r in scenario.requests if not r.takers}
        self.restarting: dict[str, None] = {}
        self._pairs: dict[tuple[str, str], frozenset[tuple[int, int]]] = {}
        self.longest_wait_s = 0.0

    def _settings(self) -> Settings:
        scenario = self.scenario
        scale = scenario.deadline_scale
        defaults = Deadlines()
        rng = random.Random(f"deadlines {scenario.seed}")
        values = {}
        for name in Deadlines.__slots__:
            own = rng.choice((0.02, 0.1, 0.2, 1.0)) if scenario.odd_deadlines else scale
            if name == "tombstone_s":
                own = 1.0  # it has to outlive a call that comes late, after a pause, too
            values[name] = getattr(defaults, name) * own
        deadlines = Deadlines(**values)
        limits = Limits()
        if scenario.small_limits:
            limits = Limits(
                max_requests=rng.choice((2, 5, 12)),
                max_parked=rng.choice((1, 3)),
                max_substeps_per_step=rng.choice((0, 1, 2)),
                max_calls_per_peer=rng.choice((1, 2, 128)),
            )
        return Settings(
            deadlines=deadlines,
            limits=limits,
            generation=Generation(scenario.generation),
            choose=scenario.choose,
        )

    def _word_bound_s(self) -> float:
        """The driver's word on a request comes within the deadlines of its attempts, not later."""
        d = self.settings.deadlines
        attempt_s = d.connect_s * 2 + d.grant_s * 2 + d.queue_s + d.load_s
        attempts = max(
            (t.max_attempts for r in self.scenario.requests for t in r.takers), default=1
        )
        pauses_s = sum(f.duration_s for f in self.scenario.faults if f.kind == "pause")
        return d.blocks_s + attempts * attempt_s + pauses_s + SLACK_S

    def _outcome_bound_s(self) -> float:
        """No client waits longer than for that word, plus what its engine takes."""
        slowest_s = max(i.step_s for i in self.scenario.instances)
        engine_s = (200.0 + len(self.scenario.requests) * 40) * slowest_s + 60.0
        slow_s = 40 * 12.0 * sum(1 for f in self.scenario.faults if f.kind == "slow_rank")
        return self.word_bound_s + engine_s + slow_s

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Start everything, play the scenario, go on until nothing is left to happen, check."""
        for instance in self.instances.values():
            instance.start()
        start_s = 0.05
        prefixes = [
            make_tags(random.Random(f"prefix {self.scenario.seed} {i}"), length)
            for i, length in enumerate(self.scenario.prefix_lengths)
        ]
        for request in self.scenario.requests:
            self._schedule_request(request, start_s, prefixes)
        for fault in self.scenario.faults:
            self.queue.at(start_s + fault.at_s, self._inject, fault)
        queue = self.queue
        while queue.run_next():
            if queue.num_run > MAX_EVENTS or queue.now_s > MAX_VIRTUAL_S:
                raise Violation("quiescence", f"still busy after {queue.num_run} events")
        for instance in self.instances.values():
            instance.count_core()
        self._check_end()

    def _schedule_request(
        self, request: ClientRequest, start_s: float, prefixes: list[list[int]]
    ) -> None:
        prefix = prefixes[request.prefix][: request.prefix_tokens] if request.prefix >= 0 else None
        max_new = max([request.prefill_new_tokens, *(t.max_new_tokens for t in request.takers)])
        length = request.num_prompt_tokens + max_new
        seed = self.scenario.seed
        tags = make_tags(random.Random(f"prompt {seed} {request.index}"), length, prefix)
        size = self.scenario.block_size
        content = Content(tags, request.num_prompt_tokens, size)
        arrival_s = start_s + request.arrival_s
        content_id = self._know(content)
        if request.mode == "dual" and request.prefill_delay_s >= 0:
            self.queue.at(arrival_s + request.prefill_delay_s, self._to_prefill, request, content)
        for taker in request.takers:
            own, own_id = content, content_id
            if taker.wrong_content:
                other = make_tags(random.Random(f"wrong {seed} {taker.request_id}"), length)
                own = Content(other, request.num_prompt_tokens, size)
                own_id = self._know(own)
            self.queue.at(arrival_s + taker.delay_s, self._to_decode, request, taker, own, own_id)

    def _know(self, content: Content) -> int:
        self.contents.append(content)
        return len(self.contents) - 1

    def content_of(self, payload: int, ids: RequestContent) -> Content:
        """The simulated content that PREFILL's opaque payload names."""
        content = self.contents[payload]
        want = content.request_content
        if list(ids.token_ids) != list(want.token_ids):
            raise Violation("prefill", f"P was given other tokens than content {payload} has")
        return content

    # -- clients -------------------------------------------------------------------------------

    def _to_prefill(self, request: ClientRequest, content: Content) -> None:
        instance = self.instances[request.prefill]
        assert isinstance(instance, SimPrefill)
        if not instance.process.alive:
            self.trace.count("client.prefill_refused")
            return
        takers = max(1, len(request.takers))
        new_tokens = request.prefill_new_tokens
        instance.to_core(instance.add_dual, request.request_id, content, takers, new_tokens)
        for abort in request.prefill_aborts:
            instance.process.after(
                abort.after_s, instance.to_core, instance.abort, request.request_id
            )

    def _to_decode(
        self, request: ClientRequest, taker: Taker, content: Content, content_id: int
    ) -> None:
        instance = self.instances[taker.decode]
        assert isinstance(instance, SimDecode)
        request_id = taker.request_id
        if not instance.process.alive:
            self.trace.count("client.decode_refused")
            self.outcomes[request_id] = "refused"
            return
        dual = request.mode == "dual"
        wants_first = taker.wants_first_token
        wanted = DecodeRequest(
            request_id=request_id,
            content=content.request_content,
            mode=Mode.DUAL if dual else Mode.SINGLE,
            peer_instance=request.prefill if dual or taker.names_peer else "",
            peer_address=f"tcp://{request.prefill}" if dual else "",
            remote_request_id=request.request_id if dual else "",
            payload=content_id,
            want_first_token=wants_first,
            recompute_tail_tokens=0 if wants_first else taker.tail_tokens,
            on_failure=_POLICY[taker.policy],
            max_attempts=taker.max_attempts,
            after_retries=_POLICY[taker.then],
        )
        self.takers_at[request_id] = taker.decode
        self.tokens[request_id] = 0
        if self.trace.enabled:
            for attempt in range(8):
                me = instance.me
                key = TransferId(me.instance, me.incarnation, request_id, attempt).key()
                self.keys[key] = request.request_id
        instance.to_core(instance.add, wanted, content, taker.max_new_tokens)
        for abort in taker.aborts:
            instance.process.after(abort.after_s, instance.to_core, instance.abort, request_id)
        self.queue.after(self.outcome_bound_s, self._check_outcome, request_id)

    def _check_outcome(self, request_id: str) -> None:
        if request_id not in self.outcomes:
            raise Violation(
                "bound",
                f"{request_id} has no outcome after {self.outcome_bound_s:.0f} s",
                self.root_of(request_id),
            )

    def decode_ended(self, instance: SimDecode, request_id: str, reason: str) -> None:
        self._outcome(request_id, reason)

    def _outcome(self, request_id: str, reason: str) -> None:
        if request_id in self.outcomes:
            text = f"{request_id} ended {self.outcomes[request_id]}, then {reason}"
            raise Violation("one outcome", text, self.root_of(request_id))
        self.outcomes[request_id] = reason
        del self.takers_at[request_id]
        self.trace.count(f"outcome.{reason.split(':')[0]}")
        self.trace.record(self.queue.now_s, "client", self.root_of(request_id), "outcome", reason)

    def token_out(
        self, instance: SimDecode, request: SimRequest, position: int, token: int
    ) -> None:
        """A token leaves for the client: it must be the one that this prompt has there."""
        want = request.content.next_token(position)
        self.tokens[request.request_id] += 1
        if token != want:
            text = f"{request.request_id} got token {token} at {position}, not {want}"
            raise Violation("token", text, request.trace_id)

    def prefill_began(self, instance: SimPrefill, request_id: str) -> None:
        self.prefill_live[instance.spec.name, request_id] = None

    def prefill_ended(self, instance: SimPrefill, request_id: str, reason: str) -> None:
        if self.prefill_live.pop((instance.spec.name, request_id), 0) == 0:
            text = f"{request_id} ended twice on {instance.spec.name}"
            raise Violation("one outcome", text, self.root_of(request_id))
        self.trace.count(f"prefill.{reason.split(' ')[0]}")
        if reason == "finished" and request_id in self.nobody_comes:
            self.nobody_comes[request_id] = self.queue.now_s

    def prefill_let_go(self, request_id: str) -> None:
        """P's core thread is told to forget a request: one that nobody ever asked for was held for the
        hold lease at most (a client that is gone must not pin P for longer)."""
        since_s = self.nobody_comes.pop(request_id, 0.0)
        if since_s and not self.scenario.faults:
            held_s = self.queue.now_s - since_s
            hold_s = self.settings.deadlines.hold_s
            if held_s > hold_s + SLACK_S:
                text = f"{request_id} was held {held_s:.2f} s for nobody, hold_s is {hold_s:g}"
                raise Violation("hold", text, self.root_of(request_id))

    def decode_lease_back(self, request_id: str, told_s: float) -> None:
        """D's blocks come back: where nothing breaks, within the time a grant may take to close."""
        late_s = self.queue.now_s - told_s
        grant_s = self.settings.deadlines.grant_s
        if self.scenario.is_calm and late_s > grant_s + SLACK_S:
            text = f"blocks of {request_id} came back {late_s:.2f} s after its end"
            raise Violation("blocks back", text, self.root_of(request_id))

    def instance_died(self, instance: SimInstance) -> None:
        """Clients of a dead engine see their connection end."""
        name = instance.spec.name
        for request_id, at in list(self.takers_at.items()):
            if at == name:
                self._outcome(request_id, "engine died")
        for key in [k for k in self.prefill_live if k[0] == name]:
            del self.prefill_live[key]

    # -- faults --------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        self.trace.count(f"fault.{fault.kind}")
        self.trace.record(self.queue.now_s, "faults", FAULTS, fault.kind, fault)
        if fault.kind == "kill_scheduler":
            self.restart_instance(self.instances[fault.target], fault.duration_s, fault.workers_too)
        elif fault.kind == "kill_worker":
            name, rank = fault.target.split("/")
            self.instances[name].kill_worker(int(rank), fault.duration_s)
        elif fault.kind == "pause":
            process = (
                self.workers[fault.target].process
                if "/" in fault.target
                else self.instances[fault.target].process
            )
            process.paused_until_s = max(
                process.paused_until_s, self.queue.now_s + fault.duration_s
            )
            self.net.process_paused(process)
        elif fault.kind == "partition":
            a, b = fault.target.split("|")
            self.net.partition(a, b, fault.duration_s)
            for connection in list(self.data_connections):
                between = {connection.sender.instance, connection.receiver.instance} == {a, b}
                if between and self.rng.random() < 0.5:
                    connection.end("partition")
        elif fault.kind == "undiscovered":
            a, b = fault.target.split("|")
            decode = self.instances[b]
            if decode.process.alive:
                decode.handle(PeerGone(a))
                decode.process.after(fault.duration_s, self._discovered, decode, a)
        elif fault.kind == "slow_rank":
            worker = self.workers[fault.target]
            worker.slowness = fault.factor
            self.queue.after(fault.duration_s, self._normal_speed, worker)
        else:
            self.net.break_some_channel()

    def _discovered(self, decode: SimInstance, prefill: str) -> None:
        decode.handle(PeerFound(prefill, f"tcp://{prefill}"))

    def _normal_speed(self, worker: SimWorker) -> None:
        worker.slowness = 1.0

    def restart_instance(self, instance: SimInstance, delay_s: float, workers_too: bool) -> None:
        name = instance.spec.name
        if not instance.process.alive or name in self.restarting:
            return
        self.restarting[name] = None
        instance.kill(workers_too)
        self.queue.after(delay_s + 0.01, self._start_again, instance)

    def _start_again(self, instance: SimInstance) -> None:
        del self.restarting[instance.spec.name]
        instance.start()

    # -- services of the parts -----------------------------------------------------------------

    def hand_off_s(self) -> float:
        """How long one thread takes to see what another put into a queue."""
        rng = self.rng
        if rng.random() < 0.05:
            return rng.random() * 0.02
        return rng.random() * 0.0002

    def loses_ack(self) -> bool:
        rate = self.scenario.lose_ack_rate
        return rate > 0 and self.rng.random() < rate

    def step_fails(self, instance: SimInstance) -> int | None:
        """The rank on which the next step's forward fails, or None. Only where one step is in flight:
        an engine that pipelines steps over a failed one has to die of it."""
        rate = self.scenario.step_fail_rate
        if instance.spec.steps_in_flight == 1 and rate > 0 and self.rng.random() < rate:
            return self.rng.randrange(instance.spec.tp)
        return None

    def pairs(self, source: str, target: str) -> frozenset[tuple[int, int]]:
        """Which ranks of one instance feed which of another (as both cores and kvt work it out)."""
        found = self._pairs.get((source, target))
        if found is None:
            topologies = self.instances[source].topology, self.instances[target].topology
            found = self._pairs[source, target] = frozenset(rank_pairs(*topologies))
        return found

    def connect_data(self, sender: SimSender, target: Target) -> DataConnection | None:
        """A data connection to exactly the process that the target names, if it lives."""
        name = target.data_address.removeprefix("tcp://").split("#")[0]
        worker = self.workers.get(name)
        if worker is None or not worker.process.alive:
            return None
        if worker.process.incarnation != target.incarnation:
            return None
        if not self.net.path_is_up(sender.process, worker.process):
            return None
        connection = DataConnection(sender, worker.receiver)
        self.data_connections[connection] = None
        return connection

    def data_peer_died(self, worker: SimWorker) -> None:
        for connection in list(self.data_connections):
            if not connection.alive:
                del self.data_connections[connection]
            elif worker.process in (connection.sender.process, connection.receiver.process):
                connection.end("peer died")
                del self.data_connections[connection]

    # -- the trace -----------------------------------------------------------------------------

    def root_of(self, request_id: str) -> str:
        """The client request behind any id made from it: ``r12.0~ab`` is about ``r12``."""
        return request_id.split("~")[0].split(".")[0]

    def subject_of(self, thing: Any) -> str:
        """The client request an event, effect or item is about, "" if it is about none."""
        for name in ("request_id", "key"):
            value = getattr(thing, name, None)
            if isinstance(value, str) and value:
                return self.root_of(value)
            if isinstance(value, bytes) and value in self.keys:
                return self.keys[value]
        for name in ("message", "request", "item", "info"):
            inner = getattr(thing, name, None)
            if inner is not None and not isinstance(inner, str):
                subject = self.subject_of(inner)
                if subject:
                    return subject
        return ""

    # -- the end -------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """Nothing is left to happen: everybody has an outcome and every table is empty."""
        missing = list(self.takers_at)
        if missing:
            roots = [self.root_of(r) for r in missing]
            raise Violation("one outcome", f"no outcome for {missing}", *roots)
        for instance in self.instances.values():
            self._check_instance_end(instance)
        if self.scenario.is_calm:
            counts = self.trace.counts
            found = [name for name in CALM_NEVER if counts[name]]
            # P may preempt a request whose send has begun, and find blocks for it after `progress_s` only.
            if counts["engine.preemptions"] and "load_done.TIMEOUT" in found:
                found.remove("load_done.TIMEOUT")
            if found:
                raise Violation("calm", f"nothing broke, and still: {', '.join(found)}")

    def _check_instance_end(self, instance: SimInstance) -> None:
        name = instance.spec.name
        now_s = self.queue.now_s

        def fail(what: str, *subjects: str) -> None:
            raise Violation("quiescence", f"{name}: {what}", *subjects)

        if not instance.process.alive:
            fail("never came back")
        if instance.engine.requests:
            stuck = list(instance.engine.requests.values())
            fail(f"engine still has {stuck}", *(r.trace_id for r in stuck))
        if instance.engine.steps:
            fail("steps in flight")
        if len(instance.side.mailbox):
            fail(f"undrained commands in {instance.side.mailbox!r}")
        if not instance.core.is_idle():
            fail(f"core is not idle: {instance.core.snapshot(now_s)}")
        if isinstance(instance, SimPrefill):
            problem = books_problem(instance.core, now_s)
            if problem:
                raise Violation("books", f"{name}: {problem}")
        snapshot = instance.core.snapshot(now_s)
        left_over = {k: v for k, v in snapshot["tables"].items() if v and k not in MAY_REMAIN}
        if left_over or snapshot.get("steps"):
            fail(f"tables {left_over}, steps {snapshot.get('steps')}")
        if instance.answers:
            fail("unanswered calls")
        if isinstance(instance, SimPrefill):
            table = instance.planner.leases
        else:
            assert isinstance(instance, SimDecode)
            table = instance.leases
        if table.acquired != table.released or any(table.blocks.values()):
            fail(f"leases taken {table.acquired}, returned {table.released}, held {table.blocks}")
        if isinstance(instance, SimDecode) and len(instance.leases):
            left = list(instance.leases)
            fail(f"leases left: {left}", *(self.root_of(x.request_id) for x in left))
        if isinstance(instance, SimPrefill) and (
            not instance.planner.is_idle() or instance.planner.num_requests
        ):
            left = list(instance.planner.leases)
            fail(f"planner is not idle, leases {left}", *(self.root_of(x.request_id) for x in left))
        held = instance.pool.held()
        if held:
            fail(f"blocks never came back: {held}")
        if instance.pool.num_free != instance.pool.num_blocks:
            fail("free list and references disagree")
        for worker in instance.workers:
            if not worker.process.alive:
                fail(f"rank {worker.rank} never came back")
            if worker.sender.pinned:
                fail(f"rank {worker.rank} still reads blocks {sorted(worker.sender.pinned)}")
            if worker.receiver.granted:
                fail(f"rank {worker.rank} still has open grants {sorted(worker.receiver.granted)}")
