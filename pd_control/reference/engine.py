"""The engine's core: one thread that owns the scheduler and the block pool, and the workers' steps.

Threads: :meth:`Engine.submit`, :meth:`Engine.abort` and :meth:`Engine.wake` may be called from any
thread at any moment; everything else happens on the core thread. With nothing to compute the core
thread sleeps in ``select`` until a worker answers or somebody wakes it: there is no tick.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pd_control.codes import Code
from pd_control.engine import DecodeDriver, PrefillDriver, RankReport
from pd_control.reference.blocks import BlockPool
from pd_control.reference.control import ControlPort
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.scheduler import Scheduler, Sequence, StepPlan
from pd_control.reference.spec import ModelSpec
from pd_control.reference.wire import WorkerInit
from pd_control.reference.worker_group import WorkerDiedError, WorkerGroup

log = logging.getLogger(__name__)

#: Loading a few hundred megabytes of weights on a busy machine; past this something is stuck.
LOAD_TIMEOUT_S = 300.0
#: Weights and KV are float32.
KV_ITEM_BYTES = 4


@dataclass(frozen=True)
class EngineConfig:
    """``source`` as in :func:`checkpoint.load`; sizes in tokens, blocks and sequences."""

    source: str = "tiny"
    tp_size: int = 1
    num_blocks: int = 512
    block_tokens: int = 16
    max_step_tokens: int = 2048
    max_running: int = 32
    prefix_caching: bool = True
    split_last_token: bool = False
    num_threads: int = 1
    device: str = "cpu"
    model_identity: str = ""  # what the KV is of; "" takes the model's name and dtype


@dataclass(frozen=True)
class Request:
    """A prompt to continue. ``control`` is what a router says about prefill and decode, if it does."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: bytes = b""
    control: dict[str, Any] | None = None


@dataclass(frozen=True)
class Output:
    """One step's news of a request. ``finish_reason``: None while it runs; ``stop``, ``length``,
    ``abort`` or ``error`` at its end, which comes exactly once; ``error`` then says why."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
    error: str = ""
    num_cached: int = 0
    is_refusal: bool = (
        False  # an error of the request itself, found before anything was done for it
    )


OnOutput = Callable[[Output], None]


class Engine:
    """An engine of ``config.tp_size`` worker processes. Use :meth:`start`, then :meth:`close`.

    Args:
        on_output: called on the core thread; must not block.
        on_fatal: called once, on the core thread, when the engine cannot go on; every request has
            then been told ``error``.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        on_output: OnOutput,
        on_fatal: Callable[[str], None] = lambda reason: None,
        open_workers: Callable[[list[WorkerInit]], WorkerGroup] = WorkerGroup,
    ) -> None:
        spec.check_tp(config.tp_size)
        self.config, self.spec = config, spec
        self.pool = BlockPool(
            config.num_blocks, config.block_tokens, prefix_caching=config.prefix_caching
        )
        self.scheduler = Scheduler(
            self.pool,
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            eos_token_id=spec.eos_token_id,
            split_last_token=config.split_last_token,
        )
        self._on_output, self._on_fatal = on_output, on_fatal
        self._open_workers = open_workers
        self.control = ControlPort(
            self.scheduler,
            config.model_identity or f"{spec.name}:float32",
            self._tell,
            self.wake,
            lambda reason: self._post(lambda: self._fail(reason)),
        )
        self._worker_control: Callable[[int], dict[str, Any] | None] = lambda rank: None
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = self._has_started = False
        self._dead = ""
        self._in_flight: StepPlan | None = None
        self._workers: WorkerGroup | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self.num_steps = 0

    # -- any thread -----------------------------------------------------------------------------

    def attach(
        self,
        *,
        prefill: PrefillDriver | None = None,
        decode: DecodeDriver | None = None,
        worker_control: Callable[[int], dict[str, Any] | None] = lambda rank: None,
    ) -> None:
        """Give it its drivers, before :meth:`start`. ``worker_control(rank)`` is what the control plane
        wants to tell that rank's worker process when it starts."""
        self.control.prefill, self.control.decode = prefill, decode
        self._worker_control = worker_control

    def start(self) -> None:
        """Start the workers, wait until they are ready, start the core thread. Not re-startable.

        Raises:
            WorkerDiedError, TimeoutError: no engine, or closed meanwhile; the workers are gone.
        """
        config = self.config
        inits = [
            WorkerInit(
                source=config.source,
                tp_rank=rank,
                tp_size=config.tp_size,
                num_blocks=config.num_blocks,
                block_tokens=config.block_tokens,
                num_threads=config.num_threads,
                device=config.device,
                control=self._worker_control(rank),
            )
            for rank in range(config.tp_size)
        ]
        self._workers = self._open_workers(inits)
        try:
            if self._stopping:
                raise WorkerDiedError("the engine was closed while it started")
            self._workers.wait_ready(LOAD_TIMEOUT_S)
        except BaseException:
            self._workers.close()
            raise
        self._thread.start()
        self._has_started = True

    def submit(self, request: Request) -> None:
        """Take a request in; its end, good or bad, arrives through ``on_output``."""
        self._post(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """End a request early. Idempotent; unknown ids are ignored."""
        self._post(lambda: self._abort(request_id))

    def wake(self) -> None:
        """Make the core thread look around; safe between "nothing to do" and sleep."""
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # a full pipe wakes as well
        except OSError:
            pass  # closed: there is nobody to wake

    def close(self) -> None:
        """Stop the core thread, fail what is left as aborted, end every worker. Idempotent.

        While :meth:`start` is still at work on another thread this ends the workers, and start raises.
        """
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._workers is not None:
            if self._has_started:
                self._workers.close()
            else:
                self._workers.kill()
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1

    @property
    def worker_pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all ranks together; with more ranks than KV heads several store the same head."""
        spec, tp_size = self.spec, self.config.tp_size
        heads = sum(len(spec.kv_heads_of(rank, tp_size)) for rank in range(tp_size))
        return spec.num_layers * 2 * heads * spec.head_dim * KV_ITEM_BYTES

    @property
    def core_thread_ident(self) -> int:
        """Of the started core thread, for whoever measures what it costs."""
        return self._thread.ident or 0

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.wake()

    # -- core thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._workers is not None
        selector = selectors.DefaultSelector()
        selector.register(self._wake_read, selectors.EVENT_READ)
        for descriptor in self._workers.filenos():
            selector.register(descriptor, selectors.EVENT_READ)
        try:
            while True:
                self._drain_inbox()
                if self._stopping:  # only after draining: the wake that tells of it is used up now
                    break
                self.control.drain()
                self.control.place()
                if self._in_flight is None:
                    self._begin_step()
                outputs = self._workers.poll()  # also when idle: a worker may have died
                if outputs is None:
                    selector.select()
                else:
                    self._end_step(outputs)
        except WorkerDiedError as error:
            self._dead = str(error)
        except Exception as error:  # an engine that does not know its own state must not go on
            log.exception("engine core failed")
            self._dead = f"engine core failed: {error!r}"
        finally:
            selector.close()
            self._end_all()

    def _drain_inbox(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, request: Request) -> None:
        try:
            if not request.token_ids:
                raise ValueError("a prompt needs at least one token")
            if not all(0 <= t < self.spec.vocab for t in request.token_ids):
                raise ValueError(f"token ids must lie in [0, {self.spec.vocab})")
            sequence = Sequence(
                request.request_id, list(request.token_ids), request.sampling, salt=request.salt
            )
            self.control.add(sequence, request.control or {})
        except ValueError as error:
            self._on_output(Output(request.request_id, [], "error", str(error), is_refusal=True))

    def _abort(self, request_id: str) -> None:
        self.control.abort(request_id)
        self._finish(request_id, "abort")

    def _fail(self, reason: str) -> None:
        self._dead, self._stopping = reason, True

    def _tell(self, sequence: Sequence, tokens: list[int], reason: str | None, error: str) -> None:
        self._on_output(
            Output(sequence.request_id, tokens, reason, error, num_cached=sequence.num_cached)
        )

    def _finish(self, request_id: str, reason: str, error: str = "") -> None:
        if self.scheduler.finish(request_id, reason) is not None:
            self._on_output(Output(request_id, [], reason, error))

    def _begin_step(self) -> None:
        plan = self.scheduler.plan()
        self.control.tell_blocks_wanted()
        if plan is None:
            return
        rows = []
        for part in plan.scheduled:
            s = part.sequence
            new = s.token_ids[part.first_token : part.first_token + part.num_tokens]
            rows.append(
                (new, part.first_token, s.block_ids, asdict(s.sampling) if part.samples else None)
            )
        assert self._workers is not None
        self._workers.start_step(
            {"step": plan.step, "rows": rows, "control": self.control.plan(plan)}
        )
        self._in_flight = plan

    def _end_step(self, outputs: list[dict[str, Any]]) -> None:
        plan, self._in_flight = self._in_flight, None
        assert plan is not None
        if outputs[0]["step"] != plan.step:
            raise RuntimeError(f"step {outputs[0]['step']} was answered, {plan.step} was asked")
        self.num_steps += 1
        self.control.step_finished(
            plan.step, [RankReport(r, o["control"], Code.OK) for r, o in enumerate(outputs)]
        )
        sampling = [s for s in plan.scheduled if s.samples]
        sampled = {
            s.sequence.request_id: token
            for s, token in zip(sampling, outputs[0]["tokens"], strict=True)
        }
        for sequence, token, finished in self.scheduler.commit(plan, sampled):
            self._tell(sequence, [token], sequence.finish_reason if finished else None, "")

    def _end_all(self) -> None:
        """Nobody is left waiting: what was taken in and what still lies in the inbox is told the end."""
        reason = "error" if self._dead else "abort"
        while self._inbox:
            self._inbox.popleft()()
        for request_id in list(self.scheduler.sequences):
            self.control.abort(request_id)
            self._finish(request_id, reason, self._dead or "the engine was closed")
        if self._dead:
            self._on_fatal(self._dead)
