"""What the connector counts reaches vLLM's log line and its Prometheus registry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pd_control.vllm.connector import PDControlConnector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

COUNTED = {"ended": {"OK": 2, "GONE": 1}, "tokens": 5, "seconds": [0.1, 0.2]}


def test_stats_add_up() -> None:
    empty = PDControlConnector.build_kv_connector_stats()
    counted = PDControlConnector.build_kv_connector_stats(COUNTED)
    assert empty is not None
    assert counted is not None
    assert empty.is_empty()
    assert not counted.is_empty()
    assert empty.aggregate(counted).data == COUNTED
    both = counted.aggregate(counted).reduce()
    assert both["loads OK"] == 4
    assert both["loads GONE"] == 2
    assert both["loaded tokens"] == 10
    assert both["load max (ms)"] == 200


def test_metrics_are_exported_per_engine_and_code() -> None:
    registry = CollectorRegistry()

    def make(kind: type[Counter] | type[Histogram]):  # type: ignore[no-untyped-def]
        def factory(**arguments: object) -> Counter | Histogram:
            return kind(registry=registry, **arguments)  # type: ignore[arg-type]

        return factory

    kinds = {Counter: make(Counter), Histogram: make(Histogram), Gauge: Gauge}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PDControlConnector.build_prom_metrics(
        config, kinds, ["model_name", "engine"], {0: ["m", "0"]}
    )
    assert metrics is not None
    metrics.observe(COUNTED, 0)
    labels = {"model_name": "m", "engine": "0"}
    value = registry.get_sample_value
    assert value("vllm:pd_control_loads_total", {**labels, "code": "OK"}) == 2
    assert value("vllm:pd_control_loads_total", {**labels, "code": "GONE"}) == 1
    assert value("vllm:pd_control_loaded_tokens_total", labels) == 5
    assert value("vllm:pd_control_load_seconds_count", labels) == 2
