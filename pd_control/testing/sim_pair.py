"""A P and a D back to back, without clock or network: the standard fixture for orders of messages.

Both cores, the step planner and both lease tables are real. Everything between them is a queue, and nothing
leaves a queue by itself: whoever drives the pair (a property test) decides what happens next with
:meth:`Pair.step`. Queues keep order only where the real transports do: the two directions of the link, the
stream to and from each worker, each data connection, the two queues between a core thread and its loop. Calls
and answers overtake each other.

Workers are reduced to what the contract says of them. Memory holds token numbers, so a token that was never
written, is somebody else's, or comes from a block that was given away is found when D is told to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pd_control.codes import Code
from pd_control.ids import Content, PeerId, identity_digest
from pd_control.messages import (
    Abort,
    CancelSend,
    Final,
    FrozenSends,
    GrantOp,
    HeloAttributes,
    Prefill,
    RankInfo,
    Renew,
    Send,
    Started,
    Substep,
    Topology,
)
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.decode import DecodeCore
from pd_control.protocol.leases import LeaseKind, LeaseTable
from pd_control.protocol.planner import ScheduledRequest, StepPlanner
from pd_control.protocol.prefill import PrefillCore
from pd_control.protocol.settings import Settings
from pd_control.testing.sim_checks import books_problem, waits_for_ever
from pd_control.testing.sim_pair_parts import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Outgoing,
    PairRank,
    PrefillRun,
    Refs,
    StepRun,
)
from pd_control.testing.sim_trace import Violation

P = PeerId("p", b"p" * 16)
D = PeerId("d", b"d" * 16)


class Pair:
    """See the module. ``p_tp`` and ``d_tp`` may differ."""

    def __init__(self, p_tp: int, d_tp: int, settings: Settings, num_tokens: int) -> None:
        self.now_s = 0.0
        self.num_heads = p_tp * d_tp
        self.p_tp, self.d_tp = p_tp, d_tp
        self.p_topology = Topology(p_tp, num_kv_heads=self.num_heads)
        self.d_topology = Topology(d_tp, num_kv_heads=self.num_heads)
        self.p = PrefillCore(P, self.p_topology, settings)
        self.d = DecodeCore(D, self.d_topology, settings)
        self.p_refs, self.d_refs = Refs(), Refs()
        self.planner = StepPlanner(self.p_refs, BLOCK_SIZE)
        self.leases = LeaseTable(self.d_refs)
        self.p_ranks = [PairRank(r, d_tp) for r in range(p_tp)]
        self.d_ranks = [PairRank(r, p_tp) for r in range(d_tp)]
        self.content = Content(list(range(1, num_tokens + 1)), identity_digest("pair"))
        self.queues: dict[str, deque[Callable[[], None]]] = {}
        self.runs: dict[str, PrefillRun] = {}
        self.steps: dict[int, StepRun] = {}
        self.num_steps = 0
        self.d_blocks: dict[str, tuple[int, ...]] = {}
        self.d_waiting: dict[str, None] = {}  # added, blocks not yet allocated
        self.outcomes: dict[str, str] = {}
        self.loaded: dict[str, int] = {}
        self.link_up = False
        self.link_id = 0
        self.num_calls = 0
        self.fatal = False
        self.lose_acks: dict[int, None] = {}  # ranks whose step outputs do not say what they took
        for rank in range(p_tp):
            self.feed_p(ev.WorkerRegistered(rank, bytes([80 + rank]) * 16, f"tcp://p/{rank}", "f"))
        for rank in range(d_tp):
            self.feed_d(ev.WorkerRegistered(rank, bytes([68 + rank]) * 16, f"tcp://d/{rank}", "f"))
        self.feed_d(ev.PeerFound("p", "tcp://p"))

    # -- queues --------------------------------------------------------------------------------

    def put(self, queue: str, fn: Callable[[], None]) -> None:
        self.queues.setdefault(queue, deque()).append(fn)

    def ready(self) -> list[str]:
        """Queues with something at their head, in the order in which they came up."""
        return [name for name, items in self.queues.items() if items]

    def step(self, queue: str) -> None:
        """Let the head of one queue happen. Calls and answers sit in queues of their own each."""
        self.queues[queue].popleft()()
        if not self.queues[queue]:
            del self.queues[queue]

    def settle(self, max_steps: int = 10_000) -> None:
        """Let everything happen, oldest queue first, until nothing is left to happen."""
        for _ in range(max_steps):
            names = self.ready()
            if not names:
                return
            self.step(names[0])
        raise Violation("quiescence", f"still busy after {max_steps} steps: {self.ready()}")

    # -- loop threads --------------------------------------------------------------------------

    def feed_p(self, event: Any) -> None:
        self._run(self.p, event, self._p_effect)

    def feed_d(self, event: Any) -> None:
        self._run(self.d, event, self._d_effect)

    def _run(self, core: Any, event: Any, execute: Callable[[Any], None]) -> None:
        for effect in core.handle(event, self.now_s):
            execute(effect)
        problem = waits_for_ever(core, self.now_s)
        if problem:
            raise Violation("deadline", f"after {event!r}: {problem}")

    def next_deadline(self) -> float | None:
        due = [t for t in (self.p.next_deadline(), self.d.next_deadline()) if t is not None]
        return min(due, default=None)

    def let_time_pass(self) -> bool:
        """Go to the next deadline and fire it. False: nothing waits."""
        due_s = self.next_deadline()
        if due_s is None:
            return False
        self.now_s = max(self.now_s, due_s)
        for core, feed in ((self.p, self.feed_p), (self.d, self.feed_d)):
            at_s = core.next_deadline()
            if at_s is not None and at_s <= self.now_s:
                feed(ev.Tick())
        return True

    def _p_effect(self, effect: Any) -> None:
        if isinstance(effect, fx.CoreCommand):
            self.put("p.core", lambda: self._p_command(effect))
        elif isinstance(effect, fx.WorkerNews):
            rank = self.p_ranks[effect.rank]
            self.put(f"p.worker{effect.rank}", lambda: self._p_worker(rank, effect.item))
        elif isinstance(effect, fx.LinkNews):
            self._news("link.pd", effect, self._news_to_d)
        elif isinstance(effect, fx.Answer):
            call_id = effect.call_ref
            result = ev.CallResult(call_id, effect.code, effect.message, effect.queue_depth)
            self.put(f"answer{call_id}", lambda: self.feed_d(result))
        elif isinstance(effect, fx.CloseLink):
            self.break_link()
        elif isinstance(effect, fx.Fatal):
            self.fatal = True
        else:
            raise Violation("driver", f"P cannot execute {effect!r}")

    def _d_effect(self, effect: Any) -> None:
        if isinstance(effect, fx.CoreCommand):
            self.put("d.core", lambda: self._d_command(effect))
        elif isinstance(effect, fx.WorkerNews):
            rank = self.d_ranks[effect.rank]
            self.put(f"d.worker{effect.rank}", lambda: self._d_worker(rank, effect.item))
        elif isinstance(effect, fx.LinkNews):
            self._news("link.dp", effect, self._news_to_p)
        elif isinstance(effect, fx.OpenLink):
            self.put(f"open{effect.link_id}", lambda: self._open_link(effect.link_id))
        elif isinstance(effect, fx.Call):
            self.put(f"call{effect.call_id}", lambda: self._call(effect))
        elif isinstance(effect, fx.CloseLink):
            self.break_link()
        elif isinstance(effect, fx.Fatal):
            self.fatal = True
        else:
            raise Violation("driver", f"D cannot execute {effect!r}")

    # -- the link and the calls ----------------------------------------------------------------

    def _open_link(self, link_id: int) -> None:
        self.link_up, self.link_id = True, link_id
        mine = HeloAttributes(self.d_topology, self._rank_infos("d", self.d_tp), "", link_id)
        theirs = HeloAttributes(self.p_topology, self._rank_infos("p", self.p_tp), "", link_id)
        self.feed_p(ev.LinkUp(D, link_id, mine))
        self.feed_d(ev.LinkUp(P, link_id, theirs))

    def _rank_infos(self, side: str, tp: int) -> tuple[RankInfo, ...]:
        base = 80 if side == "p" else 68
        return tuple(
            RankInfo(r, 0, r, bytes([base + r]) * 16, f"tcp://{side}/{r}", "f") for r in range(tp)
        )

    def _news(self, queue: str, effect: fx.LinkNews, deliver: Callable[[Any], None]) -> None:
        if self.link_up and effect.link_id == self.link_id:
            self.put(queue, lambda: deliver(effect.item))

    def _news_to_d(self, item: Any) -> None:
        if isinstance(item, Started):
            self.feed_d(ev.StartedReceived(P, item))
        elif isinstance(item, Final):
            self.feed_d(ev.FinalReceived(P, item))
        else:
            self.feed_d(ev.AbortReceived(P, item))

    def _news_to_p(self, item: Any) -> None:
        if isinstance(item, Renew):
            self.feed_p(ev.RenewReceived(D, item))
        elif isinstance(item, Abort):
            self.feed_p(ev.AbortReceived(D, item))

    def break_link(self) -> None:
        """Both sides lose it; what was on its way is gone."""
        if not self.link_up:
            return
        self.link_up = False
        for queue in ("link.pd", "link.dp"):
            self.queues.pop(queue, None)
        link_id = self.link_id
        self.put("down.p", lambda: self.feed_p(ev.LinkDown(D, link_id)))
        self.put("down.d", lambda: self.feed_d(ev.LinkDown(P, link_id)))

    def _call(self, effect: fx.Call) -> None:
        if isinstance(effect.message, Prefill):
            self.feed_p(ev.PrefillReceived(effect.call_id, D, effect.message))
        else:
            self.feed_p(ev.TransferKvReceived(effect.call_id, D, effect.message))

    def duplicate_call(self, queue: str) -> None:
        """The transport repeats an idempotent call: it will be handled twice."""
        items = self.queues[queue]
        items.append(items[0])

    def lose(self, queue: str) -> None:
        """A call or an answer is lost; the caller hears TIMEOUT."""
        del self.queues[queue]
        call_id = int(queue.removeprefix("call").removeprefix("answer"))
        self.put(f"answer{call_id}", lambda: self.feed_d(ev.CallResult(call_id, Code.TIMEOUT)))

    # -- P's core thread -----------------------------------------------------------------------

    def p_add(self, request_id: str, num_takers: int = 1) -> None:
        """The router gives P the request (dual mode)."""
        self._p_admit(request_id, self.content, num_takers)

    def _p_admit(self, request_id: str, content: Content, num_takers: int) -> None:
        self.planner.add_request(request_id)
        self._p_post(ev.RequestAdded(request_id, content, num_takers))
        self.runs[request_id] = PrefillRun(request_id, content)

    def _p_post(self, event: Any) -> None:
        if event is not None:
            self.put("p.loop", lambda: self.feed_p(event))

    def can_schedule(self) -> list[str]:
        """Requests that P can compute more of."""
        return [
            r.request_id
            for r in self.runs.values()
            if not r.done and r.computed < r.content.num_tokens
        ]

    def p_schedule(self, request_id: str | None, count: int) -> None:
        """One main step: ``count`` more tokens of one request (None: an empty step)."""
        while self.queues.get("p.core"):  # drained at the start of each plan_step
            self.step("p.core")
        self.p_plan_without_draining(request_id, count)

    def p_plan_without_draining(self, request_id: str | None, count: int) -> None:
        """The same, for commands that come just too late for the draining."""
        run = self.runs.get(request_id) if request_id else None
        if run is not None and run.done:
            run = None
        self.num_steps += 1
        scheduled = []
        first = end = 0
        if run is not None:
            first = run.computed
            end = min(first + count, run.content.num_tokens)
            need = -(-end // BLOCK_SIZE) - len(run.blocks)
            run.blocks += self.p_refs.allocate(need) if need > 0 else ()
            added = run.blocks[run.first_unplanned :]
            run.first_unplanned = len(run.blocks)
            run.computed = end
            run.in_flight.append(self.num_steps)
            scheduled.append(ScheduledRequest(run.request_id, first, end, (added,)))
        plan = self.planner.plan_step(self.num_steps, scheduled)
        step = StepRun(self.num_steps, run, first, end, plan.sends, self.p_tp)
        self.p_refs.hold((step.blocks,))
        self.steps[step.step] = step
        self._p_post(plan.event)
        for rank in self.p_ranks:
            for part in (self._start_step, self._freeze):
                self.put(f"p.exec{rank.rank}", partial(part, rank, step))

    def p_preempt(self, request_id: str) -> None:
        """The engine takes the blocks back; the request will be computed again."""
        run = self.runs[request_id]
        if run.done or not run.blocks:
            return
        self._p_post(self.planner.preempt(request_id))
        self.p_refs.release((run.blocks,))
        run.blocks, run.computed, run.reported, run.first_unplanned = (), 0, 0, 0
        for number in run.in_flight:
            self.steps[number].stale = True
        run.in_flight = []

    def p_finish(self, request_id: str, code: Code) -> None:
        """The engine is done with it, or its client on P aborts it."""
        run = self.runs[request_id]
        if run.done:
            return
        run.done = True
        token = 5 if code is Code.OK else None
        self._p_post(self.planner.finish_request(request_id, code, token))
        self.p_refs.release((run.blocks,))

    def _p_command(self, command: Any) -> None:
        if isinstance(command, fx.AdmitRequest):
            self._p_admit(command.request_id, command.content, 1)
        elif isinstance(command, fx.AbortRequest):
            if command.request_id in self.runs:
                self.p_finish(command.request_id, Code.ABORTED)
        elif isinstance(command, fx.VoidRankKv):
            pass
        else:
            self._p_post(self.planner.apply(command))

    def _rank_output(self, step: StepRun, rank: int, ack: int | None) -> None:
        """Core thread: one rank's output of a step."""
        del step.owed[rank]
        self._p_post(ev.StepFinished(step.step, rank, Code.OK, ack))
        if step.owed:
            return
        self.planner.step_finished(step.step)
        self.p_refs.release((step.blocks,))
        run = step.run
        if run is not None and not step.stale and not run.done:
            run.in_flight.remove(step.step)
            run.reported = max(run.reported, step.end)
            if run.reported == run.content.num_tokens:
                self.p_finish(run.request_id, Code.OK)

    # -- P's workers ---------------------------------------------------------------------------

    def _start_step(self, rank: PairRank, step: StepRun) -> None:
        rank.started[step.step] = 0
        bound = rank.bound[step.step] = []
        for send in step.sends:
            self._bind(rank, bound, send)
        early = rank.early.pop(step.step, {})
        while rank.started[step.step] + 1 in early:
            rank.started[step.step] += 1
            for send in early[rank.started[step.step]]:
                self._bind(rank, bound, send)

    def _freeze(self, rank: PairRank, step: StepRun) -> None:
        for token in range(step.first, step.end):
            rank.write(step.blocks, token, token)
        rank.frozen[step.step] = None
        for send in rank.bound.pop(step.step):
            self._read_later(rank, send)
        ack: int | None = rank.started[step.step]
        if rank.rank in self.lose_acks:
            ack = None
        self.put(f"p.out{rank.rank}", lambda: self._rank_output(step, rank.rank, ack))

    def _targets(self, rank: PairRank, send: Send) -> list[int]:
        """Ranks of D that hold heads which this rank has."""
        ranks = [self.d_ranks[target.rank] for target in send.targets]
        return [other.rank for other in ranks if rank.shared_heads(other)]

    def _bind(self, rank: PairRank, bound: list[Send], send: Send) -> None:
        for target in self._targets(rank, send):
            out = rank.outgoing.setdefault((send.key, target), Outgoing())
            if out.ok or (out.saw_last and not out.done):
                raise Violation("send", f"rank {rank.rank} got a send after the last one")
            out.open_sends += 1
            out.saw_last = out.saw_last or send.last
            if send.key in rank.cancelled and not out.done:
                self._send_done(rank, send.key, target, out, Code.ABORTED)
        bound.append(send)

    def _read_later(self, rank: PairRank, send: Send) -> None:
        self.put(f"p.read{rank.rank}", lambda: self._read(rank, send))

    def _read(self, rank: PairRank, send: Send) -> None:
        """All layers of a send are read; the bytes are on their way."""
        for target in self._targets(rank, send):
            out = rank.outgoing[send.key, target]
            if out.done:
                continue
            values = {
                (head, token): rank.value(send.src_block_ids[0], token, head)
                for head in rank.shared_heads(self.d_ranks[target])
                for token in range(send.first_token, send.end_token)
            }
            self._data(rank, target, send, values)
            out.open_sends -= 1
            out.tokens = max(out.tokens, send.end_token)
            if out.saw_last and out.open_sends == 0:
                self._send_done(rank, send.key, target, out, Code.OK)

    def _data(
        self, rank: PairRank, target: int, send: Send, values: dict[tuple[int, int], int]
    ) -> None:
        name = f"data{rank.rank}>{target}"
        self.put(name, lambda: self._land(self.d_ranks[target], rank.rank, send, values))

    def _send_done(
        self, rank: PairRank, key: bytes, target: int | None, out: Outgoing | None, code: Code
    ) -> None:
        tokens = 0
        if out is not None:
            out.done = True
            out.ok = code is Code.OK
            tokens = out.tokens
        event = ev.SendDone(rank.rank, bytes([80 + rank.rank]) * 16, key, target, tokens, code)
        self.put(f"p.report{rank.rank}", lambda: self.feed_p(event))

    def _p_worker(self, rank: PairRank, item: Any) -> None:
        if isinstance(item, Substep):
            if item.step in rank.frozen:
                return
            if item.step not in rank.started:
                rank.early.setdefault(item.step, {})[item.substep] = item.sends
            elif item.substep == rank.started[item.step] + 1:
                rank.started[item.step] += 1
                for send in item.sends:
                    self._bind(rank, rank.bound[item.step], send)
        elif isinstance(item, FrozenSends):
            for send in item.sends:
                self._bind(rank, [], send)
                self._read_later(rank, send)
        elif isinstance(item, CancelSend):
            rank.cancelled[item.key] = None
            found = False
            for (key, target), out in rank.outgoing.items():
                if key == item.key and not out.done:
                    found = True
                    self._send_done(rank, key, target, out, Code.ABORTED)
            if not found:
                self._send_done(rank, item.key, None, None, Code.ABORTED)

    def fail_send(self, index: int) -> None:
        """A data connection breaks: one open slice ends PEER_LOST on both sides."""
        open_ones = [
            (rank, key, target, out)
            for rank in self.p_ranks
            for (key, target), out in rank.outgoing.items()
            if not out.done
        ]
        if not open_ones:
            return
        rank, key, target, out = open_ones[index % len(open_ones)]
        self._send_done(rank, key, target, out, Code.PEER_LOST)
        receiver = self.d_ranks[target]
        self.queues.pop(f"data{rank.rank}>{target}", None)
        self.put(
            f"data{rank.rank}>{target}",
            lambda: self._end_source(receiver, rank.rank, key, Code.PEER_LOST),
        )

    # -- D's workers ---------------------------------------------------------------------------

    def _d_worker(self, rank: PairRank, item: Any) -> None:
        code = Code.OK
        if item.op == GrantOp.OPEN:
            if item.key in rank.marks:
                code = Code.ABORTED
            else:
                rank.grants[item.key] = item
        elif item.op == GrantOp.CLOSE:
            rank.marks[item.key] = None
            rank.grants.pop(item.key, None)
        else:
            return
        event = ev.GrantAcked(rank.rank, bytes([68 + rank.rank]) * 16, item.key, item.op, code)
        self.put(f"d.report{rank.rank}", lambda: self.feed_d(event))

    def _land(
        self, rank: PairRank, source: int, send: Send, values: dict[tuple[int, int], int]
    ) -> None:
        grant = rank.grants.get(send.key)
        if grant is None or (send.key, source) in rank.ended or source not in grant.source_ranks:
            return
        covered = rank.covered.setdefault((send.key, source), set())
        for token in range(send.first_token, send.end_token):
            if not grant.first_token <= token < grant.end_token:
                raise Violation("send", f"token {token} was not granted")
            if token in covered:
                raise Violation("coverage", f"rank {source} sent token {token} twice")
            covered.add(token)
        for (head, token), value in values.items():
            rank.cells(grant.block_ids[0][token // BLOCK_SIZE], head)[token % BLOCK_SIZE] = value
        if len(covered) == grant.end_token - grant.first_token:
            self._end_source(rank, source, send.key, Code.OK)

    def _end_source(self, rank: PairRank, source: int, key: bytes, code: Code) -> None:
        grant = rank.grants.get(key)
        if grant is None or source not in grant.source_ranks or (key, source) in rank.ended:
            return
        rank.ended[key, source] = None
        tokens = grant.end_token if code is Code.OK else grant.first_token
        if all((key, s) in rank.ended for s in grant.source_ranks):
            del rank.grants[key]
        event = ev.LoadDone(rank.rank, bytes([68 + rank.rank]) * 16, key, source, tokens, code)
        self.put(f"d.report{rank.rank}", lambda: self.feed_d(event))

    # -- D's core thread -----------------------------------------------------------------------

    def d_add(self, request: ev.DecodeRequest) -> None:
        self.put("d.loop", lambda: self.feed_d(ev.DecodeRequestAdded(request)))
        self.d_waiting[request.request_id] = None

    def d_allocate(self, request_id: str, cached_tokens: int) -> None:
        """The engine has blocks for it; the core thread leases them."""
        del self.d_waiting[request_id]
        blocks = self.d_refs.allocate(-(-self.content.num_tokens // BLOCK_SIZE))
        self.d_blocks[request_id] = blocks
        for rank in self.d_ranks:
            for token in range(cached_tokens):
                rank.write(blocks, token, token)
        lease_id = self.leases.acquire(LeaseKind.LOAD, request_id, (blocks,))
        event = ev.BlocksAllocated(request_id, (blocks,), cached_tokens, lease_id)
        self.put("d.loop", lambda: self.feed_d(event))

    def d_abort(self, request_id: str) -> None:
        self.put("d.loop", lambda: self.feed_d(ev.AbortRequested(request_id, "client gone")))

    def _outcome(self, request_id: str, outcome: str) -> None:
        if request_id in self.outcomes:
            raise Violation(
                "one outcome", f"{request_id}: {self.outcomes[request_id]}, then {outcome}"
            )
        self.outcomes[request_id] = outcome
        self.d_waiting.pop(request_id, None)
        blocks = self.d_blocks.pop(request_id, None)
        if blocks is not None:
            self.d_refs.release((blocks,))

    def _d_command(self, command: Any) -> None:
        if isinstance(command, fx.RequestLoaded):
            self._check_loaded(command)
            self._outcome(command.request_id, "loaded")
        elif isinstance(command, fx.RequestFailed):
            self._outcome(command.request_id, f"failed {command.code.name}")
        elif isinstance(command, fx.RecomputeRequest):
            self._outcome(command.request_id, f"recompute {command.code.name}")
        elif isinstance(command, fx.ReleaseLease):
            self.leases.release(command.lease_id)

    def _check_loaded(self, command: fx.RequestLoaded) -> None:
        """D runs: every token at every rank must be this request's own."""
        blocks = self.d_blocks[command.request_id]
        for rank in self.d_ranks:
            for head in rank.heads:
                for token in range(command.num_tokens):
                    got = rank.value(blocks, token, head)
                    if got != token:
                        text = f"{command.request_id} runs on {got} for token {token}"
                        raise Violation("kv", f"{text}, rank {rank.rank}, head {head}")

    # -- strangers -----------------------------------------------------------------------------

    def strangers_use_free_blocks(self) -> None:
        """Other requests of both engines take every free block, write to it and leave."""
        for block in self.p_refs.free():
            for rank in self.p_ranks:
                rank.overwrite(block)
        for block in self.d_refs.free():
            for rank in self.d_ranks:
                for grant in rank.grants.values():
                    lo, hi = grant.first_token // BLOCK_SIZE, -(-grant.end_token // BLOCK_SIZE)
                    if block in grant.block_ids[0][lo:hi]:
                        raise Violation("reuse", f"block {block} is given away under an open grant")
                rank.overwrite(block)

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Play everything out: the engine computes what it has, time passes, all queues empty. Then no
        lease, no reference and no table entry may be left."""
        for _ in range(2_000):
            self.settle()
            for request_id in list(self.d_waiting):
                self.d_allocate(request_id, 0)
            for request_id in self.can_schedule():
                self.p_schedule(request_id, 3)
            if not self.ready() and not self.let_time_pass():
                break
        else:
            raise Violation("quiescence", "time passes and something always waits")
        self._check_end()

    def _check_end(self) -> None:
        for name, core in (("P", self.p), ("D", self.d)):
            if not core.is_idle():
                raise Violation("quiescence", f"{name} is not idle: {core.snapshot(self.now_s)}")
        if problem := books_problem(self.p, self.now_s):
            raise Violation("books", problem)
        if len(self.leases):
            raise Violation("quiescence", f"D leases left: {list(self.leases)}")
        if not self.planner.is_idle() or self.planner.num_requests:
            raise Violation("quiescence", f"the planner keeps {self.planner.num_requests} requests")
        for name, refs in (("P", self.p_refs), ("D", self.d_refs)):
            held = [b for b in range(NUM_BLOCKS) if refs.refs[b]]
            if held and not self.fatal:
                raise Violation("quiescence", f"{name} blocks never came back: {held}")
        for rank in self.d_ranks:
            if rank.grants:
                raise Violation("quiescence", f"open grants at D rank {rank.rank}")
