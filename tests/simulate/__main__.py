"""``python -m tests.simulate``: run many seeds of the simulation, or replay one.

Exit status 0: every seed held and every kind of event that must be exercised was. 1: a seed failed.
2: the run was long enough, and still something was never exercised.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from pd_control.testing.sim_run import (
    MAX_TRACE_LINES,
    SeedResult,
    run_scenario,
    run_seed,
    shrink,
)
from pd_control.testing.sim_scenario import draw_scenario
from tests.simulate.coverage import MIN_SEEDS, missing

CHUNK_SEEDS = 10


def run_chunk(first: int, count: int) -> list[SeedResult]:
    logging.disable(logging.CRITICAL)  # what a broken rule raises is reported once, by main
    # A world is one big cycle; collecting after each chunk is cheaper than during it.
    gc.disable()
    try:
        return [run_seed(seed) for seed in range(first, first + count)]
    finally:
        gc.enable()
        gc.collect()


def describe(result: SeedResult, small: bool, whole: bool) -> list[str]:
    """A failing seed as text: what broke, how to replay it, and the shortest trace that shows it."""
    scenario = draw_scenario(result.seed)
    lines = [f"seed {result.seed} FAILED: {result.failure}"]
    lines.append(f"  replay: python -m tests.simulate --replay {result.seed} --trace")
    if small:
        scenario = shrink(scenario, result.rule)
        left = [r.request_id for r in scenario.requests]
        lines.append(f"  smaller: requests {left}, faults {[f.kind for f in scenario.faults]}")
    again = run_scenario(scenario, trace=True, whole_trace=whole)
    lines.append(f"  {again.failure or 'did not fail when replayed: the run is not deterministic'}")
    lines += [f"  {spec}" for spec in scenario.instances]
    if len(scenario.requests) <= 4:
        lines += [f"  {request}" for request in scenario.requests]
    text = again.trace if whole else again.trace[-MAX_TRACE_LINES:]
    if len(text) < len(again.trace):
        lines.append(f"  … {len(again.trace) - len(text)} earlier lines (--whole shows all)")
    return lines + ["  " + line for line in text]


def as_details(failures: list[SeedResult]) -> list[dict[str, Any]]:
    """What JSON says of each. Its counts are in the sums; `asdict` would make a Counter of a Counter's
    items of them, which JSON cannot name."""
    return [asdict(replace(failure, counts=Counter())) for failure in failures]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (default 200)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="totals as one JSON object")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed again")
    parser.add_argument("--trace", action="store_true", help="with --replay: print the trace")
    parser.add_argument("--whole", action="store_true", help="the trace of all requests")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a smaller case")
    parser.add_argument("--max-failures", type=int, default=5, help="stop after this many")
    parser.add_argument("--counts", action="store_true", help="print every counter")
    args = parser.parse_args(argv)
    if args.replay is not None:
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            return replay(args)
        finally:
            logging.disable(before)

    began = time.perf_counter()
    counts: Counter[str] = Counter()
    failures: list[SeedResult] = []
    num_seeds = num_requests = num_events = digest = 0
    jobs = max(1, min(args.jobs, -(-args.seeds // CHUNK_SEEDS)))
    last = args.first_seed + args.seeds
    chunks = [
        (first, min(CHUNK_SEEDS, last - first))
        for first in range(args.first_seed, last, CHUNK_SEEDS)
    ]
    with ProcessPoolExecutor(jobs) as pool:
        for results in pool.map(run_chunk, *zip(*chunks, strict=True)) if chunks else ():
            for result in results:
                num_seeds += 1
                num_requests += result.num_requests
                num_events += result.num_events
                digest = (digest * 31 + result.digest) & 0xFFFFFFFFFFFFFFFF
                counts.update(result.counts)
                if result.failure:
                    failures.append(result)
            if len(failures) >= args.max_failures:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    wall_s = time.perf_counter() - began
    unexercised = missing(counts) if num_seeds >= MIN_SEEDS else []
    totals = {
        "seeds": num_seeds,
        "first_seed": args.first_seed,
        "requests": num_requests,
        "events": num_events,
        "wall_s": round(wall_s, 2),
        "seeds_per_s": round(num_seeds / wall_s, 1),
        "jobs": jobs,
        "digest": f"{digest:016x}",
        "failed_seeds": [f.seed for f in failures],
        "never_exercised": unexercised,
    }
    if args.json:
        details = as_details(failures)
        print(json.dumps({**totals, "counts": dict(sorted(counts.items())), "failures": details}))
    else:
        for key, value in totals.items():
            print(f"{key:16} {value}")
        if args.counts:
            for name, count in sorted(counts.items()):
                print(f"  {name:40} {count}")
        for failure in failures[:1]:
            print("\n".join(describe(failure, not args.no_shrink, args.whole)))
        for failure in failures[1:]:
            print(f"seed {failure.seed} FAILED: {failure.failure}")
    return 1 if failures else 2 if unexercised else 0


def replay(args: argparse.Namespace) -> int:
    result = run_seed(args.replay, trace=args.trace, whole_trace=args.whole)
    if args.json:
        print(json.dumps(asdict(result)))
        return 1 if result.failure else 0
    if result.failure and not args.no_shrink:
        print("\n".join(describe(result, True, args.whole)))
    else:
        print("\n".join(result.trace))
        print(f"seed {result.seed}: {result.failure or 'all invariants held'}")
        print(f"  {result.num_events} events, digest {result.digest:016x}")
    return 1 if result.failure else 0


if __name__ == "__main__":
    sys.exit(main())
