"""One engine process: core thread, control plane and HTTP face, put together.

``Serving.open`` starts everything in the order in which it must be (control plane, workers, HTTP) and
undoes what it has done if a later part fails; ``Serving.close`` goes the other way. It runs on the
asyncio loop of the HTTP face.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pd_control.config import Config
from pd_control.http.completions import CompletionServer, no_metrics, serve_app
from pd_control.http.front import OUTCOMES, Front
from pd_control.messages import Topology
from pd_control.reference.checkpoint import prepared, read_spec
from pd_control.reference.engine import Engine, EngineConfig, Request
from pd_control.reference.tokenizer import load_tokenizer
from pd_control.runtime.scheduler import SchedulerRuntime

if TYPE_CHECKING:  # they need prometheus_client, which an engine can do without
    from pd_control.http.metrics import Meter
    from pd_control.reference.metrics import ControlCollector

log = logging.getLogger(__name__)

#: Workers register as soon as their weights are loaded, which the engine has waited for already.
REGISTER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServeConfig:
    """An engine and where it listens. ``control`` None: undivided, without a control plane."""

    engine: EngineConfig
    control: Config | None = None
    host: str = "127.0.0.1"
    port: int = 0
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "pd-control")


def make_meter() -> Meter | None:
    """None without ``prometheus_client``; ``/metrics`` then says what to install."""
    if find_spec("prometheus_client") is None:
        return None
    from pd_control.http.metrics import Meter

    return Meter(OUTCOMES)


class Serving:
    """A running engine process. Made by :meth:`open`; ``url`` and ``stopped`` are its public face."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.url = ""
        self.stopped = asyncio.Event()  # set when the engine has died by itself
        self.reason = ""
        self.engine: Engine | None = None
        self.runtime: SchedulerRuntime | None = None
        self._runner: web.AppRunner | None = None
        self._meter: Meter | None = None
        self._control_collector: ControlCollector | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, config: ServeConfig) -> Serving:
        """Start everything; returns when requests can be sent to ``url``.

        Raises:
            CheckpointError, WorkerDiedError, TimeoutError, OSError, ValueError: and nothing is left running.
        """
        serving = cls(config)
        try:
            await serving._open()
        except BaseException:
            await serving.close()
            raise
        return serving

    async def _open(self) -> None:
        config = self.config
        source = await asyncio.to_thread(prepared, config.engine.source, config.cache_dir)
        spec = read_spec(source)
        tokenizer = load_tokenizer(source)
        meter = self._meter = make_meter()
        front = Front(meter)
        engine_config = replace(config.engine, source=source)
        self.engine = Engine(engine_config, spec, front.on_output, self._fatal)
        if config.control is not None:
            self.runtime = SchedulerRuntime(
                config.control,
                self.engine.control,
                topology=Topology(tp_size=config.engine.tp_size, num_kv_heads=spec.num_kv_heads),
                block_size_tokens=config.engine.block_tokens,
                model=spec.name,
            )
            await asyncio.to_thread(self.runtime.start)
            self.engine.attach(
                prefill=self.runtime.prefill,
                decode=self.runtime.decode,
                worker_control=self._worker_control,
            )
        await asyncio.to_thread(self.engine.start)
        if self.runtime is not None and not await asyncio.to_thread(
            self.runtime.wait_ready, REGISTER_TIMEOUT_S
        ):
            raise TimeoutError(f"not every worker registered within {REGISTER_TIMEOUT_S:g} s")
        front.attach(self.engine)
        if meter is not None:
            self._collect(meter)
        server = CompletionServer(
            front,
            tokenizer,
            spec.name,
            metrics=self._metrics if meter is not None else no_metrics,
            on_refused=meter.refused if meter is not None else lambda: None,
            health=lambda: self.reason,
            control_info=self._control_info,
            answer_params=self._answer_params,
        )
        self._runner, port = await serve_app(server.app, config.host, config.port)
        self.url = f"http://{config.host}:{port}"

    async def close(self) -> None:
        """Stop taking requests, end the engine and its workers, close the control plane. Idempotent."""
        if self._runner is not None:
            with contextlib.suppress(Exception):
                await self._runner.cleanup()
            self._runner = None
        if self.engine is not None:
            await asyncio.to_thread(self.engine.close)
        if self.runtime is not None:
            await asyncio.to_thread(self.runtime.close)

    def _collect(self, meter: Meter) -> None:
        from pd_control.reference.metrics import ControlCollector, EngineCollector
        from simple_rpc.prometheus import PrometheusExporter

        assert self.engine is not None
        meter.add(EngineCollector(self.engine))
        if self.runtime is not None:
            self._control_collector = ControlCollector()
            meter.add(self._control_collector)
            meter.add(PrometheusExporter(self.runtime.metrics))

    async def _metrics(self) -> web.Response:
        assert self._meter is not None
        if self.runtime is not None and self._control_collector is not None:
            await self._control_collector.update(self.runtime)
        return self._meter.response()

    def _worker_control(self, rank: int) -> dict[str, Any]:
        assert self.runtime is not None
        assert self.runtime.worker_address is not None
        return {
            "config": self.runtime.config.to_mapping(show_secrets=True),
            "scheduler_address": str(self.runtime.worker_address),
        }

    def _control_info(self) -> dict[str, Any] | None:
        if self.runtime is None or self.runtime.address is None:
            return None
        address = self.runtime.advertised_address()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return {
            "engine_id": self.runtime.me.instance,
            "role": self.runtime.config.role,
            "on_load_failure": self.runtime.config.policy.on_load_failure,
            "after_retries": self.runtime.config.policy.after_retries,
            "control_host": host,
            "control_port": int(port),
        }

    def _answer_params(self, request: Request) -> dict[str, Any] | None:
        """For routers that ask P first: how D finds what P holds now."""
        info = self._control_info()
        if info is None or not (request.control or {}).get("do_remote_decode"):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": request.request_id,
            "remote_engine_id": info["engine_id"],
            "remote_host": info["control_host"],
            "remote_port": info["control_port"],
        }

    def _fatal(self, reason: str) -> None:
        """Core thread: the engine is dead."""
        self.reason = reason
        log.error("the engine has died: %s", reason)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.stopped.set)
