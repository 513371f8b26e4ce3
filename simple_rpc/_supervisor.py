"""Tasks that are held until they end, and whose every unexpected end somebody is told of."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ._errors import ClosedError, Code, RpcError
from .metrics import Metrics

T = TypeVar("T")
Future = concurrent.futures.Future


class Scope(enum.Enum):
    """Who suffers when a task fails."""

    REQUEST = "request"
    PEER = "peer"
    PROCESS = "process"


class LoopClosedError(ClosedError):
    """The loop thread is closing or closed (or was never started): nothing was or will be done."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who is told of a task's end: `on_failure` (spawn), `future` (submit) or nobody but us."""

    scope: Scope
    on_failure: Callable[[BaseException], None] | None
    future: Future[Any] | None = None


class Supervisor:
    """Every task of one loop, strongly referenced. The loop's thread only, but for `names`.

    `fail(reason, error)` takes the failures of PROCESS scope.
    """

    def __init__(
        self, owner_name: str, fail: Callable[[str, BaseException | None], None], metrics: Metrics
    ) -> None:
        self._owner_name = owner_name
        self._fail = fail
        self._metrics = metrics
        self._tasks: dict[asyncio.Task[Any], _Owner] = {}
        self._stopping: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def names(self) -> list[str]:
        """Of the tasks that have not ended, sorted. Any thread."""
        return sorted(task.get_name() for task in list(self._tasks))

    def spawn(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str,
        scope: Scope = Scope.PROCESS,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[T]:
        """Starts a task and holds it until it ends. Loop thread only.

        REQUEST and PEER need `on_failure(error)`: called on the loop thread when the task raises or
        is cancelled by anyone but `stop` and `close`; a plain return is fine. PROCESS takes none:
        such a task must not end at all.
        """
        if (scope is Scope.PROCESS) != (on_failure is None):
            coro.close()
            raise ValueError(f"on_failure: expected for request and peer scope only ({name!r})")
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks[task] = _Owner(scope, on_failure)
        task.add_done_callback(self._task_done)
        return task

    def adopt(self, task: asyncio.Task[Any], future: Future[Any]) -> None:
        """Holds a task whose outcome `future` takes."""
        self._tasks[task] = _Owner(Scope.REQUEST, None, future)
        task.add_done_callback(self._task_done)

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task on its owner's behalf: its end is then no failure. Loop thread only."""
        if not task.done() and task not in self._stopping:
            self._stopping.add(task)
            task.cancel()

    def abandon(self) -> None:
        """The loop will not turn again: futures of what has not ended get their end."""
        for owner in self._tasks.values():
            if owner.future is not None:
                settle(owner.future, None, self._closed_error())

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        owner = self._tasks.pop(task)
        is_expected = task in self._stopping
        self._stopping.discard(task)
        error: BaseException | None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if owner.future is not None:
            if isinstance(error, asyncio.CancelledError):
                error = self._closed_error() if is_expected else RpcError(Code.ABORTED, _how(error))
            settle(owner.future, None if error else task.result(), error)
            return
        if is_expected and (error is None or isinstance(error, asyncio.CancelledError)):
            return
        name = task.get_name()
        if owner.on_failure is None:
            how = "returned" if error is None else _how(error)
            self._fail(f"background task {name!r} {how}", error)
        elif error is not None:
            self._metrics.count(f"loop.failed.{owner.scope.value}")
            try:
                owner.on_failure(error)
            except Exception as second:
                self._fail(f"on_failure of task {name!r} raised", second)

    def _closed_error(self) -> LoopClosedError:
        return LoopClosedError(
            message=f"loop thread {self._owner_name!r} was closed before the end"
        )


def settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    """Gives a future its end, unless whoever holds it has cancelled it."""
    if not future.done() and future.set_running_or_notify_cancel():
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _how(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "was cancelled by somebody else"
    return f"raised {type(error).__name__}"
