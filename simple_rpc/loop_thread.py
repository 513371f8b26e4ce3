"""One event loop in its own thread, for a process whose own threads must not wait for it.

Hand-off into the loop (`call`, `submit`)
  callers        any thread, the loop thread included. Never blocks (a short lock).
  order          what `call` and `submit` accept starts in the order of acceptance: a coroutine takes
                 its first step before what was accepted after it.
  after close    `close` first refuses: LoopClosedError. Everything accepted before still starts;
                 nothing runs once `close` has returned. Every future given out completes.
Hand-off out of the loop: `simple_rpc.mailbox.Mailbox`.

Tasks are started with `spawn`, which holds them strongly (the loop itself does not: a task that
nobody references can be collected while it waits). A task that ends by surprise is noticed and
handled by its scope:
  REQUEST, PEER  its `on_failure` is called with the exception: that request fails, that peer goes.
  PROCESS        the task was to live as long as the loop: any end of it, also a plain return or a
                 cancellation by somebody else, makes the loop unhealthy and calls `on_fatal`, once.
An exception in a `call`, in a plain loop callback, in `on_failure`, or in a task that was not
started here is of PROCESS scope too: nobody else is there to take it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from simple_rpc._errors import Code, RpcError
from simple_rpc._lag import LAG_LIMIT_S, LagMonitor, LagReport, LagWatchdog
from simple_rpc._supervisor import LoopClosedError, Scope, Supervisor, settle
from simple_rpc.metrics import Counters, Metrics

__all__ = ["Fatal", "LoopClosedError", "LoopThread", "Scope"]

log = logging.getLogger(__name__)
T = TypeVar("T")

# Long enough for tasks to say goodbye to their peers, short enough for a shutdown somebody watches.
CLOSE_TIMEOUT_S = 5.0
# How long a new thread may need to reach its loop: covers a machine that swaps.
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Fatal:
    """Why the loop is unhealthy. `error` is None where there was no exception."""

    reason: str
    error: BaseException | None


class _State(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"


class LoopThread:
    """See the module's contract.

    `on_fatal(Fatal)` is called at most once, on the loop thread (or on the dying thread if the loop
    itself died). `on_lag(LagReport)` is called on a watchdog thread, once per stall above
    `lag_limit_s`. Both must not block. A fork copies no threads: start it after forking.
    """

    def __init__(
        self,
        name: str = "rpc-loop",
        *,
        on_fatal: Callable[[Fatal], None] | None = None,
        on_lag: Callable[[LagReport], None] | None = None,
        lag_limit_s: float = LAG_LIMIT_S,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = name
        self.metrics: Metrics = metrics if metrics is not None else Counters()
        self._on_fatal = on_fatal
        self._on_lag = on_lag
        self._monitor = LagMonitor(lag_limit_s)
        self._lock = threading.Lock()
        self._state = _State.NEW
        # Entries return True if they started a task, whose first step must come before the next entry.
        self._entries: deque[Callable[[], bool]] = deque()
        self._is_yielding = False
        self._is_wake_sent = False
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._supervisor = Supervisor(name, self.fail, self.metrics)
        self._close_timeout_s = CLOSE_TIMEOUT_S
        self._fatal: Fatal | None = None

    # -- state, from any thread ------------------------------------------------------------------

    @property
    def fatal(self) -> Fatal | None:
        """The first fatal failure, or None while healthy. Any thread."""
        return self._fatal

    @property
    def is_running(self) -> bool:
        return self._state is _State.RUNNING

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop. LoopClosedError before `start`."""
        if self._loop is None:
            raise LoopClosedError(message=f"loop thread {self.name!r} was not started")
        return self._loop

    def __repr__(self) -> str:
        health = "healthy" if self._fatal is None else f"fatal: {self._fatal.reason}"
        return (
            f"<LoopThread {self.name!r} {self._state.value} tasks={len(self._supervisor)} {health}>"
        )

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> LoopThread:
        """Starts the thread and returns once its loop turns. Once only."""
        with self._lock:
            if self._state is not _State.NEW:
                raise LoopClosedError(message=f"loop thread {self.name!r} was started before")
            self._state = _State.RUNNING
            self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise RpcError(Code.TIMEOUT, f"loop thread {self.name!r} did not start")
        return self

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Refuses new work, starts what was accepted, cancels all tasks, ends the thread.

        Any thread but the loop's own; repeating it waits for the same end. RpcError(TIMEOUT) if
        tasks have not ended `timeout_s` after their cancellation (they never run again), or if the
        loop hangs (it is left behind; the error says where).
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() waits for the loop thread: do not call it from there")
        with self._lock:
            if self._state is _State.NEW:
                self._state = _State.CLOSED
                return
            if self._state is _State.RUNNING:
                self._state = _State.CLOSING
                self._close_timeout_s = timeout_s
                self._wake()
        thread = self._thread
        assert thread is not None
        thread.join(2 * timeout_s)  # the tasks get one, the loop's own end the other
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame else "?"
            names = ", ".join(self._supervisor.names()) or "none"
            raise RpcError(
                Code.TIMEOUT,
                f"loop thread {self.name!r} hangs: not ended within {2 * timeout_s} s; "
                f"tasks left: {names}; it is at:\n{where}",
            )
        if names := ", ".join(self._supervisor.names()):
            raise RpcError(Code.TIMEOUT, f"tasks ignored their cancellation: {names}")

    def __enter__(self) -> LoopThread:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- into the loop, from any thread ------------------------------------------------------------

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Runs `function(*args)` on the loop thread, soon. It must not block and not raise."""

        def entry() -> bool:
            try:
                function(*args)
            except Exception as error:
                self.fail(f"call of {_name_of(function)} raised", error)
            return False

        self._enter(entry)

    def submit(
        self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any
    ) -> concurrent.futures.Future[T]:
        """Runs the coroutine function on the loop; the future takes its result or exception.

        Cancelling the future cancels the coroutine. At close the coroutine is cancelled and the
        future gets LoopClosedError. Do not wait for the future on the loop thread.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def entry() -> bool:
            if future.cancelled():
                return False
            try:
                task = self.loop.create_task(function(*args), name=_name_of(function))
            except Exception as error:
                settle(future, None, error)
                return False
            self._supervisor.adopt(task, future)
            future.add_done_callback(lambda future: self._future_done(future, task))
            return True

        self._enter(entry)
        return future

    def _enter(self, entry: Callable[[], bool]) -> None:
        with self._lock:
            if self._state is not _State.RUNNING:
                raise LoopClosedError(message=f"loop thread {self.name!r} is {self._state.value}")
            self._entries.append(entry)
            if not self._is_wake_sent:
                self._is_wake_sent = True
                self._wake()

    def _wake(self) -> None:
        """Under the lock, so that the loop cannot be closed between the state's check and this."""
        self.loop.call_soon_threadsafe(self._run_entries)

    # -- on the loop thread ------------------------------------------------------------------------

    def spawn(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str,
        scope: Scope = Scope.PROCESS,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[T]:
        """Starts a task and holds it until it ends. Loop thread only. See `Supervisor.spawn`."""
        return self._supervisor.spawn(coro, name=name, scope=scope, on_failure=on_failure)

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task on its owner's behalf: its end is then no failure. Loop thread only."""
        self._supervisor.stop(task)

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """A failure of the whole process: unhealthy from now on. Loop thread only.

        The first one calls `on_fatal`; later ones are logged and counted. The loop keeps turning,
        so that the embedder can still be told things and close it in order.
        """
        self.metrics.count("loop.fatal")
        log.critical("loop thread %s: %s", self.name, reason, exc_info=error)
        if self._fatal is not None:
            return
        self._fatal = Fatal(reason, error)
        if self._on_fatal is not None:
            try:
                self._on_fatal(self._fatal)
            except Exception:
                log.exception("loop thread %s: on_fatal raised", self.name)

    # -- inside ------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(self._loop_exception)
        watchdog = LagWatchdog(self._monitor, threading.get_ident(), self._lagging)
        loop.call_soon(self._started.set)
        loop.call_soon(self._beat)
        watchdog.start()
        error: BaseException | None = None
        try:
            loop.run_forever()
        except BaseException as caught:  # SystemExit and KeyboardInterrupt leave the loop
            error = caught
        with self._lock:
            was_asked_to = self._state is _State.CLOSING
            self._state = _State.CLOSED
        if not was_asked_to:
            self.fail("the loop ended without being asked to", error)
        try:
            while self._entries:  # accepted, but the loop died before their turn: they start too
                self._entries.popleft()()
            loop.run_until_complete(self._cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException:
            log.exception("loop thread %s: while ending", self.name)
        watchdog.stop()
        self._supervisor.abandon()
        asyncio.set_event_loop(None)
        loop.close()

    def _run_entries(self) -> None:
        """Runs what was accepted, in order. A wake-up that comes while this is yielding to a task's
        first step changes nothing: the rest runs after that step."""
        if self._is_yielding:
            return
        with self._lock:
            self._is_wake_sent = False
            num = len(self._entries)  # what is accepted meanwhile waits for the next turn
        for _ in range(num):
            if self._entries.popleft()() and self._entries:
                self._is_yielding = True
                self.loop.call_soon(self._go_on)
                return
        with self._lock:
            is_done = self._state is _State.CLOSING and not self._entries
        if is_done:
            self.loop.stop()
        elif self._state is _State.CLOSING:
            self.loop.call_soon(self._run_entries)

    def _go_on(self) -> None:
        self._is_yielding = False
        self._run_entries()

    async def _cancel_all(self) -> None:
        """Cancels every task on the loop, and those they start meanwhile, until none is left."""
        myself = asyncio.current_task()
        until_s = time.monotonic() + self._close_timeout_s
        while others := asyncio.all_tasks() - {myself}:
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return
            for task in others:
                self.stop(task)
            await asyncio.wait(others, timeout=remaining_s)

    def _future_done(self, future: concurrent.futures.Future[Any], task: asyncio.Task[Any]) -> None:
        """Any thread: it was settled here, or whoever submitted it has cancelled it."""
        if future.cancelled():
            with contextlib.suppress(LoopClosedError):
                self.call(self.stop, task)

    def _loop_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context.get("message", "unknown"))
        error = context.get("exception")
        if "transport" in context or "protocol" in context or "socket" in context:
            # A broken connection: its owner is told by connection_lost.
            self.metrics.count("loop.transport_error")
            log.warning("loop thread %s: %s", self.name, message, exc_info=error)
            return
        self.fail(message, error)

    def _beat(self) -> None:
        late_s = self._monitor.beat(time.monotonic())
        self.metrics.observe("loop.lag", late_s)
        self.loop.call_later(self._monitor.beat_s, self._beat)

    def _lagging(self, report: LagReport) -> None:
        log.error(
            "loop thread %s has not turned for %.1f s; it is at:\n%s",
            self.name, report.lag_s, report.stack,
        )  # fmt: skip
        if self._on_lag is not None:
            try:
                self._on_lag(report)
            except Exception:
                log.exception("loop thread %s: on_lag raised", self.name)


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
