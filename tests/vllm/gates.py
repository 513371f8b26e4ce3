"""Stopping a real vLLM engine at a chosen point, so that a drill hits it there and nowhere else.

An engine started with ``--scheduler-cls tests.vllm.gates.make_scheduler`` and `FOLDER` in its environment
looks, before each scheduling pass, whether some request is at a *stage* for which a test holds a gate. If so
its core thread waits there until the test opens the gate; its loop thread and its workers go on. Apart from
that it is the sleeping scheduler.

While the file `LOST` is there, nothing that P's state machine tells a D about a transfer leaves P; each such
word adds a byte to the file.

``prefill``
    `PREFILL_TOKENS` of a prompt are computed, and more of it are to come (so the budget must be smaller);
``decode``
    two tokens of an answer are there, and more are to come.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pd_control.protocol.effects import LinkNews

#: Environment variable: the folder of the gates' sockets.
FOLDER = "PD_TEST_GATES"
LOST = "lost-words"
#: Several steps' worth: a destination that was there before the prompt is known by then, since the loop
#: thread keeps up (see `_let_loop_thread_catch_up`).
PREFILL_TOKENS = 384
REACHED_S = 60.0


class Gate:
    """The test's side: a listening socket. Closed at first; opened for good by :meth:`open`."""

    def __init__(self, folder: Path, stage: str) -> None:
        self._path = folder / stage
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._listener.settimeout(REACHED_S)
        self._engine: socket.socket | None = None

    def wait_reached(self) -> None:
        """Until the engine stands at the gate. Raises TimeoutError."""
        self._engine, _ = self._listener.accept()

    def open(self) -> None:
        """The engine goes on, and meets this gate no more. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.open()


def _is_at(stage: str, requests: list[Any]) -> bool:
    if stage == "prefill":
        return any(PREFILL_TOKENS <= r.num_computed_tokens < r.num_prompt_tokens for r in requests)
    return any(r.num_output_tokens >= 2 for r in requests)


def _stand(folder: Path, requests: list[Any]) -> None:
    """Core thread, before a pass."""
    for stage in ("prefill", "decode"):
        path = folder / stage
        if path.exists() and _is_at(stage, requests):
            # Nobody listens any more: the gate has just been opened.
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.connect(str(path))
                sock.recv(1)


@contextlib.contextmanager
def words_lost(folder: Path) -> Iterator[Callable[[], int]]:
    """The test's side of `LOST`; gives the number of words that were lost so far."""
    path = folder / LOST
    path.touch()
    try:
        yield lambda: path.stat().st_size
    finally:
        path.unlink()


def _lose_words(folder: Path, runner: Any) -> None:
    """P's loop thread calls what is put in place here."""
    send = runner._executors[LinkNews]

    def some(effect: LinkNews) -> None:
        try:
            # Without "create": the test may have taken it away.
            lost = os.open(folder / LOST, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            send(effect)
            return
        os.write(lost, b"x")
        os.close(lost)

    runner._executors[LinkNews] = some


def _let_loop_thread_catch_up(runtime: Any) -> None:
    """Core thread: what it has told the loop thread is known there, and what that comes to is back, when this
    returns. A tiny model computes three steps in the time for which a loop thread may wait for Python's lock,
    and a core that stands at a gate takes nothing more."""
    done = threading.Event()
    runtime.call_on_loop(done.set)
    done.wait(REACHED_S)


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """For ``--scheduler-cls``."""
    from pd_control.vllm import sleeping

    # The sleeping scheduler looks for the engine core under this name in the frame that calls it.
    self = sys._getframe(1).f_locals.get("self")  # noqa: F841
    scheduler = sleeping.make_scheduler(*args, **kwargs)
    folder, schedule = Path(os.environ[FOLDER]), scheduler.schedule

    def gated(*args: Any, **kwargs: Any) -> Any:
        if (folder / "prefill").exists():
            _let_loop_thread_catch_up(scheduler.connector._runtime)
        _stand(folder, list(scheduler.running))
        return schedule(*args, **kwargs)

    scheduler.schedule = gated
    runner = scheduler.connector._runtime.prefill_runner
    if runner is not None:
        _lose_words(folder, runner)
    return scheduler
