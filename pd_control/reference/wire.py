"""The engine's own step messages: length-prefixed msgpack over a socket pair, scheduler ↔ one worker.

This is the *engine's* plumbing, as shared memory queues are in others; the control plane does not use
it. Blocking on the worker's side, readiness-driven on the scheduler's.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
#: A step of a few thousand sequences stays far below this; more means a broken stream.
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class WorkerInit:
    """The first message, as a dict of these fields. ``rendezvous`` is a file path for the rank group."""

    source: str
    tp_rank: int
    tp_size: int
    num_blocks: int
    block_tokens: int
    num_threads: int = 1
    device: str = "cpu"
    rendezvous: str = ""
    control: dict[str, Any] | None = None


class PeerGoneError(ConnectionError):
    """The process at the other end closed its socket or died."""


class MessageSocket:
    """Whole messages over a stream socket. One reader thread and one writer thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def send(self, message: Any) -> None:
        """Blocks until the message is in the socket's buffer.

        Raises:
            PeerGoneError: the other end is closed; how much arrived is unknown.
        """
        body = msgpack.packb(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def receive(self) -> Any:
        """Blocks for the next whole message.

        Raises:
            PeerGoneError: the other end closed, in the middle of a message or between two.
        """
        while True:
            messages = self._parse(limit=1)
            if messages:
                return messages[0]
            self._read()

    def receive_ready(self) -> list[Any]:
        """One read of what is there, and the messages complete by then; call it when readable."""
        self._read()
        return self._parse()

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        if not data:
            raise PeerGoneError("the other end closed its socket")
        self._buffer += data

    def _parse(self, limit: int | None = None) -> list[Any]:
        found: list[Any] = []
        while len(self._buffer) >= _LENGTH.size and (limit is None or len(found) < limit):
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise PeerGoneError(
                    f"a message of {length} bytes is announced; the stream is broken"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            found.append(msgpack.unpackb(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return found
