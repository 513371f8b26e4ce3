"""TRANSFER_KV in the middle of a long step: how soon the KV moves, in three generations of the action.

    python -m benchmarks.rapid_transfer --json [--picture docs/images/rapid_transfer.svg]

`step` waits for the next main step, `bypass` sends complete KV at once and leaves the rest to the step's
end, `substep` joins the running step. Three P's, one of each generation, and one D take turns. In each
round P prefills several prompts in one long step; D's TRANSFER_KVs for some of them arrive at random
moments of it (*unfinished*), others ask for KV that P has held since before (*finished*). A small request
that rode the main step from its beginning is the probe: when its last layer is handed over, the step's
last event has come. All times are from the engines' own stage events, on one clock:

`first_byte_ms`
    from TRANSFER_KV's arrival at P to its first layer handed to the data connection;
`admitted_after_step_ms`
    from the step's last event to D's scheduler taking the request (unfinished requests);
`residual_step_ms`
    from the arrival to the step's last event: what `step` must wait and `substep` need not;
`layer_transfer_ms`
    one layer's share of a whole transfer of the same size, sent when P was idle.

The step's cost is taken on the same P with and without fifty substeps in the step. On one machine the
fifty requests themselves (D, its client, P's own scheduler) disturb whatever else computes; so the same is
done on the P that makes no substeps of them, and the goal is for the ratio of the two. P's forward threads
get a core of their own meanwhile. `wall` is from P's rank, `cpu` the forward thread's own processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks._rapid_rig import (
    FINISHED,
    GENERATIONS,
    UNFINISHED,
    CostStep,
    Rig,
    Sample,
    pin_forward_threads,
)
from benchmarks.stages import machine
from pd_control.cli.load import percentile
from pd_control.reference.checkpoint import read_spec, smollm2_path
from pd_control.reference.cluster import Cluster


class NothingMetError(RuntimeError):
    """There is nothing to summarise."""


def spread(values: list[float]) -> dict[str, float | int]:
    return {
        "p50": round(median(values), 3),
        "p99": round(percentile(values, 99), 3),
        "n": len(values),
    }


async def step_cost(rig: Rig, rounds: int) -> dict[str, Any]:
    """Arms take turns; each ratio is of one P with itself in one round, and the median of all rounds."""
    is_pinned = pin_forward_threads(rig)
    arms = [(p, asks) for p in ("substep", "bypass") for asks in (False, True)]
    found: dict[tuple[str, bool], list[CostStep]] = {arm: [] for arm in arms}
    for i in range(rounds + 1):
        for arm in arms if i % 2 else arms[::-1]:
            step = await rig.cost_step(*arm)
            if i:  # the first round only warms up
                found[arm].append(step)
    wall = {arm: await rig.wall_s(steps) for arm, steps in found.items()}
    cpu = {arm: [step.cpu_s for step in steps] for arm, steps in found.items()}

    def ratio(times: dict[tuple[str, bool], list[float]], p: str) -> float:
        pairs = zip(times[p, False], times[p, True], strict=True)
        return median(with_ / alone for alone, with_ in pairs)

    out: dict[str, Any] = {
        "rounds": rounds,
        "forward_thread_has_its_core": is_pinned,
        "alone_ms": round(median(wall["substep", False]) * 1e3, 1),
        "substeps_in_step": round(median(step.substeps for step in found["substep", True])),
    }
    for name, times in (("wall", wall), ("cpu", cpu)):
        sub, control = ratio(times, "substep"), ratio(times, "bypass")
        out[f"{name}_ratio"] = round(sub, 4)
        out[f"{name}_ratio_of_the_same_requests_without_substeps"] = round(control, 4)
        out[f"{name}_ratio_of_the_substeps"] = round(sub / control, 4)
    return out


def summarise(samples: list[Sample], layers: int, step_s: float) -> dict[str, Any]:
    """Per generation and kind, p50 and p99 of every figure."""
    report: dict[str, Any] = {
        "step_ms": round(step_s * 1e3, 1),
        "layer_ms": round(step_s * 1e3 / layers, 2),
        "generations": {},
    }
    for g in GENERATIONS:
        report["generations"][g] = {}
        for kind in ("unfinished", "finished"):
            rows = [s.figures() for s in samples if (s.generation, s.kind) == (g, kind)]
            if not rows:
                raise NothingMetError(
                    f"no request of {g}, {kind}, met its step in {len(samples)} samples: the machine is "
                    "too busy for the moments that were drawn; try again alone, or with more --rounds"
                )
            report["generations"][g][kind] = {k: spread([r[k] for r in rows]) for k in rows[0]}
    whole = [
        (s.placed - s.first_byte) * 1e3 / layers
        for s in samples
        if (s.generation, s.kind) == ("step", "unfinished")
    ]
    report["layer_transfer_ms"] = round(median(whole), 3)
    for kind in ("unfinished", "finished"):
        soon = report["generations"]["substep"][kind]["first_byte_ms"]["p50"]
        errors = [
            s.first_byte_ms - soon - s.residual_ms
            for s in samples
            if (s.generation, s.kind) == ("step", kind)
        ]
        report[f"gain_minus_residual_ms_{kind}"] = spread(errors)
    return report


def goals(report: dict[str, Any]) -> dict[str, bool]:
    sub = report["generations"]["substep"]
    first = max(sub[kind]["first_byte_ms"]["p99"] for kind in ("unfinished", "finished"))
    error = max(
        abs(report[f"gain_minus_residual_ms_{kind}"]["p50"]) for kind in ("unfinished", "finished")
    )
    cost = report["step_cost"]
    return {
        "first byte within one layer + 2 ms (p99)": first <= report["layer_ms"] + 2,
        "D admitted within one layer's transfer + 1 ms of the step's last event (p50)": (
            sub["unfinished"]["admitted_after_step_ms"]["p50"] <= report["layer_transfer_ms"] + 1
        ),
        "gain over `step` is the residual step, within 1 % of the step (p50)": (
            error <= 0.01 * report["step_ms"]
        ),
        "50 substeps cost the step at most 1 % of wall time": (
            cost["wall_ratio_of_the_substeps"] <= 1.01
        ),
        "50 substeps cost the forward thread at most 1 % of CPU time": (
            cost["cpu_ratio_of_the_substeps"] <= 1.01
        ),
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or ("smollm2" if smollm2_path() else "tiny")
    spec = read_spec(model)
    report: dict[str, Any] = {
        "benchmark": "rapid_transfer", "model": model, "tokens": args.tokens, "machine": machine(),
    }  # fmt: skip
    cluster = Cluster(
        model=model,
        engine_args=["--blocks", "384", "--step-tokens", str(args.tokens + 64)],
        env={"PD_CONTROL__DEADLINES__HEARTBEAT_S": "10"},  # what shares one core may be late
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        rig = Rig(cluster, http, spec.vocab, args.tokens, random.Random(args.seed))
        try:
            await rig.open()
            for g in (*GENERATIONS, GENERATIONS[-1]):  # links, connections, and how long a step is
                await rig.round(g, [0.5] * (UNFINISHED + FINISHED))
            rig.asked.clear()
            steps = []
            for number in range(args.rounds):
                points = [rig.rng.uniform(0.03, 0.88) for _ in range(UNFINISHED + FINISHED)]
                for g in GENERATIONS:  # the same moments for all three
                    say(args, f"round {number + 1} of {args.rounds}, {g}")
                    await rig.round(g, points)
                    steps.append(rig.step_s)
            samples = await rig.samples()
            say(args, f"step cost, {args.cost_rounds} rounds")
            report |= summarise(samples, spec.num_layers, median(steps))
            report["step_cost"] = await step_cost(rig, args.cost_rounds)
        finally:
            await rig.close()
    say(args, "")
    report["goals"] = goals(report)
    if args.picture:
        from benchmarks._rapid_picture import draw

        draw(Path(args.picture), samples, report)
    return report


def say(args: argparse.Namespace, text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--model", help="tiny, smollm2, a file or folder (default: smollm2)")
    parser.add_argument("--tokens", type=int, default=512, help="prompt tokens of the long step")
    parser.add_argument("--rounds", type=int, default=7, help="long steps a generation")
    parser.add_argument("--cost-rounds", type=int, default=4, help="steps for each arm of the cost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", help="also draw it (.svg or .png; needs the extra replay)")
    try:
        report = asyncio.run(run(parser.parse_args()))
    except RuntimeError as error:  # an engine failed a request, or no sample met its step
        print(f"rapid_transfer: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0 if all(report["goals"].values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
