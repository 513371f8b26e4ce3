"""Request traces as jobs: lengths scaled, arrivals kept or compressed, ``hash_ids`` as shared prefixes.

The format is that of the Mooncake traces: one JSON object a line with ``timestamp`` (ms),
``input_length`` and ``output_length`` (tokens) and ``hash_ids``, one per 512 tokens of the prompt; equal
ids mean equal content.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_control.cli.load import Job, Result, percentile, spread_ms
from pd_control.cli.stages import StageTimes, hand_off_s

#: Tokens that one hash id stands for, in the published traces.
TRACE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A line that is no request; the message says which line and what is wrong."""


@dataclass(frozen=True)
class TraceRow:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first ``limit`` requests of a trace file, in order of arrival.

    Raises:
        TraceError: with the number of the offending line. OSError: no such file.
    """
    rows: list[TraceRow] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                row = TraceRow(
                    float(fields["timestamp"]),
                    int(fields["input_length"]),
                    int(fields["output_length"]),
                    tuple(int(i) for i in fields["hash_ids"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path}:{number}: {type(error).__name__}: {error}") from error
            if row.input_length < 1 or row.output_length < 1:
                raise TraceError(f"{path}:{number}: lengths must be at least 1")
            rows.append(row)
    if not rows:
        raise TraceError(f"{path} holds no request")
    rows.sort(key=lambda r: r.timestamp_ms)
    return rows


def make_jobs(
    rows: Sequence[TraceRow],
    *,
    scale: float,
    output_scale: float,
    speed: float,
    vocab: int,
    max_prompt_tokens: int,
    max_output_tokens: int,
) -> list[Job]:
    """Jobs whose prompts share what the trace says they share.

    Args:
        scale: factor on prompt lengths; 0.01 makes 138 tokens of a mean of 13,800.
        output_scale: factor on output lengths.
        speed: arrivals come this many times faster; ``inf`` sends everything at once.
        max_prompt_tokens, max_output_tokens: longer ones are cut, prompts from their end.
    """
    if min(scale, output_scale, speed) <= 0:
        raise ValueError("scales and speed must be positive")
    block = max(1, round(TRACE_BLOCK_TOKENS * scale))
    blocks: dict[int, list[int]] = {}
    start_ms = rows[0].timestamp_ms
    jobs = []
    for number, row in enumerate(rows):
        length = min(max_prompt_tokens, max(2, round(row.input_length * scale)))
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                rng = random.Random(hash_id)
                blocks[hash_id] = [rng.randrange(vocab) for _ in range(block)]
            prompt += blocks[hash_id]
        rng = random.Random(-1 - number)  # what the ids do not cover is this request's own
        prompt += [rng.randrange(vocab) for _ in range(length - len(prompt))]
        jobs.append(
            Job(
                name=f"t{number}",
                at_s=(row.timestamp_ms - start_ms) / 1e3 / speed,
                prompt=prompt[:length],
                max_tokens=min(max_output_tokens, max(1, round(row.output_length * output_scale))),
            )
        )
    return jobs


def first_token_excess(split: Sequence[Result], whole: Sequence[Result]) -> dict[str, Any]:
    """Split TTFT minus undivided TTFT, request by request; and how many outputs differ."""
    differences = []
    different_outputs = 0
    for s, w in zip(split, whole, strict=True):
        if (
            not s.error
            and not w.error
            and s.first_token_s is not None
            and w.first_token_s is not None
        ):
            differences.append(s.first_token_s - w.first_token_s)
            different_outputs += s.tokens != w.tokens
    return {
        "requests": len(differences),
        "ms": spread_ms(differences),
        "different_outputs": different_outputs,
    }


def hand_off_figures(split: Sequence[Result], times: Mapping[str, StageTimes]) -> dict[str, Any]:
    """What the engines' own stage events say of the hand-off: from P's last layer ready to D's request
    admitted, and of it the part with bytes under way and the part with neither bytes nor computing.

    Requests that needed nothing of P, or were computed on D after all, have no hand-off.
    """
    found = [hand_off_s(times[r.request_id]) for r in split if r.request_id in times]
    whole = [h for h in found if h is not None]
    return {
        "requests": len(whole),
        "whole_ms": spread_ms([h[0] for h in whole]),
        "bytes_ms": spread_ms([h[1] for h in whole]),
        "control_ms": spread_ms([h[2] for h in whole]),
    }


def draw(path: Path, series: Mapping[str, Sequence[Result]], title: str) -> None:
    """Both latency distributions as cumulative curves, one colour an engine; SVG, PNG or PDF by suffix.

    Raises:
        ImportError: matplotlib is not installed. OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, results in series.items():
        firsts = [r.first_token_s * 1e3 for r in results if r.first_token_s is not None]
        gaps = [g * 1e3 for r in results for g in r.gaps_s]
        for axis, values in zip(axes, (firsts, gaps), strict=True):
            if values:
                axis.ecdf(values, label=f"{name} (p50 {percentile(values, 50):.1f} ms)")
    for axis, what in zip(axes, ("time to first token", "time between tokens"), strict=True):
        axis.set_xlabel(f"{what}, ms")
        axis.set_ylabel("share of requests" if "first" in what else "share of tokens")
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)
