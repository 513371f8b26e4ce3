"""A simulated engine instance: a scheduler process with a core thread and a loop thread, and its workers.

The two threads share nothing but two queues, as in the runtime: events go from the core thread to the loop
and commands back, in order, each at a time of its own choosing. The pure cores, the step planner and the
lease table are the real ones; this file and its two subclasses only execute effects.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_control.codes import Code
from pd_control.engine import Refusal
from pd_control.ids import Content, PeerId
from pd_control.messages import HeloAttributes, RankInfo, Topology
from pd_control.protocol.effects import (
    Answer,
    CloseLink,
    CoreCommand,
    Effect,
    Fatal,
    LinkNews,
    WorkerNews,
)
from pd_control.protocol.errors import EngineContractError, InvariantError
from pd_control.protocol.events import Event, LinkDown, Tick, WorkerDied, WorkerRegistered
from pd_control.runtime.sides import DecodeSide, PrefillSide
from pd_control.testing.sim_blocks import BlockPool
from pd_control.testing.sim_checks import waits_for_ever
from pd_control.testing.sim_clock import Timer
from pd_control.testing.sim_engine import SimRequest, SimScheduler, SimStep
from pd_control.testing.sim_net import Channel, Process
from pd_control.testing.sim_scenario import InstanceSpec
from pd_control.testing.sim_trace import FAULTS, Violation
from pd_control.testing.sim_worker import SimWorker, StepWork

if TYPE_CHECKING:
    from pd_control.testing.sim_world import World

#: Events of a core between two looks at everything that waits in it.
CHECK_EVERY = 128

#: How often a scheduling pass that finds nothing still makes a step (engines do, for their own reasons).
EMPTY_STEP_RATE = 0.03

#: How often commands of the loop slip in between the draining and the planning of a pass.
LATE_COMMAND_RATE = 0.1

Core = Any  # PrefillCore | DecodeCore: the methods used here are the same


class SimInstance:
    """Common to P and D. Subclasses make the cores and execute what only their side has."""

    def __init__(self, world: World, spec: InstanceSpec) -> None:
        self.world = world
        self.spec = spec
        self.rng: random.Random = world.rng
        self.process = Process(world.queue, spec.name, spec.name)
        self.workers = [SimWorker(world, self, rank) for rank in range(spec.tp)]
        self.topology = Topology(tp_size=spec.tp, num_kv_heads=world.scenario.num_kv_heads)
        self.num_events = 0
        self.nothing_due = True
        self.pool: BlockPool
        self.engine: SimScheduler
        self.core: Core
        self.side: DecodeSide | PrefillSide
        self.me: PeerId
        self._reset()

    def _reset(self) -> None:
        self.links: dict[Any, tuple[Channel, int]] = {}
        self.answers: dict[int, Callable[[Any], None]] = {}
        self.next_ref = 1
        self.ranks: dict[int, RankInfo] = {}  # registered and alive, as the loop knows
        self.ranks_up: dict[int, bytes] = {}  # as the core thread knows
        self.lost_incarnations: dict[bytes, None] = {}  # the core thread has dealt with
        self.tick_timer: Timer | None = None
        self.loop_free_s = 0.0  # FIFO from the core thread to the loop
        self.core_free_s = 0.0
        self.output_free_s: dict[int, float] = {}
        self.step_free_s: dict[int, float] = {}
        self.deadline_timer: Timer | None = None
        self.deadline_s = 0.0

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """A new scheduler process, nothing remembered; workers that survived are told."""
        scenario, spec = self.world.scenario, self.spec
        self.process.start()
        self._reset()
        self.me = PeerId(spec.name, self.process.incarnation)
        self.pool = BlockPool(spec.num_blocks, self.rng, self._guard)
        self.engine = SimScheduler(
            self,
            self.pool,
            self.rng,
            self.world.trace,
            scenario.block_size,
            spec.tp,
            spec.max_batched_tokens,
            max_running=16,
            steps_in_flight=spec.steps_in_flight,
        )
        self.make_core()
        for worker in self.workers:
            self.start_worker(worker, self.rng.random() * 0.01)

    def make_core(self) -> None:
        raise NotImplementedError

    def start_worker(self, worker: SimWorker, delay_s: float) -> None:
        """(Re)start a worker or adopt a living one; it registers when it is up."""
        self.process.after(delay_s, self._bring_up, worker)

    def _bring_up(self, worker: SimWorker, incarnation: bytes = b"") -> None:
        """`incarnation`: the life of the worker that it is for, if it has waited."""
        if incarnation and worker.process.incarnation != incarnation:
            return  # killed in its pause; the next life was brought up by whoever started it
        if not worker.process.alive:
            worker.start()
        if self.world.queue.now_s < worker.process.paused_until_s:
            again_s = worker.process.paused_until_s
            self.process.at(again_s, self._bring_up, worker, worker.process.incarnation)
            return
        worker.new_owner(self.process.incarnation)
        worker.channel = self.world.net.open_channel(worker.process, self.process, (worker, self))
        rank = worker.rank
        info = RankInfo(rank, 0, rank, worker.process.incarnation, worker.data_address(), "sim")
        self.ranks[rank] = info
        event = WorkerRegistered(rank, info.incarnation, info.data_address, info.fingerprint)
        self.handle(event)
        self.to_core(self._rank_up, rank, info.incarnation)

    def _rank_up(self, rank: int, incarnation: bytes) -> None:
        if incarnation not in self.lost_incarnations:
            self.ranks_up[rank] = incarnation
            self.wake()

    @property
    def is_ready(self) -> bool:
        return self.process.alive and len(self.ranks) == self.spec.tp

    def kill(self, workers_too: bool) -> None:
        """The scheduler process dies (kill -9): its clients see that at once."""
        self.process.kill()
        self.world.net.process_died(self.process)
        if workers_too:
            for worker in self.workers:
                if worker.process.alive:
                    self.kill_worker_process(worker)
        self.count_core()
        self.world.instance_died(self)

    def count_core(self) -> None:
        """Add what this life of the core counted to the run's coverage."""
        side = "p" if self.spec.prefill else "d"
        for name, count in self.core.counters.items():
            self.world.trace.count(f"{side}.{name}", count)

    def kill_worker_process(self, worker: SimWorker) -> None:
        worker.process.kill()
        self.world.net.process_died(worker.process)
        self.world.data_peer_died(worker)

    def kill_worker(self, rank: int, restart_s: float) -> None:
        """One rank dies; supervision tells both threads, then brings up another."""
        worker = self.workers[rank]
        if not worker.process.alive:
            return
        incarnation = worker.process.incarnation
        self.kill_worker_process(worker)
        if self.process.alive:
            notice_s = self.rng.random() * 0.02
            self.process.after(notice_s, self._worker_died, worker, incarnation, restart_s)
            self.process.after(self.rng.random() * 0.03, self._core_lost, rank, incarnation)

    def _worker_died(self, worker: SimWorker, incarnation: bytes, restart_s: float) -> None:
        info = self.ranks.get(worker.rank)
        if info is not None and info.incarnation == incarnation:
            del self.ranks[worker.rank]
        worker.channel = None
        self.handle(WorkerDied(worker.rank, incarnation, "killed"))
        self.start_worker(worker, 0.04 + restart_s)

    def _core_lost(self, rank: int, incarnation: bytes) -> None:
        """Core thread: the executor noticed. What was in flight did not happen on that rank."""
        if incarnation in self.lost_incarnations:
            return
        self.lost_incarnations[incarnation] = None
        self.ranks_up.pop(rank, None)
        self.engine.worker_lost(rank)
        self.wake()

    def _guard(self, block: int) -> None:
        for worker in self.workers:
            why = worker.touches(block)
            if why:
                raise Violation("reuse", f"block {block} of {self.spec.name} is free, but {why}")

    # -- loop thread ---------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give one event to the core and execute what it wants."""
        world = self.world
        now_s = world.queue.now_s
        core = self.core
        if world.trace.enabled:
            world.trace.record(now_s, self.spec.name, world.subject_of(event), "event", event)
        try:
            effects: list[Effect] = core.handle(event, now_s)
        except (InvariantError, EngineContractError) as e:
            raise Violation("core", f"{self.spec.name}: {e}", world.subject_of(event)) from e
        for effect in effects:
            if world.trace.enabled:
                subject = world.subject_of(effect) or world.subject_of(event)
                world.trace.record(now_s, self.spec.name, subject, "effect", effect)
            self.execute(effect)
        due_s = core.next_deadline()
        self.num_events += 1
        if due_s is not None:
            self._arm(due_s)
        nothing_due, self.nothing_due = self.nothing_due, due_s is None
        if (due_s is None and not nothing_due) or self.num_events % CHECK_EVERY == 0:
            problem = waits_for_ever(core, now_s)
            if problem:
                raise Violation("deadline", f"{self.spec.name}: {problem}", world.subject_of(event))

    def _arm(self, due_s: float) -> None:
        timer = self.deadline_timer
        if timer is not None:
            if self.deadline_s <= due_s:
                return  # it fires too early and arms itself again
            timer.cancel()
        self.deadline_s = due_s
        self.deadline_timer = self.process.at(due_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self.deadline_timer = None
        due_s = self.core.next_deadline()
        if due_s is None:
            return
        if due_s <= self.world.queue.now_s:
            self.handle(Tick())
            again_s = self.core.next_deadline()
            if again_s is not None and again_s <= self.world.queue.now_s:
                raise Violation("deadline", f"{self.spec.name}: a tick left a due deadline behind")
        else:
            self._arm(due_s)

    def execute(self, effect: Effect) -> None:
        if isinstance(effect, CoreCommand):
            self.check_command(effect)
            self.side.mailbox.put(effect)
        elif isinstance(effect, WorkerNews):
            worker = self.workers[effect.rank]
            channel = worker.channel
            if channel is not None and worker.process.incarnation == effect.incarnation:
                self.send_to_worker(channel, effect.item)
        elif isinstance(effect, LinkNews):
            link = self.links.get(self.link_key(effect.peer, effect.link_id))
            if link is not None:
                channel, side = link
                channel.send(side, effect.item.HEAD, effect.item)
        elif isinstance(effect, CloseLink):
            link = self.links.pop(self.link_key(effect.peer, effect.link_id), None)
            if link is not None:
                link[0].close("closed by its user")
        elif isinstance(effect, Answer):
            self.answers.pop(effect.call_ref)(effect)
        elif isinstance(effect, Fatal):
            self._on_fatal(effect)
        else:
            self.execute_own(effect)

    def check_command(self, command: CoreCommand) -> None:
        """Hook: what the loop may tell the core thread, checked when it does."""

    def execute_own(self, effect: Effect) -> None:
        raise Violation("driver", f"{self.spec.name} cannot execute {effect!r}")

    def send_to_worker(self, channel: Channel, item: Any) -> None:
        scenario = self.world.scenario
        if scenario.stall_rate and self.rng.random() < scenario.stall_rate:
            channel.stall(1, scenario.stall_s * self.rng.random())
        channel.send(1, item.HEAD, item)

    def link_key(self, peer: PeerId, link_id: int) -> Any:
        return (peer.instance, peer.incarnation, link_id)

    def attributes(self, link_id: int) -> HeloAttributes:
        ranks = tuple(self.ranks[rank] for rank in sorted(self.ranks))
        return HeloAttributes(self.topology, ranks, "", link_id)

    def _on_fatal(self, effect: Fatal) -> None:
        """The embedder's answer, in its own time: end the worker, or the whole engine."""
        self.world.trace.count("fatal.workers")
        trace = self.world.trace
        trace.record(self.world.queue.now_s, self.spec.name, FAULTS, "fatal", effect)
        delay_s = self.rng.choice((0.01, 1.0, 5.0))
        if self.rng.random() < 0.5:
            self.process.after(delay_s, self._end_fatal_worker, effect)
        else:
            self.process.after(delay_s, self.world.restart_instance, self, 0.5, True)

    def _end_fatal_worker(self, effect: Fatal) -> None:
        if self.workers[effect.rank].process.incarnation == effect.incarnation:
            self.kill_worker(effect.rank, 0.5)

    # -- channels (loop thread) ----------------------------------------------------------------

    def on_news(self, channel: Channel, side: int, head: str, items: list[Any]) -> None:
        other = channel.ends[1 - side]
        for worker in self.workers:
            if worker.process is other:
                if channel is worker.channel:
                    for item in items:
                        self.on_worker_news(worker, item)
                return
        for key, (link, _) in list(self.links.items()):
            if link is channel:
                for item in items:
                    self.on_link_news(key, item)
                return

    def on_worker_news(self, worker: SimWorker, item: Any) -> None:
        raise NotImplementedError

    def on_link_news(self, key: Any, item: Any) -> None:
        raise NotImplementedError

    def on_channel_lost(self, channel: Channel, side: int, reason: str) -> None:
        for key, (link, _) in list(self.links.items()):
            if link is channel:
                del self.links[key]
                instance, incarnation, link_id = key
                down = LinkDown(PeerId(instance, incarnation), link_id, Code.PEER_LOST, reason)
                self.handle(down)
                return

    # -- between the threads -------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Core thread → loop, in order."""
        now_s = self.world.queue.now_s
        at_s = max(self.loop_free_s, now_s + self.world.hand_off_s())
        self.loop_free_s = at_s
        self.process.at(at_s, self.handle, event)

    def to_core(self, fn: Callable[..., None], *args: Any) -> None:
        """Run on the core thread, in order with the others handed over this way."""
        now_s = self.world.queue.now_s
        at_s = max(self.core_free_s, now_s + self.world.hand_off_s())
        self.core_free_s = at_s
        self.process.at(at_s, fn, *args)

    def wake_later(self) -> None:
        """The loop wakes the core thread; it comes when it comes."""
        if self.tick_timer is None:
            self.tick_timer = self.process.after(self.world.hand_off_s(), self._tick)

    def wake(self) -> None:
        if self.tick_timer is None:
            self.tick_timer = self.process.after(0.00002, self._tick)

    # -- core thread ---------------------------------------------------------------------------

    def side_failed(self, why: str, error: BaseException) -> None:
        """The driver's half on this thread met a fault of the program."""
        if isinstance(error, Violation):
            raise error
        raise Violation("core thread", f"{self.spec.name}: {why}: {error}") from error

    def void_rank(self, rank: int) -> None:
        """The driver says that a rank's KV is gone; the engine may know it, or not yet."""
        worker, known = self.workers[rank], self.ranks_up.get(rank)
        if known is not None and not (worker.process.alive and worker.process.incarnation == known):
            self._core_lost(rank, known)
        else:
            self.engine.start_over()

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        raise Violation("driver", f"{self.spec.name} is asked to admit {request_id}")

    def abort_request(self, request_id: str) -> None:
        raise Violation("driver", f"{self.spec.name} is asked to stop {request_id}")

    def _tick(self) -> None:
        self.tick_timer = None
        if len(self.side.mailbox) and self.rng.random() < LATE_COMMAND_RATE:
            # The commands come a moment after the draining: planning meets them in mid-pass.
            self.world.trace.count("driver.late_commands")
            self.wake()
        else:
            self.side.drain()
        if len(self.ranks_up) < self.spec.tp or not self.engine.can_schedule():
            return
        step = self.engine.schedule()
        self.after_scheduling()
        if step is None and self.rng.random() < EMPTY_STEP_RATE:
            step = self.engine.empty_step()
        if step is None:
            return
        self.world.trace.count("engine.steps")
        try:
            self.dispatch(step)
        except (InvariantError, EngineContractError) as e:
            raise Violation("core thread", f"{self.spec.name}: {e}") from e
        self.wake()

    def after_scheduling(self) -> None:
        """Hook: what the scheduling pass found out (blocks wanted)."""

    def dispatch(self, step: SimStep) -> None:
        raise NotImplementedError

    def send_step(self, step: SimStep, sends: tuple[Any, ...]) -> None:
        """The engine's own step message to every rank."""
        now_s = self.world.queue.now_s
        failing = self.world.step_fails(self)
        for worker in self.workers:
            delay_s = self.world.net.latency_s(self.process, worker.process)
            at_s = max(self.step_free_s.get(worker.rank, 0.0), now_s + delay_s)
            self.step_free_s[worker.rank] = at_s
            work = StepWork(step.step, step.items, sends, failing == worker.rank)
            run, rank_incarnation = worker.run, worker.process.incarnation
            worker.process.at(at_s, self._step_arrives, worker, work, run, rank_incarnation)

    def _step_arrives(self, worker: SimWorker, work: StepWork, run: int, inc: bytes) -> None:
        if worker.run == run and worker.process.incarnation == inc:
            worker.take_step(work)

    def step_output(self, worker: SimWorker, step: int, code: Code, ack: int) -> None:
        """A worker's output of one step, on its way to the core thread (called at the worker)."""
        if not self.process.alive:
            return
        world = self.world
        delay_s = world.net.latency_s(worker.process, self.process)
        at_s = max(self.output_free_s.get(worker.rank, 0.0), world.queue.now_s + delay_s)
        self.output_free_s[worker.rank] = at_s
        said: int | None = ack
        if world.loses_ack():
            world.trace.count("substep.acks_lost")
            said = None
        inc = worker.process.incarnation
        self.process.at(at_s, self._output_arrives, worker.rank, inc, step, code, said)

    def _output_arrives(
        self, rank: int, incarnation: bytes, step: int, code: Code, ack: int | None
    ) -> None:
        if self.ranks_up.get(rank) == incarnation:
            self.engine.on_output(step, rank, code, ack)
            self.wake()

    # -- engine hooks (core thread); the defaults suit both sides ------------------------------

    def want_remote(self, request: SimRequest) -> bool:
        return False

    def on_rank_output(self, step: SimStep, rank: int, code: Code, ack: int | None) -> None:
        pass

    def on_step_done(self, step: SimStep) -> None:
        pass

    def on_preempted(self, request: SimRequest) -> None:
        pass

    def on_token(self, request: SimRequest, position: int, token: int) -> None:
        pass

    def on_finished(self, request: SimRequest, reason: str) -> None:
        raise NotImplementedError
