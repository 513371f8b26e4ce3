"""Counters, histograms and the Prometheus view of them."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from simple_rpc.metrics import LATENCY_BOUNDS_S, MAX_ROWS, OTHER, Counters, Histogram
from simple_rpc.prometheus import PrometheusExporter


def test_calls_are_counted_per_side_head_and_code():
    counters = Counters()
    counters.call("server", "PREF", 1, 0.001)
    counters.call("server", "PREF", 1, 0.002)
    counters.call("server", "PREF", 4, 0.5)
    counters.call("client", "PREF", 0, 0.1)
    rows = counters.snapshot().calls
    assert rows["server", "PREF"].codes == {1: 2, 4: 1}
    assert rows["server", "PREF"].num_calls == 3
    assert rows["server", "PREF"].num_errors == 1
    assert rows["server", "PREF"].latency.total_s == pytest.approx(0.503)
    assert rows["client", "PREF"].num_errors == 0


@pytest.mark.parametrize("index", range(len(LATENCY_BOUNDS_S)))
def test_a_value_on_a_bound_belongs_to_that_bucket_and_above_to_the_next(index):
    histogram = Histogram()
    histogram.add(LATENCY_BOUNDS_S[index])
    histogram.add(LATENCY_BOUNDS_S[index] * 1.0001)
    assert histogram.buckets[index] == 1
    assert histogram.buckets[index + 1] == 1


def test_quantiles():
    histogram = Histogram()
    assert histogram.quantile_s(0.5) == 0.0
    for _ in range(9):
        histogram.add(15e-6)
    histogram.add(100.0)
    assert histogram.quantile_s(0.5) == LATENCY_BOUNDS_S[0]
    assert histogram.quantile_s(0.9) == LATENCY_BOUNDS_S[0]
    assert histogram.quantile_s(0.99) == float("inf")
    with pytest.raises(ValueError, match=r"expected 0\.\.1"):
        histogram.quantile_s(1.5)


def test_a_snapshot_does_not_change_afterwards():
    counters = Counters()
    counters.call("server", "PREF", 0, 0.1)
    counters.count("news.duplicates")
    counters.observe("loop.lag", 0.1)
    before = counters.snapshot()
    counters.call("server", "PREF", 0, 0.1)
    counters.count("news.duplicates", 5)
    counters.observe("loop.lag", 0.1)
    assert before.calls["server", "PREF"].num_calls == 1
    assert before.calls["server", "PREF"].latency.num == 1
    assert before.counters == {"news.duplicates": 1}
    assert before.durations["loop.lag"].num == 1


def test_rows_are_bounded_and_the_rest_is_added_up_not_lost():
    counters = Counters()
    for i in range(MAX_ROWS * 2):
        counters.call("server", f"H{i:03}", 0, 0.1)
        counters.count(f"event.{i}")
        counters.observe(f"what.{i}", 0.1)
    snapshot = counters.snapshot()
    assert len(snapshot.calls) <= MAX_ROWS + 1
    assert sum(row.num_calls for row in snapshot.calls.values()) == MAX_ROWS * 2
    assert snapshot.counters[OTHER] == MAX_ROWS
    assert sum(h.num for h in snapshot.durations.values()) == MAX_ROWS * 2


def test_snapshots_from_another_thread_while_rows_appear():
    counters = Counters()
    done = threading.Event()
    errors: list[BaseException] = []

    def scrape() -> None:
        try:
            while not done.is_set():
                counters.snapshot()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for i in range(20_000):
        counters.call("server", f"H{i % 400}", i % 7, 0.1)
        counters.count(f"event.{i % 400}")
    done.set()
    thread.join()
    assert not errors


def test_prometheus_shows_the_same_numbers():
    counters = Counters()
    counters.call("server", "PREF", 0, 30e-6)
    counters.call("server", "PREF", 4, 3.0)
    counters.count("news.duplicates", 7)
    counters.observe("loop.lag", 20.0)
    registry = CollectorRegistry()
    registry.register(PrometheusExporter(counters))
    text = generate_latest(registry).decode()
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    head = ("head", "PREF"), ("side", "server")
    assert samples["simple_rpc_calls_total", (("code", "0"), *head)] == 1
    assert samples["simple_rpc_calls_total", (("code", "4"), *head)] == 1
    assert samples["simple_rpc_call_seconds_count", head] == 2
    assert samples["simple_rpc_call_seconds_sum", head] == pytest.approx(3.00003)
    assert samples["simple_rpc_call_seconds_bucket", (*head[:1], ("le", "5e-05"), head[1])] == 1
    assert samples["simple_rpc_call_seconds_bucket", (*head[:1], ("le", "3.0"), head[1])] == 2
    assert samples["simple_rpc_events_total", (("event", "news.duplicates"),)] == 7
    assert (
        samples["simple_rpc_duration_seconds_bucket", (("le", "10.0"), ("what", "loop.lag"))] == 0
    )
    assert (
        samples["simple_rpc_duration_seconds_bucket", (("le", "+Inf"), ("what", "loop.lag"))] == 1
    )
    counters.count("news.duplicates")
    assert "8.0" in generate_latest(registry).decode()
