"""From the last layer's event on P to D's request admitted, and split TTFT minus undivided TTFT.

    python -m benchmarks.handoff --json

One P, one D, a proxy and an undivided engine of the same model run in processes of their own; requests
go one at a time, each prompt once through both. The hand-off is taken from the engines' own stage
events: `ready` the last layer of the step was recorded on P, `placed` its last byte lies in D's memory,
`admitted` D's scheduler took the request. Between `placed` and `admitted` there are no bytes and no
computing: that is the control plane's own part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from statistics import median
from typing import Any

import aiohttp

from benchmarks.stages import machine, stages_of
from pd_control.cli.load import Job, complete, percentile
from pd_control.reference.checkpoint import read_spec, smollm2_path
from pd_control.reference.cluster import Cluster
from pd_control.trace import Stage

LENGTHS = (128, 1024, 4096)
#: The very first requests open links and data connections; they are not the steady state.
WARMUP = 2


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": round(median(values), 3), "p99": round(percentile(values, 99), 3)}


async def measure(cluster: Cluster, rounds: int, vocab: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    out: dict[str, Any] = {}
    async with aiohttp.ClientSession() as http:
        for length in LENGTHS:
            rows: dict[str, list[float]] = {
                k: [] for k in ("handoff_ms", "bytes_ms", "control_ms", "ttft_excess_ms")
            }
            different = 0
            for i in range(rounds + WARMUP):
                prompt = [rng.randrange(vocab) for _ in range(length)]
                job = Job(f"{length}-{i}", 0.0, prompt, 2)
                whole = await complete(http, cluster.undivided_url, job)
                split = await complete(http, cluster.proxy_url, job)
                if split.error or whole.error:
                    raise RuntimeError(split.error or whole.error)
                at = await stages_of(cluster.endpoints, split.request_id)
                if i < WARMUP:
                    continue
                ready, placed = max(at[Stage.LAYERS_READY]), max(at[Stage.PLACED])
                admitted = at[Stage.ADMITTED][-1]
                rows["handoff_ms"].append((admitted - ready) * 1e3)
                rows["bytes_ms"].append((placed - ready) * 1e3)
                rows["control_ms"].append((admitted - placed) * 1e3)
                assert split.first_token_s is not None
                assert whole.first_token_s is not None
                rows["ttft_excess_ms"].append((split.first_token_s - whole.first_token_s) * 1e3)
                different += split.tokens != whole.tokens
            out[str(length)] = {k: spread(v) for k, v in rows.items()} | {
                "rounds": rounds,
                "different_outputs": different,
            }
    return out


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or ("smollm2" if smollm2_path() else "tiny")
    vocab = read_spec(model).vocab
    cluster = Cluster(model=model, engine_args=["--blocks", "640", "--step-tokens", "4096"])
    try:
        await cluster.start_undivided()
        await cluster.start_split()
        figures = await measure(cluster, args.rounds, vocab, args.seed)
    finally:
        await cluster.close()
    return {
        "benchmark": "handoff",
        "model": model,
        "mode": "dual",
        "machine": machine(),
        "by_prompt_tokens": figures,
        "goal": "control_ms p50 <= 1",
        "met": all(f["control_ms"]["p50"] <= 1.0 for f in figures.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON (else a table)")
    parser.add_argument("--model", help="tiny, smollm2, a file or folder (default: smollm2)")
    parser.add_argument("--rounds", type=int, default=8, help="requests per prompt length")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = asyncio.run(run(args))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for length, f in report["by_prompt_tokens"].items():
            row = ", ".join(
                f"{k} p50 {v['p50']} p99 {v['p99']}" for k, v in f.items() if isinstance(v, dict)
            )
            print(f"{length:>6} tokens: {row}")
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
