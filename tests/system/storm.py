"""A storm of dual-mode requests whose TRANSFER_KV arrives at random times of P's steps.

    python -m tests.system.storm --requests 1000 [--combination 2x1-tcp] [--abort-share 0.1] [--json]

Real processes of the reference engine with the small context-sensitive model: TP (2, 1) and (1, 2), each
over tcp and cma. P's steps follow each other without a pause; for each request D's half is sent a random
time before or after P's, so that it meets every moment of a step: before the prefill, between two chunks,
in the last step, at its freeze, afterwards. Some prompts share a prefix with others in flight. At the end
every token is compared with the undivided engine's, nothing may be leased, and the counters must add up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from pd_control.cli.load import Job, Result, complete
from pd_control.protocol.books import imbalances
from pd_control.reference.cluster import Cluster
from tests.system.split_kit import GUARD_S, Farm, open_farm

MODEL = "tiny:7"
VOCAB = 500
OUT = 3
IN_FLIGHT = 12
MAX_PROMPT = 600  # tokens; a prompt may take two steps
ENGINE_ARGS = ["--blocks", "1536", "--step-tokens", "512"]
PREFIXES = 5
NEVER = 1e9

#: name → (P's TP, D's TP, transports of D)
COMBINATIONS = {
    "2x1-tcp": (2, 1, "tcp"),
    "2x1-cma": (2, 1, "cma"),
    "1x2-tcp": (1, 2, "tcp"),
    "1x2-cma": (1, 2, "cma"),
}


@dataclass
class Tally:
    """What one combination came to. `problems` is empty if all is well."""

    combination: str
    requests: int
    right: int = 0
    aborted: int = 0
    took_s: float = 0.0
    p: dict[str, int] = field(default_factory=dict)  # P's counters, by how much they grew
    d: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Drop:
    """One request of the storm. `point`: when D's half is sent, 0 with P's half, 1 when P's half is likely
    to end, negative before either."""

    name: str
    prompt: list[int]
    point: float
    abort_s: float  # D's client leaves this long after its half was sent; NEVER: it stays


def draw(seed: int, combination: str, count: int, abort_share: float) -> list[Drop]:
    """The requests, the same for the same arguments."""
    rng = random.Random(f"{seed} {combination}")

    def tokens(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    prefixes = [tokens(rng.choice((32, 48, 64))) for _ in range(PREFIXES)]
    drops = []
    for i in range(count):
        length = rng.choice((1, 16, 17, *(rng.randrange(2, MAX_PROMPT) for _ in range(12))))
        prompt = tokens(length)
        if rng.random() < 0.2:
            prompt = (rng.choice(prefixes) + prompt)[:MAX_PROMPT]
        point = rng.choice(
            (0.0, rng.uniform(-0.2, 0.5), *(rng.uniform(0.4, 1.2) for _ in range(3)))
        )
        abort_s = rng.uniform(0.0, 0.1) if rng.random() < abort_share else NEVER
        drops.append(Drop(f"{combination}-{seed}-{i}", prompt, point, abort_s))
    return drops


def make_cluster() -> Cluster:
    return Cluster(model=MODEL, engine_args=ENGINE_ARGS, env={"PD_CONTROL__DEADLINES__HOLD_S": "3"})


async def start(farm: Farm, combinations: list[str]) -> None:
    """The engines that these need, all at once."""
    wanted: dict[str, tuple[str, ...]] = {"undivided": ("undivided", "--split-last-token")}
    for name in combinations:
        p_tp, d_tp, transports = COMBINATIONS[name]
        wanted[f"p{p_tp}"] = ("prefill", "--tp", str(p_tp), "--generation", "substep")
        wanted[f"d{d_tp}{transports}"] = ("decode", "--tp", str(d_tp), "--transports", transports)
    await asyncio.gather(*(farm.start(name, *args) for name, args in wanted.items()))


class Pace:
    """How long P's halves take just now, so that D's can be sent in their last step."""

    def __init__(self) -> None:
        self.span_s = 0.1

    def took(self, seconds: float) -> None:
        self.span_s += (seconds - self.span_s) / 8


async def request(farm: Farm, p: str, d: str, drop: Drop, pace: Pace) -> Result | None:
    """Both halves. None: its client left before the end."""
    lead_s = drop.point * pace.span_s

    async def left() -> None:
        await asyncio.sleep(max(0.0, -lead_s))
        began = time.monotonic()
        status, body = await farm.prefill_half(p, drop.name, drop.prompt)
        pace.took(time.monotonic() - began)
        # An abort of D withdraws the taker, which may end P's half early.
        assert status == 200 or drop.abort_s < NEVER, body

    async def right() -> Result:
        await asyncio.sleep(max(0.0, lead_s))
        job = Job(drop.name, 0.0, drop.prompt, OUT)
        params = farm.remote(p, drop.name, on_failure="fail")
        half = complete(
            farm.http,
            farm.child(d).url,
            job,
            kv_transfer_params=params,
            request_id=f"{drop.name}-d",
        )
        return await (half if drop.abort_s == NEVER else asyncio.wait_for(half, drop.abort_s))

    results = await asyncio.gather(left(), right(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.TimeoutError):
            raise result
    found = results[1]
    return found if isinstance(found, Result) else None


async def books(farm: Farm, name: str) -> dict[str, int]:
    """The counters of an engine's one side."""
    (body,) = await farm.processes(name)
    (side,) = body["sides"].values()
    return dict(side["core"]["counters"])


def growth(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in grown.items() if count}


async def leaks(farm: Farm, *names: str) -> list[str]:
    """What is left in an idle engine that should not be."""
    found = []
    for body in await farm.processes(*names):
        for side, state in body["sides"].items():
            where = f"{body['instance']} ({side})"
            if state["num_leases"] or any(state["leased_blocks"].values()):
                found.append(f"{where}: {state['num_leases']} leases: {state['leased_blocks']}")
            if state["leases_acquired"] != state["leases_released"]:
                found.append(
                    f"{where}: leases taken {state['leases_acquired']}, "
                    f"given back {state['leases_released']}"
                )
            tables = state["core"]["tables"]
            kept = ("tombstones", "marks", "timers", "peers", "links")
            left = {k: v for k, v in tables.items() if v and k not in kept}
            if left:
                found.append(f"{where}: tables {left}")
    return found


def audit(tally: Tally, p_tp: int, whole: dict[str, int]) -> list[str]:
    """What of the counters does not add up. `whole`: P's counters since it started."""
    problems = imbalances(whole)
    p, d = tally.p, tally.d

    def expect(what: str, got: int, want: int) -> None:
        if got != want:
            problems.append(f"{what}: {got} != {want}")

    failed = sum(n for name, n in p.items() if name.startswith("p_transfer.failed."))
    # Every transfer reads from all of P's ranks, at these pairs of sizes.
    pushed = p.get("substeps.pushed", 0) + p.get("substeps.missed", 0)
    expect("ranks a substep was for", pushed, p_tp * p.get("sends.substep", 0))
    if not tally.aborted:
        served = p.get("p_transfer.ok", 0) + p.get("p_transfer.empty", 0)
        expect("transfers served by P", served, tally.requests)
        expect("requests made ready by D", d.get("d_request.ready", 0), tally.requests)
        expect("failed", failed, 0)
        for way in ("substep", "frozen"):
            expect(f"sends.{way}", p.get(f"sends.{way}", 0), p.get(f"ways.{way}", 0))
        for name in ("substeps.unknown", "substeps.withdrawn", "repairs.dropped"):
            expect(name, p.get(name, 0), 0)
    return problems


async def storm(
    farm: Farm,
    combination: str,
    count: int,
    seed: int = 1,
    abort_share: float = 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Tally:
    """One combination's share. Its engines run already; others may be busy with other things."""
    p_tp, d_tp, transports = COMBINATIONS[combination]
    p, d = f"p{p_tp}", f"d{d_tp}{transports}"
    drops = draw(seed, combination, count, abort_share)
    tally = Tally(combination, count)
    before = await books(farm, p), await books(farm, d)
    gate = asyncio.Semaphore(IN_FLIGHT)
    pace = Pace()
    done = 0

    async def one(drop: Drop) -> Result | None:
        nonlocal done
        async with gate:
            result = await asyncio.wait_for(request(farm, p, d, drop, pace), GUARD_S)
        done += 1
        progress(done)
        return result

    began = time.monotonic()
    results = await asyncio.gather(*(one(drop) for drop in drops))
    tally.took_s = round(time.monotonic() - began, 2)
    await farm.wait_unpinned(p, d)
    after = await books(farm, p), await books(farm, d)
    tally.p, tally.d = growth(after[0], before[0]), growth(after[1], before[1])

    async def check(drop: Drop, result: Result | None) -> None:
        if result is None:
            tally.aborted += 1
            return
        async with gate:
            whole = await asyncio.wait_for(farm.whole(drop.prompt, OUT), GUARD_S)
        if result.error:
            tally.problems.append(f"{drop.name}: {result.error}")
        elif result.tokens != whole.tokens:
            tally.problems.append(f"{drop.name}: {result.tokens}, undivided: {whole.tokens}")
        else:
            tally.right += 1

    await asyncio.gather(
        *(check(drop, result) for drop, result in zip(drops, results, strict=True))
    )
    tally.problems += await leaks(farm, p, d)
    tally.problems += audit(tally, p_tp, after[0])
    return tally


async def run(args: argparse.Namespace) -> list[Tally]:
    names = [args.combination] if args.combination else list(COMBINATIONS)
    share = -(-args.requests // len(names))
    cluster = make_cluster()
    tallies = []
    async with open_farm(cluster) as farm:
        await start(farm, names)
        for name in names:

            def progress(done: int, name: str = name) -> None:
                if sys.stderr.isatty():
                    print(f"\r{name} {done}/{share} ", end="", file=sys.stderr, flush=True)

            tally = await storm(farm, name, share, args.seed, args.abort_share, progress)
            tallies.append(tally)
            if not args.json:
                print(show(tally), flush=True)
    return tallies


def show(tally: Tally) -> str:
    p = tally.p
    lines = [
        f"{tally.combination}: {tally.right} of {tally.requests} right, {tally.aborted} left early, "
        f"{tally.took_s:g} s",
        *(f"  {name:28} {p[name]:6}" for name in sorted(p) if name.split(".")[0] in SHOWN),
        *(f"  PROBLEM {problem}" for problem in tally.problems[:20]),
    ]
    return "\n".join(lines)


SHOWN = ("p_transfer", "ways", "sends", "substeps", "repairs")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="over all combinations")
    parser.add_argument("--combination", choices=[*COMBINATIONS], help="only this one")
    parser.add_argument(
        "--abort-share", type=float, default=0.0, help="of clients that leave early"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    tallies = asyncio.run(run(args))
    bad = sum(1 for tally in tallies if tally.problems)
    if args.json:
        print(json.dumps({"combinations": [asdict(t) for t in tallies], "failed": bad}, indent=2))
    else:
        print(f"{sum(t.right for t in tallies)} right, {bad} combinations with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
