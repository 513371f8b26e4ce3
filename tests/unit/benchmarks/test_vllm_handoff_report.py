"""Samples as figures, and figures as verdicts; no server."""

from __future__ import annotations

from typing import Any

from benchmarks._vllm_report import all_met, judge, rows
from benchmarks._vllm_rows import Samples


def connector(
    excess: dict[str, float], waiting_s: float | None, end: str = "HTTP 500"
) -> dict[str, Any]:
    samples = {
        cell: {"both": Samples([60.0, 60.0], [10.0 + ms] * 2, [10.0] * 2)}
        for cell, ms in excess.items()
    }
    waiting = {"cpu_s_total": waiting_s, "end": end, "ended_after_s": 12.1}
    return {"handoff_ms": rows(samples, {cell: [50.0] for cell in excess}), "waiting": waiting}


def verdict(**connectors: Any) -> dict[str, Any]:
    named = {n.replace("ours", "pd-control"): c for n, c in connectors.items()}
    return judge({"neutral": {"what": "", "connectors": named}})


def test_the_figures_are_differences_of_percentiles() -> None:
    row = connector({"128x1": 3.0}, 1.0)["handoff_ms"]["128x1"]["both"]
    assert row["excess"] == {"p50": 3.0, "p99": 3.0}
    assert row["over_undivided"] == {"p50": 10.0, "p99": 10.0}


def test_half_of_the_best_peer_is_met_and_more_is_not() -> None:
    peers = {"a": connector({"128x1": 6.0}, 20.0), "b": connector({"128x1": 4.0}, 10.0)}
    good = verdict(ours=connector({"128x1": 2.0}, 1.0), **peers)
    assert good["neutral"]["excess"]["128x1"]["best_peer"] == "b"
    assert all_met(good)
    for slow in (connector({"128x1": 2.1}, 1.0), connector({"128x1": 2.0}, 1.1)):
        assert not all_met(verdict(ours=slow, **peers))


def test_a_peer_that_failed_is_not_compared_with_and_ours_that_failed_is_a_miss() -> None:
    broken = {"failed": ["RuntimeError: x"]}
    only = verdict(ours=connector({"128x1": 2.0}, 1.0), a=broken)
    assert only["neutral"]["excess"]["128x1"]["met"] is None
    assert not all_met(verdict(ours=broken, a=connector({"128x1": 4.0}, 1.0)))


def test_a_wait_that_does_not_end_is_a_miss() -> None:
    ours = connector({"128x1": 2.0}, 1.0, end="no answer within 16 s")
    assert verdict(ours=ours)["neutral"]["vain_wait"]["met"] is False


def test_excess_that_grows_with_the_bytes_is_no_sending_by_layers() -> None:
    grows = verdict(ours=connector({"128x1": 1.0, "4096x1": 8.0}, 1.0))
    hidden = verdict(ours=connector({"128x1": -20.0, "4096x1": 1.0}, 1.0))
    assert grows["neutral"]["layer_by_layer"]["met"] is False
    assert hidden["neutral"]["layer_by_layer"]["met"] is True
