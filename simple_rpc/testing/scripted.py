"""A server that says exactly what a script says."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from .._frames import PREFIX_BYTES, encode_frame, head_from_name
from ..identity import Address


class ScriptedConnection:
    """What a script uses: frames by head name and msgpack fields, or plain bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_exactly(self, num_bytes: int) -> bytes:
        return await self.reader.readexactly(num_bytes)

    async def read_frame(self) -> tuple[str, Any]:
        """The next frame's head name and unpacked body."""
        head, body = await self.read_raw_frame()
        return head, msgpack.unpackb(body)

    async def read_raw_frame(self) -> tuple[str, bytes]:
        head, length = struct.unpack("<4sI", await self.reader.readexactly(PREFIX_BYTES))
        return head.decode("latin-1"), await self.reader.readexactly(length)

    async def expect(self, head: str) -> Any:
        """The body of the next frame, which must have this head."""
        got, body = await self.read_frame()
        if got != head:
            raise AssertionError(f"script: expected a {head} frame, got {got}: {body!r:.200}")
        return body

    async def expect_end(self) -> None:
        """Waits until the peer has closed. Whatever it still sent is an error."""
        try:
            rest = await self.reader.read()
        except ConnectionResetError:
            return
        if rest:
            raise AssertionError(f"script: expected the end, got {rest[:80]!r}")

    def send(self, head: str, fields: Any) -> None:
        """One whole frame."""
        self.send_bytes(encode_frame(head_from_name(head), msgpack.packb(fields)))

    def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    def close(self) -> None:
        """An orderly end, after what was sent."""
        self.writer.close()

    def reset(self) -> None:
        """A reset (RST): what was sent and not yet read is lost."""
        if self.writer.is_closing():
            return
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[ScriptedConnection], Awaitable[None]]


class ScriptedPeer:
    """Listens on a loopback port (or a Unix path) and runs `script(connection)` for each connection.

        async def rude(peer):
            await peer.expect("HELO")
            peer.send_bytes(b"garbage!")
        async with ScriptedPeer(rude) as peer:
            await client.call(peer.address, ...)

    When the script returns its connection is closed. On leaving the block every script still running
    is cancelled, and the first exception that one raised (an end of the stream does not count) is
    raised here.
    """

    def __init__(self, script: Script, *, path: str | None = None) -> None:
        self._script = script
        self._path = path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self.num_connections = 0

    @property
    def address(self) -> Address:
        assert self._server is not None, "not started"
        if self._path is not None:
            return Address.unix(self._path)
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host=host, port=port)

    async def __aenter__(self) -> ScriptedPeer:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        if self._error is not None and kind is None:
            raise self._error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            await self._script(ScriptedConnection(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            self._error = self._error or error
        except asyncio.CancelledError:
            pass  # leaving the block
        finally:
            self._tasks.discard(task)
            writer.close()
