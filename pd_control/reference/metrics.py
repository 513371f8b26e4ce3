"""What a reference engine and its control plane tell Prometheus. Needs ``prometheus_client``."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pd_control.reference.engine import Engine
from pd_control.reference.scheduler import Status
from pd_control.runtime.inspect import Inspector
from pd_control.runtime.scheduler import SchedulerRuntime

#: The loop thread answers in a few milliseconds; past this it does not answer at all.
ANSWER_TIMEOUT_S = 2.0


class EngineCollector:
    """Blocks, sequences and steps of an engine. The numbers belong to its core thread and are read one by
    one from another: each is right, two may be a step apart."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        pool, scheduler = self._engine.pool, self._engine.scheduler
        blocks = GaugeMetricFamily("pd_kv_blocks", "KV blocks by state", labels=["state"])
        free = pool.num_free
        blocks.add_metric(["free"], free)
        blocks.add_metric(["held"], pool.num_blocks - free)
        yield blocks
        sequences = GaugeMetricFamily(
            "pd_sequences", "Sequences in the engine by status", labels=["status"]
        )
        statuses = [s.status for s in list(scheduler.sequences.values())]
        for status in (Status.WAITING, Status.PARKED, Status.RUNNING):
            sequences.add_metric([status.value], statuses.count(status))
        yield sequences
        yield CounterMetricFamily("pd_steps", "Steps computed", value=self._engine.num_steps)
        tokens = self._engine.control.num_tokens_loaded
        yield CounterMetricFamily(
            "pd_kv_loaded_tokens", "Tokens whose KV came from a P", value=tokens
        )
        yield CounterMetricFamily(
            "pd_kv_loaded_bytes", "Bytes of KV placed here for them, over all ranks",
            value=tokens * self._engine.kv_bytes_per_token,
        )  # fmt: skip


class ControlCollector:
    """The control plane's own tables and counters, from an answer to INSPECT ``process``."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None

    async def update(self, runtime: SchedulerRuntime) -> None:
        """Ask the runtime's loop thread; without an answer in time ``pd_control_answers`` is 0."""
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(Inspector(runtime).process())
            except Exception as error:
                answer.set_exception(error)

        runtime.call_on_loop(ask)
        try:
            self.body = await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.body = None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pd_control_answers", "1 if the control plane answers", value=float(bool(self.body))
        )
        if self.body is None:
            return
        pinned = GaugeMetricFamily(
            "pd_control_leased_blocks", "Blocks pinned by leases", labels=["side", "kind"]
        )
        leases = CounterMetricFamily(
            "pd_control_leases", "Leases taken and released", labels=["side", "kind", "what"]
        )
        tables = GaugeMetricFamily(
            "pd_control_table_rows", "Rows of the control plane's tables", labels=["side", "table"]
        )
        events = CounterMetricFamily(
            "pd_control_events", "Things the state machines counted", labels=["side", "event"]
        )
        for side, s in self.body["sides"].items():
            for kind, count in s["leased_blocks"].items():
                pinned.add_metric([side, kind], count)
            for what in ("acquired", "released"):
                for kind, count in s[f"leases_{what}"].items():
                    leases.add_metric([side, kind, what], count)
            for table, count in s["core"]["tables"].items():
                tables.add_metric([side, table], count)
            for event, count in s["core"]["counters"].items():
                events.add_metric([side, event], count)
        yield from (pinned, leases, tables, events)
        yield GaugeMetricFamily(
            "pd_control_ranks_missing", "Workers not registered",
            value=len(self.body["ranks_missing"]),
        )  # fmt: skip
