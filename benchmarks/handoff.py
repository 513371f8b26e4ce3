"""From the last layer's event on P to D's request admitted, and split TTFT minus undivided TTFT.

    python -m benchmarks.handoff --json           # the real model: minutes, on two idle cores
    python -m benchmarks.handoff --json --quick   # two requests at each length
    python -m benchmarks.handoff --model tiny     # seconds; computing is not what is measured

One P, one D, a proxy and an undivided engine of the same model run in processes of their own; requests
go one at a time, each prompt once through both. The hand-off is taken from the engines' own stage
events: `ready` the last layer of the step was recorded on P, `placed` its last byte lies in D's memory,
`admitted` D's scheduler took the request. Between `placed` and `admitted` there are no bytes and no
computing: that is the control plane's own part.

p99 of so few rounds is the worst of them.
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
from pd_control.cli.stages import hand_off_s
from pd_control.reference.checkpoint import read_spec, smollm2_path
from pd_control.reference.cluster import Cluster, ClusterError, threads_to_use

#: Prompt tokens → its share of ``--rounds``: a prefill of 4,096 takes a CPU ten seconds, twice a round.
LENGTHS = {128: 1.0, 1024: 1.0, 4096: 0.5}
#: The very first requests open links and data connections; they are not the steady state.
WARMUP = 3


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": round(median(values), 3), "p99": round(percentile(values, 99), 3)}


def say(text: str) -> None:
    """Progress, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Measurement:
    """One request after the other, each prompt once through the undivided engine and once through P and D."""

    def __init__(
        self, cluster: Cluster, http: aiohttp.ClientSession, vocab: int, seed: int
    ) -> None:
        self._cluster, self._http, self._vocab = cluster, http, vocab
        self._rng = random.Random(seed)

    async def once(self, length: int) -> tuple[dict[str, float], bool]:
        """Its figures in milliseconds, and whether the outputs are equal."""
        prompt = [self._rng.randrange(self._vocab) for _ in range(length)]
        job = Job(str(length), 0.0, prompt, 2)
        whole = await complete(self._http, self._cluster.undivided_url, job)
        split = await complete(self._http, self._cluster.proxy_url, job)
        if split.first_token_s is None or whole.first_token_s is None:
            raise RuntimeError(split.error or whole.error or "no token")
        hand_off = hand_off_s(await stages_of(self._cluster.endpoints, split.request_id))
        if hand_off is None:
            raise RuntimeError(f"{split.request_id} did not get its KV from P")
        figures = dict(zip(("handoff_ms", "bytes_ms", "control_ms"), hand_off, strict=True))
        figures["ttft_excess_ms"] = split.first_token_s - whole.first_token_s
        return {k: v * 1e3 for k, v in figures.items()}, split.tokens == whole.tokens


async def measure(cluster: Cluster, rounds: int, vocab: int, seed: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    async with aiohttp.ClientSession() as http:
        measurement = Measurement(cluster, http, vocab, seed)
        for _ in range(WARMUP):
            await measurement.once(min(LENGTHS))
        for length, share in LENGTHS.items():
            count = max(2, round(rounds * share))
            rows = []
            for i in range(count):
                say(f"{length} tokens: {i + 1} of {count}")
                rows.append(await measurement.once(length))
            out[str(length)] = {
                k: spread([figures[k] for figures, _ in rows]) for k in rows[0][0]
            } | {
                "rounds": count,
                "different_outputs": sum(not same for _, same in rows),
            }
    return out


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or ("smollm2" if smollm2_path() else "tiny")
    threads = threads_to_use()
    cluster = Cluster(
        model=model,
        engine_args=["--blocks", "640", "--step-tokens", "4096", "--threads", str(threads)],
        on_start=lambda name: say(f"starting {name}"),
    )
    try:
        await cluster.start_undivided()
        await cluster.start_split()
        figures = await measure(cluster, args.rounds, read_spec(model).vocab, args.seed)
    finally:
        say("")
        await cluster.close()
    return {
        "benchmark": "handoff",
        "model": model,
        "mode": "dual",
        "compute_threads": threads,
        "machine": machine(),
        "by_prompt_tokens": figures,
        "goal": "control_ms p50 <= 1",
        "met": all(f["control_ms"]["p50"] <= 1.0 for f in figures.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON (else a table)")
    parser.add_argument("--model", help="tiny, smollm2, a file or folder (default: smollm2)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="requests at 128 and 1,024 tokens; half of them at 4,096",
    )
    parser.add_argument("--quick", action="store_true", help="two requests at each length")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.rounds = 2 if args.quick else max(1, args.rounds)
    try:
        report = asyncio.run(run(args))
    except KeyboardInterrupt:
        return 130
    except (ClusterError, RuntimeError) as error:
        print(f"handoff: {error}", file=sys.stderr)
        return 2
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
