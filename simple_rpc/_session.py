"""The accepting end of one connection: handshake, then calls one at a time, then the end.

Nothing reaches a handler before the handshake is complete. A frame is dispatched by a plain call from the
transport's callback; a coroutine handler gets a task of its own, a plain function is answered on the
spot. While a task runs the connection is held, so calls on one connection are strictly in order.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from ._connection import Connection
from ._entries import CallContext, Entry, RawEntry, TypedEntry
from ._errors import (
    BusyError,
    ClosedError,
    Code,
    InvalidMessageError,
    PeerProtocolError,
    RpcError,
)
from ._frames import FAIL, OKAY
from ._streams import close_streams, open_streams
from .handoff import DetachedSocket
from .hello import ServerHandshake
from .identity import Identity
from .methods import pack_fail, unpack_call

if TYPE_CHECKING:
    import socket

    from .server import PeerCalls, Server

log = logging.getLogger(__name__)
_OK = int(Code.OK)  # an enum's member is a slow attribute in Python 3.11


class Session:
    """An ``Owner``. Made for each accepted connection; counted by the server until it is closed."""

    __slots__ = (
        "_active_s",
        "_call_start_s",
        "_calls",
        "_cancel_error",
        "_entry",
        "_handshake",
        "_has_started",
        "_is_detached",
        "_is_draining",
        "_is_refused",
        "_server",
        "connection",
        "peer",
        "task",
    )

    peer: Identity  # once the handshake is complete
    connection: Connection
    _calls: PeerCalls

    def __init__(self, server: Server) -> None:
        self._server = server
        self._handshake: ServerHandshake | None = ServerHandshake(
            server.identity, server.secret, server.versions
        )
        self.task: asyncio.Task[None] | None = None
        self._entry: Entry | None = None
        self._cancel_error: RpcError | None = None
        self._call_start_s = 0.0
        self._active_s = 0.0
        self._has_started = False
        self._is_detached = False
        self._is_draining = False
        self._is_refused = False

    @property
    def is_handshaking(self) -> bool:
        return self._handshake is not None

    def make_protocol(self) -> Connection:
        server = self._server
        handshake = self._handshake
        assert handshake is not None
        return Connection(
            self,
            server.limits,
            server.watchdog,
            server.clock,
            heads=handshake.heads,
            max_body_bytes=server.limits.max_handshake_body_bytes,
            on_made=self._made,
            on_closed=self._closed,
        )

    def _made(self, connection: Connection) -> None:
        self.connection = connection
        connection.answer_before_reading = True
        server = self._server
        refusal = server.admit(self)
        if refusal is not None:
            self._is_refused = True
            self._refuse(refusal)
            return
        connection.wait_until(server.now() + server.limits.handshake_s)

    def _closed(self, connection: Connection) -> None:
        self._server.forget(self)

    # Owner

    def on_frame(self, head: int, body: bytes | None) -> None:
        if self._handshake is not None:
            self._shake(self._handshake, head, body or b"")
            return
        entry = self._server.entries.get(head)
        if entry is None:
            self._open_channel(body or b"")  # LINK: the decoder lets no other head through
        elif body is None:
            self._call_raw(entry)
        else:
            self._call_typed(cast("TypedEntry", entry), body)

    def on_violation(self, error: PeerProtocolError) -> None:
        self._refuse(error)

    def on_lost(self, error: RpcError) -> None:
        """A handler that is running is left to finish (its effects should not be cut in half because of a
        network), within its deadline; its answer is dropped."""
        server = self._server
        if self._handshake is not None and not self._is_refused:
            self._is_refused = True
            server.metrics.count("server.handshake_lost")
        elif isinstance(error, PeerProtocolError) and not self._is_refused:
            server.note_closed(self, error)  # not reading, too slow: nothing could be answered

    def on_wait_over(self) -> None:
        limits = self._server.limits
        if self._handshake is not None:
            self._refuse(
                PeerProtocolError(
                    Code.TIMEOUT,
                    f"no handshake within {limits.handshake_s} s",
                    {"reason": "handshake_too_slow"},
                )
            )
        elif self.task is not None:
            self._cancel(_deadline_passed("in the handler"))
        elif self._active_s + limits.idle_s > self._server.now():
            self.connection.wait_until(self._active_s + limits.idle_s)  # there were calls meanwhile
        else:
            self._server.metrics.count("server.closed.idle")
            self.connection.close(ClosedError(message=f"no call for {limits.idle_s} s"))

    def on_shutdown(self, error: RpcError) -> None:
        self._cancel(error)

    def drain(self) -> None:
        """Close now, or after the call in progress."""
        self._is_draining = True
        if self.task is None:
            self.connection.close(ClosedError(message="the server is draining"))

    # Handshake

    def _shake(self, handshake: ServerHandshake, head: int, body: bytes) -> None:
        connection = self.connection
        try:
            answer = handshake.receive(head, body)
            if connection.decoder.buffered_bytes:
                raise PeerProtocolError(
                    Code.BAD_REQUEST, "bytes before the handshake was over", {"reason": "pipelined"}
                )
        except RpcError as error:
            self._refuse(error)
            return
        if handshake.peer is not None:
            server = self._server
            self._handshake = None
            self.peer = handshake.peer
            self._calls = server.calls_of(handshake.peer)
            server.established(self)
            connection.decoder.heads = server.heads
            connection.decoder.max_body_bytes = server.limits.max_body_bytes
            self._active_s = server.now()
            connection.wait_until(self._active_s + server.limits.idle_s)
        else:
            connection.decoder.heads = handshake.heads
        connection.transport.write(answer)

    def _refuse(self, error: RpcError) -> None:
        """Tell the peer why, count and log it, and end the connection."""
        self._server.note_closed(self, error)
        self._is_refused = True
        self.connection.write_frame(FAIL, pack_fail(self._server.pack, error))
        self.connection.close(error)

    # Calls

    def _call_typed(self, entry: TypedEntry, body: bytes) -> None:
        """A plain handler is answered before this returns; much of it is written out for that path."""
        server = self._server
        now_s = self._call_start_s = self._active_s = server.now()
        try:
            timeout_ms, request = entry.method.unpack_request(body)
            if not timeout_ms:
                raise _deadline_passed("on arrival")
            if self._calls.num_running >= server.limits.max_in_flight_per_peer:
                raise self._too_many()
        except RpcError as error:
            self._fail(entry, error)
            return
        # The caller's remaining time, counted from now: clocks of two machines are never compared.
        timeout_s = timeout_ms / 1000.0
        max_call_s = server.limits.max_call_s
        deadline_at_s = now_s + (timeout_s if timeout_s < max_call_s else max_call_s)
        self._entry = entry
        context = CallContext(self, self.peer, deadline_at_s)
        if entry.is_coroutine:
            self._calls.num_running += 1
            server.call_began(self)
            self.connection.hold()
            self.connection.wait_until(deadline_at_s)
            self.task = server.loop.create_task(self._run(entry, request, context))
            return
        try:
            response = entry.handler(request, context)
        except Exception as error:
            self._finish(entry, None, self._as_rpc_error(entry, error))
        else:
            self._finish(entry, response, None)

    def _too_many(self) -> BusyError:
        num = self._calls.num_running
        return BusyError(message=f"{num} calls of this peer are in progress")

    async def _run(self, entry: TypedEntry, request: Any, context: CallContext) -> None:
        response, failure = None, self._cancel_error
        self._has_started = True
        try:
            if failure is None:
                response = await entry.handler(request, context)
        except asyncio.CancelledError:
            # Ours (the deadline, a shutdown), or the handler's own doing: the caller gets an answer anyway.
            failure = self._cancel_error or RpcError(Code.ABORTED, "the handler was cancelled")
        except Exception as error:
            failure = self._as_rpc_error(entry, error)
        except BaseException:
            self.connection.abort(ClosedError(message="the server's process is ending"))
            raise
        self._task_ended()
        self._finish(entry, response, failure)

    def _task_ended(self) -> None:
        self.task = None
        self._has_started = False
        self._cancel_error = None
        self._calls.num_running -= 1
        self._server.call_ended(self)

    def _cancel(self, error: RpcError) -> None:
        """End the call in progress with ``error`` (unless its handler finishes in spite of it)."""
        if self.task is not None:
            self._cancel_error = error
            # A task cancelled before its first step would never run a line, ours included.
            if self._has_started:
                self.task.cancel()

    def _as_rpc_error(self, entry: TypedEntry, error: Exception) -> RpcError:
        if isinstance(error, RpcError):
            return error
        log.error("handler of %s raised", entry.name, exc_info=error)
        # The type helps the caller's log; the text might hold anything and stays here.
        return RpcError(Code.INTERNAL, f"the handler of {entry.name} raised {type(error).__name__}")

    def _finish(self, entry: TypedEntry, response: Any, failure: RpcError | None) -> None:
        """The call has an outcome: answer it, and be ready for the next."""
        server = self._server
        self._entry = None
        if self._is_detached:
            server.metrics.call("server", entry.name, Code.OK, self._elapsed_s())
            return
        if failure is None:
            try:
                body = entry.method.pack_response(server.pack, response)
                if len(body) <= server.limits.max_body_bytes:
                    self.connection.write_frame(OKAY, body)
                    now_s = self._active_s = server.now()
                    server.metrics.call("server", entry.name, _OK, now_s - self._call_start_s)
                    if entry.is_coroutine or self._is_draining:
                        self._ready(now_s)
                    return
                message = f"a response of {len(body)} bytes is too large"
            except InvalidMessageError as error:
                message = error.message
            log.error("the handler of %s returned what cannot be sent: %s", entry.name, message)
            failure = RpcError(Code.INTERNAL, f"response of {entry.name}: {message}")
        self._fail(entry, failure)

    def _fail(self, entry: Entry, error: RpcError) -> None:
        server = self._server
        server.metrics.call("server", entry.name, error.code, self._elapsed_s())
        self.connection.write_frame(FAIL, pack_fail(server.pack, error))
        self._ready(server.now())

    def _ready(self, now_s: float) -> None:
        """Between two calls: idle, unless the next one has been read ahead."""
        connection = self.connection
        if self._is_draining:
            connection.close(ClosedError(message="the server is draining"))
            return
        self._active_s = now_s
        if connection.is_open and connection.is_held:
            connection.wait_until(now_s + self._server.limits.idle_s)
            connection.release()

    def _elapsed_s(self) -> float:
        return self._server.now() - self._call_start_s

    # Raw methods

    def _call_raw(self, entry: Entry) -> None:
        assert isinstance(entry, RawEntry)
        server = self._server
        now_s = self._call_start_s = server.now()
        if self._calls.num_running >= server.limits.max_in_flight_per_peer:
            self._refuse(self._too_many())  # what follows the head cannot be skipped
            return
        self._calls.num_running += 1
        server.call_began(self)
        self.connection.hold()
        self.connection.wait_until(now_s + server.limits.max_call_s)
        self._entry = entry
        self.task = server.loop.create_task(self._run_raw(entry))

    async def _run_raw(self, entry: RawEntry) -> None:
        """Any exception ends the connection: where in its stream it stands is not known."""
        server, connection = self._server, self.connection
        self._has_started = True
        reader, writer = open_streams(connection)
        code, message = Code.OK, ""
        try:
            if self._cancel_error is not None:
                raise self._cancel_error
            await entry.callback(reader, writer)
        except asyncio.CancelledError:
            failure = self._cancel_error or RpcError(Code.ABORTED, "the callback was cancelled")
            code, message = failure.code, failure.message
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code, message = Code.PEER_LOST, f"{type(error).__name__}: {error}"
        except RpcError as error:
            code, message = error.code, error.message
        except Exception as error:
            log.error("callback of %s raised", entry.name, exc_info=error)
            code, message = Code.INTERNAL, f"the callback of {entry.name} raised"
        finally:
            self._task_ended()
            self._entry = None
            server.metrics.call("server", entry.name, code, self._elapsed_s())
        if code is not Code.OK:
            connection.abort(RpcError(code, message))
            return
        close_streams(connection, reader)
        self._ready(server.now())

    # Channels and hand-overs

    def _open_channel(self, body: bytes) -> None:
        server, connection = self._server, self.connection
        self._call_start_s = server.now()
        connection.hold()
        try:
            _, fields = unpack_call(body)
            if type(fields) is not list or not fields or type(fields[0]) is not str:
                raise InvalidMessageError(message="LINK: expected [kind, ...]")
            table = server.channels.get(fields[0])
            if table is None:
                raise RpcError(Code.NOT_FOUND, f"no channels of kind {fields[0]!r:.80} here")
            if self._is_draining:
                raise ClosedError(message="the server is draining")
            table.accept(connection, self.peer, fields, clock=server.clock, metrics=server.metrics)
        except Exception as error:
            failure = error if isinstance(error, RpcError) else None
            if failure is None:
                log.error("accepting a channel raised", exc_info=error)
                failure = RpcError(Code.INTERNAL, "accepting the channel raised")
            if connection.owner is self:
                server.metrics.call("server", "LINK", failure.code, self._elapsed_s())
                connection.write_frame(FAIL, pack_fail(server.pack, failure))
                self._ready(server.now())
            else:
                connection.close(failure)
        else:
            server.metrics.call("server", "LINK", Code.OK, self._elapsed_s())

    def detach(self) -> DetachedSocket:
        if self._entry is None or self._is_detached:
            raise ValueError("detach is for a handler, during its call, once")
        duplicate: socket.socket = self.connection.detach()
        self._is_detached = True
        return DetachedSocket(duplicate, self.peer)

    def describe(self) -> str:
        who = "a stranger" if self._handshake is not None else str(self.peer)
        return f"{who} at {self.connection.peer_name}"

    def __repr__(self) -> str:
        doing = "handshaking" if self._handshake is not None else "idle"
        if self._entry is not None:
            doing = f"in {self._entry.name}"
        return f"<Session {self.describe()} {doing}>"


def _deadline_passed(where: str) -> RpcError:
    return RpcError(Code.TIMEOUT, f"the caller's deadline passed {where}", {"reason": "deadline"})
