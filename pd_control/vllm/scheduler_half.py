"""vLLM's scheduler and the drivers: the half of the connector that lives in the engine core.

Core thread, except :meth:`SchedulerHalf.wake` and :meth:`SchedulerHalf.on_fatal`. It implements
:class:`pd_control.engine.Engine` over vLLM's block pool and request queue, as far as a connector can reach
them:

* what came for the engine is taken from the drivers (`drain`) in every hook, since vLLM calls some hook
  before each thing it does;
* D's loaded requests are reported in ``update_connector_output``, exactly once each: reporting an id
  twice, or one that the scheduler has forgotten, ends the engine;
* D's failed requests travel to the worker half in the step's metadata, since only workers may report
  failures, and only once vLLM has put them into its waiting state;
* blocks are held by references of our own on the pool, so vLLM frees its own at once in every case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pd_control.codes import Code
from pd_control.engine import (
    BlockIds,
    Content,
    DecodeDriver,
    DecodeRequest,
    Mode,
    OnFailure,
    PrefillDriver,
    RankReport,
    Refusal,
    ScheduledRequest,
    identity_digest,
)
from pd_control.protocol.errors import EngineContractError
from pd_control.text import printable
from pd_control.vllm.params import (
    DecodeParams,
    ParamsError,
    PrefillParams,
    answer,
    parse,
    prompt_id,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Ended loads that are remembered for :meth:`SchedulerHalf._new_on_d`, of each kind.
MAX_REMEMBERED = 1024


def _remember(kept: dict[str, None], key: str) -> None:
    kept[key] = None
    if len(kept) > MAX_REMEMBERED:
        del kept[next(iter(kept))]


class _Waiting:
    """One D request between its arrival and the report of its end to vLLM's scheduler."""

    __slots__ = ("allocated_s", "is_allocated", "params", "prompt_id", "request_id", "state", "why")

    def __init__(self, request_id: str, params: DecodeParams) -> None:
        self.request_id = request_id
        self.prompt_id = prompt_id(request_id)  # the samples of one request have it in common
        self.params = params
        #: joined (another sample loads it), wanted, here (nothing to load), loaded, failed, doomed (failed
        #: before vLLM had given it blocks), done
        self.state = "wanted"
        self.why = ""
        self.is_allocated = False
        self.allocated_s = 0.0


class SchedulerHalf:
    """See the module.

    Args:
        prefill, decode: the drivers of this engine's roles.
        model: what the KV is of, beyond the token ids.
        on_load_failure: vLLM's own policy for failed loads, ``fail`` or ``recompute``.
        public: (host, port) that D's are told, and the engine id.
        wake: makes a sleeping core look around; may do nothing.
    """

    def __init__(
        self,
        *,
        prefill: PrefillDriver | None,
        decode: DecodeDriver | None,
        model: str,
        block_tokens: int,
        tp_size: int,
        on_load_failure: str,
        public: Callable[[], tuple[str, int, str]],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._model, self._block_tokens, self._tp_size = model, block_tokens, tp_size
        self._on_failure = OnFailure[on_load_failure.upper()]
        self._public = public
        self._wake = wake
        self._pool: BlockPool | None = None
        self._fatal = ""
        self._step = 0
        # P: vLLM request id → reference, while vLLM runs it; of several samples the first is the one tracked.
        self._references: dict[str, str] = {}
        self._first_of: dict[str, str] = {}
        self._asked: dict[
            str, int
        ] = {}  # blocks asked for in this scheduling pass and not given yet
        # D
        self._waiting: dict[str, _Waiting] = {}
        self._leader: dict[str, str] = {}  # prompt id → the sample that loads the prompt
        self._loaded: list[str] = []  # to report in update_connector_output
        self._stats: dict[str, Any] | None = None
        self._failed: dict[str, str] = {}  # to report by the workers of the next step, and why
        self._told: dict[str, None] = {}  # references whose load has failed, the latest last
        self._given: dict[str, None] = {}  # prompt ids that P will not give again, the latest last

    # -- binding -----------------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def has_news(self) -> bool:
        """Whether a step must run, even an empty one, for something to be told to vLLM."""
        self.drain()
        return bool(self._loaded or self._failed or self._fatal)

    def drain(self) -> None:
        """Take what the drivers have for the engine. Raises RuntimeError once the driver is dead."""
        if self.decode is not None:
            self.decode.drain()
        if self.prefill is not None:
            self.prefill.drain()
        if self._fatal:
            raise RuntimeError(f"pd-control cannot go on in this engine: {self._fatal}")

    # -- hooks of D --------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """A request has arrived. Bad parameters are logged and make it an ordinary request on P, and on D
        one that fails by name when it is scheduled."""
        self.drain()
        try:
            params = parse(request.request_id, request.kv_transfer_params)
        except ParamsError as error:
            log.warning("request %s: kv_transfer_params: %s", request.request_id, error)
            if (request.kv_transfer_params or {}).get("do_remote_prefill") or (
                self.decode is not None and self.prefill is None
            ):
                waiting = _Waiting(request.request_id, DecodeParams("", ""))
                waiting.state, waiting.why = "doomed", str(error)
                self._waiting[request.request_id] = waiting
            return
        if isinstance(params, PrefillParams):
            self._new_on_p(request, params)
        elif isinstance(params, DecodeParams):
            self._new_on_d(request, params)

    def _new_on_d(self, request: Request, params: DecodeParams) -> None:
        if self.decode is None:
            log.warning(
                "request %s: do_remote_prefill, but kv_role has no consumer", request.request_id
            )
            return
        if getattr(request, "abort_immediately", False) and params.reference in self._told:
            # vLLM tells of each answer that was an error by a request that is aborted at once, so that P is
            # told. P knows of this one; and what P has refused may be somebody else's to take.
            return
        waiting = _Waiting(request.request_id, params)
        self._waiting[request.request_id] = waiting
        if waiting.prompt_id in self._given or waiting.prompt_id in self._leader:
            waiting.state = "joined"  # another sample of the same prompt loads it, or has done so
            return
        self._lead(request, waiting)

    def _lead(self, request: Request, waiting: _Waiting) -> None:
        assert self.decode is not None
        params = waiting.params
        self._leader[waiting.prompt_id] = request.request_id
        waiting.state = "wanted"
        self.decode.add(
            DecodeRequest(
                request.request_id,
                self._content(request),
                mode=Mode.DUAL,
                # By its address: routers need not know the instance, and one P must have one link.
                peer_instance=params.address,
                peer_address=params.address,
                remote_request_id=params.reference,
                recompute_tail_tokens=1,
                on_failure=self._on_failure,
            )
        )

    @staticmethod
    def _wanted_end(request: Request) -> int:
        """Tokens that P provides: all of the prompt but the last, which D computes for its logits."""
        return int(request.num_prompt_tokens) - 1

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local hit come from P. Free of side effects towards vLLM; asked
        in every pass until blocks are found, and again after a failed load or a preemption."""
        self.drain()
        if self.prefill is not None:
            missing = int(request.num_tokens) - num_computed
            self._asked[request.request_id] = -(-missing // self._block_tokens)
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.state in ("done", "loaded", "failed"):
            return 0, False
        if waiting.state == "joined":
            if waiting.prompt_id in self._leader:
                return None, False  # asked again when the other sample has its KV, or failed
            # What the other has loaded P does not give twice. A hit is rounded down to a block, so some of it
            # is missing here, and more if D had to use those blocks again: D computes that.
            if waiting.prompt_id in self._given:
                waiting.state = "done"
                return 0, False
            self._lead(request, waiting)
        missing = self._wanted_end(request) - num_computed
        if waiting.state == "doomed":
            # vLLM takes a failure only of a request that waits for KV: let it wait, for nothing.
            return (max(1, missing), True) if self._on_failure is OnFailure.FAIL else (0, False)
        return (missing, True) if missing > 0 else (0, False)

    def will_wait(self, request_ids: Iterable[str]) -> bool:
        """See :meth:`pd_control.vllm.connector.PDControlConnector.will_wait`."""
        return self.prefill is None and all(
            (waiting := self._waiting.get(i)) is not None and waiting.state == "wanted"
            for i in request_ids
        )

    def allocated(self, request: Request, block_ids: BlockIds, num_external: int) -> None:
        """vLLM has given the request blocks. The first time, with external tokens, they are D's
        destination."""
        self._asked.pop(request.request_id, None)
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            return
        if waiting.is_allocated:
            # Admitted, so its blocks are registered now: the other samples find them.
            self._stop_leading(waiting)
            return
        if waiting.state == "doomed" and num_external:
            waiting.is_allocated, waiting.state = True, "failed"
            self._failed[request.request_id] = waiting.why
        if waiting.state != "wanted":
            return
        assert self.decode is not None
        wanted_end = self._wanted_end(request)
        waiting.is_allocated, waiting.allocated_s = True, time.monotonic()
        if not num_external:
            # Everything wanted is here already; P is told by an empty range.
            self.decode.blocks_allocated(request.request_id, block_ids, wanted_end)
            waiting.state = "here"
            _remember(self._given, waiting.prompt_id)
            self._stop_leading(waiting)
            return
        self.decode.blocks_allocated(request.request_id, block_ids, wanted_end - num_external)

    # -- hooks of P --------------------------------------------------------------------------------

    def _new_on_p(self, request: Request, params: PrefillParams) -> None:
        if self.prefill is None:
            log.warning(
                "request %s: do_remote_decode, but kv_role has no producer", request.request_id
            )
            return
        self._references[request.request_id] = params.reference
        if params.reference in self._first_of:
            return  # another sample of the same prompt: the first one's KV is the one held
        try:
            self.prefill.add(params.reference, self._content(request), params.num_takers)
        except (ValueError, EngineContractError):
            # Held already: another sample has finished, or another request took the same transfer_id.
            # The answer names what is held; its digest tells D whether that is what it wants.
            log.info("request %s: %r is held already", request.request_id, params.reference)
            return
        self._first_of[params.reference] = request.request_id

    def build_metadata(self, output: SchedulerOutput) -> tuple[int, bytes | None, list[str]]:
        """One step's metadata: (step number, the workers' plan on P, requests whose load has failed)."""
        self.drain()
        self._step += 1
        plan = None
        if self.prefill is not None:
            for request_id in output.preempted_req_ids or ():
                self._preempted(request_id)
            plan = self.prefill.plan_step(self._step, list(self._scheduled(output)))
            # Asked and given nothing: these wait for blocks.
            self.prefill.blocks_wanted(sum(self._asked.values()))
            self._asked.clear()
        failed = list(self._failed)
        self._failed.clear()
        return self._step, plan, failed

    def _preempted(self, request_id: str) -> None:
        if self.prefill is not None:
            self.prefill.preempted(self._name(request_id))

    def _name(self, request_id: str) -> str:
        """Under which the driver has a request: only the first sample of a prompt is tracked."""
        reference = self._references.get(request_id)
        is_first = reference is not None and self._first_of.get(reference) == request_id
        return reference if reference is not None and is_first else request_id

    def _scheduled(self, output: SchedulerOutput) -> Iterable[ScheduledRequest]:
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            yield self._part(new.req_id, new.num_computed_tokens, counts[new.req_id], new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i] or ()
            yield self._part(request_id, cached.num_computed_tokens[i], counts[request_id], blocks)

    def _part(
        self, request_id: str, first: int, count: int, blocks: Iterable[Iterable[int]]
    ) -> ScheduledRequest:
        return ScheduledRequest(
            self._name(request_id), first, first + count, tuple(tuple(g) for g in blocks)
        )

    def step_reported(self, step: int, acks: dict[int, int | None]) -> None:
        """Every rank's answer of a step: the highest substep that each took."""
        self.drain()
        if self.prefill is not None:
            self.prefill.step_finished(
                step, [RankReport(rank, ack, Code.OK) for rank, ack in sorted(acks.items())]
            )

    def take_stats(self) -> dict[str, Any] | None:
        """Loads that have ended since the last call; see `pd_control.vllm.stats`."""
        stats, self._stats = self._stats, None
        return stats

    def _count(self, code: Code) -> dict[str, Any]:
        if self._stats is None:
            self._stats = {"ended": {}, "tokens": 0, "seconds": []}
        ended = self._stats["ended"]
        ended[code.name] = ended.get(code.name, 0) + 1
        return self._stats

    # -- both --------------------------------------------------------------------------------------

    def take_loaded(self) -> set[str]:
        """Requests whose KV has landed, or that ended while they waited for it: each exactly once."""
        loaded, self._loaded = set(self._loaded), []
        return loaded

    def finished(self, request: Request, succeeded: bool) -> dict[str, Any] | None:
        """vLLM is done with a request, before it frees its own references. Returns what its answer
        carries. ``succeeded``: its prompt is computed and it ended by itself."""
        self.drain()
        self._asked.pop(request.request_id, None)
        self._finish_on_d(request)
        if self.prefill is None:
            return None
        name = self._name(request.request_id)
        reference = self._references.pop(request.request_id, None)
        if name == reference:
            del self._first_of[name]
        outputs = request.output_token_ids
        first_token = int(outputs[0]) if outputs else None
        self.prefill.finished(name, Code.OK if succeeded else Code.ABORTED, first_token)
        if reference is None or not succeeded:
            return None
        host, port, engine_id = self._public()
        return answer(
            reference=reference,
            engine_id=engine_id,
            host=host,
            port=port,
            tp_size=self._tp_size,
            num_tokens=int(request.num_prompt_tokens),
        )

    def _finish_on_d(self, request: Request) -> None:
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is None:
            return
        self._stop_leading(waiting)
        if waiting.state in ("wanted", "here") and self.decode is not None:
            self.decode.abort(request.request_id, "finished or aborted by the engine")
            # It keeps its blocks until its receive is reported; our lease outlives that.
            if waiting.state == "wanted" and waiting.is_allocated:
                self._loaded.append(request.request_id)
                self._wake()

    def _content(self, request: Request) -> Content:
        lora = request.lora_request
        identity = identity_digest(
            self._model,
            adapter=lora.lora_name if lora is not None else "",
            multimodal_hashes=[f.identifier for f in request.mm_features or ()],
            cache_salt=request.cache_salt or "",
        )
        return Content(tuple(request.prompt_token_ids or ()), identity)

    # -- pd_control.engine.Engine --------------------------------------------------------------------

    def hold_blocks(self, block_ids: BlockIds) -> None:
        assert self._pool is not None
        self._pool.touch(self._blocks(block_ids))

    def release_blocks(self, block_ids: BlockIds) -> None:
        assert self._pool is not None
        self._pool.free_blocks(reversed(self._blocks(block_ids)))

    def _blocks(self, block_ids: BlockIds) -> list[Any]:
        assert self._pool is not None
        every = self._pool.blocks
        return [every[i] for group in block_ids for i in group if not every[i].is_null]

    def void_rank(self, rank: int) -> None:
        """vLLM's engine dies with any of its workers: there is nothing left to void."""

    def wake(self) -> None:
        """Any thread."""
        self._wake()

    def on_fatal(self, reason: str) -> None:
        """Loop thread: the next hook raises, which ends the engine core."""
        log.error("pd-control: %s", reason)
        self._fatal = reason
        self._wake()

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        waiting = self._ended(request_id, "loaded")
        if waiting is not None:
            _remember(self._given, waiting.prompt_id)
        if waiting is not None and waiting.is_allocated:
            self._loaded.append(request_id)
            stats = self._count(Code.OK)
            stats["tokens"] += num_tokens
            stats["seconds"].append(time.monotonic() - waiting.allocated_s)

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        text = printable(message)  # it may quote what a client or a peer said
        log.warning("request %s: its KV did not come: %s: %s", request_id, code.name, text)
        waiting = self._ended(request_id, "failed")
        if waiting is None:
            return
        _remember(self._told, waiting.params.reference)
        waiting.why = f"{code.name}: {message}"
        self._count(code)
        if self._leader.get(waiting.prompt_id) == request_id:
            self._stop_leading(waiting)
            self._fail_followers(waiting)
        if waiting.is_allocated:
            self._failed[request_id] = waiting.why
        else:
            waiting.state = "doomed"

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        """The workers' report makes vLLM's own policy recompute it."""
        self.request_failed(request_id, code, message)

    def _ended(self, request_id: str, state: str) -> _Waiting | None:
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        if waiting.state == "here":  # nothing was loaded: vLLM does not wait for us
            waiting.state = "done"
            return None
        waiting.state = state
        return waiting

    def _stop_leading(self, waiting: _Waiting) -> None:
        if self._leader.get(waiting.prompt_id) == waiting.request_id:
            del self._leader[waiting.prompt_id]

    def _fail_followers(self, leader: _Waiting) -> None:
        """What was true for one sample is true for those that waited for it."""
        for other in self._waiting.values():
            if other.state == "joined" and other.prompt_id == leader.prompt_id:
                other.state, other.why = "doomed", leader.why

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        return Refusal(Code.BAD_REQUEST, "single-request mode is not possible through vLLM's hooks")

    def abort_request(self, request_id: str, code: Code, message: str) -> None:
        """A connector cannot end a request of vLLM; it runs to its end and nobody takes its KV."""
