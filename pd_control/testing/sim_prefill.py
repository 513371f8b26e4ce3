"""A simulated P instance: executes what ``PrefillCore`` and ``StepPlanner`` decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_control.codes import Code
from pd_control.ids import Content as RequestContent
from pd_control.ids import PeerId
from pd_control.messages import (
    Abort,
    FrozenSends,
    HeloAttributes,
    Prefill,
    Renew,
    SendDoneItem,
    Substep,
    TransferKv,
)
from pd_control.protocol.effects import (
    AbortRequest,
    AdmitRequest,
    CoreCommand,
    ForgetRequest,
    OfferTransfer,
    ReleaseLease,
    VoidRankKv,
    WithdrawTransfer,
)
from pd_control.protocol.events import (
    AbortReceived,
    FirstToken,
    LinkUp,
    PrefillReceived,
    RenewReceived,
    RequestAdded,
    RequestRefused,
    SendDone,
    StepFinished,
    TransferKvReceived,
)
from pd_control.protocol.planner import ScheduledRequest, StepPlanner
from pd_control.protocol.prefill import PrefillCore
from pd_control.testing.sim_engine import SimRequest, SimStep
from pd_control.testing.sim_instance import PoolRefs, SimInstance
from pd_control.testing.sim_memory import Content
from pd_control.testing.sim_net import Channel
from pd_control.testing.sim_trace import Violation
from pd_control.testing.sim_wire import plan_over_wire
from pd_control.testing.sim_worker import SimWorker


class SimPrefill(SimInstance):
    """P. Requests come from the router (dual) or by PREFILL (single)."""

    planner: StepPlanner

    def make_core(self) -> None:
        self.core = PrefillCore(self.me, self.topology, self.world.settings)
        self.planner = StepPlanner(PoolRefs(self), self.world.scenario.block_size)
        self.stopping = ""
        self.outputs_at_end = self.rng.random() < 0.5  # all ranks' reports at once, as vLLM does

    # -- router and peers (loop thread, except add) --------------------------------------------

    def add_dual(
        self, request_id: str, content: Content, num_takers: int, num_new_tokens: int
    ) -> None:
        """Core thread: the router's copy of a dual-mode request."""
        self._admit(request_id, content, content.request_content, num_takers, num_new_tokens)

    def _admit(
        self,
        request_id: str,
        content: Content,
        ids: RequestContent,
        num_takers: int,
        num_new_tokens: int,
    ) -> None:
        self.planner.add_request(request_id)
        self.post(RequestAdded(request_id, ids, num_takers))
        root = self.world.root_of(request_id)
        self.engine.add(SimRequest(request_id, content, num_new_tokens, False, root))
        self.world.prefill_began(self, request_id)
        self.wake()

    def abort(self, request_id: str) -> None:
        """Core thread: the client on P's side is gone."""
        if self.engine.abort(request_id, "aborted"):
            self.world.trace.count("abort.prefill")
        self.wake()

    def _give_up(self, request_id: str) -> None:
        """Core thread: the engine itself cannot go on with it."""
        if self.engine.abort(request_id, "gave up"):
            self.world.trace.count("prefill.given_up")
        self.wake()

    def accept_link(
        self, peer: PeerId, attributes: HeloAttributes, channel: Channel
    ) -> HeloAttributes:
        """The acceptor's core hears of the link before the opener does."""
        self.links[peer.instance, peer.incarnation, attributes.link_id] = (channel, 1)
        self.handle(LinkUp(peer, attributes.link_id, attributes))
        return self.attributes(attributes.link_id)

    def on_call(
        self, peer: PeerId, message: Prefill | TransferKv, answer: Callable[[Any], None]
    ) -> None:
        ref = self.next_ref
        self.next_ref += 1
        self.answers[ref] = answer
        if isinstance(message, Prefill):
            self.handle(PrefillReceived(ref, peer, message))
        else:
            self.handle(TransferKvReceived(ref, peer, message))
        if ref in self.answers:
            raise Violation("answer", f"{self.spec.name} did not answer {message!r} at once")

    def on_link_news(self, key: Any, item: Any) -> None:
        peer = PeerId(key[0], key[1])
        if isinstance(item, Renew):
            self.world.trace.count("hold.renewals")
            self.handle(RenewReceived(peer, item))
        elif isinstance(item, Abort):
            self.handle(AbortReceived(peer, item))
        else:
            raise Violation("link", f"P got {item!r}")

    def on_worker_news(self, worker: SimWorker, item: Any) -> None:
        if not isinstance(item, SendDoneItem):
            raise Violation("worker", f"P got {item!r} from a worker")
        self.world.trace.count(f"send_done.{Code(item.code).name}")
        self.handle(
            SendDone(
                item.rank,
                worker.process.incarnation,
                item.key,
                item.target_rank,
                item.tokens,
                Code(item.code),
                item.detail,
            )
        )

    def send_to_worker(self, channel: Channel, item: Any) -> None:
        if isinstance(item, Substep):
            self.world.trace.count("substep.pushed")
            delay_s = self.world.scenario.substep_delay_s * self.rng.random()
            if delay_s:
                # One stream: what follows waits as well, so delay the stream, not the item.
                channel.stall(1, delay_s)
        elif isinstance(item, FrozenSends):
            self.world.trace.count("send.frozen")
        super().send_to_worker(channel, item)

    # -- core thread ---------------------------------------------------------------------------

    def run_command(self, command: CoreCommand) -> None:
        if isinstance(command, OfferTransfer | WithdrawTransfer | ForgetRequest | ReleaseLease):
            if isinstance(command, ForgetRequest):
                self.world.prefill_let_go(command.request_id)
            event = self.planner.apply(command)
            if event is not None:
                self.post(event)
        elif isinstance(command, AdmitRequest):
            content = self.world.content_of(command.payload, command.content)
            if self.rng.random() < self.world.refuse_rate:
                self.world.trace.count("prefill.refused")
                self.post(RequestRefused(command.request_id, Code.BUSY, "no room"))
            else:
                self._admit(command.request_id, content, command.content, 1, 1)
                if self.rng.random() < self.world.scenario.give_up_rate:
                    delay_s = self.rng.random() * 3 * self.spec.step_s
                    self.process.after(delay_s, self.to_core, self._give_up, command.request_id)
        elif isinstance(command, AbortRequest):
            # Told by the driver to stop: its end is not reported to the planner as an end of its own.
            self.stopping = command.request_id
            self.engine.abort(command.request_id, "aborted by the driver")
            self.stopping = ""
            ended = self.planner.stopped(command.request_id)
            if ended is not None:
                self.post(ended)
            self.wake()
        elif isinstance(command, VoidRankKv):
            self._core_lost(command.rank, command.incarnation)
        else:
            raise Violation("driver", f"P cannot execute {command!r}")

    def after_scheduling(self) -> None:
        event = self.planner.want_blocks(self.engine.blocks_missing)
        if event is not None:
            self.world.trace.count("prefill.blocks_wanted")
            self.post(event)

    def dispatch(self, step: SimStep) -> None:
        scheduled = []
        for item in step.items:
            request = item.request
            added = tuple(item.blocks[request.num_planned_blocks :])
            request.num_planned_blocks = len(item.blocks)
            scheduled.append(ScheduledRequest(request.request_id, item.first, item.end, (added,)))
        plan = self.planner.plan_step(step.step, scheduled)
        if plan.sends:
            self.world.trace.count("send.main_step", len(plan.sends))
        self.post(plan.event)
        sends = plan.sends
        if sends and self.world.scenario.real_wire:
            sends = plan_over_wire(sends)
        self.send_step(step, sends)

    def on_rank_output(self, step: SimStep, rank: int, code: Code, ack: int | None) -> None:
        if not self.outputs_at_end:
            self.post(StepFinished(step.step, rank, code, ack))
        else:
            step.acks[rank] = ack
            step.codes[rank] = code

    def on_step_done(self, step: SimStep) -> None:
        if self.outputs_at_end:
            for rank in sorted(step.acks):
                self.post(StepFinished(step.step, rank, step.codes[rank], step.acks[rank]))
        self.planner.step_finished(step.step)

    def on_preempted(self, request: SimRequest) -> None:
        event = self.planner.preempt(request.request_id)
        if event is not None:
            self.post(event)

    def on_token(self, request: SimRequest, position: int, token: int) -> None:
        first = position == request.content.num_prompt_tokens
        if first and request.max_new_tokens > 1:
            self.world.trace.count("prefill.first_token_early")
            self.post(FirstToken(request.request_id, token))

    def on_finished(self, request: SimRequest, reason: str) -> None:
        token = None
        code = Code.ABORTED
        if reason == "finished":
            code = Code.OK
            token = request.content.next_token(request.content.num_prompt_tokens)
        if request.request_id != self.stopping:
            event = self.planner.finish_request(request.request_id, code, token)
            if event is not None:
                self.post(event)
        self.world.prefill_ended(self, request.request_id, reason)
