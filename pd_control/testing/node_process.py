"""A `Node` in a process of its own, driven over its standard input and output.

    python -m pd_control.testing.node_process SPEC     (SPEC: JSON, see `NodeSpec`)

Parent and child exchange JSON lines: ``[number, op, arguments]`` and ``[number, result, error]``;
the child's first line is number 0. The child ends with its input, so however its parent ends,
nothing stays behind; its workers end with it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from pd_control._schema import build
from pd_control.config import Config
from pd_control.engine import Mode, OnFailure
from pd_control.testing.fake_batch import EngineSpec
from pd_control.testing.fake_model import Geometry
from pd_control.testing.node import Node

START_TIMEOUT_S = 60.0


class NodeError(RuntimeError):
    """What the node answered, or that it is gone."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node process is told."""

    config: Config
    engine: EngineSpec

    def dump(self) -> str:
        return json.dumps(
            {
                "config": self.config.to_mapping(show_secrets=True),
                "engine": asdict(self.engine),
            }
        )

    @staticmethod
    def load(text: str) -> NodeSpec:
        values = json.loads(text)
        engine = values["engine"]
        engine["geometry"] = Geometry(**engine["geometry"])
        return NodeSpec(build(Config, values["config"]), EngineSpec(**engine))


class NodeProcess:
    """The parent's end. Any thread."""

    def __init__(self, spec: NodeSpec, *, quiet: bool = True) -> None:
        self.spec = spec
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ready: Future[Any] = Future()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pd_control.testing.node_process", spec.dump()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        self._futures[0] = self._ready
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = ""
        self._worker_pids: list[int] = []

    def wait_ready(self) -> NodeProcess:
        """Until it serves. Raises NodeError with the child's reason."""
        try:
            info = self._ready.result(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.address = info["address"]
        self._worker_pids = info["worker_pids"]
        return self

    @property
    def name(self) -> str:
        return self.spec.config.instance

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def worker_pid(self, rank: int = 0) -> int:
        """Of the rank's process now (it changes when one is replaced)."""
        with contextlib.suppress(NodeError):
            self._worker_pids = self.ask("worker_pids")
        return self._worker_pids[rank]

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask the child; the future fails with NodeError."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            self._futures[number] = future
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([number, op, arguments]) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            self._fail_all()
        return future

    def ask(self, op: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
        return self.submit(op, **arguments).result(timeout_s)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        if pid == self.pid:
            self._process.wait()

    def stop(self) -> None:
        """End it in order; kill what does not end."""
        if self.is_alive:
            with contextlib.suppress(OSError, ValueError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> NodeProcess:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                number, result, error = json.loads(line)
                with self._lock:
                    future = self._futures.pop(number, None)
                if future is None:
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(NodeError(error))
        self._fail_all()

    def _fail_all(self) -> None:
        with self._lock:
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(NodeError(f"{self.name} (process {self.pid}) is gone"))


class _Child:
    """The child's end: one thread reads, answers are written by whoever has them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._ops: dict[str, Callable[..., Any]] = {
            "decode": self._decode,
            "prefill": self._prefill,
            "local": self._local,
            "abort": node.engine.abort,
            "leaks": node.leaks,
            "worker_pids": lambda: [w.pid for w in node.engine.workers],
            "counters": self._counters,
        }

    def answer(self, number: int, result: Any, error: str | None = None) -> None:
        with self._lock, contextlib.suppress(OSError):
            sys.stdout.write(json.dumps([number, result, error]) + "\n")
            sys.stdout.flush()

    def serve(self) -> None:
        for line in sys.stdin:
            number, op, arguments = json.loads(line)
            try:
                result = self._ops[op](**arguments)
            except Exception as e:
                self.answer(number, None, f"{type(e).__name__}: {e}")
                continue
            if isinstance(result, Future):
                result.add_done_callback(functools.partial(self._done, number))
            else:
                self.answer(number, result)

    def _done(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self.answer(number, future.result())
        else:
            self.answer(number, None, str(error))

    def _decode(
        self,
        request_id: str,
        prompt: list[int],
        num_new_tokens: int,
        mode: str,
        peer: str = "",
        address: str = "",
        on_failure: str = "",
    ) -> Future[list[int]]:
        return self._node.decode(
            request_id,
            prompt,
            num_new_tokens,
            mode=Mode[mode],
            peer_instance=peer,
            peer_address=address,
            on_failure=OnFailure[on_failure] if on_failure else None,
        )

    def _prefill(self, request_id: str, prompt: list[int]) -> Future[list[int]]:
        return self._node.prefill(request_id, prompt)

    def _local(self, request_id: str, prompt: list[int], num_new_tokens: int) -> Future[list[int]]:
        return self._node.engine.generate(request_id, prompt, num_new_tokens)

    def _counters(self) -> dict[str, Any]:
        engine = self._node.engine
        return {
            "steps": engine.num_steps,
            "wakes": engine.num_wakes,
            "fatal": engine.fatal or self._node.runtime.fatal,
        }


def main(argv: list[str]) -> int:
    """Child process."""
    spec = NodeSpec.load(argv[1])
    node = Node(spec.config, spec.engine, plane="kvt")
    child = _Child(node)
    try:
        node.start()
    except Exception as e:
        child.answer(0, None, f"{type(e).__name__}: {e}")
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    child.answer(0, {"address": node.address, "worker_pids": [w.pid for w in node.engine.workers]})
    try:
        child.serve()
    finally:
        node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
