"""A whole engine for tests and examples: fake engine, runtime, workers, in one object.

    with Node(config, spec, plane="loopback", hub=hub) as node:
        node.engine.generate(…)

Workers are threads over a loopback plane, or threads or processes over kvt.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from pd_control.config import Config
from pd_control.engine import DecodeRequest, Mode, OnFailure, WorkerDriver
from pd_control.messages import Topology
from pd_control.runtime.plane import DataPlane
from pd_control.runtime.scheduler import SchedulerRuntime
from pd_control.runtime.worker_side import WorkerSide
from pd_control.testing.fake_engine import EngineSpec, FakeEngine
from pd_control.testing.fake_model import CacheShard
from pd_control.testing.fake_worker import OpenDriver, WorkerSpec
from pd_control.testing.loopback_plane import Hub, LoopbackPlane
from pd_control.trace import Stage

PlaneKind = Literal["loopback", "kvt"]
KVT_ENTRY = "pd_control.testing.kvt_worker:open_kvt_worker"  # loaded only where it is used
READY_TIMEOUT_S = 60.0


def open_worker(
    config: Config,
    spec: WorkerSpec,
    address: str,
    plane: DataPlane,
    on_lost: Callable[[str], None] | None = None,
) -> tuple[WorkerDriver, Callable[[], None]]:
    """A registered `WorkerSide` over `plane`, and what closes it."""
    side = WorkerSide(config, spec.rank, address, plane, on_lost=on_lost)
    side.start()
    return side, side.close


class Node:
    """One engine with its driver. `start` and `stop` in one thread; the rest anywhere."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        *,
        plane: PlaneKind = "loopback",
        hub: Hub | None = None,
        model: str = "",
    ) -> None:
        if plane == "loopback" and hub is None:
            raise ValueError("hub: a loopback plane needs one, shared by all nodes of the test")
        self.config = config
        self.spec = spec
        self._plane = plane
        self._hub = hub
        self._is_stopped = False
        self.engine = FakeEngine(
            spec,
            name=config.instance,
            open_driver=self._open_thread_worker,
            worker_entry=KVT_ENTRY,
        )
        self.runtime = SchedulerRuntime(
            config,
            self.engine,
            topology=Topology(tp_size=spec.tp_size, num_kv_heads=spec.geometry.num_heads),
            block_size_tokens=spec.geometry.block_size_tokens,
            model=model or spec.geometry.name,
        )
        self.engine.attach(prefill=self.runtime.prefill, decode=self.runtime.decode)

    def _open_thread_worker(
        self, shard: CacheShard, spec: WorkerSpec
    ) -> tuple[WorkerDriver, Callable[[], None]]:
        if self._plane == "kvt":
            module, _, name = KVT_ENTRY.partition(":")
            open_kvt: OpenDriver = getattr(importlib.import_module(module), name)
            return open_kvt(shard, spec)
        assert self._hub is not None
        address = str(self.runtime.worker_address)
        return open_worker(self.config, spec, address, LoopbackPlane(shard, self._hub))

    def start(self) -> Node:
        """Listening, every worker registered, the engine running."""
        self.runtime.start()
        try:
            self.engine.worker_options.update(
                config=self.config.to_mapping(show_secrets=True),
                address=str(self.runtime.worker_address),
                is_process=self.spec.workers == "process",
            )
            self.engine.start()
            if not self.runtime.wait_ready(READY_TIMEOUT_S):
                raise TimeoutError(f"{self.config.instance}: ranks missing")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self.engine.stop()
            self.runtime.close()

    def __enter__(self) -> Node:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return self.runtime.advertised_address()

    # -- requests ----------------------------------------------------------------------------------

    def prefill(
        self, request_id: str, prompt: list[int], *, num_takers: int = 1, salt: str = ""
    ) -> Future[list[int]]:
        """P's half of a dual request."""
        return self.engine.generate(
            request_id, prompt, prefill_half=True, num_takers=num_takers, salt=salt
        )

    def decode(
        self,
        request_id: str,
        prompt: list[int],
        num_new_tokens: int,
        *,
        mode: Mode = Mode.SINGLE,
        peer: Node | None = None,
        peer_instance: str = "",
        peer_address: str = "",
        remote_request_id: str = "",
        on_failure: OnFailure | None = None,
        salt: str = "",
        on_token: Callable[[int], None] | None = None,
        **more: Any,
    ) -> Future[list[int]]:
        """D's half, or the whole of a single-mode request. Without a peer discovery decides."""
        if peer is not None:
            peer_instance, peer_address = peer.config.instance, peer.address
        remote = DecodeRequest(
            request_id,
            self.engine.content_of(prompt, salt),
            mode=mode,
            peer_instance=peer_instance,
            peer_address=peer_address,
            remote_request_id=(remote_request_id or request_id) if mode is Mode.DUAL else "",
            payload={"salt": salt},
            on_failure=on_failure,
            **more,
        )
        return self.engine.generate(
            request_id, prompt, num_new_tokens, salt=salt, remote=remote, on_token=on_token
        )

    def on_core(self, function: Callable[[], Any]) -> Any:
        return self.engine.call(function)

    def has_stage(self, stage: Stage) -> bool:
        """Whether any request has reached it in this process."""
        return any(event.stage is stage for event in self.runtime.trace.events())

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the runtime's loop thread and returns its result."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.runtime.call_on_loop(run)
        return done.result(READY_TIMEOUT_S)

    def leaks(self) -> list[str]:
        """What is still held or remembered although nothing should be; empty when all is well.

        For an engine without requests: block references, leases, core tables.
        """
        found: list[str] = []
        for side in (self.runtime.decode, self.runtime.prefill):
            if side is not None:
                leases = self.on_core(functools.partial(list, side.leases))
                found += [f"lease {lease.lease_id} of {lease.request_id}" for lease in leases]
        found += [
            f"block {block} has {n} references"
            for block, n in self.on_core(self.engine.pool.referenced).items()
        ]
        for runner in (self.runtime.decode_runner, self.runtime.prefill_runner):
            if runner is not None and not self.on_loop(runner.core.is_idle):
                found.append(f"the {runner.name} core is not idle")
        return found

    def wait_clean(self, timeout_s: float = 30.0) -> list[str]:
        """Waits until nothing leaks, or returns what does after `timeout_s` (a deadlock guard)."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.02)):
            found = self.leaks()
            if not found:
                return []
            pause.wait(0.02)
        return self.leaks()
