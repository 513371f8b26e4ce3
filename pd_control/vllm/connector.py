"""The class that vLLM loads: ``kv_connector_module_path="pd_control.vllm.connector"``.

The API server, the engine core and the workers all import this module; making an object of one role imports
and starts what that role needs. All methods run on the thread that vLLM calls them on: the core thread for
the scheduler's half, the worker's main thread for the other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pd_control.vllm.bootstrap import Bootstrap
    from pd_control.vllm.scheduler_half import SchedulerHalf
    from pd_control.vllm.worker_half import WorkerHalf

log = logging.getLogger(__name__)

#: Workers load their weights before the scheduler exists, so they are ready to register at once.
REGISTER_TIMEOUT_S = 30.0


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What every worker must know of one step."""

    step: int
    plan: bytes | None
    failed: list[str]


@dataclass
class StepAcks(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the ranks said at the end of one step: rank → highest substep taken (None: no plan)."""

    step: int
    acks: dict[int, int | None] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepAcks)
        if other.step != self.step:
            raise RuntimeError(f"ranks answered for steps {self.step} and {other.step} at once")
        return StepAcks(self.step, {**self.acks, **other.acks})


@dataclass
class WorkerIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker waits to be told its scheduler's address."""

    rank: int
    path: str


class PDControlConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill/decode disaggregation for vLLM by pd-control."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        import vllm

        from pd_control.vllm.settings import check_supported, check_version, make_config

        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        check_version(vllm.__version__, bool(extra.get("allow_untested_version")))
        check_supported(vllm_config)
        self._config = make_config(
            transfer.engine_id,
            transfer.kv_role,
            extra,
            transfer.kv_load_failure_policy,
            data_parallel_index=vllm_config.parallel_config.data_parallel_index,
        )
        model = vllm_config.model_config
        self._model = f"{model.served_model_name or model.model}:{model.dtype}"
        self._num_kv_heads = model.get_total_num_kv_heads()
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._runtime: Any = None
        self._half: SchedulerHalf | None = None
        self._bootstrap: Bootstrap | None = None
        self._worker: WorkerHalf | None = None
        self._forward_context = vllm_config.compilation_config.static_forward_context
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_half(vllm_config)
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            from pd_control.vllm.worker_half import WorkerHalf

            self._worker = WorkerHalf(
                self._config, rank=get_tensor_model_parallel_rank(), tp_size=self._tp_size
            )

    # -- scheduler half ------------------------------------------------------------------------------

    def _start_scheduler_half(self, vllm_config: VllmConfig) -> None:
        from pd_control.messages import Topology
        from pd_control.runtime.scheduler import SchedulerRuntime
        from pd_control.vllm.scheduler_half import SchedulerHalf
        from pd_control.vllm.settings import port_of

        block_tokens = vllm_config.cache_config.block_size
        self._half = half = SchedulerHalf(
            prefill=None,
            decode=None,
            model=self._model,
            block_tokens=block_tokens,
            tp_size=self._tp_size,
            on_load_failure=vllm_config.kv_transfer_config.kv_load_failure_policy,
            public=self._public_address,
        )
        self._runtime = SchedulerRuntime(
            self._config,
            half,
            topology=Topology(tp_size=self._tp_size, num_kv_heads=self._num_kv_heads),
            block_size_tokens=block_tokens,
            model=self._model,
        )
        half.prefill, half.decode = self._runtime.prefill, self._runtime.decode
        self._runtime.start()
        log.warning("pd-control listens on %s", self._runtime.advertised_address())
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if self._runtime.prefill is not None and "bootstrap_port" in extra:
            try:
                self._start_bootstrap(port_of(extra, "bootstrap_port"))
            except BaseException:
                self._runtime.close()
                raise

    def _start_bootstrap(self, port: int) -> None:
        from pd_control.vllm.bootstrap import Bootstrap

        control_host, control_port, engine_id = self._public_address()
        self._bootstrap = Bootstrap(
            self._runtime.address.host, port, engine_id=engine_id,
            control=(control_host, control_port), tp_size=self._tp_size,
        )  # fmt: skip
        log.warning("the bootstrap server listens on port %d", self._bootstrap.port)

    def _public_address(self) -> tuple[str, int, str]:
        from simple_rpc import Address

        address = Address.parse(self._runtime.advertised_address())
        return address.host, address.port, self._config.instance

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Any thread may be woken up by ``wake`` from now on (:mod:`pd_control.vllm.sleeping`)."""
        assert self._half is not None
        self._half.set_wake(wake)

    @property
    def has_news(self) -> bool:
        """Whether the scheduler must run a step for something to be told to vLLM. Core thread."""
        return self._half is not None and self._half.has_news

    def will_wait(self, request_ids: Iterable[str]) -> bool:
        """Whether a step that holds these new requests alone has nothing for a worker, as far as is known
        before it is scheduled: each will wait for its KV, and this engine is nobody's P. Core thread."""
        return self._half is not None and self._half.will_wait(request_ids)

    @staticmethod
    def needs_no_worker(metadata: KVConnectorMetadata | None) -> bool:
        """Whether this part of a step that computes nothing may go unsaid. Core thread."""
        return isinstance(metadata, StepMetadata) and metadata.plan is None and not metadata.failed

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Every worker has said where it waits: tell it our address, and wait until it has registered."""
        from pd_control.vllm.worker_half import introduce

        for found in metadata.values():
            introduce(found.path, str(self._runtime.worker_address))
        if not self._runtime.wait_ready(REGISTER_TIMEOUT_S):
            raise TimeoutError(f"not every worker registered within {REGISTER_TIMEOUT_S:g} s")

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self._half is not None
        self._half.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        assert self._half is not None
        self._half.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._half is not None
        return self._half.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._half is not None
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        self._half.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._half is not None
        return StepMetadata(*self._half.build_metadata(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._half is not None
        acks = connector_output.kv_connector_worker_meta
        if isinstance(acks, StepAcks):
            self._half.step_reported(acks.step, acks.acks)
        loaded = self._half.take_loaded()
        if loaded:
            connector_output.finished_recving = (
                connector_output.finished_recving or set()
            ) | loaded

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        from vllm.v1.request import RequestStatus

        assert self._half is not None
        succeeded = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        return False, self._half.finished(request, succeeded)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counted = None if self._half is None else self._half.take_stats()
        if counted is None:
            return None
        from pd_control.vllm.stats import LoadStats

        return LoadStats(counted)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """API process."""
        from pd_control.vllm.stats import LoadStats

        found = LoadStats(data or {})
        if data is None:
            found.reset()
        return found

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """API process."""
        from pd_control.vllm.stats import LoadMetrics

        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        """Asked when the core is about to sleep: the last moment to take what came for it."""
        return self.has_news

    # -- worker half ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.register(
            kv_caches,
            self._kv_cache_config,
            self._forward_context,
            model=self._model,
            num_kv_heads=self._num_kv_heads,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return WorkerIntroduction(self._worker.rank, self._worker.introduction_path)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            m = connector_metadata
            self._worker.begin_step(m.step, m.plan, m.failed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to start: the receiver places KV on its own as it comes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request that waits for KV is in no step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        stream = 0
        if kv_layer.is_cuda:
            import torch

            stream = torch.cuda.current_stream().cuda_stream
        self._worker.layer_done(layer_name, stream)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        failed = self._worker.take_failed()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        step, rank, ack = self._worker.ack
        return StepAcks(step, {rank: ack})

    # -- both ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        for server in (self._bootstrap, self._runtime):
            with contextlib.suppress(Exception):
                if server is not None:
                    server.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer events are recorded by Python hooks, which a full CUDA graph would not replay."""
        return True
