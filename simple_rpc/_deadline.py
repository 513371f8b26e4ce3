"""Absolute deadlines, an injectable clock, and one timer for many waits.

A timer per call costs more than the rest of a call's bookkeeping together, and nearly all of them are
cancelled unused. So whoever has waits (a client, a server) keeps one :class:`Watchdog`: it holds the
objects that may be waiting, sleeps until the earliest instant at which one of them could be due, asks
each of them, and sleeps again. Starting a wait is one comparison; ending it is nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

MIN_TIMER_S = 0.001  # libuv timers have millisecond resolution; an earlier wake-up would spin


class TimerHandle(Protocol):
    """What ``Clock.call_later`` returns: something to cancel."""

    def cancel(self) -> Any: ...


class Clock(Protocol):
    """Time as this package sees it. ``testing`` has one that only moves when told to."""

    def now(self) -> float:
        """Seconds on a monotonic scale (that of :func:`time.monotonic` for the real clock)."""
        ...

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> TimerHandle:
        """Run ``callback(*args)`` on the event loop's thread after ``delay_s`` seconds."""
        ...


class LoopClock:
    """The real clock. Timers go to the running loop (or the one given)."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    now = staticmethod(time.monotonic)  # a call of it enters no Python frame

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> TimerHandle:
        loop = self._loop if self._loop is not None else asyncio.get_running_loop()
        return loop.call_later(delay_s, callback, *args)


class Deadline:
    """An instant on the monotonic clock by which something must have ended. Immutable.

    ``at_s`` is on the scale of :func:`time.monotonic`, or of the clock it was made with; ``inf`` means
    never and is meant for waits that something else bounds.
    """

    __slots__ = ("at_s",)

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    @classmethod
    def after(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        """The instant ``seconds`` from now; ``inf`` for never."""
        return cls((time.monotonic() if clock is None else clock.now()) + seconds)

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    def remaining_s(self, clock: Clock | None = None) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - (time.monotonic() if clock is None else clock.now()))

    def has_passed(self, clock: Clock | None = None) -> bool:
        return self.at_s <= (time.monotonic() if clock is None else clock.now())

    def earlier(self, other: Deadline) -> Deadline:
        return self if self.at_s <= other.at_s else other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deadline) and self.at_s == other.at_s

    def __hash__(self) -> int:
        return hash(self.at_s)

    def __repr__(self) -> str:
        return f"<Deadline in {self.at_s - time.monotonic():+.3f} s>"


class Watched(Protocol):
    """Something that a :class:`Watchdog` looks after. Must be hashable."""

    def due_at_s(self) -> float:
        """When the current wait must have ended; ``inf`` if none. May move later freely; whoever
        makes it *earlier* than it was calls ``Watchdog.expect``."""
        ...

    def on_due(self, now_s: float) -> None:
        """The wait has ended by time. Must not raise; must leave ``due_at_s() > now_s`` or unwatch."""
        ...


W = TypeVar("W", bound=Watched)


class Watchdog(Generic[W]):
    """One timer for all waits of one owner; event loop's thread only.

    Cost: ``expect`` is a comparison unless the new wait is the earliest of all. When the timer fires
    every watched object is asked, so it is meant for thousands of objects and waits of tenths of
    seconds and more, which is what network deadlines are.
    """

    __slots__ = ("_clock", "_on_empty", "_timer", "_watched", "armed_at_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: set[W] = set()
        self._timer: TimerHandle | None = None
        self._on_empty: Callable[[], None] | None = None
        self.armed_at_s = math.inf
        """When the timer fires; hot paths compare with it before they call ``expect``."""

    def __len__(self) -> int:
        return len(self._watched)

    def watched(self) -> list[W]:
        return list(self._watched)

    def watch(self, item: W) -> None:
        self._watched.add(item)
        self.expect(item.due_at_s())

    def unwatch(self, item: W) -> None:
        self._watched.discard(item)
        if not self._watched and self._on_empty is not None:
            on_empty, self._on_empty = self._on_empty, None
            on_empty()

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once, when nothing is watched any more (at once if that is so)."""
        if self._watched:
            self._on_empty = callback
        else:
            callback()

    def expect(self, at_s: float) -> None:
        """A watched object may be due at ``at_s``."""
        if at_s < self.armed_at_s:
            if self._timer is not None:
                self._timer.cancel()
            self.armed_at_s = at_s
            delay_s = max(MIN_TIMER_S, at_s - self._clock.now())
            self._timer = self._clock.call_later(delay_s, self._fire)

    def close(self) -> None:
        """Forget everything; no callback runs after this."""
        self._watched.clear()
        self.armed_at_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self.armed_at_s = math.inf
        now_s = self._clock.now()
        for item in [item for item in self._watched if item.due_at_s() <= now_s]:
            if item in self._watched:  # not unwatched by what the others did
                item.on_due(now_s)
        if self._watched:
            self.expect(min(item.due_at_s() for item in self._watched))
