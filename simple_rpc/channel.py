"""A channel: two news streams, one each way, over one authenticated connection after LINK.

    opener → LINK [timeout_ms, [kind, stream_id, next_seq, heartbeat_ms, attributes]]
    opener ← OKAY [stream_id, next_seq, attributes]        or FAIL
    then, both ways at will: NEWS, ACKN, BEAT, and FAIL, which ends it with a reason.

docs/news.md has the wire in full. A `Channel` outlives its connection if it is *resumable*: it is
then detached until the next connection resumes it under the same numbers. Whatever ends a channel
for good is told to its owner once: `on_lost`.

Everything here runs on the loop thread; callbacks are plain calls from the transport's own callback.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from ._channel_wire import (
    EMPTY_ARRAY,
    MAX_CHANNEL_BODY_BYTES,
    STREAM_ID_BYTES,
    check_ackn,
    check_beat,
    check_news,
    pack,
    pack_fail,
    unpack,
    unpack_fail,
)
from ._connection import Connection
from ._deadline import Clock, TimerHandle
from ._errors import ClosedError, Code, ConnectionLostError, PeerProtocolError, RpcError, shown
from ._frames import ACKN, BEAT, FAIL, NEWS
from ._heartbeat import Heartbeat
from .identity import Identity
from .metrics import Metrics
from .news import MAX_SLOTS, Attached, NewsProtocolError, NewsReceiver, NewsSender, Slots

log = logging.getLogger(__name__)

Handler = Callable[[list[Any]], None]

# A peer acknowledges after its handlers have run, which takes milliseconds. One that beats but does
# not acknowledge for this long is broken, and its sender's slots would fill up in silence.
ACK_TIMEOUT_S = 30.0


class ChannelState(enum.Enum):
    """ATTACHED: a connection stands. DETACHED: none does, one may come. LOST: over, for good."""

    ATTACHED = "attached"
    DETACHED = "detached"
    LOST = "lost"


class Channel:
    """One end of a channel. Made by `open_channel`, `ReconnectingChannel` or a server's acceptor.

    `on(head, handler)` takes news in: `handler(items)` gets a batch, in order, each item once.
    `publish` / `reserve` send news out. Set the callbacks before the first `await`:

    on_lost(error)      the channel is over; once, and not after our own `close`
    on_detached(error)  resumable only: the connection is gone, the channel waits for the next
    on_resumed()        resumable only: attached again, nothing was lost in either direction
    on_new_peer(num_dropped)  attached to a receiver without memory of this stream (on the opener's
                        side the first attach is one): the unacknowledged is dropped, register anew
    """

    def __init__(
        self,
        kind: str,
        *,
        clock: Clock,
        metrics: Metrics,
        is_opener: bool,
        is_resumable: bool,
        max_slots: int = MAX_SLOTS,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.peer: Identity | None = None
        self.peer_stream_id: bytes | None = None
        self.stream_id = os.urandom(STREAM_ID_BYTES)
        self.attributes: Mapping[str, Any] = attributes or {}
        self.is_opener = is_opener
        self.is_resumable = is_resumable
        self.sender = NewsSender(max_slots=max_slots)
        self.receiver = NewsReceiver()
        self.error: RpcError | None = None
        self.on_lost: Callable[[RpcError], None] | None = None
        self.on_detached: Callable[[RpcError], None] | None = None
        self.on_resumed: Callable[[], None] | None = None
        self.on_new_peer: Callable[[int], None] | None = None
        self._state = ChannelState.DETACHED
        self._clock = clock
        self._metrics = metrics
        self._handlers: dict[str, tuple[Handler, str]] = {}
        self._attachment: _Attachment | None = None
        self._on_flushed: list[Callable[[], None]] = []
        # Whoever keeps this channel: told when it is detached, and when it is over.
        self._parked: Callable[[], None] | None = None
        self._ended: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return (
            f"<Channel {self.kind!r} {self._state.value} peer={self.peer} "
            f"out={self.sender!r} expected={self.receiver.expected_seq}>"
        )

    @property
    def state(self) -> ChannelState:
        return self._state

    # -- what owners use ---------------------------------------------------------------------------

    def on(self, head: str, handler: Handler) -> None:
        """Takes news of `head`. ValueError if it is taken already.

        The handler must not block. If it raises, the channel ends with INTERNAL on both sides: the
        state that it left behind is not known.
        """
        if head in self._handlers:
            raise ValueError(f"channel {self.kind!r}: news {head} has a handler already")
        self._handlers[head] = (handler, f"news.received.{head}")

    def publish(self, head: str, item: object) -> None:
        """Sends one item: at once if no frame is in flight, else in the next one.

        BusyError if every slot is taken (see `reserve`). After the channel's end the item is
        dropped and counted.
        """
        self.sender.publish(head, item)

    def reserve(self, num: int = 1) -> Slots:
        """Room for `num` items whose `publish` then cannot fail. BusyError if there is none."""
        return self.sender.reserve(num)

    def when_flushed(self, callback: Callable[[], None]) -> None:
        """Calls back once, when nothing published is unacknowledged (now, if that is so) or the
        channel has ended."""
        if not self.sender.num_unacked or self._state is ChannelState.LOST:
            callback()
        else:
            self._on_flushed.append(callback)

    def close(self, code: Code = Code.ABORTED, message: str = "closed") -> None:
        """Ends the channel: the peer gets FAIL and this reason. `on_lost` is not called here.

        News not yet acknowledged may or may not arrive; see `when_flushed`. Repeating it does nothing.
        """
        self.on_lost = None
        self._end(ClosedError(message=f"channel {self.kind!r}: {message}"), (code, message))

    # -- attaching, for the two ends ---------------------------------------------------------------

    def _attach(self, attachment: _Attachment) -> None:
        """The streams are agreed on, and `attachment` owns its held connection. No frame yet."""
        assert self._state is ChannelState.DETACHED
        attachment.connection.decoder.max_body_bytes = MAX_CHANNEL_BODY_BYTES
        attachment.connection.answer_before_reading = False
        self._attachment = attachment
        self._state = ChannelState.ATTACHED

    def _detach(self, attachment: _Attachment, error: RpcError) -> None:
        """The connection is of no more use. Resumable: wait for another; else: the end."""
        if self._attachment is not attachment:
            return
        if not self.is_resumable:
            self._end(error, None)
            return
        self._attachment = None
        self._state = ChannelState.DETACHED
        self.sender.on_published = None
        self.sender.detach()
        attachment.drop(error)
        self._metrics.count("channel.detached")
        if self._parked is not None:
            self._parked()
        _call(self.on_detached, error)

    def _end(self, error: RpcError, farewell: tuple[Code, str] | None) -> None:
        """The end for good, with a FAIL to the peer if there is a farewell and a connection."""
        if self._state is ChannelState.LOST:
            return
        self._state = ChannelState.LOST
        self.error = error
        attachment, self._attachment = self._attachment, None
        self.sender.on_published = None
        self.sender.close()
        if attachment is not None:
            if farewell is not None:
                attachment.connection.write_frame(FAIL, pack_fail(*farewell))
            attachment.drop(error, flush=farewell is not None)
        self._metrics.count(f"channel.ended.{error.code.name}")
        ended, self._ended, self._parked = self._ended, None, None  # and no cycle is left behind
        if ended is not None:
            ended()
        self._tell_flushed()
        _call(self.on_lost, error)

    def _tell_attached(self, attached: Attached) -> None:
        if attached.is_new:
            _call(self.on_new_peer, attached.num_dropped)
        else:
            _call(self.on_resumed)

    def _tell_flushed(self) -> None:
        callbacks, self._on_flushed = self._on_flushed, []
        for callback in callbacks:
            _call(callback)


class _Attachment:
    """A channel's hold on one connection; the connection's owner (see `_owner.Owner`)."""

    __slots__ = (
        "_ack_due_s",
        "_clock",
        "_heartbeat",
        "_news_sent_s",
        "_timer",
        "channel",
        "connection",
    )

    connection: Connection  # set as soon as this owns it

    def __init__(self, channel: Channel, heartbeat_s: float) -> None:
        clock = channel._clock
        self.channel = channel
        self._clock = clock
        self._heartbeat = Heartbeat(heartbeat_s, clock.now())
        self._ack_due_s = math.inf
        self._news_sent_s = 0.0
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """From now on publishing writes. What waits in the queue leaves first."""
        self.channel.sender.on_published = self.send_news
        self._arm()
        self.send_news()

    def drop(self, error: RpcError, *, flush: bool = False) -> None:
        """Lets go of the connection; nothing it still says reaches the channel."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if flush:
            self.connection.close(error)
        else:
            self.connection.abort(error)

    def send_news(self) -> None:
        body = self.channel.sender.next_frame()
        if body is not None:
            self.connection.write_frame(NEWS, body)
            now_s = self._clock.now()
            self._heartbeat.sent_s = self._news_sent_s = now_s
            self._ack_due_s = now_s + ACK_TIMEOUT_S

    # Owner

    def on_frame(self, head: int, body: bytes | None) -> None:
        if self.channel._attachment is not self or body is None:
            return
        self._heartbeat.received_s = self._clock.now()
        try:
            if head == NEWS:
                self._on_news(body)
            elif head == ACKN:
                self._on_ackn(body)
            elif head == FAIL:
                self.channel._end(unpack_fail(body), None)
            elif body != EMPTY_ARRAY:
                check_beat(body)
        except PeerProtocolError as error:
            # Kept as the channel's error: with its traceback it would keep this frame, a cycle.
            self.on_violation(error.with_traceback(None))

    def on_violation(self, error: PeerProtocolError) -> None:
        self.channel._metrics.count("channel.violation")
        log.warning("channel %r with %s: %s", self.channel.kind, self.channel.peer, error)
        if self.channel._attachment is self:
            self.channel._end(error, (error.code, error.message))

    def on_lost(self, error: RpcError) -> None:
        self.channel._detach(self, error)

    def on_wait_over(self) -> None:
        """Not used: a channel has its own timer."""

    def on_shutdown(self, error: RpcError) -> None:
        channel = self.channel
        if channel._attachment is self:
            # An opener that can resume looks for our successor if the connection just ends; FAIL would
            # tell it to stop.
            will_return = channel.is_resumable and not channel.is_opener
            channel._end(error, None if will_return else (error.code, error.message))

    # Frames

    def _on_news(self, body: bytes) -> None:
        channel = self.channel
        first_seq, groups = check_news(unpack(body, "NEWS"))
        for head, _ in groups:
            if head not in channel._handlers:
                raise NewsProtocolError(f"NEWS: head {shown(head)} is not known here")
        receiver = channel.receiver
        num_skipped = receiver.stats.num_duplicates
        groups = receiver.accept(first_seq, groups)
        num_skipped = receiver.stats.num_duplicates - num_skipped
        if num_skipped:
            channel._metrics.count("news.duplicates", num_skipped)
        for head, items in groups:
            handler, counter = channel._handlers[head]
            channel._metrics.count(counter, len(items))
            try:
                handler(items)
            except Exception as error:
                log.exception("channel %r: the handler of %s news raised", channel.kind, head)
                channel._metrics.count("news.handler_failed")
                message = f"the handler of {head} news raised {type(error).__name__}"
                channel._end(RpcError(Code.INTERNAL, message), (Code.INTERNAL, message))
            if channel._attachment is not self:
                return  # closed by a handler, or because of one
        self.connection.write_frame(ACKN, pack([receiver.expected_seq]))
        self._heartbeat.sent_s = self._heartbeat.received_s

    def _on_ackn(self, body: bytes) -> None:
        sender = self.channel.sender
        sender.acknowledge(check_ackn(unpack(body, "ACKN")))
        if not sender.num_in_flight and self._ack_due_s != math.inf:
            self._ack_due_s = math.inf
            self.channel._metrics.observe(
                "news.ack", self._heartbeat.received_s - self._news_sent_s
            )
            self.send_news()
            if not sender.num_unacked and self.channel._on_flushed:
                self.channel._tell_flushed()

    # Time

    def _arm(self) -> None:
        tick_s = min(self._heartbeat.next_tick_s(), self._clock.now() + ACK_TIMEOUT_S)
        self._timer = self._clock.call_later(max(0.0, tick_s - self._clock.now()), self._tick)

    def _tick(self) -> None:
        """One timer a channel, never re-armed by traffic: it looks when it fires."""
        if self.channel._attachment is not self:
            return
        now_s = self._clock.now()
        channel, heartbeat = self.channel, self._heartbeat
        if heartbeat.is_lost(now_s):
            silent_s = now_s - heartbeat.received_s
            self._give_up(f"{channel.peer} has been silent for {silent_s:.3g} s")
        elif self._ack_due_s <= now_s:
            self._give_up(f"{channel.peer} did not acknowledge news within {ACK_TIMEOUT_S:.3g} s")
        else:
            if heartbeat.beat_due_s <= now_s:
                self.connection.write_frame(BEAT, EMPTY_ARRAY)
                heartbeat.sent_s = now_s
            self._arm()

    def _give_up(self, message: str) -> None:
        channel = self.channel
        error = ConnectionLostError(message=message)
        log.warning("channel %r: %s", channel.kind, message)
        if channel.is_resumable:
            channel._detach(self, error)
        else:
            channel._end(error, (Code.PEER_LOST, message))


def _call(callback: Callable[..., None] | None, *args: Any) -> None:
    """Runs an owner's callback. What it raises must not reach the transport: it goes to the loop's
    exception handler, where a `LoopThread` takes it for a failure of the process."""
    if callback is None:
        return
    try:
        callback(*args)
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a channel's callback {callback!r} raised", "exception": error}
        )
