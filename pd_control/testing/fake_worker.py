"""One rank of the fake engine: executes steps on its cache shard, as a thread or as a process.

The scheduler and a worker exchange small msgpack messages in order:
  → ["step", step, plan, [[request_id, block_ids, first_position, states, num_tokens], …]]
      write the KV of `states` from `first_position` on; with num_tokens > 0 also return the fold of
      that many tokens (what decides the next token)
  → ["stop"]
  ← ["ready"]   ← ["done", step, rank, highest_substep, [[request_id, fold], …]]
  ← ["failed", step, rank, reason]
A worker that dies is noticed by the end of its pipe.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import msgpack

from pd_control.engine import WorkerDriver
from pd_control.testing.fake_model import CacheShard, Geometry

MAX_MESSAGE_BYTES = 64 << 20  # a bound against a runaway, far above any step of the fake engine
_U64 = (1 << 64) - 1

OpenDriver = Callable[[CacheShard, "WorkerSpec"], "tuple[WorkerDriver, Callable[[], None]]"]
"""Builds the driver of a worker over its cache; returns it and what closes it."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start. `driver` is opaque to the fake engine."""

    rank: int
    tp_size: int
    num_blocks: int
    geometry: Geometry
    layer_delay_s: float = 0.0  # a slow GPU: time spent in each layer of a step
    driver: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @staticmethod
    def unpack(raw: bytes) -> WorkerSpec:
        values = msgpack.unpackb(raw)
        values["geometry"] = Geometry(**values["geometry"])
        return WorkerSpec(**values)


class Worker:
    """The step executor proper; single-threaded."""

    def __init__(self, spec: WorkerSpec, shard: CacheShard, driver: WorkerDriver | None) -> None:
        self._spec = spec
        self._shard = shard
        self._driver = driver

    def execute(self, message: list[Any]) -> list[Any]:
        """Runs one step message and returns its answer; an exception becomes `failed`."""
        _, step, plan, parts = message
        try:
            return self._run(step, plan, parts)
        except Exception as e:
            return ["failed", step, self._spec.rank, f"{type(e).__name__}: {e}"]

    def _run(self, step: int, plan: bytes, parts: list[Any]) -> list[Any]:
        if self._driver is not None:
            self._driver.start_step(step, plan)
        for layer in range(self._spec.geometry.num_layers):
            for _, block_ids, first, states, _ in parts:
                if states:
                    self._shard.write(layer, block_ids, first, states)
            if self._spec.layer_delay_s:
                time.sleep(self._spec.layer_delay_s)
            if self._driver is not None:
                self._driver.record_event(step, layer)
        highest = 0
        if self._driver is not None:
            highest = self._driver.freeze_step(step)
        folds = [
            [request_id, self._shard.fold(block_ids, num_tokens) & _U64]
            for request_id, block_ids, _, _, num_tokens in parts
            if num_tokens
        ]
        return ["done", step, self._spec.rank, highest, folds]


class WorkerHandle(Protocol):
    """The scheduler's end of a worker. `deliver` (given at construction) is called on a reader
    thread with each answer, and with ["lost", rank, reason] once if the worker died."""

    def send(self, message: list[Any]) -> None:
        """Never waits for the worker; after its death the message goes nowhere."""
        ...

    def stop(self) -> None:
        """Ends it and waits for the end."""
        ...

    @property
    def pid(self) -> int: ...


class ThreadWorker:
    """A worker in this process."""

    def __init__(
        self, spec: WorkerSpec, deliver: Callable[[list[Any]], None], open_driver: OpenDriver | None
    ) -> None:
        self.shard = CacheShard(spec.geometry, spec.num_blocks, spec.rank, spec.tp_size)
        self._inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._deliver = deliver
        driver: WorkerDriver | None = None
        self._close: Callable[[], None] | None = None
        if open_driver is not None:
            driver, self._close = open_driver(self.shard, spec)
        self._worker = Worker(spec, self.shard, driver)
        self._thread = threading.Thread(
            target=self._run, name=f"fake-worker-{spec.rank}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        self._deliver(["ready"])
        while (message := self._inbox.get())[0] != "stop":
            self._deliver(self._worker.execute(message))

    def send(self, message: list[Any]) -> None:
        self._inbox.put(message)

    def stop(self) -> None:
        self._inbox.put(["stop"])
        self._thread.join()
        if self._close is not None:
            self._close()
            self._close = None

    @property
    def pid(self) -> int:
        return os.getpid()


class ProcessWorker:
    """A worker in a process of its own, over a socket pair that only the two of them have.

    The child ends when the pair does, so no scheduler leaves workers behind, however it dies.
    """

    def __init__(self, spec: WorkerSpec, deliver: Callable[[list[Any]], None], entry: str) -> None:
        """`entry`: "module:function", an `OpenDriver` to be imported in the child; or ""."""
        self._spec = spec
        self._deliver = deliver
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._stopping = False
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pd_control.testing.fake_worker",
                    str(theirs.fileno()),
                    entry,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        _send(self._socket, spec.pack())
        self._thread = threading.Thread(
            target=self._read, name=f"fake-worker-{spec.rank}-reader", daemon=True
        )
        self._thread.start()

    def _read(self) -> None:
        reason = "end of pipe"
        try:
            while (raw := _receive(self._socket)) is not None:
                self._deliver(msgpack.unpackb(raw))
        except OSError as e:
            reason = str(e)
        if not self._stopping:
            self._deliver(["lost", self._spec.rank, reason])

    def send(self, message: list[Any]) -> None:
        with contextlib.suppress(OSError):  # the reader reports the death
            _send(self._socket, msgpack.packb(message))

    def stop(self) -> None:
        self._stopping = True
        self.send(["stop"])
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._socket.close()

    @property
    def pid(self) -> int:
        return self._process.pid


def _send(sock: socket.socket, raw: bytes) -> None:
    sock.sendall(len(raw).to_bytes(4, "little") + raw)


def _receive(sock: socket.socket) -> bytes | None:
    """One message; None at a clean end."""
    head = _exactly(sock, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_MESSAGE_BYTES:
        raise OSError(f"message of {size} bytes, at most {MAX_MESSAGE_BYTES}")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    out = bytearray()
    while len(out) < count:
        part = sock.recv(min(count - len(out), 1 << 20))
        if not part:
            return None
        out += part
    return bytes(out)


def main(argv: list[str]) -> int:
    """Child process: `fake_worker FD ENTRY`."""
    sock = socket.socket(fileno=int(argv[1]))
    raw = _receive(sock)
    if raw is None:
        return 0
    spec = WorkerSpec.unpack(raw)
    shard = CacheShard(spec.geometry, spec.num_blocks, spec.rank, spec.tp_size)
    driver, close = None, None
    if argv[2]:
        module, _, name = argv[2].partition(":")
        open_driver: OpenDriver = getattr(__import__(module, fromlist=[name]), name)
        driver, close = open_driver(shard, spec)
    worker = Worker(spec, shard, driver)
    try:
        _send(sock, msgpack.packb(["ready"]))
        while (raw := _receive(sock)) is not None:
            message = msgpack.unpackb(raw)
            if message[0] == "stop":
                break
            _send(sock, msgpack.packb(worker.execute(message)))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the scheduler died
    finally:
        if close is not None:
            close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
