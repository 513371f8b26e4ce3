"""kvt against the machine's own floors and against its peers, on the same pieces of memory.

    python -m benchmarks.kvt [--json] [--quick] [--only tcp_floor,kvt_tcp,...] [--peers FOLDER]

Every contender moves `num` pieces of `piece` bytes from one process to another, from and to random
places, as KV blocks lie in a pool, and its bytes are compared afterwards:

    memcpy_floor, tcp_floor, cma_floor   no protocol at all (benchmarks/native/floors.cpp)
    kvt_tcp, kvt_cma                     submitted in Python to LOAD_DONE read in Python
    nixl_tcp, nixl_sm                    NIXL WRITE over UCX, UCX_TLS=tcp and =tcp,sm,self, as it comes
    nixl_tcp_polled, nixl_sm_polled      the same without its progress threads, both processes spinning
    mooncake_tcp                         batch_transfer_sync_write

What each counts is said at the top of its runner in benchmarks/peers/. Contenders run one after the other
in several rounds, so that a slow minute of the machine does not fall on one of them alone. Reported is the
median over all repetitions, and the best one. Peers are installed into venvs of their own (NIXL 1.5.1,
Mooncake 0.3.13) under build/bench/peers by the first run.

Bias to know about: NIXL waits by spinning, kvt and the floors sleep in the kernel. kvt's figure has the
grant's check, the plan and the coverage in it, the peers' have prepared descriptors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
PIECES = [(size, num) for size in (256, 4096, 32_768, 262_144) for num in (64, 1024, 8192)]
QUICK_PIECES = [(256, 1024), (32_768, 64), (32_768, 1024)]
ROUNDS = 3
LATENCY_REPETITIONS = 100
# Of one run of one contender, over all sizes. The longest is NIXL with 8,192 pieces of 256 KiB.
RUN_TIMEOUT_S = 180

KEY = (32_768, 1024)
GOALS: dict[str, float | None] = {
    "kvt_tcp_over_tcp_floor": 0.9,
    "kvt_tcp_over_nixl_tcp": 3.0,
    "kvt_tcp_over_mooncake_tcp": 2.5,
    "kvt_tcp_over_nixl_tcp_polled": None,  # no goal: it costs a spinning main thread at both ends
    "kvt_cma_over_nixl_sm": 2.0,
    "kvt_cma_over_nixl_sm_polled": None,
    "kvt_cma_over_cma_floor": 0.8,
    "kvt_best_over_best_peer_at_256": 3.0,
}


@dataclass
class Contender:
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    has_latency: bool = True
    is_fragile: bool = False  # one failed transfer breaks all after it: a process for each size
    seconds: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)
    latency_what: str = ""
    failures: list[str] = field(default_factory=list)

    def run(self, pieces: list[tuple[int, int]], min_s: float, latency: int) -> None:
        """One round; results are added to those before."""
        if self.is_fragile and len(pieces) > 1:
            for n, one in enumerate(pieces):
                self.run([one], min_s, latency if n == 0 else 0)
            return
        command = [*self.command, "--pieces", json.dumps(pieces), "--min-s", str(min_s)]
        if self.has_latency:
            command += ["--latency", str(latency)]
        environment = {**os.environ, **self.environment}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as late:
            self.failures.append(f"no end within {RUN_TIMEOUT_S} s")
            output = late.stdout or b""
            self.take(output.decode() if isinstance(output, bytes) else output)
            return
        before = len(self.failures)
        self.take(done.stdout)
        if done.returncode and len(self.failures) == before:
            self.failures.append((done.stderr.strip() or "?").splitlines()[-1])

    def take(self, output: str) -> None:
        for line in output.splitlines():
            if not line.startswith("{"):
                continue  # a peer's own log
            result = json.loads(line)
            if "latency_s" in result:
                self.latency_s += result["latency_s"]
                self.latency_what = result["what"]
                continue
            key = (result["piece_bytes"], result["num_pieces"])
            if "error" in result:
                failure = f"{key[1]} x {key[0]} B: {result['error']}"
                self.failures += [failure] if failure not in self.failures else []
            elif not result["right"]:
                self.failures.append(f"{key[1]} x {key[0]} B: wrong bytes")
            else:
                self.seconds.setdefault(key, []).extend(result["seconds"])

    def gb_per_s(self, key: tuple[int, int]) -> float | None:
        seconds = self.seconds.get(key)
        return key[0] * key[1] / statistics.median(seconds) / 1e9 if seconds else None


def floors_binary() -> Path:
    """Compiled when it is missing or older than its source."""
    source, binary = HERE / "native" / "floors.cpp", BUILD / "floors"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        subprocess.run([compiler, "-O2", "-std=c++20", "-o", binary, source], check=True)
    return binary


def contenders(peers: Path) -> list[Contender]:
    def python(venv: str, script: str, *options: str) -> list[str]:
        executable = sys.executable if not venv else str(peers / venv / "bin" / "python")
        return [executable, str(HERE / "peers" / script), *options]

    def nixl(name: str, transports: str, progress: str) -> Contender:
        command = python("nixl", "run_nixl.py", "--progress", progress)
        return Contender(name, command, {"UCX_TLS": transports})

    libraries = [peers / "mooncake" / "libs" / p for p in ("usr/lib", "lib")]
    libraries = [p / f"{platform.machine()}-linux-gnu" for p in libraries]
    mooncake = {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    floors = python("", "run_floors.py", str(floors_binary()))
    return [
        Contender("memcpy_floor", [*floors, "memcpy"], has_latency=False),
        Contender("tcp_floor", [*floors, "tcp"], has_latency=False),
        Contender("kvt_tcp", python("", "run_kvt.py", "--transport", "tcp")),
        nixl("nixl_tcp", "tcp", "thread"),
        nixl("nixl_tcp_polled", "tcp", "polled"),
        Contender("mooncake_tcp", python("mooncake", "run_mooncake.py"), mooncake, is_fragile=True),
        Contender("cma_floor", [*floors, "cma"], has_latency=False),
        Contender("kvt_cma", python("", "run_kvt.py", "--transport", "cma")),
        nixl("nixl_sm", "tcp,sm,self", "thread"),
        nixl("nixl_sm_polled", "tcp,sm,self", "polled"),
    ]


def ratios(by_name: dict[str, Contender]) -> dict[str, float]:
    """The figures that the goals are about; what could not be measured is left out."""

    def rate(name: str, key: tuple[int, int]) -> float | None:
        return by_name[name].gb_per_s(key) if name in by_name else None

    out = {}
    for goal in GOALS:
        if goal == "kvt_best_over_best_peer_at_256":
            continue
        over, under = goal.split("_over_")
        a, b = rate(over, KEY), rate(under, KEY)
        if a and b:
            out[goal] = a / b
    small = (256, 1024)
    ours = [r for n in ("kvt_tcp", "kvt_cma") if (r := rate(n, small))]
    peers = [n for n in by_name if n.startswith(("nixl", "mooncake"))]
    theirs = [r for n in peers if (r := rate(n, small))]
    if ours and theirs:
        out["kvt_best_over_best_peer_at_256"] = max(ours) / max(theirs)
    return out


def as_json(all_of_them: list[Contender], pieces: list[tuple[int, int]]) -> dict[str, Any]:
    found = ratios({c.name: c for c in all_of_them})
    return {
        "benchmark": "kvt",
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "gb_per_s": {
            c.name: {
                f"{num}x{piece}": {
                    "median": round(piece * num / statistics.median(s) / 1e9, 4),
                    "best": round(piece * num / min(s) / 1e9, 4),
                    "repetitions": len(s),
                }
                for piece, num in pieces
                if (s := c.seconds.get((piece, num)))
            }
            for c in all_of_them
        },
        "latency_64_kib_us": {
            c.name: {
                "median": round(statistics.median(c.latency_s) * 1e6, 1),
                "p90": round(sorted(c.latency_s)[int(0.9 * len(c.latency_s))] * 1e6, 1),
                "what": c.latency_what,
            }
            for c in all_of_them
            if c.latency_s
        },
        "ratios": {k: round(v, 3) for k, v in found.items()},
        "goals": {
            k: {"goal": goal, "met": found[k] >= goal}
            for k, goal in GOALS.items()
            if k in found and goal is not None
        },
        "failures": {c.name: c.failures for c in all_of_them if c.failures},
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def show(result: dict[str, Any], pieces: list[tuple[int, int]]) -> None:
    names = list(result["gb_per_s"])
    print("GB/s, median".ljust(16) + "".join(n.rjust(17) for n in names))
    for piece, num in pieces:
        row = [result["gb_per_s"][n].get(f"{num}x{piece}", {}).get("median") for n in names]
        cells = "".join((f"{r:.3g}" if r is not None else "-").rjust(17) for r in row)
        print(f"{num} x {piece} B".ljust(16) + cells)
    for name, latency in result["latency_64_kib_us"].items():
        print(f"64 KiB, {name}: {latency['median']} us (p90 {latency['p90']}): {latency['what']}")
    for name, ratio in result["ratios"].items():
        goal = result["goals"].get(name)
        verdict = f" (goal {goal['goal']}: {'met' if goal['met'] else 'NOT met'})" if goal else ""
        print(f"{name}: {ratio}{verdict}")
    for name, failures in result["failures"].items():
        print(f"{name} failed: {'; '.join(failures)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="three sizes, one round, a minute")
    parser.add_argument("--only", default="", help="names of contenders, separated by commas")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--peers", type=Path, default=BUILD / "peers", help="where peers live")
    options = parser.parse_args()
    pieces = QUICK_PIECES if options.quick else PIECES
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    wanted = set(filter(None, options.only.split(",")))
    runs = [c for c in contenders(options.peers) if not wanted or c.name in wanted]
    if unknown := wanted - {c.name for c in runs}:
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}")
    for peer in ("nixl", "mooncake"):
        if any(c.name.startswith(peer) for c in runs):
            script = HERE / "peers" / "install.sh"
            subprocess.run([script, options.peers, peer], check=True, stdout=sys.stderr)
    for _ in range(rounds):
        for contender in runs:
            print(f"{contender.name} ...", file=sys.stderr, flush=True)
            contender.run(pieces, 0.4 / rounds, LATENCY_REPETITIONS // rounds)
    result = as_json(runs, pieces)
    print(json.dumps(result, indent=2)) if options.json else show(result, pieces)


if __name__ == "__main__":
    main()
