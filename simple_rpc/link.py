"""The opening end of channels: `open_channel` for one connection's life, `ReconnectingChannel` for
as long as somebody wants to talk to an address.

A *link* is a channel with a heartbeat that is not resumed: its loss is the loss of the peer, and both
sides see it. A worker's news go through a `ReconnectingChannel`, which outlives restarts of its
scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from ._channel_wire import CHANNEL_HEADS, check_answer
from ._deadline import Clock, Deadline, LoopClock
from ._errors import Code, ConnectionLostError, RpcError
from ._frames import LINK
from .channel import Channel, ChannelState, Handler, _Attachment
from .client import Client
from .dedicated import AuthenticatedConnection
from .identity import Address, Identity
from .metrics import Metrics, NoMetrics
from .news import MAX_SLOTS, Attached, NewsReceiver

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# The first attempt comes at once, the second quickly (a closed socket, a scheduler's restart under a
# supervisor), later ones at most once a second: cheap for us, and soon enough for an operator.
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
# A connection that did not last this long counts as one more failed attempt: a peer that accepts us
# and hangs up at once is not called in a tight loop.
STABLE_S = 5.0
# One attempt: connect, HELLO and LINK.
ATTEMPT_S = 3.0
# How long a reconnecting channel tries before its peer counts as lost.
GIVE_UP_S = 30.0
# A new attempt cannot change these answers.
_FINAL_CODES = frozenset({Code.UNAUTHORIZED, Code.INCOMPATIBLE})


async def open_channel(
    client: Client,
    address: Address | str,
    *,
    kind: str,
    deadline: Deadline,
    heartbeat_s: float = HEARTBEAT_S,
    handlers: Mapping[str, Handler] | None = None,
    on_lost: Callable[[RpcError], None] | None = None,
    attributes: Mapping[str, Any] | None = None,
    expect_incarnation: bytes | None = None,
    max_slots: int = MAX_SLOTS,
    clock: Clock | None = None,
    metrics: Metrics | None = None,
) -> Channel:
    """Opens a channel of `kind` to the server at `address`: connect, HELLO, LINK, by `deadline`.

    `handlers` maps heads to `handler(items)`; they can run before this returns, and so can `on_lost`
    (check `channel.error`). Raises the RpcError of whichever step failed; then nothing is left open.
    """
    channel = Channel(
        kind,
        clock=clock or LoopClock(),
        metrics=metrics or NoMetrics(),
        is_opener=True,
        is_resumable=False,
        max_slots=max_slots,
    )
    channel.on_lost = on_lost
    for head, handler in (handlers or {}).items():
        channel.on(head, handler)
    connection = await client.connect(address, deadline, expect_incarnation=expect_incarnation)
    await _open(channel, connection, heartbeat_s, attributes, deadline)
    return channel


async def _open(
    channel: Channel,
    connection: AuthenticatedConnection,
    heartbeat_s: float,
    attributes: Mapping[str, Any] | None,
    deadline: Deadline,
) -> Attached:
    """LINK over an authenticated connection, then the channel takes it over. Owns `connection`."""
    try:
        fields = await connection.request(
            LINK,
            [
                channel.kind,
                channel.stream_id,
                channel.receiver.expected_seq,
                round(heartbeat_s * 1000),
                dict(attributes or {}),
            ],
            deadline=deadline,
            hold=True,
        )
        # From here on without an await: nothing can come in between.
        stream_id, next_seq, is_fresh = check_answer(fields)
        attached = channel.sender.attach(connection.peer.incarnation, next_seq, is_fresh=is_fresh)
        if stream_id != channel.peer_stream_id:
            channel.receiver = NewsReceiver()
        channel.peer_stream_id = stream_id
        channel.peer = connection.peer
        attachment = _Attachment(channel, heartbeat_s)
        attachment.connection = connection.take_over(attachment, CHANNEL_HEADS)
        channel._attach(attachment)
    except BaseException:
        channel.sender.detach()
        connection.close()
        raise
    # The owner registers first, so that its registration is the first of the news.
    channel._tell_attached(attached)
    if channel._attachment is attachment:
        attachment.start()
        attachment.connection.release()
    return attached


class ReconnectingChannel:
    """A channel to whoever listens at `address`, kept up across lost connections and restarts.

    `channel` is there from the start: set handlers, reserve and publish at any time; what is published
    while no connection stands waits. After a lost connection the stream is resumed under the same
    numbers. When somebody with a new incarnation answers (or one that forgot us), what was not
    acknowledged is dropped and `on_new_peer(peer, num_dropped)` is called, synchronously, before
    anything else is sent: publish the registration there. It is called for the first contact too.

    Whoever makes it owns it: `await start(deadline)`, then `close()`. If no connection stands for
    `give_up_s`, or the peer refuses us for good, the channel ends: `on_lost(error)`, once.
    Loop thread only.
    """

    def __init__(
        self,
        client: Client,
        address: Address | str,
        *,
        kind: str,
        on_new_peer: Callable[[Identity, int], None],
        on_lost: Callable[[RpcError], None],
        heartbeat_s: float = HEARTBEAT_S,
        attributes: Mapping[str, Any] | None = None,
        max_slots: int = MAX_SLOTS,
        give_up_s: float = GIVE_UP_S,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.address = Address.parse(address)
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._attributes = attributes
        self._give_up_s = give_up_s
        self._clock: Clock = clock or LoopClock()
        self._metrics: Metrics = metrics or NoMetrics()
        self._on_new_peer = on_new_peer
        self._task: asyncio.Task[None] | None = None
        self._backoff_s = 0.0
        self._attached_s = 0.0
        self.channel = Channel(
            kind,
            clock=self._clock,
            metrics=self._metrics,
            is_opener=True,
            is_resumable=True,
            max_slots=max_slots,
        )
        self.channel.on_lost = on_lost
        self.channel.on_new_peer = self._new_peer
        self.channel._parked = self._detached
        self.channel._ended = self._ended

    def __repr__(self) -> str:
        return f"<ReconnectingChannel {self.address} {self.channel!r}>"

    async def start(self, deadline: Deadline) -> None:
        """Makes the first connection by `deadline`, trying again as after a loss.

        Raises the last attempt's RpcError; the channel is over then, without `on_lost`.
        """
        on_lost, self.channel.on_lost = self.channel.on_lost, None
        try:
            await self._connect(deadline)
        except BaseException:
            self.close()
            raise
        if self.channel.error is not None:
            raise self.channel.error
        self.channel.on_lost = on_lost

    def close(self, code: Code = Code.ABORTED, message: str = "closed") -> None:
        """Ends the channel (the peer gets FAIL) and any attempt to reconnect. No `on_lost`."""
        self.channel.close(code, message)

    # -- inside ------------------------------------------------------------------------------------

    def _new_peer(self, num_dropped: int) -> None:
        peer = self.channel.peer
        assert peer is not None
        self._on_new_peer(peer, num_dropped)

    def _detached(self) -> None:
        if self._clock.now() - self._attached_s >= STABLE_S:
            self._backoff_s = 0.0
        deadline = Deadline.after(self._give_up_s, self._clock)
        task = asyncio.get_running_loop().create_task(
            self._connect(deadline), name=f"reconnect {self.address}"
        )
        self._task = task
        task.add_done_callback(self._reconnected)

    def _ended(self) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _reconnected(self, task: asyncio.Task[None]) -> None:
        """However the task ended, the channel is attached again, or over and its owner told."""
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            log.error("reconnecting to %s failed", self.address, exc_info=task.exception())
        if self.channel.state is ChannelState.DETACHED and self._task is None:
            self.channel._end(
                RpcError(Code.INTERNAL, f"reconnecting to {self.address} was stopped"), None
            )

    async def _connect(self, deadline: Deadline) -> None:
        while True:
            if self._backoff_s:
                await self._sleep(self._backoff_s * random.uniform(0.5, 1.0))
            self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_FIRST_S), BACKOFF_MAX_S)
            attempt = deadline.earlier(Deadline.after(ATTEMPT_S, self._clock))
            try:
                connection = await self._client.connect(self.address, attempt)
                self._attached_s = self._clock.now()
                await _open(self.channel, connection, self._heartbeat_s, self._attributes, attempt)
                return
            except RpcError as error:
                self._metrics.count("channel.reconnect_failed")
                if (
                    error.code in _FINAL_CODES
                    or deadline.remaining_s(self._clock) <= self._backoff_s
                ):
                    self.channel._end(_gave_up(self.address, error), None)
                    return
                log.info("reconnecting to %s: %s", self.address, error)

    async def _sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(seconds, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _gave_up(address: Address, last: RpcError) -> RpcError:
    if last.code in _FINAL_CODES:
        return last
    error = ConnectionLostError(message=f"no connection to {address}; the last attempt: {last}")
    error.__cause__ = last
    return error
