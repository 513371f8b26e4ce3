"""What the connector counts, through vLLM's own hooks: its log line and its Prometheus registry.

The scheduler half of D counts loads; what it counted since the last step travels with vLLM's stats to the API
process, which logs it and keeps the metrics. Nothing travels while no step runs.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    120.0,
)


class LoadStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: ``ended`` (code name → loads), ``tokens`` (loaded), ``seconds`` (of each good load)."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {"ended": {}, "tokens": 0, "seconds": []}

    def is_empty(self) -> bool:
        return not self.data.get("ended")

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        mine, theirs = self.data, other.data
        ended = dict(mine["ended"])
        for code, count in theirs["ended"].items():
            ended[code] = ended.get(code, 0) + count
        return LoadStats(
            {
                "ended": ended,
                "tokens": mine["tokens"] + theirs["tokens"],
                "seconds": mine["seconds"] + theirs["seconds"],
            }
        )

    def reduce(self) -> dict[str, int | float]:
        seconds = sorted(self.data["seconds"])
        found: dict[str, int | float] = {f"loads {c}": n for c, n in self.data["ended"].items()}
        if seconds:
            found["loaded tokens"] = self.data["tokens"]
            found["load p50 (ms)"] = round(seconds[len(seconds) // 2] * 1000, 2)
            found["load max (ms)"] = round(seconds[-1] * 1000, 2)
        return found


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._ended = self._counter_cls(
            name="vllm:pd_control_loads",
            documentation="Loads of a prompt's KV that ended on this D, by code.",
            labelnames=[*labelnames, "code"],
        )
        self._tokens = self._counter_cls(
            name="vllm:pd_control_loaded_tokens",
            documentation="Prompt tokens whose KV was loaded from a P.",
            labelnames=labelnames,
        )
        self._seconds = self._histogram_cls(
            name="vllm:pd_control_load_seconds",
            documentation="From D's blocks to KV that has landed in all of them.",
            buckets=BUCKETS_S,
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for code, count in transfer_stats_data["ended"].items():
            self._ended.labels(*values, code).inc(count)
        self._tokens.labels(*values).inc(transfer_stats_data["tokens"])
        for seconds in transfer_stats_data["seconds"]:
            self._seconds.labels(*values).observe(seconds)
