"""simple_rpc against bare streams, zmq.asyncio and grpc.aio: latency, calls per second, news.

    python -m benchmarks.rpc [--json] [--runs 5] [--quick]

Each server is a process of its own, each client is this process; see ``rpc_contenders`` for what a call
is. A run lets all contenders take turns in short slices, so that whatever else the machine does, and
however its clock varies, falls on all of them alike; a ratio is taken within each run. Reported are the
mean over the runs and the spread (smallest and largest run).

Bias to know about: client and server share the machine, so latency includes the scheduler's wake-ups, and
at 64 in flight the slower of the two processes sets the rate. zmq runs its I/O threads beside Python's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import uvloop

from benchmarks.rpc_contenders import CONTENDERS, NUM_BLOCKS, Caller

IN_FLIGHT = 64
WARM_UP_CALLS = 300
LATENCY_SLICES = 15
LATENCY_SLICE_CALLS = 100
RATE_SLICES = 6
RATE_SLICE_S = 0.2
GOALS = {
    "latency.rpc_tcp_over_floor_tcp": ("<=", 1.15),
    "latency.zmq_over_rpc_tcp": (">=", 2.6),
    "latency.grpc_over_rpc_tcp": (">=", 9.0),
    "calls_per_s_64.rpc_tcp_over_floor_tcp": (">=", 0.85),
    "calls_per_s_64.rpc_tcp_over_zmq": (">=", 4.0),
    "calls_per_s_64.rpc_tcp_over_grpc": (">=", 12.0),
    "news_per_s": (">=", 200_000.0),
    "news_latency_over_call_latency": ("<=", 0.8),
}


class ServerProcess:
    """One contender's server."""

    def __init__(self, name: str, directory: str) -> None:
        address = f"unix://{directory}/{name}" if name.endswith("uds") else "tcp://127.0.0.1:0"
        command = [sys.executable, "-m", "benchmarks.rpc", "--serve", name, address]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        if not self.address:
            raise RuntimeError(f"the server of {name} did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


async def serve(name: str, address: str) -> None:
    print(await CONTENDERS[name][0](address), flush=True)
    await asyncio.Event().wait()


async def latency_slice(caller: Caller, num_calls: int) -> list[float]:
    """Seconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(num_calls):
        start_s = time.perf_counter()
        await caller.call()
        taken.append(time.perf_counter() - start_s)
    return taken


async def rate_slice(caller: Caller, seconds: float) -> tuple[int, float]:
    """Calls answered, and the time they took, with 64 in flight."""
    start_s = time.perf_counter()
    end_s = start_s + seconds
    num = 0

    async def worker() -> None:
        nonlocal num
        while time.perf_counter() < end_s:
            await caller.call()
            num += 1

    await asyncio.gather(*[worker() for _ in range(IN_FLIGHT)])
    return num, time.perf_counter() - start_s


async def one_run(addresses: dict[str, str], scale: float) -> dict[str, dict[str, float]]:
    callers: dict[str, Caller] = {name: CONTENDERS[name][1](addresses[name]) for name in addresses}
    for caller in callers.values():
        await rate_slice(caller, 0.1)
        await latency_slice(caller, int(WARM_UP_CALLS * scale))
    latencies: dict[str, list[float]] = {name: [] for name in callers}
    rates: dict[str, list[tuple[int, float]]] = {name: [] for name in callers}
    for _ in range(max(1, int(LATENCY_SLICES * scale))):
        for name, caller in callers.items():
            latencies[name] += await latency_slice(caller, LATENCY_SLICE_CALLS)
    for _ in range(max(1, int(RATE_SLICES * scale))):
        for name, caller in callers.items():
            rates[name].append(await rate_slice(caller, RATE_SLICE_S))
    for caller in callers.values():
        await caller.close()
    return {
        "latency_p50_us": {
            name: statistics.median(taken) * 1e6 for name, taken in latencies.items()
        },
        "latency_p99_us": {
            name: statistics.quantiles(taken, n=100)[98] * 1e6 for name, taken in latencies.items()
        },
        "calls_per_s_64": {
            name: sum(num for num, _ in slices) / sum(taken for _, taken in slices)
            for name, slices in rates.items()
        },
    }


def run_calls(scale: float) -> dict[str, dict[str, float]]:
    """One run with fresh processes."""
    with tempfile.TemporaryDirectory() as directory:
        servers = {name: ServerProcess(name, directory) for name in CONTENDERS}
        try:
            return uvloop.run(one_run({name: s.address for name, s in servers.items()}, scale))
        finally:
            for server in servers.values():
                server.stop()


def run_news(scale: float) -> dict[str, float]:
    from benchmarks import _news  # measured by the code of the news layer

    return {
        "news_per_s": _news.news_per_s(num_each=int(100_000 * scale)),
        "news_latency_p50_us": _news.news_latency_p50_us(num_items=int(4000 * scale)),
    }


def ratios(run: dict[str, Any]) -> dict[str, float]:
    latency, rate = run["latency_p50_us"], run["calls_per_s_64"]
    found = {
        "latency.rpc_tcp_over_floor_tcp": latency["rpc_tcp"] / latency["floor_tcp"],
        "latency.rpc_tcp_over_floor_bytes": latency["rpc_tcp"] / latency["floor_bytes"],
        "latency.rpc_uds_over_floor_tcp": latency["rpc_uds"] / latency["floor_tcp"],
        "latency.zmq_over_rpc_tcp": latency["zmq"] / latency["rpc_tcp"],
        "latency.grpc_over_rpc_tcp": latency["grpc"] / latency["rpc_tcp"],
        "calls_per_s_64.rpc_tcp_over_floor_tcp": rate["rpc_tcp"] / rate["floor_tcp"],
        "calls_per_s_64.rpc_tcp_over_floor_bytes": rate["rpc_tcp"] / rate["floor_bytes"],
        "calls_per_s_64.rpc_tcp_over_zmq": rate["rpc_tcp"] / rate["zmq"],
        "calls_per_s_64.rpc_tcp_over_grpc": rate["rpc_tcp"] / rate["grpc"],
    }
    if "news_latency_p50_us" in run:
        found["news_latency_over_call_latency"] = run["news_latency_p50_us"] / latency["rpc_tcp"]
    return found


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of everything, by the dotted keys of the nested dicts."""

    def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
        if not isinstance(value, dict):
            return {path: value}
        found: dict[tuple[str, ...], float] = {}
        for key, inner in value.items():
            found |= leaves(inner, (*path, key))
        return found

    mean: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    flat = [leaves(run) for run in runs]
    for path in flat[0]:
        values = [run[path] for run in flat]
        for target, value in (
            (mean, statistics.fmean(values)),
            (spread, [min(values), max(values)]),
        ):
            for key in path[:-1]:
                target = target.setdefault(key, {})
            target[path[-1]] = value
    return mean | {"spread": spread}


def machine() -> dict[str, Any]:
    """Where and with what: numbers without it mean little."""
    model = "unknown"
    try:
        with open("/proc/cpuinfo") as file:
            model = next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    versions = {}
    for package in ("uvloop", "msgpack", "pyzmq", "grpcio"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def check_goals(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = results["ratios"] | {key: results[key] for key in ("news_per_s",) if key in results}
    checks: dict[str, dict[str, Any]] = {}
    for name, (relation, goal) in GOALS.items():
        if name in found:
            holds = found[name] <= goal if relation == "<=" else found[name] >= goal
            checks[name] = {"value": found[name], "goal": f"{relation} {goal:g}", "reached": holds}
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the results as JSON only")
    parser.add_argument("--runs", type=int, help="5, or 1 with --quick")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the calls: shows that it works"
    )
    parser.add_argument("--no-news", action="store_true", help="calls only")
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(*options.serve))
        return
    say: Callable[[str], None] = lambda text: None if options.json else print(text, flush=True)  # noqa: E731
    scale = 0.1 if options.quick else 1.0
    num_runs = options.runs or (1 if options.quick else 5)
    runs = []
    for number in range(num_runs):
        say(f"run {number + 1} of {num_runs}")
        run: dict[str, Any] = dict(run_calls(scale))
        if not options.no_news:
            run |= run_news(scale)
        run["ratios"] = ratios(run)
        runs.append(run)
    results = summarize(runs)
    results["goals"] = check_goals(results)
    results["machine"] = machine()
    results["method"] = {
        "command": "python -m benchmarks.rpc " + " ".join(sys.argv[1:]),
        "runs": num_runs,
        "blocks": NUM_BLOCKS,
        "in_flight": IN_FLIGHT,
        "floor_tcp": "bare uvloop streams; both ends pack and unpack the same msgpack as everybody",
        "floor_bytes": "bare uvloop streams moving the same bytes, never packed or unpacked",
        "spread": "smallest and largest run",
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for table in ("latency_p50_us", "calls_per_s_64"):
        say(f"\n{table}")
        for name, value in results[table].items():
            low, high = results["spread"][table][name]
            say(f"  {name:20} {value:12,.1f}   ({low:,.1f} .. {high:,.1f})")
    say("\ngoals")
    for name, check in results["goals"].items():
        mark = "reached" if check["reached"] else "MISSED"
        say(f"  {name:42} {check['value']:12,.3f}   {check['goal']:10} {mark}")
    say(f"\n{results['machine']}")


if __name__ == "__main__":
    main()
