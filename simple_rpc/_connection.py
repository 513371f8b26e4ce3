"""One connection: a transport, a frame decoder, and whoever owns it at the moment.

Everything here runs on the event loop's thread. A connection has exactly one *owner* at a time (a
handshake, a call, a channel), which gets whole frames as they arrive, by a plain call from the
transport's callback: no task, future or queue is in between unless the owner wants one. The owner
hears of the end exactly once.

The times that a peer may take live here too, because they are the same for both ends: a frame's first
byte to its last, our bytes lying unread, a closing connection's last flush, and one wait of the
owner's own (``wait_due_s``: handshake, call, idle).
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

from ._deadline import Clock, Watchdog
from ._errors import ClosedError, Code, ConnectionLostError, PeerProtocolError, RpcError
from ._frames import PREFIX_BYTES, FrameDecoder, FrameError
from ._limits import Limits
from ._owner import NOBODY, Owner

_PREFIX = struct.Struct("<II")
_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from

KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3
"""A peer whose machine vanished is noticed on an idle connection within a minute, by the kernel."""


class Connection(asyncio.Protocol):
    """See the module. Made for a transport's protocol factory; usable after ``connection_made``.

    ``heads`` and ``max_body_bytes`` of ``decoder`` belong to the owner. ``on_made`` is
    called once the transport is there (after TLS), ``on_closed`` once when it is really gone or detached.
    """

    __slots__ = (
        "_clock",
        "_close_due_s",
        "_error",
        "_frame_due_s",
        "_held",
        "_limits",
        "_on_closed",
        "_on_made",
        "_owner",
        "_reading_paused",
        "_send_due_s",
        "_watchdog",
        "_write_paused",
        "answer_before_reading",
        "decoder",
        "peer_name",
        "transport",
        "wait_due_s",
    )

    transport: asyncio.Transport

    def __init__(
        self,
        owner: Owner,
        limits: Limits,
        watchdog: Watchdog[Connection],
        clock: Clock,
        *,
        heads: Mapping[int, bool],
        max_body_bytes: int,
        on_made: Callable[[Connection], None] | None = None,
        on_closed: Callable[[Connection], None] | None = None,
    ) -> None:
        self._owner = owner
        self._limits = limits
        self._watchdog = watchdog
        self._clock = clock
        self._on_made = on_made
        self._on_closed = on_closed
        self.decoder = FrameDecoder(max_body_bytes, heads)
        self.peer_name = "?"
        # A caller that does not read its answers gets no further calls served. False for a channel, where
        # both sides write at will: if each waited for the other to read, both would wait for ever.
        self.answer_before_reading = False
        self.wait_due_s = math.inf
        self._frame_due_s = math.inf
        self._send_due_s = math.inf
        self._close_due_s = math.inf
        self._held = False
        self._write_paused = False
        self._reading_paused = False
        self._error: RpcError | None = None

    # What owners use

    @property
    def owner(self) -> Owner:
        return self._owner

    @property
    def is_held(self) -> bool:
        return self._held

    @property
    def is_open(self) -> bool:
        """False from the moment ``on_lost`` has been (or is being) called."""
        return self._error is None

    @property
    def write_buffer_bytes(self) -> int:
        """What the kernel has not taken yet."""
        return 0 if self._error is not None else self.transport.get_write_buffer_size()

    def check_open(self) -> None:
        """Raises the ``ConnectionLostError`` of a connection that is no longer open."""
        if self._error is not None:
            raise ConnectionLostError(
                message=f"the connection has ended: {self._error}", peer=self.peer_name
            )

    def write_frame(self, head: int, body: bytes) -> None:
        """Send one frame. Never blocks; does nothing on a connection that is no longer open."""
        if self._error is None:
            self.transport.write(_pack_prefix(head, len(body)) + body)

    def hold(self) -> None:
        """Deliver no frame until ``release``; bytes are kept up to the read-ahead limit."""
        self._held = True

    def release(self) -> None:
        """Deliver frames again, first those that are already here."""
        self._held = False
        if self.decoder.buffered:
            self._pump()
        elif self._reading_paused:
            self._resume_reading()

    def take_over(self, owner: Owner, heads: Mapping[int, bool]) -> None:
        """Make ``owner`` responsible from the next frame on, which is held back if ``hold`` was called.
        The new owner hears nothing of a connection that has already been lost: check ``is_open``."""
        self._owner = owner
        self.decoder.heads = heads
        self.wait_due_s = math.inf

    def wait_until(self, at_s: float) -> None:
        """Have ``on_wait_over`` called at ``at_s``, instead of any earlier arrangement."""
        self.wait_due_s = at_s
        if at_s < self._watchdog.armed_at_s:
            self._watchdog.expect(at_s)

    def shut_down(self, error: RpcError) -> None:
        """This process ends the connection in order: the owner may say goodbye first."""
        if self._error is None:
            self._owner.on_shutdown(error)
            self.close(error)

    def close(self, error: RpcError) -> None:
        """Flush what was written (at most ``close_s``), then end. ``on_lost(error)`` comes at once."""
        if self._error is None:
            self._close_due_s = self._clock.now() + self._limits.close_s
            self._watchdog.expect(self._close_due_s)
            self.transport.close()
            self._lose(error)

    def abort(self, error: RpcError) -> None:
        """End now; what was not sent is dropped. ``on_lost(error)`` comes at once."""
        if self._error is None:
            self.transport.abort()
            self._lose(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from it
        self.peer_name = _peer_name(self.transport)
        _tune(transport.get_extra_info("socket"))
        self._watchdog.watch(self)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        decoder = self.decoder
        if (
            self._held
            or self._error is not None
            or (self._write_paused and self.answer_before_reading)
        ):
            self._read_ahead(data)
            return
        if not decoder.buffered and len(data) >= PREFIX_BYTES:
            # The usual case, decided here without a call: one whole frame, nothing before or after it.
            head, length = _unpack_prefix(data)
            if (
                len(data) == PREFIX_BYTES + length
                and length <= decoder.max_body_bytes
                and decoder.heads.get(head) is False
            ):
                try:
                    self._owner.on_frame(head, data[PREFIX_BYTES:])
                except Exception as error:
                    self._owner_failed(error)
                    raise
                return
        decoder.feed(data)
        self._pump()

    def eof_received(self) -> None:
        # Half-closed peers are not served: the protocol has no use for them, and a peer that is gone must
        # be noticed. Returning None closes the transport.
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.unwatch(self)
        if self._error is None:
            how = f"{type(exc).__name__}: {exc}" if exc is not None else "closed by the peer"
            if len(self.decoder.buffered) and not self._held:
                how += (
                    f" in the middle of a frame ({len(self.decoder.buffered)} bytes of it received)"
                )
            self._lose(ConnectionLostError(message=f"connection {how}", peer=self.peer_name))
        self._closed()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._send_due_s = self._clock.now() + self._limits.send_s
        self._watchdog.expect(self._send_due_s)

    def resume_writing(self) -> None:
        self._write_paused = False
        self._send_due_s = math.inf
        if not self._held and len(self.decoder.buffered):
            self._pump()
        elif self._reading_paused and not self._held:
            self._resume_reading()

    # Watched

    def due_at_s(self) -> float:
        return min(self._frame_due_s, self._send_due_s, self._close_due_s, self.wait_due_s)

    def on_due(self, now_s: float) -> None:
        if self._close_due_s <= now_s:
            self._close_due_s = math.inf
            self.transport.abort()
        elif self._error is not None:
            self._frame_due_s = self._send_due_s = self.wait_due_s = math.inf
        elif self._frame_due_s <= now_s:
            self._frame_due_s = math.inf
            limit_s = self._limits.frame_s
            self._violated(FrameError("frame_too_slow", f"frame not complete within {limit_s} s"))
        elif self._send_due_s <= now_s:
            self._send_due_s = math.inf
            unread = self.transport.get_write_buffer_size()
            self.abort(
                _violation(
                    "peer_not_reading", f"{unread} bytes unread for {self._limits.send_s} s", self
                )
            )
        else:
            self.wait_due_s = math.inf
            self._owner.on_wait_over()

    # Inside

    def _pump(self) -> None:
        """Deliver the frames that are buffered, as far as the owner lets us."""
        try:
            while not self._held and self._error is None:
                if self._write_paused and self.answer_before_reading:
                    break
                frame = self.decoder.next_frame()
                if frame is None:
                    break
                self._frame_due_s = math.inf
                try:
                    self._owner.on_frame(*frame)
                except Exception as error:
                    self._owner_failed(error)
                    raise
        except FrameError as error:
            self._violated(error)
            return
        self._after_pump()

    def _owner_failed(self, error: Exception) -> None:
        """An owner must not raise. If it does, whatever waits for this connection must not wait for ever."""
        self.abort(RpcError(Code.INTERNAL, f"internal error: {type(error).__name__}: {error}"))

    def _after_pump(self) -> None:
        if self._error is not None:
            return
        waiting_for_peer = not self._held and not (
            self._write_paused and self.answer_before_reading
        )
        if waiting_for_peer:
            if len(self.decoder.buffered) and self._frame_due_s == math.inf:
                self._frame_due_s = self._clock.now() + self._limits.frame_s
                self._watchdog.expect(self._frame_due_s)
            if self._reading_paused:
                self._resume_reading()
        else:
            self._frame_due_s = math.inf

    def _read_ahead(self, data: bytes) -> None:
        if self._error is not None:
            return  # closing: whatever still comes is of no interest
        self.decoder.feed(data)
        if not self._reading_paused and len(self.decoder.buffered) > self._limits.read_ahead_bytes:
            self._reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if self._error is None:
            self.transport.resume_reading()

    def _violated(self, error: FrameError) -> None:
        violation = _violation(error.reason, str(error), self)
        self._owner.on_violation(violation)
        self.abort(violation)  # if the owner did not end it

    def _lose(self, error: RpcError) -> None:
        self._error = error
        self._frame_due_s = self._send_due_s = self.wait_due_s = math.inf
        self._owner.on_lost(error)

    def _closed(self) -> None:
        self._close_due_s = math.inf
        self._owner = NOBODY  # no cycle of references outlives the transport
        self._on_made = None
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(self)

    def detach(self) -> socket.socket:
        """Give the socket away: a duplicate, non-blocking, that lives on while the transport is dropped.

        Only between two frames: raises ``ValueError``, with the connection untouched, if anything is
        buffered in either direction or the transport is not a plain socket (TLS keeps its state in this
        process). Afterwards this object is closed; ``on_lost`` is not called, the caller has the socket.
        """
        if self._error is not None:
            raise ValueError(f"the connection is already closed: {self._error}")
        if self.transport.get_extra_info("ssl_object") is not None:
            raise ValueError(
                "a TLS connection cannot be handed over: its keys live in this process"
            )
        if self.decoder.buffered:
            raise ValueError(
                f"{len(self.decoder.buffered)} bytes were read ahead; nothing may follow"
            )
        if self.transport.get_write_buffer_size():
            raise ValueError(f"{self.transport.get_write_buffer_size()} bytes are still unsent")
        self.transport.pause_reading()
        duplicate = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        duplicate.setblocking(False)
        self._error = ClosedError(message="the socket has been handed over")
        self._watchdog.unwatch(self)
        self._closed()
        self.transport.abort()  # closes our descriptor; the duplicate keeps the connection alive
        return duplicate


def _violation(reason: str, message: str, connection: Connection) -> PeerProtocolError:
    return PeerProtocolError(message=message, details={"reason": reason}, peer=connection.peer_name)


def _peer_name(transport: asyncio.Transport) -> str:
    peer: Any = transport.get_extra_info("peername")
    if isinstance(peer, tuple):
        return f"{peer[0]}:{peer[1]}"
    own: Any = transport.get_extra_info("sockname")
    name = peer or own or "unix"
    return name if isinstance(name, str) else os.fsdecode(name)


def _tune(sock: Any) -> None:
    """Small frames leave at once; a vanished peer is noticed on an idle connection."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
