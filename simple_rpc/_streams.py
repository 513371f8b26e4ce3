"""The raw layer: asyncio streams over a connection that otherwise carries frames."""

from __future__ import annotations

import asyncio

from ._connection import Connection

STREAM_LIMIT_BYTES = (
    64 * 1024
)  # asyncio's own default: what a reader buffers before it stops reading


class _Reader(asyncio.StreamReader):
    def take_leftover(self) -> bytes:
        """Bytes received and not read: the beginning of the next frame."""
        # The one place that needs to know how StreamReader keeps its bytes; a test watches it.
        buffer: bytearray = self._buffer  # type: ignore[attr-defined]
        leftover = bytes(buffer)
        buffer.clear()
        return leftover


class _Writer(asyncio.StreamWriter):
    def __del__(self) -> None:
        """Later Pythons close the transport here, which is not the callback's to close: its connection is."""


class _StreamProtocol(asyncio.StreamReaderProtocol):
    """Feeds a stream reader while a raw callback runs; the end of the transport is told to both."""

    def __init__(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.connection_lost(exc)


def open_streams(connection: Connection) -> tuple[_Reader, asyncio.StreamWriter]:
    """Reader and writer on the connection's transport, starting with the bytes that were read ahead."""
    loop = asyncio.get_running_loop()
    transport = connection.transport
    reader = _Reader(limit=STREAM_LIMIT_BYTES, loop=loop)
    protocol = _StreamProtocol(reader, connection)
    ahead = connection.decoder.take_buffered()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    if ahead:
        reader.feed_data(ahead)
    transport.resume_reading()
    return reader, _Writer(transport, protocol, reader, loop)


def close_streams(connection: Connection, reader: _Reader) -> None:
    """Give the transport back to the connection, with what the callback left unread."""
    leftover = reader.take_leftover()
    if connection.is_open and not connection.transport.is_closing():
        connection.transport.set_protocol(connection)
        connection.transport.resume_reading()
        if leftover:
            connection.data_received(leftover)
