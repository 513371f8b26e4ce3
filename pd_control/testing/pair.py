"""A real P and a real D back to back, with no network, no threads and no clock but a number.

The standard fixture of the protocol's tests. Everything that either side wants done waits in
`outbox` until the test delivers it: `pump()` delivers all in order; `take(type)` picks out what the
test wants to lose, delay or answer itself. Workers are scripted: a grant is acknowledged when
delivered (unless `mute`), a send is done when the test says `sent`.
"""

# ruff: noqa: N802, N815  handlers are named after the effects they deliver
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pd_control.codes import Code
from pd_control.ids import Content, PeerId, identity_digest
from pd_control.messages import (
    Abort,
    BlockIds,
    CancelSend,
    Final,
    FrozenSends,
    Grant,
    GrantOp,
    HeloAttributes,
    Prefill,
    RankInfo,
    Renew,
    Started,
    Substep,
    Topology,
)
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.decode import DecodeCore
from pd_control.protocol.leases import LeaseKind, LeaseTable
from pd_control.protocol.planner import ScheduledRequest, StepPlan, StepPlanner
from pd_control.protocol.prefill import PrefillCore
from pd_control.protocol.settings import Settings

BLOCK_SIZE = 4
T = TypeVar("T")


class CountingRefs:
    """An engine's block references, as counts."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def hold(self, block_ids: BlockIds) -> None:
        for group, blocks in enumerate(block_ids):
            for block in blocks:
                self.counts[group, block] = self.counts.get((group, block), 0) + 1

    def release(self, block_ids: BlockIds) -> None:
        for group, blocks in enumerate(block_ids):
            for block in blocks:
                left = self.counts[group, block] - 1
                if left:
                    self.counts[group, block] = left
                else:
                    del self.counts[group, block]


@dataclass
class Outcome:
    """What the D engine was told about one request."""

    kind: str  # "loaded", "failed", "recompute"
    code: Code = Code.OK
    tokens: int = 0
    first_token: int | None = None
    message: str = ""


@dataclass
class Pair:
    """One P (`p`, `planner`) and one D (`d`, `leases`)."""

    p_topology: Topology = field(default_factory=lambda: Topology(1, num_kv_heads=4))
    d_topology: Topology = field(default_factory=lambda: Topology(1, num_kv_heads=4))
    settings: Settings = field(default_factory=Settings)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.p_id = PeerId("p0", b"P" * 16)
        self.d_id = PeerId("d0", b"D" * 16)
        self.p = PrefillCore(self.p_id, self.p_topology, self.settings)
        self.d = DecodeCore(self.d_id, self.d_topology, self.settings)
        self.p_refs = CountingRefs()
        self.d_refs = CountingRefs()
        self.planner = StepPlanner(self.p_refs, BLOCK_SIZE)
        self.leases = LeaseTable(self.d_refs)
        self.outbox: deque[tuple[str, fx.Effect]] = deque()
        self.delivered: list[tuple[str, fx.Effect]] = []
        self.outcomes: dict[str, list[Outcome]] = {}
        self.p_workers = {rank: bytes([rank]) * 16 for rank in range(self.p_topology.num_ranks)}
        self.d_workers = {
            rank: bytes([99 - rank]) * 16 for rank in range(self.d_topology.num_ranks)
        }
        self.mute: set[int] = set()  # D ranks that acknowledge nothing
        self.link_up = False
        self.admitted: list[fx.AdmitRequest] = []
        self.fatal: list[fx.Fatal] = []
        self.next_block = 1
        self.step = 0
        self._call_refs: dict[int, int] = {}
        for rank, incarnation in self.p_workers.items():
            self.to_p(ev.WorkerRegistered(rank, incarnation))
        for rank, incarnation in self.d_workers.items():
            self.to_d(ev.WorkerRegistered(rank, incarnation, f"tcp://d0:{rank}"))
        self.to_d(ev.PeerFound("p0", "tcp://p0"))

    # --- plumbing -------------------------------------------------------------------------------

    def to_p(self, event: Any) -> None:
        self.outbox.extend(("p", effect) for effect in self.p.handle(event, self.now_s))

    def to_d(self, event: Any) -> None:
        self.outbox.extend(("d", effect) for effect in self.d.handle(event, self.now_s))

    def pump(self) -> None:
        """Deliver everything, and what follows from it, until nothing is left."""
        while self.outbox:
            side, effect = self.outbox.popleft()
            self.deliver(side, effect)

    def pump_until(self, kind: type[fx.Effect]) -> None:
        """Deliver until an effect of this type is next."""
        while self.outbox and not isinstance(self.outbox[0][1], kind):
            self.deliver(*self.outbox.popleft())

    def take(self, kind: type[T], where: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Remove the undelivered effects of this type from the outbox and return them."""
        found: list[T] = []
        kept: deque[tuple[str, fx.Effect]] = deque()
        for side, effect in self.outbox:
            if isinstance(effect, kind) and where(effect):
                found.append(effect)
            else:
                kept.append((side, effect))
        self.outbox = kept
        return found

    def advance(self, seconds: float) -> None:
        """Let time pass, ticking both cores at each deadline on the way, and pump."""
        end = self.now_s + seconds
        self.pump()
        while True:
            deadlines = [
                at for at in (self.p.next_deadline(), self.d.next_deadline()) if at is not None
            ]
            at = min(deadlines, default=end + 1)
            if at > end:
                break
            self.now_s = max(self.now_s, at)
            self.to_p(ev.Tick())
            self.to_d(ev.Tick())
            self.pump()
        self.now_s = end

    def deliver(self, side: str, effect: fx.Effect) -> None:
        self.delivered.append((side, effect))
        handler = getattr(self, f"_{side}_{type(effect).__name__}", None)
        if handler is None:
            handler = getattr(self, f"_any_{type(effect).__name__}")
        handler(effect)

    def helo(self, side: str, link_id: int) -> HeloAttributes:
        topology = self.p_topology if side == "p" else self.d_topology
        workers = self.p_workers if side == "p" else self.d_workers
        ranks = tuple(
            RankInfo(
                rank,
                rank // topology.tp_size,
                rank % topology.tp_size,
                incarnation,
                f"{side}:{rank}",
            )
            for rank, incarnation in workers.items()
        )
        return HeloAttributes(topology, ranks, link_id=link_id)

    # --- network --------------------------------------------------------------------------------

    def _d_OpenLink(self, effect: fx.OpenLink) -> None:
        self.link_up = True
        self.to_p(ev.LinkUp(self.d_id, effect.link_id, self.helo("d", effect.link_id)))
        self.to_d(ev.LinkUp(self.p_id, effect.link_id, self.helo("p", effect.link_id)))

    def _any_CloseLink(self, effect: fx.CloseLink) -> None:
        self.link_up = False

    def lose_link(self) -> None:
        link_id = next(peer.link_id for peer in self.d._peers)
        self.link_up = False
        self.to_p(ev.LinkDown(self.d_id, link_id))
        self.to_d(ev.LinkDown(self.p_id, link_id))

    def _d_LinkNews(self, effect: fx.LinkNews) -> None:
        if not self.link_up:
            return
        if isinstance(effect.item, Renew):
            self.to_p(ev.RenewReceived(self.d_id, effect.item))
        elif isinstance(effect.item, Abort):
            self.to_p(ev.AbortReceived(self.d_id, effect.item))

    def _p_LinkNews(self, effect: fx.LinkNews) -> None:
        if not self.link_up:
            return
        if isinstance(effect.item, Started):
            self.to_d(ev.StartedReceived(self.p_id, effect.item))
        elif isinstance(effect.item, Final):
            self.to_d(ev.FinalReceived(self.p_id, effect.item))

    def _d_Call(self, effect: fx.Call) -> None:
        ref = len(self._call_refs) + 1
        self._call_refs[ref] = effect.call_id
        if isinstance(effect.message, Prefill):
            self.to_p(ev.PrefillReceived(ref, self.d_id, effect.message))
        else:
            self.to_p(ev.TransferKvReceived(ref, self.d_id, effect.message))

    def _p_Answer(self, effect: fx.Answer) -> None:
        call_id = self._call_refs[effect.call_ref]
        self.to_d(ev.CallResult(call_id, effect.code, effect.message, effect.queue_depth))

    # --- workers --------------------------------------------------------------------------------

    def _d_WorkerNews(self, effect: fx.WorkerNews) -> None:
        grant = effect.item
        assert isinstance(grant, Grant)
        if effect.rank not in self.mute and grant.op != GrantOp.START:
            self.to_d(ev.GrantAcked(effect.rank, effect.incarnation, grant.key, grant.op, Code.OK))

    def _p_WorkerNews(self, effect: fx.WorkerNews) -> None:
        item = effect.item
        if isinstance(item, CancelSend):
            self.to_p(ev.SendDone(effect.rank, effect.incarnation, item.key, None, 0, Code.ABORTED))
        else:
            assert isinstance(item, Substep | FrozenSends)

    def sent(
        self, key: bytes, tokens: int, code: Code = Code.OK, ranks: Iterable[int] = ()
    ) -> None:
        """P's ranks (all unless named) have sent to all their targets up to `tokens`."""
        pairs = self.p._pairs(self.p_topology, self.d_topology)
        wanted = set(ranks)
        for source, target in pairs:
            if not wanted or source in wanted:
                self.to_p(ev.SendDone(source, self.p_workers[source], key, target, tokens, code))

    def landed(self, key: bytes, tokens: int, code: Code = Code.OK) -> None:
        """It has landed at every rank of D."""
        for source, target in self.p._pairs(self.p_topology, self.d_topology):
            self.to_d(ev.LoadDone(target, self.d_workers[target], key, source, tokens, code))

    # --- core threads ---------------------------------------------------------------------------

    def _p_AdmitRequest(self, effect: fx.AdmitRequest) -> None:
        self.admitted.append(effect)
        self.planner.add_request(effect.request_id)
        self.to_p(ev.RequestAdded(effect.request_id, effect.content))

    def _p_AbortRequest(self, effect: fx.AbortRequest) -> None:
        running = self.planner._running.get(effect.request_id)
        if running is not None and not running.finished:
            event = self.planner.finish_request(effect.request_id, Code.ABORTED)
            if event is not None:
                self.to_p(event)

    def _plan_command(self, effect: Any) -> None:
        event = self.planner.apply(effect)
        if event is not None:
            self.to_p(event)

    _p_OfferTransfer = _p_WithdrawTransfer = _p_ForgetRequest = _p_ReleaseLease = _plan_command

    def _any_VoidRankKv(self, effect: fx.VoidRankKv) -> None:
        pass

    def _any_Fatal(self, effect: fx.Fatal) -> None:
        self.fatal.append(effect)

    def _d_ReleaseLease(self, effect: fx.ReleaseLease) -> None:
        self.leases.release(effect.lease_id)

    def _told(self, request_id: str, outcome: Outcome) -> None:
        self.outcomes.setdefault(request_id, []).append(outcome)

    def _d_RequestLoaded(self, effect: fx.RequestLoaded) -> None:
        self._told(
            effect.request_id,
            Outcome("loaded", tokens=effect.num_tokens, first_token=effect.first_token),
        )

    def _d_RequestFailed(self, effect: fx.RequestFailed) -> None:
        self._told(effect.request_id, Outcome("failed", effect.code, message=effect.message))

    def _d_RecomputeRequest(self, effect: fx.RecomputeRequest) -> None:
        self._told(effect.request_id, Outcome("recompute", effect.code, message=effect.message))

    # --- engines --------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> BlockIds:
        num = -(-num_tokens // BLOCK_SIZE)
        first = self.next_block
        self.next_block += num
        return (tuple(range(first, first + num)),)

    def plan(self, *scheduled: ScheduledRequest) -> StepPlan:
        """P's engine plans its next step."""
        self.step += 1
        plan = self.planner.plan_step(self.step, scheduled)
        self.to_p(plan.event)
        return plan

    def finish_step(
        self, step: int, acks: dict[int, int | None] | None = None, code: Code = Code.OK
    ) -> None:
        """Every rank of P reports the end of the step."""
        for rank in range(self.p_topology.num_ranks):
            ack = (acks or {}).get(rank, 0)
            self.to_p(ev.StepFinished(step, rank, code, ack))
        self.planner.step_finished(step)

    def add_p_request(self, request_id: str, content: Content, num_takers: int = 1) -> None:
        """The router gives the request to P."""
        self.planner.add_request(request_id)
        self.to_p(ev.RequestAdded(request_id, content, num_takers))

    def finish_p_request(self, request_id: str, first_token: int | None = None) -> None:
        event = self.planner.finish_request(request_id, Code.OK, first_token)
        if event is not None:
            self.to_p(event)

    def preempt_p_request(self, request_id: str) -> None:
        event = self.planner.preempt(request_id)
        if event is not None:
            self.to_p(event)

    def add_d_request(self, request_id: str, content: Content, **settings: Any) -> None:
        """The router gives the request to D. DUAL if `remote_request_id` is among the settings."""
        if "remote_request_id" in settings:
            settings = {
                "mode": ev.Mode.DUAL,
                "peer_instance": "p0",
                "peer_address": "tcp://p0",
                **settings,
            }
        self.to_d(ev.DecodeRequestAdded(ev.DecodeRequest(request_id, content, **settings)))

    def allocate(self, request_id: str, num_tokens: int, cached_tokens: int = 0) -> None:
        """D's engine finds blocks and its core thread leases them."""
        blocks = self.blocks_for(num_tokens)
        lease_id = self.leases.acquire(LeaseKind.LOAD, request_id, blocks)
        self.to_d(ev.BlocksAllocated(request_id, blocks, cached_tokens, lease_id))

    def key(self, request_id: str, attempt: int = 0) -> bytes:
        """The key of a D request's transfer."""
        request = self.d._requests.get(request_id)
        if request is not None and request.key:
            return request.key
        from pd_control.ids import TransferId

        return TransferId(*self.d_id, request_id, attempt).key()

    def assert_clean(self) -> None:
        """Nothing waits and every reference is back."""
        assert not self.outbox
        assert self.p.is_idle(), self.p.snapshot(self.now_s)["tables"]
        assert self.d.is_idle(), self.d.snapshot(self.now_s)["tables"]
        assert self.planner.is_idle()
        assert not len(self.leases)
        assert not self.p_refs.counts
        assert not self.d_refs.counts


def content(num_tokens: int, seed: int = 0) -> Content:
    """A request's content for tests."""
    return Content(
        [(seed * 7919 + i) % 32_000 for i in range(num_tokens)], identity_digest("test-model")
    )
