"""A simulated D instance: executes what ``DecodeCore`` decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_control.codes import Code
from pd_control.ids import PeerId
from pd_control.messages import Abort, Final, GrantAck, LoadDoneItem, Started
from pd_control.protocol.decode import DecodeCore
from pd_control.protocol.effects import (
    Call,
    CoreCommand,
    Effect,
    OpenLink,
    RecomputeRequest,
    ReleaseLease,
    RequestFailed,
    RequestLoaded,
)
from pd_control.protocol.events import (
    AbortReceived,
    CallResult,
    DecodeRequest,
    FinalReceived,
    GrantAcked,
    LinkFailed,
    LinkUp,
    LoadDone,
    PeerFound,
    StartedReceived,
)
from pd_control.protocol.leases import LeaseTable
from pd_control.runtime.sides import DecodeSide
from pd_control.testing.sim_engine import SimRequest, SimStep
from pd_control.testing.sim_face import EngineFace
from pd_control.testing.sim_instance import SimInstance
from pd_control.testing.sim_memory import Content
from pd_control.testing.sim_net import Channel
from pd_control.testing.sim_prefill import SimPrefill
from pd_control.testing.sim_trace import Violation
from pd_control.testing.sim_wire import call_over_wire
from pd_control.testing.sim_worker import SimWorker
from pd_control.trace import Trace


class SimDecode(SimInstance):
    """D. Every client outcome of the simulation is decided on one of these."""

    side: DecodeSide

    @property
    def leases(self) -> LeaseTable:
        return self.side.leases

    def make_core(self) -> None:
        self.core = DecodeCore(self.me, self.topology, self.world.settings)
        self.side = DecodeSide(EngineFace(self), self.post, self.side_failed, Trace(64))
        #: What the core said of each request, for good.
        self.told: dict[str, CoreCommand] = {}
        self.told_s: dict[str, float] = {}
        self.added_s: dict[str, float] = {}
        self.process.after(0.0, self._find_peers)

    def _find_peers(self) -> None:
        for name in self.world.prefill_names:
            self.handle(PeerFound(name, f"tcp://{name}"))

    # -- client (core thread) ------------------------------------------------------------------

    def add(self, request: DecodeRequest, content: Content, max_new_tokens: int) -> None:
        self.added_s[request.request_id] = self.world.queue.now_s
        self.side.add(request)
        self.engine.add(
            SimRequest(
                request.request_id,
                content,
                max_new_tokens,
                True,
                self.world.root_of(request.request_id),
            )
        )
        self.wake()

    def abort(self, request_id: str) -> None:
        """The client is gone: the engine drops it, the driver hears of it, no outcome follows."""
        if self.engine.abort(request_id, "aborted"):
            self.world.trace.count("abort.decode")
            self.side.abort(request_id, "client gone")
        self.wake()

    # -- effects (loop thread) -----------------------------------------------------------------

    def execute_own(self, effect: Effect) -> None:
        if isinstance(effect, OpenLink):
            self._open_link(effect)
        elif isinstance(effect, Call):
            self._call(effect)
        else:
            super().execute_own(effect)

    def _open_link(self, effect: OpenLink) -> None:
        world = self.world
        target = world.instances.get(effect.address.removeprefix("tcp://"))
        failed = self._link_failed(effect)
        if not isinstance(target, SimPrefill):
            self.process.after(0.0, failed, "UNREACHABLE")
            return
        mine = self.attributes(effect.link_id)
        channels: list[Channel] = []
        me = self.me

        def accept(answer: Callable[[Any], None]) -> None:
            if not target.is_ready:
                answer(Code.BUSY)
                return
            if channels:
                # A duplicate of the call opens a second connection; the opener uses the newest.
                channels[0].close("opened again")
                channels.clear()
            channel = world.net.open_channel(self.process, target.process, (self, target), False)
            channels.append(channel)
            answer((channel, target.me, target.accept_link(me, mine, channel)))

        def answered(value: Any) -> None:
            if isinstance(value, Code):
                failed(value.name)
                return
            channel, peer, attributes = value
            if channel.lost:
                failed("PEER_LOST")
                return
            self.links[peer.instance, peer.incarnation, effect.link_id] = (channel, 0)
            self.handle(LinkUp(peer, effect.link_id, attributes))
            channel.connect()

        def failed_call(kind: str) -> None:
            for channel in channels:
                channel.close("the opener gave up")
            failed(kind)

        timeout_s = max(0.0, effect.deadline_s - world.queue.now_s)
        world.net.call(
            self.process, target.process, accept, answered, failed_call, timeout_s, once=True
        )

    def _link_failed(self, effect: OpenLink) -> Callable[[str], None]:
        def failed(kind: str) -> None:
            self.world.trace.count("link.failed")
            self.handle(LinkFailed(effect.instance, effect.link_id, Code[kind], "sim"))

        return failed

    def _call(self, effect: Call) -> None:
        world = self.world
        target = world.instances.get(effect.address.removeprefix("tcp://"))
        call_id = effect.call_id

        def answered(value: Any) -> None:
            self.handle(CallResult(call_id, value.code, value.message, value.queue_depth))

        def failed(kind: str) -> None:
            world.trace.count(f"call.{kind}")
            self.handle(CallResult(call_id, Code[kind], "sim"))

        if not isinstance(target, SimPrefill):
            self.process.after(0.0, failed, "UNREACHABLE")
            return
        me = self.me
        message = effect.message
        if world.scenario.real_wire:
            message = call_over_wire(message)

        def at_peer(answer: Callable[[Any], None]) -> None:
            target.on_call(me, message, answer)

        timeout_s = max(0.0, effect.deadline_s - world.queue.now_s)
        world.trace.count(f"call.{effect.message.HEAD}")
        world.net.call(
            self.process,
            target.process,
            at_peer,
            answered,
            failed,
            timeout_s,
            expect_incarnation=effect.peer.incarnation,
        )

    # -- news (loop thread) --------------------------------------------------------------------

    def on_link_news(self, key: Any, item: Any) -> None:
        peer = PeerId(key[0], key[1])
        if isinstance(item, Started):
            self.handle(StartedReceived(peer, item))
        elif isinstance(item, Final):
            self.world.trace.count(f"final.{Code(item.code).name}")
            self.handle(FinalReceived(peer, item))
        elif isinstance(item, Abort):
            self.handle(AbortReceived(peer, item))
        else:
            raise Violation("link", f"D got {item!r}")

    def on_worker_news(self, worker: SimWorker, item: Any) -> None:
        incarnation = worker.process.incarnation
        code = Code(item.code)
        if isinstance(item, GrantAck):
            self.handle(GrantAcked(item.rank, incarnation, item.key, item.op, code, item.detail))
        elif isinstance(item, LoadDoneItem):
            self.world.trace.count(f"load_done.{code.name}")
            self.handle(
                LoadDone(
                    item.rank,
                    incarnation,
                    item.key,
                    item.source_rank,
                    item.tokens,
                    code,
                    item.detail,
                )
            )
        else:
            raise Violation("worker", f"D got {item!r} from a worker")

    # -- core thread ---------------------------------------------------------------------------

    def check_command(self, command: CoreCommand) -> None:
        """Each request is told one thing, and its blocks come back in time."""
        now_s = self.world.queue.now_s
        if isinstance(command, RequestLoaded | RequestFailed | RecomputeRequest):
            request_id = command.request_id
            if request_id in self.told:
                text = f"the engine is told {self.told[request_id]!r}, then {command!r}"
                raise Violation("one outcome", text, self.world.root_of(request_id))
            self.told[request_id] = command
            self.told_s[request_id] = now_s
            waited_s = now_s - self.added_s[request_id]
            if waited_s > self.world.word_bound_s:
                text = f"{request_id} heard after {waited_s:.1f} s: {command!r}"
                raise Violation("bound", text, self.world.root_of(request_id))
            if isinstance(command, RequestLoaded):
                self.world.trace.count("decode.loaded")
            else:
                what = "failed" if isinstance(command, RequestFailed) else "recompute"
                self.world.trace.count(f"decode.{what}.{command.code.name}")
        elif isinstance(command, ReleaseLease):
            lease = self.side.leases.get(command.lease_id)
            if lease is not None and lease.request_id in self.told_s:
                self.world.decode_lease_back(lease.request_id, self.told_s[lease.request_id])

    def dispatch(self, step: SimStep) -> None:
        self.send_step(step, ())

    def want_remote(self, request: SimRequest) -> bool:
        blocks = (tuple(request.blocks),)
        # False: it has ended meanwhile, and the driver's word on that is in the queue.
        self.side.blocks_allocated(request.request_id, blocks, request.cached_tokens)
        return True

    def on_token(self, request: SimRequest, position: int, token: int) -> None:
        self.world.token_out(self, request, position, token)

    def on_finished(self, request: SimRequest, reason: str) -> None:
        self.world.decode_ended(self, request.request_id, reason)
