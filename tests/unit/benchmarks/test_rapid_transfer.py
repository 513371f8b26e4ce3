"""What the rapid-transfer benchmark makes of its samples, and that its goals can be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._rapid_rig import GENERATIONS, Sample
from benchmarks.rapid_transfer import NothingMetError, goals, summarise

LAYERS, STEP_S = 30, 1.5
COST = {"wall_ratio_of_the_substeps": 1.002, "cpu_ratio_of_the_substeps": 0.999}


def sample(generation: str, kind: str, arrived: float) -> Sample:
    """One of an ideal machine: 0.5 ms to the first byte, 3 ms of bytes, 0.5 ms to admit."""
    waits = generation == "step" or (generation == "bypass" and kind == "unfinished")
    first = (STEP_S if waits else arrived) + 0.0005
    in_step = generation == "substep" and kind == "unfinished"
    placed = STEP_S + 0.0002 if in_step else first + 0.003
    return Sample(generation, kind, 0.0, STEP_S, arrived, first, placed, placed, placed + 0.0005)


def ideal() -> list[Sample]:
    points = [0.1, 0.4, 0.7, 1.2]
    kinds = ("unfinished", "finished")
    return [sample(g, k, at) for g in GENERATIONS for k in kinds for at in points]


def judged(samples: list[Sample], **cost: float) -> list[bool]:
    report: dict[str, Any] = summarise(samples, LAYERS, STEP_S)
    report["step_cost"] = COST | cost
    return list(goals(report).values())


def test_figures_of_an_ideal_machine() -> None:
    report = summarise(ideal(), LAYERS, STEP_S)
    assert report["layer_ms"] == 50.0
    assert report["layer_transfer_ms"] == 0.1
    substep = report["generations"]["substep"]["unfinished"]
    assert substep["first_byte_ms"] == {"p50": 0.5, "p99": 0.5, "n": 4}
    assert substep["admitted_after_step_ms"]["p50"] == 0.7
    assert report["generations"]["step"]["finished"]["first_byte_ms"]["p99"] == 1400.5
    assert report["gain_minus_residual_ms_unfinished"]["p50"] == 0.0
    assert judged(ideal()) == [True] * 5


def test_each_goal_can_be_missed() -> None:
    def changed(generation: str, **times: float) -> list[Sample]:
        return [
            replace(s, **{k: getattr(s, k) + by for k, by in times.items()})
            if s.generation == generation
            else s
            for s in ideal()
        ]

    assert judged(changed("substep", first_byte=0.06))[0] is False
    assert judged(changed("substep", admitted=0.001))[1] is False
    assert judged(changed("step", first_byte=-0.1, placed=-0.1))[2] is False
    assert judged(ideal(), wall_ratio_of_the_substeps=1.011)[3] is False
    assert judged(ideal(), cpu_ratio_of_the_substeps=1.011)[4] is False


def test_a_kind_without_a_sample_is_said() -> None:
    left = [s for s in ideal() if (s.generation, s.kind) != ("bypass", "finished")]
    with pytest.raises(NothingMetError, match="no request of bypass, finished, met its step"):
        summarise(left, LAYERS, STEP_S)


def test_the_picture_has_a_line_for_each_and_its_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks._rapid_picture import draw

    draw(tmp_path / "x.svg", ideal(), {})
    svg = (tmp_path / "x.svg").read_text()
    for text in (*GENERATIONS, "unfinished", "ms since P", "first byte +0.5 ms", "D has it"):
        assert text in svg, text
