"""The worker processes of one engine, seen from its scheduler process. Core thread only."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any, Protocol

from pd_control.reference.wire import MessageSocket, PeerGoneError, WorkerInit

#: A worker whose socket is closed leaves its loop by itself; one stuck in a kernel is killed after this.
STOP_GRACE_S = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process ended while it was needed; the message names the rank and how it ended."""


class Process(Protocol):
    """What is needed of a worker's `subprocess.Popen`."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class WorkerGroup:
    """Starts ``tp_size`` workers and talks to them. One step is outstanding at a time.

    After :class:`WorkerDiedError` the group can only be closed.
    """

    def __init__(self, inits: list[WorkerInit], env: dict[str, str] | None = None) -> None:
        self.inits = inits
        self._folder = tempfile.mkdtemp(prefix="pd-control-ranks-")
        self._links: list[MessageSocket] = []
        self._processes: list[Process] = []
        self._outputs: dict[int, dict[str, Any]] = {}
        self._selector = selectors.DefaultSelector()
        for init in inits:
            ours, theirs = socket.socketpair()
            self._processes.append(self._spawn(theirs, {**os.environ, **(env or {})}))
            link = MessageSocket(ours)
            self._links.append(link)
            fields = asdict(init)
            fields["rendezvous"] = os.path.join(self._folder, "ranks")
            link.send(fields)
            self._selector.register(link, selectors.EVENT_READ, init.tp_rank)

    def _spawn(self, theirs: socket.socket, env: dict[str, str]) -> Process:
        """One more worker at the other end of `theirs`, which it takes over."""
        with theirs:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "pd_control.reference.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                process_group=0 if sys.version_info >= (3, 11) else None,  # type: ignore[call-overload,unused-ignore]
            )
        return process

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def filenos(self) -> list[int]:
        """The descriptors that become readable when a worker answers or dies."""
        return [link.fileno() for link in self._links]

    def wait_ready(self, timeout_s: float) -> None:
        """Block until every worker has loaded its weights.

        Raises:
            WorkerDiedError: one ended instead. TimeoutError: not all are ready in time.
        """
        self._collect_all(timeout_s)

    def start_step(self, message: dict[str, Any]) -> None:
        """Send a step to every rank; answers come through :meth:`poll`."""
        for rank, link in enumerate(self._links):
            try:
                link.send(message)
            except PeerGoneError:
                raise self._died(rank) from None

    def poll(self) -> list[dict[str, Any]] | None:
        """All ranks' answers of the outstanding step, by rank, or None while some are missing.

        Never blocks.
        """
        for key, _ in self._selector.select(timeout=0):
            self._take(key.data)
        return self._complete()

    def _collect_all(self, timeout_s: float) -> list[dict[str, Any]]:
        while True:
            done = self._complete()
            if done is not None:
                return done
            ready = self._selector.select(timeout=timeout_s)
            if not ready:
                missing = [r for r in range(len(self._links)) if r not in self._outputs]
                raise TimeoutError(f"workers {missing} did not answer within {timeout_s:g} s")
            for key, _ in ready:
                self._take(key.data)

    def _take(self, rank: int) -> None:
        try:
            for message in self._links[rank].receive_ready():
                if "failed" in message:
                    raise WorkerDiedError(f"worker of rank {rank}: {message['failed']}")
                self._outputs[rank] = message
        except PeerGoneError:
            raise self._died(rank) from None

    def _complete(self) -> list[dict[str, Any]] | None:
        if len(self._outputs) < len(self._links):
            return None
        outputs, self._outputs = self._outputs, {}
        return [outputs[rank] for rank in range(len(self._links))]

    def _died(self, rank: int) -> WorkerDiedError:
        process = self._processes[rank]
        try:
            status = process.wait(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"worker of rank {rank} (pid {process.pid}) closed its socket")
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return WorkerDiedError(f"worker of rank {rank} (pid {process.pid}) ended: {how}")

    def kill(self) -> None:
        """Any thread: end the workers at once, so that whoever waits for them hears of it."""
        for process in self._processes:
            process.kill()  # nothing if it has been waited for

    def close(self) -> None:
        """End every worker and wait for it; none is left behind. Idempotent."""
        self._selector.close()
        for link in self._links:
            link.close()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def describe(inits: list[WorkerInit]) -> str:
    """One line for a log."""
    return json.dumps(
        {"ranks": len(inits), "model": inits[0].source, "blocks": inits[0].num_blocks}
    )
