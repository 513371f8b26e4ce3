"""Notices a loop that no longer turns. Pure part: `LagMonitor`. The thread: `LagWatchdog`."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

# The loop beats this often while it turns: fine enough to see a stall of a quarter second, and 4
# timers a second cost nothing.
BEAT_S = 0.25
# A loop thread must never block (R8). One second is far beyond any legal callback and well below the
# three seconds after which peers would call this process lost.
LAG_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class LagReport:
    """The loop has not turned for `lag_s` seconds; `stack` is where its thread was just now."""

    lag_s: float
    stack: str


class LagMonitor:
    """Decides when a silence is a stall. Each stall is reported once; a beat ends it."""

    def __init__(self, limit_s: float = LAG_LIMIT_S, beat_s: float = BEAT_S) -> None:
        if limit_s <= beat_s:
            raise ValueError(f"lag limit: expected above the beat of {beat_s} s, got {limit_s} s")
        self.limit_s = limit_s
        self.beat_s = beat_s
        self._last_beat_s: float | None = None
        self._is_reported = False

    def beat(self, now_s: float) -> float:
        """The loop turned. Returns by how much the beat came late (0 for the first)."""
        last, self._last_beat_s = self._last_beat_s, now_s
        self._is_reported = False
        return 0.0 if last is None else max(0.0, now_s - last - self.beat_s)

    def check(self, now_s: float) -> float | None:
        """The lag in seconds if it is above the limit and was not yet reported, else None."""
        if self._last_beat_s is None or self._is_reported:
            return None
        lag_s = now_s - self._last_beat_s - self.beat_s
        if lag_s < self.limit_s:
            return None
        self._is_reported = True
        return lag_s


class LagWatchdog:
    """A daemon thread that asks `monitor` and calls `report` (on this thread) for each stall."""

    def __init__(
        self, monitor: LagMonitor, thread_id: int, report: Callable[[LagReport], None]
    ) -> None:
        self._monitor = monitor
        self._watched_id = thread_id
        self._report = report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-lag-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No report is running or starts once this has returned (unless called from a report)."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._monitor.limit_s / 4):
            lag_s = self._monitor.check(time.monotonic())
            if lag_s is not None:
                frame = sys._current_frames().get(self._watched_id)
                stack = "".join(traceback.format_stack(frame)) if frame else "(thread is gone)"
                self._report(LagReport(lag_s, stack))
