"""Two connected transports without a network."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from .._deadline import Clock, LoopClock
from .faults import Cut, FaultFilter, Faults

# asyncio's own default: above it a protocol is asked to pause writing.
HIGH_WATER_BYTES = 64 * 1024


class MemoryTransport(asyncio.Transport):
    """One end of a `memory_pair`: an `asyncio.Transport` whose bytes go to the other end's protocol.

    Like a socket it never calls the other side back within `write`: delivery is a later callback of
    the loop (or of the clock, when delayed). `pause_reading` makes the other end's buffer grow.
    `cut` resets both ends, as a network or a kill would.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, faults: Faults) -> None:
        super().__init__()
        self._loop = loop
        self._clock = clock
        self._filter = FaultFilter(faults)
        self._protocol: asyncio.Protocol | None = None
        self._other: MemoryTransport | None = None
        self._in_flight: deque[bytes | Cut | None] = deque()  # None is the end of the stream
        self._num_buffered = 0
        self._is_reading = True
        self._is_closing = False
        self._is_lost = False
        self._is_paused = False
        self.num_written_bytes = 0

    # -- asyncio.Transport -------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return "memory" if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._is_lost or not data:
            return
        self.num_written_bytes += len(data)
        for action in self._filter.feed(bytes(data)):
            self._send(action if isinstance(action, Cut) else action.data, action.delay_s)
        if self._num_buffered > HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            assert self._protocol is not None
            self._protocol.pause_writing()

    def close(self) -> None:
        """What was written still arrives, then the other end sees the end of the stream."""
        if not self._is_closing and not self._is_lost:
            self._is_closing = True
            self._send(None, self._filter.faults.delay_s)
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """What was written and has not arrived is gone; the other end sees a reset."""
        self._is_closing = True
        self._in_flight.clear()
        self._num_buffered = 0
        self._in_flight.append(Cut(0.0))
        self._loop.call_soon(self._deliver)
        self._loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        assert self._other is not None
        self._loop.call_soon(self._other._deliver)

    def is_reading(self) -> bool:
        return self._is_reading

    def get_write_buffer_size(self) -> int:
        return self._num_buffered

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return HIGH_WATER_BYTES // 4, HIGH_WATER_BYTES

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    # -- faults ------------------------------------------------------------------------------------

    def set_faults(self, faults: Faults) -> None:
        """From now on; offsets keep counting from the beginning of the connection."""
        self._filter.faults = faults

    def cut(self) -> None:
        """Resets the connection now: both ends lose it, with ConnectionResetError."""
        assert self._other is not None
        self._in_flight.clear()
        self._other._in_flight.clear()
        self._loop.call_soon(self._lose, ConnectionResetError("cut"))
        self._loop.call_soon(self._other._lose, ConnectionResetError("cut"))

    # -- inside ------------------------------------------------------------------------------------

    def _send(self, what: bytes | Cut | None, delay_s: float) -> None:
        if delay_s:
            self._num_buffered += len(what) if isinstance(what, bytes) else 0
            self._clock.call_later(delay_s, self._arrive, what)
        else:
            self._num_buffered += len(what) if isinstance(what, bytes) else 0
            self._arrive(what)

    def _arrive(self, what: bytes | Cut | None) -> None:
        self._in_flight.append(what)
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        other = self._other
        assert other is not None
        while self._in_flight and not other._is_lost:
            what = self._in_flight[0]
            if isinstance(what, bytes):
                if not other._is_reading:
                    return
                self._in_flight.popleft()
                self._num_buffered = max(0, self._num_buffered - len(what))
                if not other._is_closing:
                    assert other._protocol is not None
                    other._protocol.data_received(what)
                self._maybe_resume()
            elif isinstance(what, Cut):
                self.cut()
                return
            else:
                if not other._is_reading:
                    return
                self._in_flight.popleft()
                assert other._protocol is not None
                if not other._is_closing and not other._protocol.eof_received():
                    other.close()

    def _maybe_resume(self) -> None:
        if self._is_paused and self._num_buffered <= HIGH_WATER_BYTES // 4 and not self._is_lost:
            self._is_paused = False
            assert self._protocol is not None
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            assert self._protocol is not None
            self._protocol.connection_lost(error)


def memory_pair(
    a: asyncio.Protocol,
    b: asyncio.Protocol,
    *,
    a_to_b: Faults | None = None,
    b_to_a: Faults | None = None,
    clock: Clock | None = None,
) -> tuple[MemoryTransport, MemoryTransport]:
    """Connects two protocols (`connection_made` is called on both, `b` first) and returns their
    transports. `clock` carries the delays; the loop's own by default."""
    loop = asyncio.get_running_loop()
    clock = clock or LoopClock(loop)
    end_a = MemoryTransport(loop, clock, a_to_b or Faults())
    end_b = MemoryTransport(loop, clock, b_to_a or Faults())
    end_a._other, end_b._other = end_b, end_a
    end_a._protocol, end_b._protocol = a, b
    b.connection_made(end_b)
    a.connection_made(end_a)
    return end_a, end_b


def memory_streams(
    *, a_to_b: Faults | None = None, b_to_a: Faults | None = None, clock: Clock | None = None
) -> tuple[
    tuple[asyncio.StreamReader, asyncio.StreamWriter],
    tuple[asyncio.StreamReader, asyncio.StreamWriter],
]:
    """The same for code that takes `(StreamReader, StreamWriter)`."""
    loop = asyncio.get_running_loop()
    readers = asyncio.StreamReader(loop=loop), asyncio.StreamReader(loop=loop)
    protocols = [asyncio.StreamReaderProtocol(reader, loop=loop) for reader in readers]
    ends = memory_pair(protocols[0], protocols[1], a_to_b=a_to_b, b_to_a=b_to_a, clock=clock)
    writers = [
        asyncio.StreamWriter(end, protocol, reader, loop)
        for end, protocol, reader in zip(ends, protocols, readers, strict=True)
    ]
    return (readers[0], writers[0]), (readers[1], writers[1])
