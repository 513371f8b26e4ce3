"""Virtual clock and event queue of the simulation.

Time is a float of seconds that only moves when an event is taken from the queue, so ten virtual minutes
cost nothing. Two events at the same instant run in the order in which they were scheduled; nothing
here depends on hashes, addresses or the real clock, which is what makes a seed replay exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol


class Life(Protocol):
    """What the queue asks of a process before it runs the process's work (``sim_net.Process``)."""

    alive: bool
    num_starts: int
    paused_until_s: float


class Timer:
    """One scheduled call. ``cancel()`` is idempotent and legal after it ran."""

    __slots__ = ("args", "fn", "process", "start", "time_s")

    def __init__(
        self,
        time_s: float,
        fn: Callable[..., None],
        args: tuple[Any, ...],
        process: Life | None,
        start: int,
    ) -> None:
        self.time_s = time_s
        self.fn: Callable[..., None] | None = fn
        self.args = args
        self.process = process  # whose work it is, None: the world's
        self.start = start  # which of its lives

    def cancel(self) -> None:
        self.fn = None
        self.args = ()


class EventQueue:
    """The world's only source of time. Single-threaded.

    ``digest`` is a running fingerprint over the instants of all events run so far: two runs with equal
    digests and equal event counts took the same course.
    """

    __slots__ = ("_heap", "_seq", "digest", "now_s", "num_run")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_run = 0
        self.digest = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._seq = 0

    def at(self, time_s: float, fn: Callable[..., None], *args: Any) -> Timer:
        """Run ``fn(*args)`` at ``time_s`` (virtual seconds); an instant in the past means now."""
        return self.push(time_s, fn, args, None, 0)

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Timer:
        """Run ``fn(*args)`` after ``delay_s`` virtual seconds."""
        return self.push(self.now_s + delay_s, fn, args, None, 0)

    def push(
        self,
        time_s: float,
        fn: Callable[..., None],
        args: tuple[Any, ...],
        process: Life | None,
        start: int,
    ) -> Timer:
        """The same for life ``start`` of a process: nothing if that life is over by then, later if the
        process is paused then (in order with its other work)."""
        if time_s < self.now_s:
            time_s = self.now_s
        timer = Timer(time_s, fn, args, process, start)
        self._seq += 1
        heappush(self._heap, (time_s, self._seq, timer))
        return timer

    def run_next(self) -> bool:
        """Take the next event and run it. False when none is left (time then stands still)."""
        heap = self._heap
        while heap:
            time_s, _, timer = heappop(heap)
            fn = timer.fn
            if fn is None:
                continue
            self.now_s = time_s
            process = timer.process
            if process is not None:
                if not process.alive or process.num_starts != timer.start:
                    continue
                if time_s < process.paused_until_s:
                    self._seq += 1
                    heappush(heap, (process.paused_until_s, self._seq, timer))
                    continue
            self.num_run += 1
            self.digest = hash((self.digest, time_s))  # of numbers: the same in every process
            timer.fn = None
            fn(*timer.args)
            return True
        return False

    def pending(self) -> list[Timer]:
        """The timers that would still run, in order of time (for reports; not cheap)."""
        return [timer for _, _, timer in sorted(self._heap, key=lambda e: e[:2]) if timer.fn]
