"""The server: who may connect, what they may call, and what it may cost."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from ._client_connection import run_until
from ._codec import new_pack
from ._connection import Connection
from ._deadline import Clock, Deadline, LoopClock, Watchdog
from ._entries import CallContext, Entry, RawEntry, TypedEntry
from ._errors import BusyError, ClosedError, RpcError
from ._frames import LINK, RESERVED_HEADS, head_from_name
from ._limits import MAX_HEAD_METHODS, Limits
from ._listen import Listener, check_exposure, open_listener
from ._session import Session
from .auth import Secret
from .channel_table import MAX_CHANNELS, Acceptor, ChannelTable
from .hello import PROTOCOL_VERSIONS
from .identity import Address, Identity
from .methods import Method, is_coroutine_handler
from .metrics import Counters, Metrics
from .news import MAX_SLOTS

log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")
RawCallback = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MAX_REASONS = 64  # distinct reasons counted; they are our own labels, so this is only a backstop
LOG_INTERVAL_S = 1.0  # per reason: a flood of bad connections must not become a flood of log lines


@dataclass(frozen=True)
class ServerStats:
    """A snapshot. Counters run from the server's creation."""

    num_connections: int
    num_handshaking: int
    num_calls: int
    num_accepted: int
    closed: Mapping[str, int]
    """Connections that we ended for something the peer did, by reason."""


class PeerCalls:
    """Calls of one peer that have a task now, over all its connections."""

    __slots__ = ("__weakref__", "num_running")

    def __init__(self) -> None:
        self.num_running = 0


class Server:
    """Serves methods and channels on any number of addresses. One event loop; its thread only.

    Trust: a connection is nothing before HELLO (and, with a secret, the proof) is complete; until then it
    can make us keep at most ``max_handshake_body_bytes`` and lasts at most ``handshake_s``. Listening
    off loopback takes TLS, a secret, or the word ``insecure=True``.

    A peer that breaks a rule or a limit loses its connection, with a FAIL that says why where it still
    reads; the reason is counted (``stats``, and ``server.closed.<reason>`` of the metrics) and logged.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        secret: Secret | None = None,
        limits: Limits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        insecure: bool = False,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        self.identity = identity
        self.secret = secret
        self.limits = limits or Limits()
        self.versions = versions
        self.metrics: Metrics = metrics if metrics is not None else Counters()
        self.clock: Clock = clock or LoopClock()
        self.now = self.clock.now
        self.watchdog: Watchdog[Connection] = Watchdog(self.clock)
        self.pack = new_pack()
        self.entries: dict[int, Entry] = {}
        self.heads: dict[int, bool] = {LINK: False}
        self.channels: dict[str, ChannelTable] = {}
        self.loop: asyncio.AbstractEventLoop
        self._ssl_context = ssl_context
        self._insecure = insecure
        self._listeners: list[Listener] = []
        self._sessions: set[Session] = set()
        # Those with a call that has a task, whether or not their connection still stands: the event loop
        # itself holds tasks only weakly.
        self._running: set[Session] = set()
        self._num_handshaking = 0
        self._num_accepted = 0
        self._peer_calls: WeakValueDictionary[tuple[str, bytes], PeerCalls] = WeakValueDictionary()
        self._closed: dict[str, int] = {}
        self._log_after_s: dict[str, float] = {}
        self._is_draining = False
        self._all_gone: asyncio.Future[None] | None = None  # the last connection is closed
        self._call_over: asyncio.Future[None] | None = None  # a call has ended

    # What is served

    def register_method(self, head: str, callback: RawCallback) -> None:
        """The raw layer: after ``head`` (four ASCII letters), ``await callback(reader, writer)`` reads and
        writes what the head calls for, and returns with the stream at the next head.

        The server does not frame or bound what the callback reads. An exception ends the connection.
        Raises ``ValueError`` for a head that is taken, reserved or malformed.
        """
        self._register(RawEntry(head, callback), is_raw=True)

    def register(
        self,
        method: Method[Req, Resp],
        handler: Callable[[Req, CallContext], Resp | Awaitable[Resp]],
    ) -> None:
        """Serve ``method``. ``handler(request, context)`` returns the response, or raises ``RpcError`` to
        refuse; any other exception is answered INTERNAL and logged.

        A coroutine function runs in a task and is cancelled at the caller's deadline. A plain function is
        called straight from the socket's callback, which is faster and must not block. Raises ``ValueError``
        for a head that is taken.
        """
        entry = TypedEntry(method.name, method, handler, is_coroutine_handler(handler))
        self._register(entry, is_raw=False)

    def _register(self, entry: Entry, *, is_raw: bool) -> None:
        head = head_from_name(entry.name)
        if head in RESERVED_HEADS:
            raise ValueError(f"head {entry.name} belongs to the protocol")
        if head in self.entries:
            raise ValueError(f"head {entry.name} is already registered")
        if len(self.entries) >= MAX_HEAD_METHODS:
            raise ValueError(f"more than {MAX_HEAD_METHODS} methods")
        self.entries[head] = entry
        self.heads[head] = is_raw

    def on_channel(
        self,
        kind: str,
        acceptor: Acceptor,
        *,
        resume_s: float = 0.0,
        max_channels: int = MAX_CHANNELS,
        max_slots: int = MAX_SLOTS,
    ) -> ChannelTable:
        """Accept channels of ``kind``: ``acceptor(peer, channel)`` attaches handlers. See
        ``ChannelTable`` for the rest. Raises ``ValueError`` for a kind that is taken."""
        if kind in self.channels:
            raise ValueError(f"channel kind {kind!r} is already accepted")
        table = ChannelTable(
            kind, acceptor, resume_s=resume_s, max_channels=max_channels, max_slots=max_slots
        )
        self.channels[kind] = table
        return table

    # Life

    async def listen(self, address: Address | str) -> Address:
        """Accept connections at ``address``; returns it with the real port. May be called for several.

        Raises ``ValueError`` for an address off loopback without TLS, secret or ``insecure``, and ``OSError``
        if it cannot be bound, in particular if another live server has it. A Unix socket file left by a
        dead server is replaced; one that is served is never touched.
        """
        self._check_open()
        address = Address.parse(address)
        is_trusted = self.secret is not None or self._ssl_context is not None
        if not (is_trusted or self._insecure):
            check_exposure(address)
        self.loop = asyncio.get_running_loop()
        listener = await open_listener(
            address,
            lambda: Session(self).make_protocol(),
            self._ssl_context,
            self.limits,
            must_be_loopback=not (is_trusted or self._insecure),
            note=lambda reason, message: self._note(reason, "a stranger", message),
        )
        try:
            self._check_open()
        except ClosedError:
            listener.close()
            raise
        self._listeners.append(listener)
        return listener.address

    async def drain(self, deadline: Deadline) -> None:
        """Stop accepting, let calls in progress finish until ``deadline``, then close everything.

        A connection between two calls is closed at once; channels end when the last call has."""
        self._stop_listening()
        sessions = [session for session in self._sessions if session.connection.owner is session]
        for session in sessions:
            session.drain()
        while self._running and not deadline.has_passed(self.clock):
            self._call_over = asyncio.get_running_loop().create_future()
            try:
                await run_until(_wait_for(self._call_over), deadline.at_s, self.clock)
            except TimeoutError:
                self.metrics.count("server.drain_expired")
        await self.close()

    async def close(self) -> None:
        """End everything now; calls in progress are cancelled and answered ABORTED. May be called twice.

        Returns when every handler has ended, or after ``close_s`` if one does not let itself be cancelled.
        """
        self._stop_listening()
        error = ClosedError(message="the server is closed")
        tasks = {session.task for session in self._running if session.task is not None}
        for session in list(self._running):
            session.on_shutdown(error)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=self.limits.close_s)
            for task in stuck:
                log.error("a handler ignores its cancellation: %r", task)
        for connection in self.watchdog.watched():
            connection.shut_down(error)
        for table in self.channels.values():
            table.close()
        if self._sessions:
            self._all_gone = asyncio.get_running_loop().create_future()
            try:
                # Every transport is cut after close_s by the watchdog; on a stopped clock, by us.
                await asyncio.wait_for(self._all_gone, 2 * self.limits.close_s)
            except asyncio.TimeoutError:
                for session in list(self._sessions):
                    session.connection.transport.abort()
        self.watchdog.close()

    def stats(self) -> ServerStats:
        return ServerStats(
            num_connections=len(self._sessions),
            num_handshaking=self._num_handshaking,
            num_calls=len(self._running),
            num_accepted=self._num_accepted,
            closed=dict(self._closed),
        )

    def sessions(self) -> list[str]:
        """One line per connection: who, where, doing what."""
        return [repr(session) for session in self._sessions]

    def _check_open(self) -> None:
        if self._is_draining:
            raise ClosedError(message="the server is closed")

    def _stop_listening(self) -> None:
        self._is_draining = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()

    # What sessions tell

    def admit(self, session: Session) -> RpcError | None:
        """A connection has come. Counted from now until ``forget``; or the reason to refuse it."""
        self._num_accepted += 1
        refusal: RpcError | None = None
        limits = self.limits
        if self._is_draining:
            refusal = ClosedError(message="the server is draining", details={"reason": "draining"})
        elif len(self._sessions) >= limits.max_connections:
            refusal = BusyError(
                message=f"at most {limits.max_connections} connections",
                details={"reason": "too_many_connections"},
            )
        elif self._num_handshaking >= limits.max_handshaking:
            refusal = BusyError(
                message=f"at most {limits.max_handshaking} connections in the handshake",
                details={"reason": "too_many_handshakes"},
            )
        self._sessions.add(session)
        self._num_handshaking += 1
        return refusal

    def established(self, session: Session) -> None:
        self._num_handshaking -= 1

    def forget(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            if session.is_handshaking:
                self._num_handshaking -= 1
            if not self._sessions:
                _notify(self._all_gone)

    def calls_of(self, peer: Identity) -> PeerCalls:
        """The counter that all connections of one peer share, for as long as it has any."""
        key = (peer.instance, peer.incarnation)
        calls = self._peer_calls.get(key)
        if calls is None:
            calls = self._peer_calls[key] = PeerCalls()
        return calls

    def call_began(self, session: Session) -> None:
        """A call that has a task: held until ``call_ended``."""
        self._running.add(session)

    def call_ended(self, session: Session) -> None:
        self._running.discard(session)
        if self._call_over is not None:
            _notify(self._call_over)

    def note_closed(self, session: Session, error: RpcError) -> None:
        """A peer's fault ends its connection: count and log it."""
        reason = str(error.details.get("reason", error.code.name.lower()))
        self._note(reason, session.describe, error.message)

    def _note(self, reason: str, who: str | Callable[[], str], message: str) -> None:
        if reason not in self._closed and len(self._closed) >= MAX_REASONS:
            reason = "other"
        self._closed[reason] = self._closed.get(reason, 0) + 1
        self.metrics.count(f"server.closed.{reason}")
        now_s = self.clock.now()
        if now_s >= self._log_after_s.get(reason, now_s):
            self._log_after_s[reason] = now_s + LOG_INTERVAL_S
            log.warning(
                "closing the connection of %s: %s (%s, %d so far)",
                who if isinstance(who, str) else who(),
                message,
                reason,
                self._closed[reason],
            )


def _notify(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future
