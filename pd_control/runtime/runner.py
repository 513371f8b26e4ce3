"""Runs one pure core on the loop thread: events in, effects out, one timer.

Events that come while another is being handled (an effect's execution can cause one) wait their
turn, so the effects of one event are all executed before the next event is seen. An exception of
the core, or of an effect's execution, is a failure of the process: the core's state can no longer
be trusted, so nothing more is fed to it.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pd_control.protocol import events as ev

log = logging.getLogger(__name__)

Execute = Callable[[Any], object]


class Core(Protocol):
    """What `PrefillCore` and `DecodeCore` have in common."""

    def handle(self, event: Any, now_s: float) -> list[Any]: ...

    def next_deadline(self) -> float | None: ...

    def inspect(self, request_id: str, now_s: float) -> dict[str, Any] | None: ...

    def snapshot(self, now_s: float, after: str = "", limit: int = 500) -> dict[str, Any]: ...

    def is_idle(self) -> bool: ...


class CoreRunner:
    """Loop thread only. `executors` maps each effect's type to what executes it."""

    def __init__(
        self,
        name: str,
        core: Core,
        executors: Mapping[type, Execute],
        fail: Callable[[str, BaseException], None],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.core = core
        self._handle = core.handle  # bound once: they are called for every event
        self._next_deadline = core.next_deadline
        self._executors = dict(executors)
        self._fail = fail
        self._loop = loop
        self._clock_s = clock_s
        self._queue: collections.deque[Any] = collections.deque()
        self._is_running = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self.num_events = 0

    def post(self, event: Any) -> None:
        """Take one event. Never raises; after `close` or a failure it goes nowhere."""
        if self._is_closed:
            return
        if self._is_running:
            self._queue.append(event)
            return
        self._is_running = True
        try:
            executors, queue = self._executors, self._queue
            while True:
                self.num_events += 1
                for effect in self._handle(event, self._clock_s()):
                    executors[type(effect)](effect)
                if not queue:
                    break
                event = queue.popleft()
        except Exception as error:
            log.exception("%s core", self.name)
            self.close()
            self._fail(f"{self.name} core: {type(error).__name__}: {error}", error)
        finally:
            self._is_running = False
        at_s = self._next_deadline()
        # Usually nothing is new: the timer in place comes first, and then looks again.
        if at_s is not None and (self._timer_at_s is None or at_s < self._timer_at_s):
            self._arm(at_s)

    def _arm(self, at_s: float) -> None:
        if self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = self._loop if self._loop is not None else asyncio.get_running_loop()
        self._timer_at_s = at_s
        self._timer = loop.call_later(max(0.0, at_s - self._clock_s()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at_s = None
        at_s = self._next_deadline()
        # Timers of the loop may fire a little early on its coarser clock; a tick must not.
        if at_s is not None and at_s <= self._clock_s():
            self.post(ev.Tick())
        elif at_s is not None:
            self._arm(at_s)

    def close(self) -> None:
        """Nothing more is handled. Idempotent."""
        self._is_closed = True
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
