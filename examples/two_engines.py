"""Two engines in processes of their own: one prefills, the other decodes.

    python examples/two_engines.py [--tp N] [--prompt-tokens N] [--json]

The engines are the in-memory ones of the testing kit: paged cache, batching, worker processes and
real bytes, but a made-up model whose next token is a checksum of every KV cell before it. So the
tokens below are right only if each byte that P computed arrived where D expected it. One request
goes the single way (D hands it to P), one the dual way (a router gives it to both); then the
stages of each are put on one clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, uninstalled

from pd_control.config import Config
from pd_control.testing.fake_engine import EngineSpec
from pd_control.testing.fake_model import Geometry, oracle
from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.node_process import NodeProcess, NodeSpec
from pd_control.trace import Stage, TimelineRow, TraceEvent, timeline

GEOMETRY = Geometry(num_layers=6, num_heads=8, head_dim=16, block_size_tokens=16)
NEW_TOKENS = 8
WAIT_S = 30.0


class Screen(Protocol):
    """Where the output goes: rich if it is there, plain text if not."""

    def step(self, text: str) -> None: ...

    def result(self, text: str, good: bool) -> None: ...

    def timeline(self, title: str, rows: list[TimelineRow]) -> None: ...


class PlainScreen:
    def step(self, text: str) -> None:
        print(f"· {text}", flush=True)

    def result(self, text: str, good: bool) -> None:
        print(f"{'✓' if good else '✗'} {text}", flush=True)

    def timeline(self, title: str, rows: list[TimelineRow]) -> None:
        print(f"\n{title}")
        print(f"  {'at':>9}  {'+':>8}  {'where':8} stage")
        for row in rows:
            print(
                f"  {row.since_start_s * 1e3:6.2f} ms  {row.since_previous_s * 1e3:5.2f} ms  "
                f"{where(row):8} {row.stage.label + amount(row):30} {bar(row, rows)}"
            )
        print()


class RichScreen:
    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console()

    def step(self, text: str) -> None:
        self._console.print(f"[dim]·[/] {text}")

    def result(self, text: str, good: bool) -> None:
        self._console.print(f"[{'bold green]✓' if good else 'bold red]✗'}[/] {text}")

    def timeline(self, title: str, rows: list[TimelineRow]) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column("at ms", justify="right", no_wrap=True)
        table.add_column("+ ms", justify="right", no_wrap=True, style="dim")
        table.add_column("where", no_wrap=True, min_width=8)
        table.add_column("stage", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in rows:
            color = "cyan" if row.side == "P" else "magenta"
            table.add_row(
                f"{row.since_start_s * 1e3:.2f}",
                f"{row.since_previous_s * 1e3:.2f}",
                f"[{color}]{where(row)}[/]",
                f"{row.stage.label}[dim]{amount(row)}[/]",
                f"[{color}]{bar(row, rows)}[/]",
            )
        self._console.print()
        self._console.print(table)


def screen() -> Screen:
    try:
        return RichScreen()
    except ImportError:
        return PlainScreen()


def where(row: TimelineRow) -> str:
    return row.side if row.rank < 0 else f"{row.side} rank {row.rank}"


def amount(row: TimelineRow) -> str:
    if row.stage is Stage.BOUND:
        return ""
    unit = "blocks" if row.stage is Stage.BLOCKS_LEASED else "tokens"
    return f" ({row.value} {unit})" if row.value else ""


def bar(row: TimelineRow, rows: list[TimelineRow]) -> str:
    """A mark at the row's place on a line as long as the whole."""
    width = 12
    total = rows[-1].since_start_s or 1.0
    at = min(width - 1, int(row.since_start_s / total * width))
    return "─" * at + "●" + " " * (width - 1 - at)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [(i * 7919 + seed * 104_729) % GEOMETRY.vocab_size for i in range(num_tokens)]


def start(name: str, role: Any, tp_size: int) -> NodeProcess:
    engine = EngineSpec(
        geometry=GEOMETRY,
        tp_size=tp_size,
        num_blocks=512,
        max_step_tokens=256,
        workers="process",
        layer_delay_s=0.001,  # what a layer might take
    )
    return NodeProcess(NodeSpec(Config(instance=name, role=role), engine))


def stages(inspect: InspectClient, d: NodeProcess, p: NodeProcess, name: str) -> list[TimelineRow]:
    """The request's events of both processes on one clock, once P's last word is in."""
    mine = inspect.ask(d.address, "request", request_id=name)
    keys = {e[3] for e in mine["events"] if e[3]}
    deadline_s = time.monotonic() + WAIT_S
    theirs: dict[str, Any] = {"events": [], "clock_offset_ns": 0}
    while time.monotonic() < deadline_s:
        theirs = inspect.ask(p.address, "request", request_id="\0none", key=next(iter(keys)))
        if sum(e[1] == Stage.SEND_DONE for e in theirs["events"]) >= p.spec.engine.tp_size:
            break
        time.sleep(0.01)
    return timeline(
        (
            side,
            body["clock_offset_ns"],
            [TraceEvent(e[0], Stage(e[1]), *e[2:]) for e in body["events"]],
        )
        for side, body in (("D", mine), ("P", theirs))
    )


def run(args: argparse.Namespace, out: Screen, stack: ExitStack) -> dict[str, Any]:
    began_s = time.monotonic()
    out.step(
        f"starting a prefill engine (tp {args.tp}) and a decode engine (tp 1): "
        f"{args.tp + 3} processes"
    )
    p, d = start("p0", "prefill", args.tp), start("d0", "decode", 1)
    stack.callback(d.stop)
    stack.callback(p.stop)
    p.wait_ready()
    d.wait_ready()
    inspect = stack.enter_context(InspectClient())
    out.result(
        f"both serve after {time.monotonic() - began_s:.1f} s  (P {p.address}, D {d.address})", True
    )
    report: dict[str, Any] = {"requests": [], "prompt_tokens": args.prompt_tokens}

    def ask(name: str, seed: int, mode: str, before: Callable[[list[int]], object]) -> None:
        tokens = prompt(seed, args.prompt_tokens)
        before(tokens)
        start_s = time.monotonic()
        got = d.ask(
            "decode", request_id=name, prompt=tokens, num_new_tokens=NEW_TOKENS, mode=mode,
            peer=p.name, address=p.address, on_failure="FAIL", timeout_s=WAIT_S,
        )  # fmt: skip
        took_s = time.monotonic() - start_s
        good = got == oracle(tokens, NEW_TOKENS, GEOMETRY)
        rows = stages(inspect, d, p, name)
        out.result(
            f"{args.prompt_tokens} prompt tokens, {len(got)} new in {took_s * 1e3:.0f} ms, "
            f"{'equal to' if good else 'NOT those of'} an undivided engine", good,
        )  # fmt: skip
        out.timeline(f"{name}: from D's engine to D's engine", rows)
        report["requests"].append(
            {
                "request": name,
                "tokens": got,
                "equal_to_undivided": good,
                "seconds": took_s,
                "timeline": [
                    [r.side, r.rank, r.stage.label, round(r.since_start_s, 6)] for r in rows
                ],
            }
        )

    d.ask(
        "decode", request_id="warm-up", prompt=prompt(1, 40), num_new_tokens=1, mode="SINGLE",
        peer=p.name, address=p.address, timeout_s=WAIT_S,
    )  # fmt: skip  # the first request also opens the link and the data connections
    out.step("single-request mode: D hands the prompt to P")
    ask("single", 2, "SINGLE", lambda tokens: None)
    out.step("dual-request mode: a router gives the prompt to both")
    ask(
        "dual",
        3,
        "DUAL",
        lambda tokens: p.submit("prefill", request_id="dual", prompt=tokens),
    )
    leaks = clean(p) + clean(d)
    out.result(
        "nothing is held any more on either side" if not leaks else f"held: {leaks}", not leaks
    )
    report["leaks"] = leaks
    report["seconds"] = time.monotonic() - began_s
    return report


def clean(node: NodeProcess) -> list[str]:
    deadline_s = time.monotonic() + WAIT_S
    while (found := node.ask("leaks")) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return [f"{node.name}: {what}" for what in found]


class Silent:
    def step(self, text: str) -> None: ...

    def result(self, text: str, good: bool) -> None: ...

    def timeline(self, title: str, rows: list[TimelineRow]) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tp", type=int, default=2, help="ranks of the prefill engine (1, 2, 4, 8)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    out: Screen = Silent() if args.json else screen()
    try:
        with ExitStack() as stack:
            report = run(args, out, stack)
    except KeyboardInterrupt:
        print("stopped; both engines have ended", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(report))
    good = not report["leaks"] and all(r["equal_to_undivided"] for r in report["requests"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
