"""``pdctl replay``: a trace against split engines and against an undivided one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pd_control.cli.endpoints import Asker
from pd_control.cli.load import Job, Result, run_jobs, summarise
from pd_control.cli.options import (
    NO,
    USAGE,
    JsonOption,
    console,
    fail,
    find_given,
    print_json,
    run,
)
from pd_control.cli.replay import (
    TraceError,
    draw,
    first_token_excess,
    hand_off_figures,
    make_jobs,
    read_trace,
)
from pd_control.cli.stages import collect_events, stage_times

PICTURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Engines:
    """What to replay against. A URL that is "" is an engine to be started here and ended afterwards."""

    split: str
    undivided: str
    endpoints: list[str]  # control addresses of the split engines, if they are given
    model: str
    p_tp: int
    d_tp: int
    engine_args: list[str]

    def describe(self) -> dict[str, Any]:
        if self.split and self.undivided:
            return {"split": self.split, "undivided": self.undivided}
        return {"model": self.model, "p_tp": self.p_tp, "d_tp": self.d_tp} | {
            "split": self.split or "started here",
            "undivided": self.undivided or "started here",
        }


@dataclass(frozen=True)
class Running:
    urls: dict[str, str]
    endpoints: list[str]


@contextlib.asynccontextmanager
async def running(engines: Engines, say: Progress) -> AsyncIterator[Running]:
    """The engines, started as far as they are not given; what was started ends with the block."""
    from pd_control.reference.cluster import Cluster

    task = say.add_task("starting engines", total=None)
    cluster = Cluster(
        model=engines.model,
        p_tp=engines.p_tp,
        d_tp=engines.d_tp,
        engine_args=engines.engine_args,
        on_start=lambda name: say.update(task, description=f"starting {name}"),
    )
    try:
        if not engines.undivided:
            await cluster.start_undivided()
        if not engines.split:
            await cluster.start_split()
        say.remove_task(task)
        urls = {
            "split": engines.split or cluster.proxy_url,
            "undivided": engines.undivided or cluster.undivided_url,
        }
        yield Running(urls, engines.endpoints if engines.split else cluster.endpoints)
    finally:
        await asyncio.shield(cluster.close())


async def measure(
    engines: Engines, jobs: list[Job], max_concurrent: int, say: Progress
) -> tuple[dict[str, list[Result]], dict[str, Any]]:
    """Replay against both, one after the other, each with a progress bar."""
    series: dict[str, list[Result]] = {}
    report: dict[str, Any] = {"engines": engines.describe()}
    async with running(engines, say) as targets:
        for name, url in targets.urls.items():
            task = say.add_task(name, total=len(jobs))
            series[name], took_s = await run_jobs(
                url, jobs, max_concurrent=max_concurrent, on_done=partial(_advance, say, task)
            )
            report[name] = summarise(series[name], took_s)
            if name == "split" and targets.endpoints:
                async with Asker(targets.endpoints) as asker:
                    times = stage_times(await collect_events(asker))
                report["hand_off"] = hand_off_figures(series[name], times)
    report["first_token_excess"] = first_token_excess(series["split"], series["undivided"])
    return series, report


def _advance(say: Progress, task: TaskID, _: Result) -> None:
    say.advance(task)


def replay(
    trace: Annotated[Path, typer.Argument(help="Trace file, one JSON request a line.")],
    requests: Annotated[int, typer.Option("--requests", "-n", help="First N.", min=1)] = 100,
    scale: Annotated[float, typer.Option(help="Factor on all lengths.")] = 0.02,
    output_scale: Annotated[
        float, typer.Option(help="Factor on outputs; default: as --scale.", min=0)
    ] = 0.0,
    speed: Annotated[
        float, typer.Option(help="Arrivals this many times faster; 0: all at once.", min=0)
    ] = 1.0,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are cut.", min=2)] = 2048,
    max_output_tokens: Annotated[int, typer.Option(help="Longer outputs are cut.", min=1)] = 64,
    max_concurrent: Annotated[int, typer.Option(help="Open requests at most.", min=1)] = 256,
    model: Annotated[
        str, typer.Option(help="Of the engines started here: tiny, smollm2, a file or folder.")
    ] = "tiny",
    p_tp: Annotated[int, typer.Option(help="Worker processes of P.", min=1)] = 1,
    d_tp: Annotated[int, typer.Option(help="Worker processes of D.", min=1)] = 1,
    blocks: Annotated[int, typer.Option(help="KV blocks of each engine.", min=1)] = 1024,
    threads: Annotated[int, typer.Option(help="Compute threads a worker.", min=1)] = 1,
    split: Annotated[
        str, typer.Option(metavar="URL", help="A proxy before P and D that runs already.")
    ] = "",
    undivided: Annotated[
        str, typer.Option(metavar="URL", help="An undivided engine that runs already.")
    ] = "",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            "-e",
            metavar="ADDRESS",
            help="Control address of a P or D behind --split; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Save the figures as JSON here.")
    ] = Path("pd-replay.json"),
    picture: Annotated[
        Path | None, typer.Option(help="Save both latency distributions (.svg, .png or .pdf).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace against P and D engines, and against an undivided engine.

    Engines are started here and end with it, unless --split and --undivided name some that run. With
    --split, --endpoint names the control addresses of P and D, for the hand-off figures.
    """
    _check_files(output, picture)
    if endpoint and not split:
        fail("--endpoint: only together with --split, engines started here are known", USAGE)
    engines = Engines(
        split.rstrip("/"),
        undivided.rstrip("/"),
        find_given(endpoint),
        model,
        p_tp,
        d_tp,
        ["--blocks", str(blocks), "--threads", str(threads)],
    )
    from pd_control.reference.checkpoint import CheckpointError
    from pd_control.reference.cluster import ClusterError

    try:
        jobs = make_jobs(
            read_trace(trace, requests),
            scale=scale,
            output_scale=output_scale or scale,
            speed=speed or math.inf,
            vocab=_vocab(engines),
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )
    except (OSError, TraceError, CheckpointError, ValueError) as error:
        fail(str(error), USAGE)

    async def main() -> tuple[dict[str, list[Result]], dict[str, Any]]:
        task = asyncio.current_task()
        assert task is not None
        # As Ctrl-C does: what was started here is ended before this ends.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with _progress(as_json) as say:
            return await measure(engines, jobs, max_concurrent, say)

    try:
        series, figures = run(main)
    except ClusterError as error:
        fail(str(error))
    except asyncio.CancelledError:
        fail("ended by SIGTERM")
    report = {
        "trace": trace.name, "requests": len(jobs), "scale": scale, "output_scale": output_scale or scale,
        "speed": speed, **figures,
    }  # fmt: skip
    saved, problem = [output, *([picture] if picture else [])], ""
    try:
        output.write_text(json.dumps(report, indent=2) + "\n")
        if picture is not None:
            draw(picture, series, f"{trace.name}: {len(jobs)} requests, lengths × {scale:g}")
    except OSError as error:  # a full disk: what was measured is at least printed
        saved, problem = [], f"not everything could be saved: {error}"
    if as_json:
        print_json(report)
    else:
        _print(report, saved)
    if problem:
        fail(problem)
    if report["split"]["failed"] or report["undivided"]["failed"]:
        raise typer.Exit(NO)


def _check_files(output: Path, picture: Path | None) -> None:
    """Before minutes of work: can what comes out of it be saved?"""
    for option, path in (("--output", output), ("--picture", picture)):
        if path is not None and not path.parent.is_dir():
            fail(f"{option}: there is no folder {path.parent}", USAGE)
    if picture is None:
        return
    if picture.suffix not in PICTURES:
        fail(f"--picture: expected {', '.join(PICTURES)}, got {picture.name!r}", USAGE)
    if importlib.util.find_spec("matplotlib") is None:
        fail("--picture needs matplotlib: pip install 'pd-control[replay]'", USAGE)


def _vocab(engines: Engines) -> int:
    """Token ids that the engines know; of engines that run already, those that any model knows."""
    if engines.split or engines.undivided:
        return 256
    from pd_control.reference.checkpoint import read_spec

    return read_spec(engines.model).vocab


def _progress(as_json: bool) -> Progress:
    """On stderr if stdout is for a program."""
    out = Console(stderr=True) if as_json else console()
    return Progress(
        TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=out, disable=not out.is_terminal,
    )  # fmt: skip


def _print(report: dict[str, Any], files: Sequence[Path]) -> None:
    from pd_control.cli.look import make_table

    right = (
        "REQUESTS", "FAILED", "PROMPT", "CACHED", "TTFT p50", "p90", "p99", "TOKEN GAP p50", "TOKENS/s",
    )  # fmt: skip
    table = make_table("", "", *right[:-1], "p99", right[-1], right=right)
    for name in ("split", "undivided"):
        r = report[name]
        first, gap = r["first_token_ms"], r["inter_token_ms"]
        table.add_row(
            name, str(r["requests"]), str(r["failed"]), str(r["prompt_tokens"]), str(r["cached_tokens"]),
            *(_ms(first[k]) for k in ("p50", "p90", "p99")),
            _ms(gap["p50"]), _ms(gap["p99"]), f"{r['output_tokens_per_s']:.1f}",
        )  # fmt: skip
    out = console()
    out.print(table)
    hand_off, excess = report.get("hand_off"), report["first_token_excess"]
    if hand_off and hand_off["requests"]:
        whole, rest = hand_off["whole_ms"], hand_off["control_ms"]
        out.print(
            f"hand-off (P's last layer ready → admitted on D): p50 {_ms(whole['p50'])}, p99 "
            f"{_ms(whole['p99'])}; of it neither bytes nor computing: p50 {_ms(rest['p50'])}",
            highlight=False,
        )
    if excess["requests"]:
        out.print(
            f"split minus undivided TTFT: p50 {_ms(excess['ms']['p50'])}, p99 "
            f"{_ms(excess['ms']['p99'])}; outputs that differ: {excess['different_outputs']} of "
            f"{excess['requests']}",
            highlight=False,
        )
    for name in ("split", "undivided"):
        if report[name]["sent_late"]:
            out.print(
                f"{name}: {report[name]['sent_late']} requests were sent late, since "
                "--max-concurrent were open; their times start when they were sent",
                highlight=False,
            )
        for error in report[name]["errors"]:
            out.print(f"{name}: {error}", markup=False, highlight=False)
    if files:
        out.print(f"saved: {', '.join(map(str, files))}", highlight=False)


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f} ms" if abs(value) < 1000 else f"{value / 1e3:.2f} s"
