"""Traces become jobs: shared prefixes stay shared, lengths scale, arrivals keep their order."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pd_control.cli.load import Result, percentile, summarise
from pd_control.cli.replay import (
    TraceError,
    TraceRow,
    draw,
    first_token_excess,
    hand_off_figures,
    make_jobs,
    read_trace,
)
from pd_control.cli.stages import StageTimes
from pd_control.trace import Stage

ROWS = [
    TraceRow(1000.0, 1300, 100, (0, 1, 2)),
    TraceRow(3000.0, 1100, 50, (0, 1, 9)),
    TraceRow(3000.0, 40_000, 9000, tuple(range(100, 178))),
]


def jobs(scale: float = 0.1, speed: float = 2.0):  # type: ignore[no-untyped-def]
    return make_jobs(
        ROWS, scale=scale, output_scale=scale, speed=speed, vocab=512, max_prompt_tokens=1000,
        max_output_tokens=64,
    )  # fmt: skip


def test_equal_hash_ids_are_equal_tokens_and_others_are_not() -> None:
    a, b, _ = (j.prompt for j in jobs())
    assert (len(a), len(b)) == (130, 110)
    assert a[:102] == b[:102], "two blocks of 51 tokens are shared"
    assert a[102:110] != b[102:110]
    assert [j.prompt for j in jobs()] == [j.prompt for j in jobs()], "the same in every run"


def test_lengths_are_scaled_and_bounded_and_arrivals_compressed() -> None:
    assert [j.max_tokens for j in jobs()] == [10, 5, 64]
    assert len(jobs()[2].prompt) == 1000
    assert [j.at_s for j in jobs()] == [0.0, 1.0, 1.0]
    assert [j.at_s for j in jobs(speed=math.inf)] == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="must be positive"):
        jobs(scale=0)


def test_a_trace_is_read_with_the_line_of_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = {"timestamp": 5, "input_length": 10, "output_length": 2, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps(r) for r in (good, good | {"timestamp": 1}, {})))
    assert [r.timestamp_ms for r in read_trace(path, limit=2)] == [1, 5]
    with pytest.raises(TraceError, match=r"t\.jsonl:3: KeyError: 'timestamp'"):
        read_trace(path)
    path.write_text(json.dumps(good | {"output_length": 0}))
    with pytest.raises(TraceError, match="lengths must be at least 1"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(path)


def result(name: str, first_s: float | None, tokens: list[int], error: str = "") -> Result:
    return Result(name, 10, first_s, [0.01] * (len(tokens) - 1), 1.0, tokens, error=error)


def test_percentiles_are_nearest_rank() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 1) == 7
    assert math.isnan(percentile([], 50))


def test_a_summary_counts_failures_and_measures_the_rest() -> None:
    found = summarise([result("a", 0.1, [1, 2]), result("b", None, [], "HTTP 500: x")], 2.0)
    assert (found["requests"], found["failed"], found["errors"]) == (2, 1, ["HTTP 500: x"])
    assert found["first_token_ms"]["p50"] == 100.0
    assert found["output_tokens_per_s"] == 1.0


def test_the_overhead_is_paired_and_differing_tokens_are_counted() -> None:
    split = [result("a", 0.15, [1, 2]), result("b", 0.2, [3]), result("c", None, [], "lost")]
    whole = [result("a", 0.10, [1, 2]), result("b", 0.1, [4]), result("c", 0.1, [5])]
    found = first_token_excess(split, whole)
    assert found["requests"] == 2
    assert found["different_outputs"] == 1
    assert found["ms"]["p50"] == 50.0
    assert first_token_excess([], [])["ms"]["p50"] is None


def test_the_hand_off_is_that_of_the_requests_that_had_one() -> None:
    at: StageTimes = {stage: [] for stage in Stage}
    full = at | {Stage.LAYERS_READY: [1.0], Stage.PLACED: [1.002], Stage.ADMITTED: [1.003]}
    results = [result("a", 0.1, [1]), result("b", 0.1, [1]), result("c", 0.1, [1])]
    for r in results:
        r.request_id = f"{r.name}-d"
    found = hand_off_figures(results, {"a-d": full, "b-d": at})
    assert found["requests"] == 1
    assert (found["whole_ms"]["p50"], found["bytes_ms"]["p50"]) == (3.0, 2.0)
    assert found["control_ms"]["p99"] == 1.0


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    draw(path, {"split": [result("a", 0.1, [1, 2])], "undivided": [result("b", 0.2, [1])]}, "t")
    assert "<svg" in path.read_text()
