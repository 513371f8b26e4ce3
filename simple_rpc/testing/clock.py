"""A clock that moves when told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any


class ManualTimer:
    """One pending call of a `ManualClock`."""

    __slots__ = ("args", "callback", "is_cancelled", "when_s")

    def __init__(self, when_s: float, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.when_s = when_s
        self.callback = callback
        self.args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        """Like asyncio's, it lets go of the callback at once."""
        self.is_cancelled = True
        self.callback, self.args = _nothing, ()


def _nothing() -> None:
    pass


class ManualClock:
    """Implements `Clock`. `advance` moves the time and runs what falls due, in order, as it would
    have run: each callback sees its own due time as `now()`. One thread."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._heap: list[tuple[float, int, ManualTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> ManualTimer:
        timer = ManualTimer(self._now_s + max(0.0, delay_s), callback, args)
        heapq.heappush(self._heap, (timer.when_s, next(self._order), timer))
        return timer

    @property
    def next_due_s(self) -> float | None:
        """When the next pending callback is due; None if nothing is pending."""
        while self._heap and self._heap[0][2].is_cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def advance(self, seconds: float) -> int:
        """Moves the time forward by `seconds`. Returns how many callbacks ran."""
        if seconds < 0:
            raise ValueError(f"time moves forward: expected 0 or more seconds, got {seconds}")
        until_s = self._now_s + seconds
        num_run = 0
        while (due_s := self.next_due_s) is not None and due_s <= until_s:
            timer = heapq.heappop(self._heap)[2]
            self._now_s = max(self._now_s, timer.when_s)
            timer.callback(*timer.args)
            num_run += 1
        self._now_s = until_s
        return num_run

    def jump(self, seconds: float) -> int:
        """Like a process that was stopped: the time is later at once, and all that is overdue runs
        then, late."""
        self._now_s += seconds
        num_run = 0
        while (due_s := self.next_due_s) is not None and due_s <= self._now_s:
            timer = heapq.heappop(self._heap)[2]
            timer.callback(*timer.args)
            num_run += 1
        return num_run

    async def run(self, seconds: float, step_s: float = 0.01) -> None:
        """`advance` in steps, letting the event loop settle after each: for conversations."""
        until_s = self._now_s + seconds
        await settle()
        while self._now_s < until_s:
            self.advance(min(step_s, until_s - self._now_s))
            await settle()


async def settle(turns: int = 10) -> None:
    """Lets the event loop turn `turns` times: what is ready runs, and what that makes ready."""
    for _ in range(turns):
        await asyncio.sleep(0)
