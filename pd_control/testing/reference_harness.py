"""The reference engine under the engine conformance suite: the real core, scheduler, control port and
model, its two workers as threads of this process so that scripted drivers can stop them in a layer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from pd_control.engine import Content, DecodeDriver, PrefillDriver, WorkerDriver, identity_digest
from pd_control.reference import checkpoint
from pd_control.reference.control import ControlPort
from pd_control.reference.engine import Engine, EngineConfig, Output, Request
from pd_control.reference.model import Model
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.wire import MessageSocket, WorkerInit
from pd_control.reference.worker import serve
from pd_control.reference.worker_group import WorkerGroup

IDENTITY = "conformance"
WAIT_S = 60.0


class SumOverThreads:
    """The all-reduce of `num_ranks` threads: every rank leaves with the sum in its tensor."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._parts: list[torch.Tensor | None] = [None] * num_ranks

    def of_rank(self, rank: int) -> Callable[[torch.Tensor], Any]:
        def reduce(tensor: torch.Tensor) -> None:
            self._parts[rank] = tensor.clone()
            self._barrier.wait(WAIT_S)
            total = torch.stack([p for p in self._parts if p is not None]).sum(0)
            self._barrier.wait(WAIT_S)  # all have read before anybody writes the next one
            tensor.copy_(total)

        return reduce


class DriverHooks:
    """A `WorkerDriver` behind the worker's four points."""

    def __init__(self, driver: WorkerDriver) -> None:
        self._driver = driver

    def before_step(self, step: int, metadata: Any) -> None:
        self._driver.start_step(step, metadata)

    def layer_done(self, step: int, layer: int) -> None:
        self._driver.record_event(step, layer, 0)

    def after_step(self, step: int) -> Any:
        return self._driver.freeze_step(step)

    def close(self) -> None:
        return None


class _ThreadProcess:
    """A worker thread with the face of a process."""

    pid = 0

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(WAIT_S if timeout is None else timeout)
        return 0

    def kill(self) -> None:
        return None  # it ends with its socket


class ThreadGroup(WorkerGroup):
    """A `WorkerGroup` of threads with the drivers of `worker`. Keeps each rank's cache tensors."""

    def __init__(self, inits: list[WorkerInit], worker: Callable[[int], WorkerDriver]) -> None:
        self._driver_of = worker
        self._sum = SumOverThreads(len(inits))
        self.caches: dict[int, list[torch.Tensor]] = {}
        super().__init__(inits)

    def _spawn(self, theirs: socket.socket, env: dict[str, str]) -> _ThreadProcess:
        thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        thread.start()
        return _ThreadProcess(thread)

    def _serve(self, theirs: socket.socket) -> None:
        with theirs:
            serve(
                MessageSocket(theirs),
                lambda init: self._sum.of_rank(init.tp_rank),
                self._hooks,
            )

    def _hooks(self, init: WorkerInit, cache: list[torch.Tensor], model: Model) -> DriverHooks:
        self.caches[init.tp_rank] = cache
        return DriverHooks(self._driver_of(init.tp_rank))


class ReferenceHarness:
    """See `pd_control.testing.engine_harness.EngineHarness`."""

    num_blocks = 24
    block_size_tokens = 8

    def __init__(self) -> None:
        self._futures: dict[str, tuple[Future[Any], list[int]]] = {}
        self._engine: Engine
        self._group: ThreadGroup

    @property
    def engine(self) -> ControlPort:
        return self._engine.control

    def start(
        self, prefill: PrefillDriver, decode: DecodeDriver, worker: Callable[[int], WorkerDriver]
    ) -> None:
        config = EngineConfig(
            source="tiny",
            tp_size=2,
            num_blocks=self.num_blocks,
            block_tokens=self.block_size_tokens,
            max_step_tokens=16,
            num_threads=torch.get_num_threads(),  # of this process: leave it as it is
            model_identity=IDENTITY,
        )

        def open_workers(inits: list[WorkerInit]) -> ThreadGroup:
            self._group = ThreadGroup(inits, worker)
            return self._group

        spec = checkpoint.read_spec("tiny")
        self._engine = Engine(config, spec, self._on_output, open_workers=open_workers)
        self._engine.attach(prefill=prefill, decode=decode)
        self._engine.start()

    def stop(self) -> None:
        self._engine.close()

    def _submit(
        self, request_id: str, prompt: Sequence[int], num_new: int, control: dict[str, Any] | None
    ) -> Future[Any]:
        future: Future[Any] = Future()
        self._futures[request_id] = (future, [])
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
        self._engine.submit(Request(request_id, list(prompt), sampling, control=control))
        return future

    def _on_output(self, output: Output) -> None:
        if output.request_id not in self._futures:
            return  # admitted by the driver: nobody here waits
        future, tokens = self._futures[output.request_id]
        tokens += output.tokens
        if output.finish_reason in ("stop", "length"):
            future.set_result(tokens)
        elif output.finish_reason is not None:
            future.set_exception(RuntimeError(f"{output.finish_reason}: {output.error}"))

    def prefill(self, request_id: str, prompt: Sequence[int]) -> Future[Any]:
        return self._submit(request_id, prompt, 1, {"do_remote_decode": True})

    def decode(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        control = {
            "do_remote_prefill": True,
            "mode": "dual",
            "transfer_id": request_id,
            "remote_engine_id": "p",
        }
        return self._submit(request_id, prompt, num_new, control)

    def local(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        return self._submit(request_id, prompt, num_new, None)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def content(self, prompt: Sequence[int]) -> Content:
        return Content(list(prompt), identity_digest(IDENTITY, cache_salt=""))

    def _call(self, function: Callable[[], int]) -> int:
        """On the core thread, which owns the pool."""
        answer: Future[int] = Future()
        self._engine._post(lambda: answer.set_result(function()))
        return answer.result(WAIT_S)

    def references(self, block_id: int) -> int:
        return self._call(lambda: self._engine.pool.refs(block_id))

    def num_free_blocks(self) -> int:
        return self._call(lambda: self._engine.pool.num_free)

    def _layers(self) -> list[torch.Tensor]:
        return [layer for rank in sorted(self._group.caches) for layer in self._group.caches[rank]]

    def block_bytes(self, block_id: int) -> bytes:
        return b"".join(layer[:, block_id].numpy().tobytes() for layer in self._layers())

    def fill_block(self, block_id: int, value: int) -> None:
        for layer in self._layers():
            layer[:, block_id] = value
