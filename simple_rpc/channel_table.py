"""The accepting end of channels of one kind: who is attached, who may come back, who is gone.

A `ChannelTable` remembers each channel under (opener's incarnation, opener's stream id). A resumable
kind keeps a detached channel for `resume_s`, so that a reconnect continues where it stopped; then, or
when the same instance shows up with a new incarnation, the channel is over and its owner is told.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ._channel_wire import CHANNEL_HEADS, LinkRequest, pack
from ._connection import Connection
from ._deadline import Clock, TimerHandle
from ._errors import BusyError, ClosedError, Code, ConnectionLostError, RpcError
from ._frames import OKAY
from .channel import Channel, _Attachment
from .identity import Identity
from .metrics import Metrics
from .news import MAX_SLOTS

log = logging.getLogger(__name__)

# Attached and detached ones together, per kind. Each costs a few kilobytes, and its queue.
MAX_CHANNELS = 4096

Acceptor = Callable[[Identity, Channel], None]


class ChannelTable:
    """All channels of one kind at one server. Loop thread only.

    `acceptor(peer, channel)` is called for each new channel, before any news of it is delivered: it
    sets handlers and callbacks and may publish. It refuses by raising RpcError. `resume_s` 0: the end
    of a connection is the end of its channel (a link).
    """

    def __init__(
        self,
        kind: str,
        acceptor: Acceptor,
        *,
        resume_s: float = 0.0,
        max_channels: int = MAX_CHANNELS,
        max_slots: int = MAX_SLOTS,
    ) -> None:
        self.kind = kind
        self.resume_s = resume_s
        self.max_channels = max_channels
        self.max_slots = max_slots
        self._acceptor = acceptor
        self._channels: dict[tuple[bytes, bytes], Channel] = {}
        # The detached ones, the longest detached first, with the timer that ends each.
        self._detached: OrderedDict[tuple[bytes, bytes], TimerHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def num_detached(self) -> int:
        return len(self._detached)

    def channels(self) -> list[Channel]:
        """All that are not over, attached or not."""
        return list(self._channels.values())

    def accept(
        self,
        connection: Connection,
        peer: Identity,
        fields: Sequence[Any],
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> Channel:
        """A LINK call arrived on `connection`, which is held. Answers OKAY and takes it over.

        Raises RpcError to be answered FAIL, with nothing changed: malformed fields, a table full of
        attached channels (BUSY), or the acceptor's refusal.
        """
        request = LinkRequest(fields)
        key = (peer.incarnation, request.stream_id)
        known = self._channels.get(key)
        if known is not None and known._attachment is not None:
            # Half-open: the opener has given that connection up, so it is of no use to us either.
            replaced = ConnectionLostError(message=f"{peer} has opened a newer connection")
            known._detach(known._attachment, replaced)
        channel = self._channels.get(key)
        is_fresh = channel is None
        if channel is None:
            self._forget_older_incarnations(peer)
            self._make_room()
            channel = self._new_channel(key, peer, request, clock, metrics)
            self._acceptor(peer, channel)
            if channel.error is not None:  # the acceptor closed what it was given
                raise channel.error
        next_seq = 1 if is_fresh else request.next_seq
        attached = channel.sender.attach(peer.incarnation, next_seq, is_fresh=is_fresh)
        self._channels[key] = channel
        timer = self._detached.pop(key, None)
        if timer is not None:
            timer.cancel()
        answer = [channel.stream_id, channel.receiver.expected_seq, {"fresh": is_fresh}]
        attachment = _Attachment(channel, request.heartbeat_s)
        attachment.connection = connection
        connection.take_over(attachment, CHANNEL_HEADS)
        channel._attach(attachment)
        connection.write_frame(OKAY, pack(answer))
        attachment.start()
        metrics.count("channel.accepted" if is_fresh else "channel.resumed")
        if not is_fresh:
            channel._tell_attached(attached)
        connection.release()
        return channel

    def close(self) -> None:
        """The server is closing: ends what is left. Owners of channels are told (ABORTED)."""
        for channel in self.channels():
            channel._end(ClosedError(message="the server is closed"), None)

    # -- inside ------------------------------------------------------------------------------------

    def _new_channel(
        self,
        key: tuple[bytes, bytes],
        peer: Identity,
        request: LinkRequest,
        clock: Clock,
        metrics: Metrics,
    ) -> Channel:
        channel = Channel(
            self.kind,
            clock=clock,
            metrics=metrics,
            is_opener=False,
            is_resumable=self.resume_s > 0,
            max_slots=self.max_slots,
            attributes=request.attributes,
        )
        channel.peer = peer
        channel.peer_stream_id = request.stream_id

        def ended() -> None:
            self._channels.pop(key, None)
            timer = self._detached.pop(key, None)
            if timer is not None:
                timer.cancel()

        def detached() -> None:
            self._detached[key] = clock.call_later(self.resume_s, expired)

        def expired() -> None:
            message = f"{peer} has not come back within {self.resume_s:.3g} s"
            channel._end(ConnectionLostError(message=message), None)

        channel._ended = ended
        channel._parked = detached
        return channel

    def _forget_older_incarnations(self, peer: Identity) -> None:
        """A restart is proof that the process before it is dead."""
        for channel in self.channels():
            old = channel.peer
            if (
                old is not None
                and (old.role, old.instance) == (peer.role, peer.instance)
                and old.incarnation != peer.incarnation
            ):
                message = f"{old} was restarted: it is {peer} now"
                log.warning("channel %r: %s", self.kind, message)
                channel._end(ConnectionLostError(message=message), (Code.PEER_LOST, message))

    def _make_room(self) -> None:
        if len(self._channels) < self.max_channels:
            return
        if not self._detached:
            raise BusyError(
                message=f"channel {self.kind!r}: all {self.max_channels} channels are in use"
            )
        channel = self._channels[next(iter(self._detached))]
        message = f"made room: more than {self.max_channels} channels of kind {self.kind!r}"
        channel._end(RpcError(Code.GONE, message), None)
