"""The connecting end of one connection: opening it, and one call at a time on it."""

from __future__ import annotations

import asyncio
import math
import ssl
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ._connection import Connection
from ._deadline import Clock, Watchdog
from ._errors import (
    AuthenticationError,
    BusyError,
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    PeerProtocolError,
    Phase,
    RpcError,
    UnreachableError,
)
from ._frames import head_name
from ._limits import Limits
from .auth import Secret
from .hello import ANSWER_HEADS, ClientHandshake
from .identity import Address, Identity

T = TypeVar("T")
_pack_prefix = struct.Struct("<II").pack
Answer = tuple[int, bytes]


@dataclass(frozen=True)
class Dialer:
    """What every connection of one client has in common."""

    own: Identity
    secret: Secret | None
    limits: Limits
    ssl_context: ssl.SSLContext | None
    server_hostname: str | None
    watchdog: Watchdog[Connection]
    clock: Clock
    versions: tuple[int, int]


class ClientConnection:
    """An ``Owner``: the handshake first, then calls, one at a time.

    ``on_gone`` is called once, when the connection has become unusable after it was established.
    ``is_unanswered`` is meaningful after a loss: no byte of an answer had come.
    """

    __slots__ = (
        "_dialer",
        "_future",
        "_handshake",
        "_hold_after_answer",
        "_loop",
        "_watchdog",
        "address",
        "connection",
        "is_open",
        "is_unanswered",
        "on_gone",
        "peer",
        "phase",
        "pool",
        "version",
    )

    peer: Identity
    connection: Connection

    def __init__(self, dialer: Dialer, address: Address) -> None:
        self._dialer = dialer
        self._watchdog = dialer.watchdog
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer] | None = None
        self._handshake: ClientHandshake | None = None
        self._hold_after_answer = False
        self.address = address
        self.is_open = True
        self.is_unanswered = False
        self.on_gone: Callable[[ClientConnection], None] | None = None
        self.phase = Phase.CONNECT
        self.pool: Any = None  # the PeerPool that counts this connection, if any
        self.version = 0

    async def open(self, deadline_at_s: float) -> None:
        """Connect and shake hands. On any failure, cancellation included, nothing stays behind.

        Raises ``UnreachableError``, ``DeadlineError``, ``AuthenticationError``, ``IncompatibleError``,
        ``PeerProtocolError`` or the ``RemoteError`` with which the server refused.
        """
        dialer = self._dialer
        limit_at_s = dialer.clock.now() + dialer.limits.connect_s
        try:
            await run_until(self._open(), min(deadline_at_s, limit_at_s), dialer.clock)
        except BaseException as error:
            if hasattr(self, "connection"):
                self.connection.abort(ClosedError(message="given up while connecting"))
            raise self._mapped(error, deadline_at_s <= limit_at_s) from error

    async def _open(self) -> None:
        dialer, address, loop = self._dialer, self.address, self._loop
        established = self._future = loop.create_future()
        tls: dict[str, Any] = {}
        if dialer.ssl_context is not None:
            tls = {
                "ssl": dialer.ssl_context,
                "server_hostname": dialer.server_hostname or address.host or "localhost",
                "ssl_handshake_timeout": dialer.limits.connect_s,
            }
        try:
            if address.is_unix:
                await loop.create_unix_connection(self._protocol, address.path, **tls)
            else:
                await loop.create_connection(self._protocol, address.host, address.port, **tls)
            await established
        finally:
            # An error set on it that nobody came to await would be reported as unretrieved.
            established.cancel()
        self._future = None

    def _protocol(self) -> Connection:
        dialer = self._dialer
        return Connection(
            self,
            dialer.limits,
            dialer.watchdog,
            dialer.clock,
            heads=ANSWER_HEADS,
            max_body_bytes=dialer.limits.max_handshake_body_bytes,
            on_made=self._made,
        )

    def _made(self, connection: Connection) -> None:
        self.connection = connection
        self.phase = Phase.HELLO
        dialer = self._dialer
        self._handshake = ClientHandshake(dialer.own, dialer.secret, dialer.versions)
        connection.transport.write(self._handshake.first())

    def _mapped(self, error: BaseException, is_callers_deadline: bool) -> BaseException:
        """A failure to open, in this package's words."""
        peer, phase = str(self.address), self.phase
        if isinstance(error, TimeoutError):
            if is_callers_deadline:
                return DeadlineError(message="deadline passed", phase=phase, peer=peer)
            limit_s = self._dialer.limits.connect_s
            return UnreachableError(
                message=f"no connection within {limit_s} s", phase=phase, peer=peer
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthenticationError(message=f"TLS: {error}", phase=phase, peer=peer)
        if isinstance(error, (OSError, UnicodeError)):
            return UnreachableError(message=f"{error}", phase=phase, peer=peer)
        if isinstance(error, ConnectionLostError):
            return UnreachableError(message=error.message, phase=phase, peer=peer)
        if isinstance(error, RpcError):
            error.phase, error.peer = phase, peer
        return error

    # Calls

    def send(self, head: int, body: bytes, deadline_at_s: float) -> asyncio.Future[Answer]:
        """Send one call; the future gets ``(OKAY or FAIL, body)``, or ``DeadlineError``,
        ``ConnectionLostError`` or ``PeerProtocolError``, after which the connection is closed.

        Whoever stops waiting for it calls ``abandon``."""
        if self._future is not None:
            raise BusyError(message="one call at a time on a connection", peer=str(self.address))
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._future = future
        connection = self.connection
        connection.wait_due_s = deadline_at_s
        if deadline_at_s < self._watchdog.armed_at_s:
            self._watchdog.expect(deadline_at_s)
        connection.transport.write(_pack_prefix(head, len(body)) + body)
        return future

    def abandon(self) -> None:
        """Nobody waits for the answer. Unless it is there already, the connection is closed: an answer that
        came later would be taken for that of the next call."""
        if self._future is not None:
            self._future = None
            self.connection.abort(ClosedError(message="call cancelled"))

    async def exchange(
        self, head: int, body: bytes, deadline_at_s: float, *, hold: bool = False
    ) -> Answer:
        """``send`` and wait. With ``hold``, frames after the answer are held back."""
        self.connection.check_open()
        self._hold_after_answer = hold
        try:
            return await self.send(head, body, deadline_at_s)
        except asyncio.CancelledError:
            self.abandon()
            raise

    def close(self, reason: str) -> None:
        self.connection.close(ClosedError(message=reason, peer=str(self.address)))

    # Owner

    def on_frame(self, head: int, body: bytes | None) -> None:
        future = self._future
        if future is None or body is None:
            self.connection.abort(
                PeerProtocolError(
                    message=f"{head_name(head)} that nobody asked for",
                    details={"reason": "unsolicited"},
                    peer=str(self.address),
                )
            )
        elif self._handshake is not None:
            self._shake(self._handshake, head, body)
        else:
            self._future = None
            connection = self.connection
            connection.wait_due_s = math.inf
            if self._hold_after_answer:
                connection.hold()
            if not future.done():
                future.set_result((head, body))

    def _shake(self, handshake: ClientHandshake, head: int, body: bytes) -> None:
        connection = self.connection
        try:
            frame = handshake.receive(head, body)
        except RpcError as error:
            connection.abort(error)
            return
        if connection.decoder.buffered_bytes:
            connection.abort(
                PeerProtocolError(
                    message="the server sent more than the handshake",
                    details={"reason": "pipelined"},
                )
            )
        elif frame is not None:
            connection.transport.write(frame)
        elif handshake.peer is not None:
            self._handshake = None
            self.peer = handshake.peer
            self.version = handshake.version
            self.phase = Phase.ANSWER
            connection.decoder.max_body_bytes = self._dialer.limits.max_body_bytes
            if self._future is not None and not self._future.done():
                self._future.set_result((head, b""))

    def on_violation(self, error: PeerProtocolError) -> None:
        """The connection is aborted, and ``on_lost`` tells the call."""

    def on_lost(self, error: RpcError) -> None:
        future, self._future = self._future, None
        self.is_open = False
        self.is_unanswered = not self.connection.decoder.buffered_bytes
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone(self)
        if future is not None and not future.done():
            if error.phase is None:
                error.phase = self.phase
            error.peer = str(self.address)
            future.set_exception(error)

    def on_wait_over(self) -> None:
        if self._future is None:
            self.close("unused for too long")
            return
        unsent = self.connection.write_buffer_bytes
        phase = Phase.SEND if unsent else Phase.ANSWER
        what = (
            f"deadline passed with {unsent} bytes unsent" if unsent else "no answer by the deadline"
        )
        self.connection.abort(DeadlineError(message=what, phase=phase, peer=str(self.address)))

    def on_shutdown(self, error: RpcError) -> None:
        self.connection.close(error)


async def run_until(coroutine: Coroutine[Any, Any, T], at_s: float, clock: Clock) -> T:
    """The coroutine's result, if it ends before ``at_s``; else it is cancelled and ``TimeoutError`` raised.

    Whatever happens, the coroutine has ended when this returns, cancellation of the caller included.
    """
    task = asyncio.ensure_future(coroutine)
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = None
    if at_s != math.inf:
        timer = clock.call_later(max(0.0, at_s - clock.now()), expire)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved; the cancellation is what the caller hears
        raise
    finally:
        if timer is not None:
            timer.cancel()
    if expired and task.cancelled():
        raise TimeoutError
    return task.result()
