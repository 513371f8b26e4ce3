"""A simulated P instance: executes what ``PrefillCore`` and ``StepPlanner`` decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_control.codes import Code
from pd_control.engine import RankReport, Refusal
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
from pd_control.protocol.effects import CoreCommand, ForgetRequest
from pd_control.protocol.events import (
    AbortReceived,
    LinkUp,
    PrefillReceived,
    RenewReceived,
    SendDone,
    StepFinished,
    TransferKvReceived,
)
from pd_control.protocol.planner import ScheduledRequest, StepPlanner
from pd_control.protocol.prefill import PrefillCore
from pd_control.runtime.sides import PrefillSide
from pd_control.runtime.wire import unpack_plan
from pd_control.testing.sim_engine import SimRequest, SimStep
from pd_control.testing.sim_face import EngineFace
from pd_control.testing.sim_instance import SimInstance
from pd_control.testing.sim_memory import Content
from pd_control.testing.sim_net import Channel
from pd_control.testing.sim_trace import Violation
from pd_control.testing.sim_worker import SimWorker
from pd_control.trace import Trace


class SimPrefill(SimInstance):
    """P. Requests come from the router (dual) or by PREFILL (single)."""

    side: PrefillSide

    @property
    def planner(self) -> StepPlanner:
        return self.side.planner

    def make_core(self) -> None:
        self.core = PrefillCore(self.me, self.topology, self.world.settings)
        block_size = self.world.scenario.block_size
        face = EngineFace(self)
        self.side = PrefillSide(face, block_size, self.post, self.side_failed, Trace(64))
        self.stopping = ""
        self.outputs_at_end = self.rng.random() < 0.5  # all ranks' reports at once, as vLLM does

    # -- router and peers (loop thread, except add) --------------------------------------------

    def add_dual(
        self, request_id: str, content: Content, num_takers: int, num_new_tokens: int
    ) -> None:
        """Core thread: the router's copy of a dual-mode request."""
        self.side.add(request_id, content.request_content, num_takers)
        self._take(request_id, content, num_new_tokens)

    def _take(self, request_id: str, content: Content, num_new_tokens: int) -> None:
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

    def check_command(self, command: CoreCommand) -> None:
        if isinstance(command, ForgetRequest):
            self.world.prefill_let_go(command.request_id)

    def admit_request(
        self, request_id: str, content: RequestContent, payload: Any
    ) -> Refusal | None:
        known = self.world.content_of(payload, content)
        if self.rng.random() < self.world.refuse_rate:
            self.world.trace.count("prefill.refused")
            return Refusal(Code.BUSY, "no room")
        self._take(request_id, known, 1)
        if self.rng.random() < self.world.scenario.give_up_rate:
            delay_s = self.rng.random() * 3 * self.spec.step_s
            self.process.after(delay_s, self.to_core, self._give_up, request_id)
        return None

    def abort_request(self, request_id: str) -> None:
        # The driver knows of this end: the engine does not report it.
        self.stopping = request_id
        self.engine.abort(request_id, "aborted by the driver")
        self.stopping = ""
        self.wake()

    def after_scheduling(self) -> None:
        self.side.blocks_wanted(self.engine.blocks_missing)

    def dispatch(self, step: SimStep) -> None:
        scheduled = []
        for item in step.items:
            request = item.request
            added = tuple(item.blocks[request.num_planned_blocks :])
            request.num_planned_blocks = len(item.blocks)
            scheduled.append(ScheduledRequest(request.request_id, item.first, item.end, (added,)))
        sends = tuple(unpack_plan(self.side.plan_step(step.step, scheduled)))
        if sends:
            self.world.trace.count("send.main_step", len(sends))
        self.send_step(step, sends)

    def on_rank_output(self, step: SimStep, rank: int, code: Code, ack: int | None) -> None:
        if not self.outputs_at_end:
            self.post(StepFinished(step.step, rank, code, ack))
        else:
            step.acks[rank] = ack
            step.codes[rank] = code

    def on_step_done(self, step: SimStep) -> None:
        ranks = sorted(step.acks) if self.outputs_at_end else []
        reports = [RankReport(rank, step.acks[rank], step.codes[rank]) for rank in ranks]
        self.side.step_finished(step.step, reports)

    def on_preempted(self, request: SimRequest) -> None:
        self.side.preempted(request.request_id)

    def on_token(self, request: SimRequest, position: int, token: int) -> None:
        first = position == request.content.num_prompt_tokens
        if first and request.max_new_tokens > 1:
            self.world.trace.count("prefill.first_token_early")
            self.side.first_token(request.request_id, token)

    def on_finished(self, request: SimRequest, reason: str) -> None:
        token = None
        code = Code.ABORTED
        if reason == "finished":
            code = Code.OK
            token = request.content.next_token(request.content.num_prompt_tokens)
        if request.request_id != self.stopping:
            self.side.finished(request.request_id, code, token)
        self.world.prefill_ended(self, request.request_id, reason)
