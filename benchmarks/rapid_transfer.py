"""TRANSFER_KV in the middle of a long step: how soon the KV moves, in three generations of the action.

    python -m benchmarks.rapid_transfer --json [--picture docs/images/rapid_transfer.svg]

`step` waits for the next main step, `bypass` sends complete KV at once and leaves the rest to the step's
end, `substep` joins the running step. P prefills a prompt in one long step; at a random moment in it D's
TRANSFER_KV arrives (*unfinished* requests), or D asks for another request's KV that is complete
(*finished* requests) while such a step runs. All times are from the engines' own stage events, on one
clock:

`first_byte_ms`
    from TRANSFER_KV's arrival at P to its first layer handed to the data connection;
`admitted_after_step_ms`
    from the step's last layer event to D's scheduler taking the request (unfinished requests);
`residual_step_ms`
    from the arrival to that last layer event: what `step` must wait and `substep` need not.
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

from benchmarks.stages import machine, stages_of
from pd_control.cli.load import Job, Result, complete, percentile
from pd_control.reference.checkpoint import read_spec, smollm2_path
from pd_control.reference.cluster import Cluster
from pd_control.trace import Stage

GENERATIONS = ("step", "bypass", "substep")


def spread(values: list[float]) -> dict[str, float | int]:
    return {
        "p50": round(median(values), 3),
        "p99": round(percentile(values, 99), 3),
        "n": len(values),
    }


class Pair:
    """A P of one generation and a D."""

    def __init__(
        self, model: str, generation: str, vocab: int, long_tokens: int, seed: int
    ) -> None:
        self.cluster = Cluster(
            model=model,
            engine_args=["--blocks", "1024", "--step-tokens", "8192"],
            prefill_args=["--generation", generation],
        )
        self.generation, self.vocab, self.long_tokens = generation, vocab, long_tokens
        self.rng = random.Random(seed)
        self.step_s = 0.0
        self._count = 0

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(tokens)]

    def name(self) -> str:
        self._count += 1
        return f"{self.generation}-{self._count}"

    async def open(self, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(
            self.cluster.start_engine("p", "prefill", ["--generation", self.generation]),
            self.cluster.start_engine("d", "decode"),
        )
        async with http.get(self.cluster.children["p"].url + "/pd") as answer:
            self.p_info = await answer.json()
        for _ in range(2):  # links and data connections; and how long the long step takes
            loop = asyncio.get_running_loop()
            began = loop.time()
            name = self.name()
            left = self.prefill(http, name, prompt := self.prompt(self.long_tokens))
            await left
            self.step_s = loop.time() - began
            await self.decode(http, name, prompt)

    async def prefill(self, http: aiohttp.ClientSession, name: str, prompt: list[int]) -> None:
        body = {
            "prompt": prompt, "max_tokens": 1, "request_id": name,
            "kv_transfer_params": {"do_remote_decode": True, "transfer_id": name},
        }  # fmt: skip
        url = self.cluster.children["p"].url + "/v1/completions"
        async with http.post(url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())

    async def decode(self, http: aiohttp.ClientSession, name: str, prompt: list[int]) -> Result:
        params = {
            "do_remote_prefill": True, "transfer_id": name, "on_failure": "fail",
            "remote_engine_id": self.p_info["engine_id"],
            "remote_host": self.p_info["control_host"], "remote_port": self.p_info["control_port"],
        }  # fmt: skip
        job = Job(name, 0.0, prompt, 1)
        url = self.cluster.children["d"].url
        result = await complete(http, url, job, kv_transfer_params=params, request_id=f"{name}-d")
        if result.error:
            raise RuntimeError(result.error)
        return result

    async def unfinished(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """TRANSFER_KV for the request that is in the running step."""
        name, prompt = self.name(), self.prompt(self.long_tokens)
        left = asyncio.ensure_future(self.prefill(http, name, prompt))
        await asyncio.sleep(self.step_s * self.rng.uniform(0.15, 0.8))
        await self.decode(http, name, prompt)
        await left
        at = await stages_of(self.cluster.endpoints, f"{name}-d")
        arrived, ready = at[Stage.MESSAGE_RECEIVED][0], max(at[Stage.LAYERS_READY])
        return {
            "first_byte_ms": (await self.first_byte(f"{name}-d", at) - arrived) * 1e3,
            "admitted_after_step_ms": (at[Stage.ADMITTED][-1] - ready) * 1e3,
            "admitted_after_arrival_ms": (at[Stage.ADMITTED][-1] - arrived) * 1e3,
            "residual_step_ms": (ready - arrived) * 1e3,
        }

    async def finished(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """TRANSFER_KV for a request that P holds, while a long step of another runs."""
        name, prompt = self.name(), self.prompt(256)
        await self.prefill(http, name, prompt)
        other = asyncio.ensure_future(
            self.prefill(http, self.name(), self.prompt(self.long_tokens))
        )
        await asyncio.sleep(self.step_s * self.rng.uniform(0.15, 0.6))
        await self.decode(http, name, prompt)
        await other
        at = await stages_of(self.cluster.endpoints, f"{name}-d")
        arrived = at[Stage.MESSAGE_RECEIVED][0]
        return {
            "first_byte_ms": (await self.first_byte(f"{name}-d", at) - arrived) * 1e3,
            "admitted_after_arrival_ms": (at[Stage.ADMITTED][-1] - arrived) * 1e3,
        }

    async def first_byte(self, request_id: str, at: dict[Stage, list[float]]) -> float:
        """When the first layer was handed to its connection: BOUND carries the time from then on."""
        from pd_control.cli.endpoints import Asker
        from pd_control.cli.look import stage_events

        async with Asker(self.cluster.endpoints) as asker:
            answers = [a for a in await asker.ask_all("events", limit=1000) if a.ok]
        keys = {
            e.key
            for a in answers
            for e in stage_events(a.body)
            if e.request_id == request_id and e.key
        }
        waits = [
            (e.at_ns + a.body["clock_offset_ns"]) / 1e9 + e.value / 1e6
            for a in answers
            for e in stage_events(a.body)
            if e.stage is Stage.BOUND and e.key in keys
        ]
        return min(waits)


async def step_cost(pair: Pair, http: aiohttp.ClientSession, rounds: int) -> dict[str, Any]:
    """The long step's own duration with fifty TRANSFER_KV in it, against the same step without."""
    loop = asyncio.get_running_loop()
    times: dict[str, list[float]] = {"alone": [], "with_50": []}
    for i in range(2 * rounds):
        kind = "with_50" if i % 2 else "alone"
        small = [(pair.name(), pair.prompt(24)) for _ in range(50 if kind == "with_50" else 0)]
        await asyncio.gather(*(pair.prefill(http, n, p) for n, p in small))
        began = loop.time()
        step = asyncio.ensure_future(pair.prefill(http, pair.name(), pair.prompt(pair.long_tokens)))
        await asyncio.sleep(pair.step_s * 0.1)
        others = [asyncio.ensure_future(pair.decode(http, n, p)) for n, p in small]
        await step
        times[kind].append(loop.time() - began)
        await asyncio.gather(*others)
    alone, loaded = median(times["alone"]), median(times["with_50"])
    return {"alone_ms": round(alone * 1e3, 1), "with_50_ms": round(loaded * 1e3, 1),
            "ratio": round(loaded / alone, 4)}  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or ("smollm2" if smollm2_path() else "tiny")
    spec = read_spec(model)
    report: dict[str, Any] = {
        "benchmark": "rapid_transfer", "model": model, "prompt_tokens": args.tokens,
        "machine": machine(), "generations": {},
    }  # fmt: skip
    samples: dict[str, list[dict[str, float]]] = {}
    async with aiohttp.ClientSession() as http:
        for generation in GENERATIONS:
            pair = Pair(model, generation, spec.vocab, args.tokens, args.seed)
            try:
                await pair.open(http)
                unfinished = [await pair.unfinished(http) for _ in range(args.rounds)]
                finished = [await pair.finished(http) for _ in range(args.rounds)]
                cost = await step_cost(pair, http, 3) if generation == "substep" else None
            finally:
                await pair.cluster.close()
            samples[generation] = unfinished
            report["generations"][generation] = {
                "step_ms": round(pair.step_s * 1e3, 1),
                "layer_ms": round(pair.step_s * 1e3 / spec.num_layers, 2),
                "unfinished": {k: spread([r[k] for r in unfinished]) for k in unfinished[0]},
                "finished": {k: spread([r[k] for r in finished]) for k in finished[0]},
            } | ({"step_cost": cost} if cost else {})
    found = report["generations"]
    sub = found["substep"]
    report["goals"] = {
        "first byte within one layer + 2 ms": sub["unfinished"]["first_byte_ms"]["p50"]
        <= sub["layer_ms"] + 2,
        "step unharmed (<= 1 %)": sub["step_cost"]["ratio"] <= 1.01,
    }
    if args.picture:
        draw(Path(args.picture), samples)
    return report


def draw(path: Path, samples: dict[str, list[dict[str, float]]]) -> None:
    """First byte after arrival against what was left of the step, a colour a generation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for generation, rows in samples.items():
        axis.scatter([r["residual_step_ms"] for r in rows], [r["first_byte_ms"] for r in rows],
                     label=generation, s=18)  # fmt: skip
    most = max(r["residual_step_ms"] for rows in samples.values() for r in rows)
    axis.plot([0, most], [0, most], color="gray", lw=0.8, ls="--", label="the rest of the step")
    axis.set_xlabel("left of the running step when TRANSFER_KV arrived, ms")
    axis.set_ylabel("first byte after that, ms")
    axis.legend()
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--model", help="tiny, smollm2, a file or folder (default: smollm2)")
    parser.add_argument("--tokens", type=int, default=1500, help="prompt tokens of the long step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", help="also draw it (.svg or .png; needs the extra replay)")
    report = asyncio.run(run(parser.parse_args()))
    print(json.dumps(report, indent=2))
    return 0 if all(report["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
