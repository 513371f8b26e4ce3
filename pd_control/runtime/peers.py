"""Effects that concern peers, over simple_rpc: links, calls, answers. Loop thread only.

D opens links and makes calls (`PeersOfDecode`); P accepts links and answers calls
(`PeersOfPrefill`). What a link or call comes to is posted to the core as an event; nothing here
decides anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.ids import PeerId
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.runtime import wire
from pd_control.text import printable
from pd_control.trace import Stage, Trace
from simple_rpc import Client, Deadline, Identity, InvalidMessageError, RpcError
from simple_rpc.channel import Channel
from simple_rpc.link import open_channel
from simple_rpc.loop_thread import LoopThread, Scope

log = logging.getLogger(__name__)

Post = Callable[[Any], None]


def peer_of(identity: Identity) -> PeerId:
    return PeerId(identity.instance, identity.incarnation)


class _Links:
    """The channels of one side by (peer, link id), and the news on them."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._links: dict[tuple[PeerId, int], Channel] = {}

    def __len__(self) -> int:
        return len(self._links)

    def send(self, effect: fx.LinkNews) -> None:
        """`LinkNews`. A link that is gone drops it: its loss was an event."""
        channel = self._links.get((effect.peer, effect.link_id))
        if channel is not None:
            head, encode = wire.LINK_ITEMS[type(effect.item)]
            channel.publish(head, encode(effect.item))

    def close(self, effect: fx.CloseLink) -> None:
        channel = self._links.pop((effect.peer, effect.link_id), None)
        if channel is not None:
            # What was said on it still arrives: the peer judges for itself what does not fit.
            channel.when_flushed(lambda: channel.close(message="this link is not needed any more"))

    def close_all(self, message: str) -> None:
        links, self._links = self._links, {}
        for channel in links.values():
            channel.close(message=message)

    def _up(
        self, channel: Channel, peer: PeerId, link_id: int, attributes: m.HeloAttributes
    ) -> None:
        self._links[(peer, link_id)] = channel
        self._post(ev.LinkUp(peer, link_id, attributes))

    def _lost(self, peer: PeerId, link_id: int, error: RpcError) -> None:
        if self._links.pop((peer, link_id), None) is not None:
            self._post(ev.LinkDown(peer, link_id, Code.PEER_LOST, str(error)))


class PeersOfPrefill(_Links):
    """P: links that D's open, calls that D's make."""

    def __init__(self, post: Post, about: Callable[[], m.HeloAttributes], trace: Trace) -> None:
        super().__init__(post)
        self._about = about
        self._trace = trace
        self._answers: dict[int, fx.Answer] = {}
        self._next_call_ref = 0

    def accept(self, identity: Identity, channel: Channel) -> None:
        """A D opens a link. Called before any news of it is delivered and before D learns of it."""
        if identity.role != wire.ROLE_SCHEDULER:
            raise RpcError(Code.BAD_REQUEST, f"a link is for schedulers, not for {identity}")
        attributes = wire.unpack_about(channel.attributes)
        peer, link_id = peer_of(identity), attributes.link_id

        def news(
            decode: Callable[[Any], Any], make: Callable[..., Any]
        ) -> Callable[[list[Any]], None]:
            def handler(items: list[Any]) -> None:
                for item in items:
                    self._post(make(peer, decode(item)))

            return handler

        channel.on(wire.RENEW.head, news(wire.RENEW.decode, ev.RenewReceived))
        channel.on(wire.ABORT.head, news(wire.ABORT.decode, ev.AbortReceived))
        channel.on_lost = lambda error: self._lost(peer, link_id, error)
        channel.publish(wire.ABOUT_HEAD, wire.ABOUT.encode(self._about()))
        self._up(channel, peer, link_id, attributes)

    def on_prefill(self, identity: Identity, message: m.Prefill) -> m.Accepted:
        self._record(message.info, "")
        return self._ask(lambda ref: ev.PrefillReceived(ref, peer_of(identity), message))

    def on_transfer_kv(self, identity: Identity, message: m.TransferKv) -> m.Accepted:
        self._record(message.info, message.request_id)
        return self._ask(lambda ref: ev.TransferKvReceived(ref, peer_of(identity), message))

    def _record(self, info: m.DInfo, request_id: str) -> None:
        self._trace.record(
            Stage.MESSAGE_RECEIVED, request_id, key=info.transfer_id.key(), value=info.max_tokens
        )

    def _ask(self, make: Callable[[int], Any]) -> m.Accepted:
        """One incoming call: the core answers it in the effects of the same event."""
        self._next_call_ref += 1
        ref = self._next_call_ref
        self._post(make(ref))
        answer = self._answers.pop(ref, None)
        if answer is None:
            raise RpcError(Code.INTERNAL, "this process is shutting down or has failed")
        if answer.code in (Code.OK, Code.ACCEPTED):
            return m.Accepted(int(answer.code), answer.queue_depth)
        raise RpcError(answer.code, answer.message)

    def answer(self, effect: fx.Answer) -> None:
        """`Answer`."""
        self._answers[effect.call_ref] = effect


class PeersOfDecode(_Links):
    """D: links to P's, calls to P's."""

    def __init__(
        self,
        post: Post,
        client: Client,
        thread: LoopThread,
        about: Callable[[], m.HeloAttributes],
        heartbeat_s: float,
        trace: Trace,
        may_dial: Callable[[str], bool],
    ) -> None:
        super().__init__(post)
        self._may_dial = may_dial
        self._client = client
        self._thread = thread
        self._about = about
        self._heartbeat_s = heartbeat_s
        self._trace = trace
        self._warned = ""  # the last failure that was logged

    # -- links -------------------------------------------------------------------------------------

    def open(self, effect: fx.OpenLink) -> None:
        """`OpenLink`."""

        def failed(error: BaseException) -> None:
            code = error.code if isinstance(error, RpcError) else Code.INTERNAL
            text = printable(f"no link to {effect.instance or effect.address}: {error}")
            if text != self._warned:  # with "recompute" requests go on, and nothing else would tell
                self._warned = text
                log.warning("%s", text)
            self._post(ev.LinkFailed(effect.instance, effect.link_id, code, str(error)))

        self._thread.spawn(
            self._open(effect),
            name=f"link to {effect.instance}",
            scope=Scope.PEER,
            on_failure=failed,
        )

    async def _open(self, effect: fx.OpenLink) -> None:
        """Ends in LinkUp, or raises. Up means: the connection stands and P has said who it is."""
        if not self._may_dial(effect.address):
            raise RpcError(Code.UNAUTHORIZED, f"{effect.address} is not among network.dial")
        link = _OpeningLink(self, effect)
        channel = await open_channel(
            self._client,
            effect.address,
            kind=wire.KIND_LINK,
            deadline=Deadline(effect.deadline_s),
            heartbeat_s=self._heartbeat_s,
            handlers=link.handlers(),
            on_lost=link.lost,
            attributes=wire.pack_about(link.about),
        )
        await link.wait_up(channel)

    # -- calls -------------------------------------------------------------------------------------

    def call(self, effect: fx.Call) -> None:
        """`Call`."""

        def failed(error: BaseException) -> None:
            code = error.code if isinstance(error, RpcError) else Code.INTERNAL
            message = error.message if isinstance(error, RpcError) else str(error)
            self._post(ev.CallResult(effect.call_id, code, message))

        self._thread.spawn(
            self._call(effect),
            name=f"{effect.message.HEAD} to {effect.peer.instance}",
            scope=Scope.REQUEST,
            on_failure=failed,
        )

    async def _call(self, effect: fx.Call) -> None:
        message = effect.message
        method: Any = wire.PREFILL if isinstance(message, m.Prefill) else wire.TRANSFER_KV
        info = message.info
        self._trace.record(
            Stage.MESSAGE_SENT,
            info.request_id,
            key=info.transfer_id.key(),
            value=info.max_tokens - info.cached_tokens,
        )
        answer: m.Accepted = await self._client.call(
            effect.address,
            method,
            message,
            deadline=Deadline(effect.deadline_s),
            expect_incarnation=effect.peer.incarnation,
        )
        self._post(
            ev.CallResult(effect.call_id, Code.from_wire(answer.code), "", answer.queue_depth)
        )


class _OpeningLink:
    """A link between `OpenLink` and `LinkUp`; afterwards its news go straight to the core."""

    def __init__(self, owner: PeersOfDecode, effect: fx.OpenLink) -> None:
        self._owner = owner
        self._effect = effect
        self._peer: PeerId | None = None
        self._theirs: m.HeloAttributes | None = None
        self._error: RpcError | None = None
        self._channel: Channel | None = None
        self._waiter: Any = None
        about = owner._about()
        self.about = m.HeloAttributes(about.topology, about.ranks, about.model, effect.link_id)

    def handlers(self) -> dict[str, Callable[[list[Any]], None]]:
        return {
            wire.ABOUT_HEAD: self._about,
            wire.STARTED.head: self._news(wire.STARTED.decode, ev.StartedReceived),
            wire.FINAL.head: self._news(wire.FINAL.decode, ev.FinalReceived),
            wire.ABORT.head: self._news(wire.ABORT.decode, ev.AbortReceived),
        }

    def _news(
        self, decode: Callable[[Any], Any], make: Callable[..., Any]
    ) -> Callable[[list[Any]], None]:
        def handler(items: list[Any]) -> None:
            if self._peer is None:
                raise InvalidMessageError(message="news before the peer has said who it is")
            for item in items:
                self._owner._post(make(self._peer, decode(item)))

        return handler

    def _about(self, items: list[Any]) -> None:
        if self._theirs is not None or len(items) != 1:
            raise InvalidMessageError(message=f"{wire.ABOUT_HEAD}: expected once")
        self._theirs = wire.ABOUT.decode(items[0])
        self._try_up()

    def lost(self, error: RpcError) -> None:
        self._error = error
        if self._peer is not None:
            self._owner._lost(self._peer, self._effect.link_id, error)
        self._wake()

    def _try_up(self) -> None:
        """Both are there: the channel (with the peer's identity) and what the peer said."""
        if self._channel is not None and self._theirs is not None and self._peer is None:
            identity = self._channel.peer
            assert identity is not None
            # A peer of which only the address is known goes by it until it has said who it is.
            if self._effect.instance not in (identity.instance, self._effect.address):
                self._error = RpcError(
                    Code.INCOMPATIBLE,
                    f"expected instance {self._effect.instance!r} at {self._effect.address}, "
                    f"got {identity.instance!r}",
                )
                self._channel.close(message=str(self._error))
            else:
                self._peer = peer_of(identity)
                self._owner._up(self._channel, self._peer, self._effect.link_id, self._theirs)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_up(self, channel: Channel) -> None:
        self._channel = channel
        # News can come before open_channel returns, and so can the loss.
        self._try_up()
        deadline = Deadline(self._effect.deadline_s)
        try:
            while self._peer is None:
                if self._error is not None:
                    raise self._error
                await self._wait(deadline)
        except BaseException:
            channel.close(message="the link did not come up")
            raise

    async def _wait(self, deadline: Deadline) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(self._waiter, max(0.001, deadline.remaining_s()))
        except asyncio.TimeoutError:
            raise RpcError(
                Code.TIMEOUT, f"{self._effect.instance} has not said who it is"
            ) from None
