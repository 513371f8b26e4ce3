"""What the engine conformance suite needs of an engine, and the scripted drivers that it plugs in.

To run the suite on another engine, write an `EngineHarness` for it and name it:

    PD_CONTROL_ENGINE_HARNESS=my_package.harness:MyHarness pytest tests/conformance/test_engine.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pd_control.codes import Code
from pd_control.engine import (
    BlockIds,
    Content,
    DecodeDriver,
    DecodeRequest,
    Engine,
    PrefillDriver,
    RankReport,
    ScheduledRequest,
    WorkerDriver,
)


class EngineHarness(Protocol):
    """One engine under test, small: `num_blocks` blocks of `block_size_tokens` in one cache group,
    two workers or more, deterministic generation. Made without arguments, fresh for each test.

    Methods may be called on any thread but the engine's own, unless said.
    """

    num_blocks: int
    block_size_tokens: int

    @property
    def engine(self) -> Engine: ...

    def start(
        self, prefill: PrefillDriver, decode: DecodeDriver, worker: Callable[[int], WorkerDriver]
    ) -> None:
        """Start with these drivers; `worker(rank)` gives each worker its own."""
        ...

    def stop(self) -> None: ...

    def prefill(self, request_id: str, prompt: Sequence[int]) -> Future[Any]:
        """P's half of a dual request. The future ends when the engine is done with it."""
        ...

    def decode(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        """D's part of a request whose KV comes from elsewhere; the future gives its tokens."""
        ...

    def local(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        """A request that has nothing to do with the driver."""
        ...

    def abort(self, request_id: str) -> None:
        """The request's client goes away."""
        ...

    def content(self, prompt: Sequence[int]) -> Content: ...

    def references(self, block_id: int) -> int:
        """How many references the block has now."""
        ...

    def num_free_blocks(self) -> int: ...

    def block_bytes(self, block_id: int) -> bytes:
        """The block's content, all layers and ranks."""
        ...

    def fill_block(self, block_id: int, value: int) -> None:
        """Write a pattern into it, all layers and ranks (as a remote writer would)."""
        ...


class _Scripted:
    """Records calls; executes what the test puts into `script` on the core thread."""

    def __init__(self) -> None:
        self.engine: Engine
        self.log: list[tuple[Any, ...]] = []
        self.script: list[Callable[[], object]] = []
        self.changed = threading.Condition()

    def _note(self, *what: Any) -> None:
        with self.changed:
            self.log.append(what)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """A deadlock guard, not a measurement."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), self.log[-20:]

    def did(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == kind]

    def drain(self) -> int:
        count = 0
        while self.script:
            self.script.pop(0)()
            count += 1
        if count:
            self._note("drained", count)
        return count


class ScriptedPrefill(_Scripted):
    """A `PrefillDriver` that holds a lease on every request it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.tracked: dict[str, list[int]] = {}
        self.steps: dict[int, Sequence[ScheduledRequest]] = {}
        self.reports: dict[int, Sequence[RankReport]] = {}

    def add(self, request_id: str, content: Content, num_takers: int = 1) -> None:
        self.tracked[request_id] = []
        self._note("add", request_id)

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> bytes:
        self.steps[step] = scheduled
        for request in scheduled:
            held = self.tracked.get(request.request_id)
            if held is not None and request.added_block_ids[0]:
                self.engine.hold_blocks(request.added_block_ids)
                held += request.added_block_ids[0]
        self._note("plan_step", step)
        return b""

    def step_finished(self, step: int, reports: Sequence[RankReport]) -> None:
        self.reports[step] = reports
        self._note("step_finished", step)

    def first_token(self, request_id: str, token: int) -> None:
        self._note("first_token", request_id)

    def preempted(self, request_id: str) -> None:
        self._note("preempted", request_id)

    def finished(
        self, request_id: str, code: Code = Code.OK, first_token: int | None = None
    ) -> None:
        self._note("finished", request_id, code)

    def blocks_wanted(self, num_blocks: int) -> None:
        self._note("blocks_wanted", num_blocks)

    def release(self, request_id: str) -> None:
        """Core thread (through `script`): the lease comes back."""
        blocks = tuple(self.tracked.pop(request_id))
        self.engine.release_blocks((blocks,))


class ScriptedDecode(_Scripted):
    """A `DecodeDriver` of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, tuple[BlockIds, int]] = {}
        self.requests: dict[str, DecodeRequest] = {}

    def add(self, request: DecodeRequest) -> None:
        self.requests[request.request_id] = request
        self._note("add", request.request_id)

    def blocks_allocated(self, request_id: str, block_ids: BlockIds, cached_tokens: int) -> bool:
        self.engine.hold_blocks(block_ids)
        self.blocks[request_id] = (block_ids, cached_tokens)
        self._note("blocks_allocated", request_id)
        return True

    def abort(self, request_id: str, reason: str = "") -> None:
        self._note("abort", request_id)

    def release(self, request_id: str) -> None:
        self.engine.release_blocks(self.blocks.pop(request_id)[0])


class ScriptedWorker:
    """A `WorkerDriver` that checks the order of its calls and can hold a step up inside a layer."""

    def __init__(self, rank: int, gate: threading.Event) -> None:
        self.rank = rank
        self.gate = gate
        self.entered = threading.Event()  # a layer of a step was reached
        self.errors: list[str] = []
        self._step: int | None = None
        self._layers: list[int] = []
        self.num_steps = 0

    def start_step(self, step: int, plan: bytes) -> None:
        if self._step is not None:
            self.errors.append(f"step {step} started inside step {self._step}")
        self._step, self._layers = step, []

    def record_event(self, step: int, layer: int, stream: int = 0) -> None:
        if step != self._step:
            self.errors.append(f"layer {layer} of step {step} recorded in step {self._step}")
        self._layers.append(layer)
        self.entered.set()
        self.gate.wait(30)

    def freeze_step(self, step: int) -> int:
        if step != self._step or not self._layers or len(set(self._layers)) != len(self._layers):
            self.errors.append(f"step {step} frozen after layers {self._layers}")
        self._step = None
        self.num_steps += 1
        return 7  # any number: the engine is to carry it back unread
