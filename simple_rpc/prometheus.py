"""Shows a `Counters` object to Prometheus. Needs the extra `pd-control[prometheus]`.

    registry.register(PrometheusExporter(counters))     # prometheus_client.REGISTRY or your own

Nothing is counted twice and the hot path does not know that Prometheus exists: numbers are copied
out of the counters when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from simple_rpc.metrics import LATENCY_BOUNDS_S, Counters, Histogram


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    rows: list[tuple[str, float]] = []
    running = 0
    for bound, num in zip((*LATENCY_BOUNDS_S, float("inf")), histogram.buckets, strict=True):
        running += num
        rows.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
    return rows


class PrometheusExporter(Collector):
    """A collector over one `Counters`. `prefix` starts every metric's name.

    Exports `<prefix>_calls_total{side,head,code}`, `<prefix>_call_seconds{side,head}`,
    `<prefix>_events_total{event}` and `<prefix>_duration_seconds{what}`.
    Threads: scraped from any thread.
    """

    def __init__(self, counters: Counters, prefix: str = "simple_rpc") -> None:
        self._counters = counters
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        snapshot = self._counters.snapshot()
        prefix = self._prefix
        calls = CounterMetricFamily(
            f"{prefix}_calls",
            "Calls ended, by numeric status code",
            labels=["side", "head", "code"],
        )
        seconds = HistogramMetricFamily(
            f"{prefix}_call_seconds", "Duration of calls", labels=["side", "head"]
        )
        for (side, head), row in snapshot.calls.items():
            for code, num in row.codes.items():
                calls.add_metric([side, head, str(code)], float(num))
            seconds.add_metric([side, head], _cumulative(row.latency), row.latency.total_s)
        events = CounterMetricFamily(f"{prefix}_events", "Things that happened", labels=["event"])
        for name, num in snapshot.counters.items():
            events.add_metric([name], float(num))
        durations = HistogramMetricFamily(
            f"{prefix}_duration_seconds", "Measured durations other than calls", labels=["what"]
        )
        for name, histogram in snapshot.durations.items():
            durations.add_metric([name], _cumulative(histogram), histogram.total_s)
        yield from (calls, seconds, events, durations)
