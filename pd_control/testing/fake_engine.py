"""An in-memory engine that embeds the driver, for tests and examples.

It is a real engine in every respect that matters to a control plane: a core thread with a paged,
reference-counted, prefix-caching block pool; continuous batching with chunked prefill, preemption
and several steps in flight; one worker per TP rank, in threads or processes, whose caches hold real
bytes. Only the model is made up (`fake_model`), so that wrong KV is always seen and the right
output is known. An engine with nothing runnable sleeps; nothing in it polls.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pd_control.codes import Code
from pd_control.engine import (
    BlockIds,
    Content,
    DecodeDriver,
    DecodeRequest,
    PrefillDriver,
    RankReport,
    Refusal,
    identity_digest,
)
from pd_control.testing.fake_batch import Batching, EngineError, EngineSpec, FakeRequest, State
from pd_control.testing.fake_blocks import block_hashes
from pd_control.testing.fake_model import chain
from pd_control.testing.fake_worker import (
    OpenDriver,
    ProcessWorker,
    ThreadWorker,
    WorkerHandle,
    WorkerSpec,
)

__all__ = ["EngineError", "EngineSpec", "FakeEngine"]

log = logging.getLogger(__name__)


class FakeEngine(Batching):
    """See the module. Public methods are safe on any thread unless they say otherwise.

    `open_driver` builds the worker half in each worker (thread workers); `worker_entry` names such
    a function for process workers ("module:function").
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str = "engine",
        open_driver: OpenDriver | None = None,
        worker_entry: str = "",
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec)
        self.name = name
        self.fatal = ""
        self._open_driver = open_driver
        self._worker_entry = worker_entry
        self.worker_options = dict(worker_options or {})  # read when a worker starts
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._stopping = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-core", daemon=True)
        self._started = threading.Event()
        self.num_wakes = 0  # times the core thread left its sleep

    # -- life --------------------------------------------------------------------------------------

    def attach(
        self, *, prefill: PrefillDriver | None = None, decode: DecodeDriver | None = None
    ) -> None:
        """Give it its drivers. Before `start`."""
        self._prefill, self._decode = prefill, decode

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts workers and core thread; returns when every worker is ready."""
        self._workers = [self._open_worker(rank) for rank in range(self.spec.tp_size)]
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise EngineError("TIMEOUT", f"{self.name}: workers not ready within {timeout_s} s")

    def _open_worker(self, rank: int) -> WorkerHandle:
        spec = WorkerSpec(
            rank,
            self.spec.tp_size,
            self.spec.num_blocks,
            self.spec.geometry,
            self.spec.layer_delay_s,
            self.worker_options,
        )

        def deliver(message: list[Any]) -> None:
            self._inbox.put(("worker", rank, message))

        if self.spec.workers == "process":
            return ProcessWorker(spec, deliver, self._worker_entry)
        return ThreadWorker(spec, deliver, self._open_driver)

    def stop(self) -> None:
        """Ends the core thread and the workers; open requests fail with ABORTED."""
        self._inbox.put(("stop",))
        if self._thread.is_alive():
            self._thread.join()
        for worker in self._workers:
            worker.stop()

    @property
    def workers(self) -> list[WorkerHandle]:
        """Their handles, by rank."""
        return list(self._workers)

    # -- clients -----------------------------------------------------------------------------------

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        max_new_tokens: int = 1,
        *,
        salt: str = "",
        remote: DecodeRequest | None = None,
        prefill_half: bool = False,
        num_takers: int = 1,
        on_token: Callable[[int], None] | None = None,
    ) -> concurrent.futures.Future[list[int]]:
        """The tokens after `prompt`. Fails with EngineError.

        `remote`: the KV comes from a P (on D). `prefill_half`: P's half in dual mode, one token.
        """
        request = FakeRequest(
            request_id=request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_new_tokens=1 if prefill_half else max_new_tokens,
            salt=salt,
            future=concurrent.futures.Future(),
            remote=remote,
            is_prefill_half=prefill_half,
            num_takers=num_takers,
            on_token=on_token,
        )
        self._put("add", request)
        return request.future

    def abort(self, request_id: str) -> None:
        """The client is gone: the future fails with ABORTED."""
        self._inbox.put(("abort", request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the core thread and returns its result (for tests)."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._put("call", function, done)
        return done.result(timeout=60)

    # -- Engine: what the driver calls ---------------------------------------------------------------

    def hold_blocks(self, block_ids: BlockIds) -> None:
        self.pool.touch(block_ids[0])

    def release_blocks(self, block_ids: BlockIds) -> None:
        self.pool.release(block_ids[0])

    def void_rank(self, rank: int) -> None:
        # What runs on it was preempted when the death was seen (`_worker_lost`).
        self.pool.evict(range(self.pool.num_blocks))

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        request = self._requests[request_id]
        assert request.state is State.WAITING_KV, f"{request_id}: loaded in state {request.state}"
        request.num_computed = num_tokens
        self._register(request)
        request.state = State.RUNNING
        self._running[request_id] = request
        if first_token is not None:
            self._emit(request, first_token)

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        self._end(self._requests[request_id], EngineError(code.name, message))

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        request = self._requests[request_id]
        assert request.state is State.WAITING_KV, f"{request_id}: recompute in {request.state}"
        self.pool.release(request.blocks)
        request.blocks = []
        request.remote = None
        request.state = State.WAITING
        self._waiting.appendleft(request)

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        tokens = list(content.token_ids)
        salt = payload.get("salt", "") if isinstance(payload, dict) else ""
        request = FakeRequest(
            request_id=request_id,
            tokens=tokens,
            num_prompt=len(tokens),
            max_new_tokens=1,
            salt=salt if isinstance(salt, str) else "",
            future=concurrent.futures.Future(),
            is_prefill_half=True,
        )
        refusal = self._refuse(request)
        if refusal is None:
            self._take(request)
        return refusal

    def abort_request(self, request_id: str, code: Code, message: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, EngineError(code.name, message))

    def wake(self) -> None:
        self._inbox.put(("wake",))

    def on_fatal(self, reason: str) -> None:
        self._inbox.put(("fatal", reason))

    # -- core thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # A bug of this engine or a broken contract: it is over, and everybody is told.
            log.exception("%s: the core thread failed", self.name)
            self.fatal = self.fatal or f"core thread: {type(error).__name__}: {error}"
        self._stopping = True
        with contextlib.suppress(Exception):
            for request in list(self._requests.values()):
                self._end(request, EngineError("ABORTED", self.fatal or "the engine stopped"))
            self._drain()
        self._is_over = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Whatever is still asked of an engine that is over ends at once."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                error = EngineError("ABORTED", self.fatal or "the engine stopped")
                if item[0] == "add":
                    item[1].future.set_exception(error)
                elif item[0] == "call":
                    item[2].set_exception(error)

    def _put(self, *item: Any) -> None:
        self._inbox.put(item)
        if self._is_over:
            self._refuse_rest()

    def _loop(self) -> None:
        while not self._stopping:
            if self._runnable():
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._handle(self._inbox.get_nowait())
            else:
                self._handle(self._inbox.get())
                self.num_wakes += 1
            self._drain()
            if not self._stopping:
                self._schedule()

    def _drain(self) -> None:
        if self._decode is not None:
            self._decode.drain()
        if self._prefill is not None:
            self._prefill.drain()

    def _handle(self, item: tuple[Any, ...]) -> None:
        kind = item[0]
        if kind == "worker":
            self._worker_said(item[1], item[2])
        elif kind == "add":
            self._add(item[1])
        elif kind == "abort":
            self._abort(item[1])
        elif kind == "call":
            try:
                item[2].set_result(item[1]())
            except BaseException as e:
                item[2].set_exception(e)
        elif kind == "fatal":
            self.fatal = self.fatal or item[1]
            self._stopping = True
        elif kind == "stop":
            self._stopping = True

    def _refuse(self, request: FakeRequest) -> Refusal | None:
        if request.request_id in self._requests:
            return Refusal(Code.BAD_REQUEST, f"request {request.request_id!r} is already here")
        if not request.tokens:
            return Refusal(Code.BAD_REQUEST, "an empty prompt")
        most = request.num_prompt + request.max_new_tokens
        if self._blocks_for(most) > self.spec.num_blocks:
            return Refusal(Code.BAD_REQUEST, f"{most} tokens never fit into the cache")
        return None

    def _take(self, request: FakeRequest) -> None:
        request.states = chain(request.tokens)
        request.hashes = block_hashes(
            request.tokens, self.spec.geometry.block_size_tokens, request.salt
        )
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def _add(self, request: FakeRequest) -> None:
        refusal = self._refuse(request)
        if refusal is not None:
            request.future.set_exception(EngineError(refusal.code.name, refusal.message))
            return
        self._take(request)
        if request.remote is not None and self._decode is not None:
            self._decode.add(request.remote)
        if request.is_prefill_half and self._prefill is not None:
            self._prefill.add(
                request.request_id,
                self.content_of(request.tokens, request.salt),
                request.num_takers,
            )

    def content_of(self, tokens: list[int], salt: str = "") -> Content:
        """What the driver needs to know of a prompt. Any thread."""
        identity = identity_digest(self.spec.geometry.name, cache_salt=salt)
        return Content(tuple(tokens), identity)

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.remote is not None and self._decode is not None:
            self._decode.abort(request_id, "aborted by its client")
        if self._prefill is not None:
            self._prefill.finished(request_id, Code.ABORTED)
        self._end(request, EngineError("ABORTED", "aborted by its client"))

    # -- workers -----------------------------------------------------------------------------------

    def _workers_ready(self) -> None:
        self._started.set()

    def _worker_lost(self, rank: int, reason: str) -> None:
        """The end of the engine, or a new worker and everything computed anew."""
        self._ready.discard(rank)
        if not self.spec.restart_lost_workers:
            self.fatal = self.fatal or f"worker {rank} died: {reason}"
            self._stopping = True
            return
        for number, step in list(self._steps.items()):
            if rank in step.pending:
                step.failed = f"worker {rank} died: {reason}"
                self._rank_done(number, RankReport(rank, None, Code.PEER_LOST, step.failed))
        for request in list(self._running.values()):
            self._preempt(request)
        self.pool.evict(range(self.pool.num_blocks))  # that rank's part of every block is gone
        self._workers[rank].stop()
        self._workers[rank] = self._open_worker(rank)
