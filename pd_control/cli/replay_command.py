"""``pdctl replay``: a trace against split engines and against an undivided one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pd_control.cli.load import Job, Result, run_jobs, summarise
from pd_control.cli.options import NO, USAGE, JsonOption, console, fail, print_json, run
from pd_control.cli.replay import TraceError, draw, hand_off_overhead, make_jobs, read_trace


async def measure(
    name: str, url: str, jobs: list[Job], progress: Progress, max_concurrent: int
) -> tuple[list[Result], dict[str, Any]]:
    """Replay against one address, with a progress bar."""
    task = progress.add_task(name, total=len(jobs))
    results, took_s = await run_jobs(
        url, jobs, max_concurrent=max_concurrent, on_done=lambda _: progress.advance(task)
    )
    return results, summarise(results, took_s)


def replay(
    trace: Annotated[Path, typer.Argument(help="Trace file, one JSON request a line.")],
    split: Annotated[str, typer.Option(help="URL of the proxy before P and D; default: own.")] = "",
    undivided: Annotated[str, typer.Option(help="URL of an undivided engine; default: own.")] = "",
    model: Annotated[str, typer.Option(help="Model of the engines that this starts.")] = "tiny",
    requests: Annotated[int, typer.Option("--requests", "-n", help="First N.", min=1)] = 100,
    scale: Annotated[float, typer.Option(help="Factor on all lengths.")] = 0.02,
    speed: Annotated[
        float, typer.Option(help="Arrivals this many times faster; 0: all at once.")
    ] = 1.0,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are cut.", min=2)] = 2048,
    max_output_tokens: Annotated[int, typer.Option(help="Longer outputs are cut.", min=1)] = 64,
    max_concurrent: Annotated[int, typer.Option(help="Open requests at most.", min=1)] = 64,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the figures as JSON.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Save both latency distributions (.svg or .png).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace against P and D engines, and against an undivided engine."""
    try:
        rows = read_trace(trace, requests)
        jobs = make_jobs(
            rows,
            scale=scale,
            speed=speed or math.inf,
            vocab=500,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )
    except (OSError, TraceError, ValueError) as error:
        fail(str(error), USAGE)

    async def main() -> dict[str, Any]:
        series: dict[str, list[Result]] = {}
        report: dict[str, Any] = {
            "trace": trace.name, "requests": len(jobs), "scale": scale, "speed": speed, "model": model,
        }  # fmt: skip
        bar = Progress(
            TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console(), disable=as_json,
        )  # fmt: skip
        with bar as progress:
            async with _engines(split, undivided, model) as urls:
                for name, url in urls.items():
                    series[name], report[name] = await measure(
                        name, url, jobs, progress, max_concurrent
                    )
        report["hand_off"] = hand_off_overhead(series["split"], series["undivided"])
        if picture is not None:
            draw(picture, series, f"{trace.name}: {len(jobs)} requests, lengths × {scale:g}")
        return report

    try:
        report = run(main)
    except RuntimeError as error:
        fail(str(error))
    if output is not None:
        output.write_text(json.dumps(report, indent=2))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["split"]["failed"] or report["undivided"]["failed"]:
        raise typer.Exit(NO)


@contextlib.asynccontextmanager
async def _engines(split: str, undivided: str, model: str) -> AsyncIterator[dict[str, str]]:
    """The two addresses; engines that were not given are started here and ended afterwards."""
    from pd_control.reference.cluster import Cluster

    cluster = Cluster(model=model)
    try:
        if not split:
            await cluster.start_split()
        if not undivided:
            await cluster.start_undivided()
        yield {"split": split or cluster.proxy_url, "undivided": undivided or cluster.undivided_url}
    finally:
        await asyncio.shield(cluster.close())


def _print(report: dict[str, Any]) -> None:
    from pd_control.cli.look import make_table

    table = make_table(
        "", "", "REQUESTS", "FAILED", "TTFT p50", "p90", "p99", "TOKEN GAP p50", "p99", "TOKENS/s",
        right=("REQUESTS", "FAILED", "TTFT p50", "p90", "p99", "TOKEN GAP p50", "TOKENS/s"),
    )  # fmt: skip
    for name in ("split", "undivided"):
        r = report[name]
        first, gap = r["first_token_ms"], r["inter_token_ms"]
        table.add_row(
            name, str(r["requests"]), str(r["failed"]), *(_ms(first[k]) for k in ("p50", "p90", "p99")),
            _ms(gap["p50"]), _ms(gap["p99"]), f"{r['output_tokens_per_s']:.1f}",
        )  # fmt: skip
    out = console()
    out.print(table)
    hand_off = report["hand_off"]
    if hand_off["first_token_ms"]:
        out.print(
            f"split minus undivided TTFT: p50 {_ms(hand_off['first_token_ms']['p50'])}, "
            f"p99 {_ms(hand_off['first_token_ms']['p99'])}; outputs that differ: "
            f"{hand_off['different_outputs']} of {hand_off['requests']}",
            highlight=False,
        )
    for name in ("split", "undivided"):
        for error in report[name]["errors"]:
            out.print(f"{name}: {error}", markup=False, highlight=False)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
