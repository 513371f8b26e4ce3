"""What handing a prompt from P to D costs on real vLLM servers, and what waiting for it costs.

    VENV/bin/python -m benchmarks.vllm_handoff [--json] [--quick] [--only CONNECTOR …]

(VENV: `tools/vllm_venv.sh VENV 0.32.0 --peers`.) For this connector and for vLLM's own, with neutral
settings and as shipped, one P and one D at a time and an undivided vLLM beside them; per prompt length and
number of concurrent requests, p50 and p99 in milliseconds:

  over_undivided   (both halves asked → D's first token) − (undivided vLLM asked → its first token)
  excess           (P's answer → D's first token) − floor; below zero where D had its token first
  floor            one more HTTP round and pass on D over KV that is already local, asked at the moments when
                   P had answered, for the same number of requests

Both conventions are measured where a connector has both: `both` asks P and D at once, `p_first` asks D with
what P answered. Then the CPU seconds of every process of D over 10 s in which a request waits for KV that
does not come, and how that request ends.

The model has random weights, 8 layers and 8 KiB of KV a token: computing is small, handing over is not. Exit
status 0: every goal that could be judged is met.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._vllm_report import all_met, judge, print_table, rows
from benchmarks._vllm_rows import (
    CONNECTORS,
    KV_BYTES_PER_TOKEN,
    SETTINGS,
    USUAL,
    WARM_S,
    AskError,
    Samples,
    benchmark_model,
    make_prompts,
    one_round,
    session,
    spread,
    undivided_round,
)
from benchmarks.stages import machine
from pd_control.testing.vllm_kit import BLOCK_TOKENS, VllmServer, prompt

WAIT_S = 10.0
#: How long a request that waits in vain is watched; ours ends sooner.
PATIENCE_S = 16.0
#: A server that is asked to end and does not is killed after this.
CLOSE_S = 8.0
#: vLLM's workers spin for a second after each message; a phase on other servers waits this long first.
SPIN_S = 1.2


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# -- measuring -------------------------------------------------------------------------------------


class Plan:
    """Which cells, and how often each."""

    def __init__(self, args: argparse.Namespace) -> None:
        # The largest first: it touches all of the cache's memory, so no later cell pays for fresh pages.
        self.cells = sorted(
            ((n, c) for n in args.lengths for c in args.concurrency),
            key=lambda cell: (cell[1], cell[0]),
            reverse=True,
        )
        self._rounds = args.rounds

    def rounds(self, concurrent: int) -> int:
        """Fewer where a round has many requests."""
        return max(1, round(self._rounds * {1: 1.0, 8: 0.25}.get(concurrent, 0.05)))

    @property
    def server_args(self) -> list[str]:
        """Room for the largest cell and a little more, so that all of it is soon in use."""
        most = max(n * c for n, c in self.cells)
        return [
            "--max-num-seqs", str(max(c for _, c in self.cells)),
            "--num-gpu-blocks-override", str(int(most * 1.2) // BLOCK_TOKENS + 64),
        ]  # fmt: skip

    @property
    def cache_gib(self) -> int:
        most = max(n * c for n, c in self.cells) * KV_BYTES_PER_TOKEN
        return -(-int(most * 1.25) // (1 << 30)) + 1


async def measure_pair(pair: Any, connector: Any, plan: Plan, seed: int) -> dict[str, Any]:
    """Every cell of one connector; conventions take turns within a cell."""
    found: dict[str, dict[str, Samples]] = {}
    longest, shortest = plan.cells[0][0], plan.cells[-1][0]
    async with session() as http:
        for i, size in enumerate([(shortest, 1), (shortest, 2), (shortest, 2), (longest, 4)]):
            for name, params in connector.params.items():  # links open, code and memory are warm
                prompts = make_prompts(*size, seed + 900 + i)
                warm = one_round(http, pair, params, prompts, f"warm-{name}-{i}", Samples())
                try:
                    await asyncio.wait_for(warm, WARM_S)
                except asyncio.TimeoutError as error:
                    logs = ", ".join(str(server.log) for server in (pair.p, pair.d))
                    raise AskError(
                        f"one of the first requests was not answered within {WARM_S:g} s; {logs}"
                    ) from error
        for num_tokens, concurrent in plan.cells:
            cell = found.setdefault(f"{num_tokens}x{concurrent}", {})
            for i in range(plan.rounds(concurrent)):
                for k, (name, params) in enumerate(connector.params.items()):
                    seed += 1
                    prompts = make_prompts(num_tokens, concurrent, seed)
                    key = f"{num_tokens}-{concurrent}-{i}-{k}"
                    into = cell.setdefault(name, Samples())
                    await one_round(http, pair, params, prompts, key, into)
            text = ", ".join(f"{n} {_median_excess(s):+.1f} ms" for n, s in cell.items())
            say(f"    {num_tokens} tokens × {concurrent}: excess {text}")
    return found


def _median_excess(s: Samples) -> float:
    return spread(s.after)["p50"] - spread(s.floor)["p50"]


async def measure_undivided(
    server: Any, plan: Plan, seed: int, into: dict[str, list[float]]
) -> None:
    """A few rounds between two connectors; long cells once per setting. All visits are pooled."""
    async with session() as http:
        for _ in range(2):
            await undivided_round(http, server, make_prompts(plan.cells[0][0], 1, seed + 990))
        for num_tokens, concurrent in plan.cells:
            values = into.setdefault(f"{num_tokens}x{concurrent}", [])
            if values and concurrent > 8:
                continue
            for _ in range(max(1, plan.rounds(concurrent) // 3)):
                seed += 1
                values += await undivided_round(
                    http, server, make_prompts(num_tokens, concurrent, seed)
                )


def wait_in_vain(pair: Any, connector: Any) -> dict[str, Any]:
    """CPU seconds per process of D while a request waits `WAIT_S`, and how the request ends.

    P never gets its half. Where D takes only what P answered, P is stopped (SIGSTOP) after it has answered.
    """
    convention = "both" if "both" in connector.params else "p_first"
    tokens = prompt(4 * BLOCK_TOKENS + 1, 4711)
    for_p, for_d = connector.params[convention](pair, "vain")
    stopped: list[int] = []
    how = "P never gets its half"
    if for_d is None:
        for_d = pair.p.ask(tokens, 1, for_p, request_id="vain").params
        time.sleep(SPIN_S)
        stopped = pair.p.processes("")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        how = "P is stopped after it answered"
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        waiting = pool.submit(pair.d.ask, tokens, 1, for_d, request_id="vain", timeout_s=PATIENCE_S)
        time.sleep(0.2)  # it is D's now; the wait itself is what is measured
        before, began = pair.d.cpu_seconds(), time.monotonic()
        concurrent.futures.wait([waiting], timeout=WAIT_S)
        window_s = time.monotonic() - began
        used = {k: round(v - before.get(k, 0.0), 2) for k, v in pair.d.cpu_seconds().items()}
        try:
            answer = waiting.result()
            end, after_s = f"HTTP {answer.status}", round(answer.seconds, 2)
        except OSError:
            end, after_s = f"no answer within {PATIENCE_S:g} s", None
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        pool.shutdown()
    waited = window_s >= WAIT_S - 0.5
    return {
        "how": how,
        "cpu_s": {k.rpartition("/")[2]: v for k, v in used.items()},
        "cpu_s_total": round(sum(used.values()), 2) if waited else None,
        "waited_s": round(window_s, 2),
        "end": end,
        "ended_after_s": after_s,
    }


# -- servers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _closing_at_once(servers: Sequence[Any]) -> Iterator[None]:
    """Whatever happens, and also while Ctrl-C is pressed again, no process is left."""
    try:
        yield
    finally:
        ignored = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
        try:
            with concurrent.futures.ThreadPoolExecutor(max(1, len(servers))) as pool:
                list(pool.map(lambda s: s.close(CLOSE_S), servers))
        finally:
            for number, handler in zip(ignored, before, strict=True):
                signal.signal(number, handler)


class Run:
    """One whole run: settings outside, connectors inside, one pair of servers at a time."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self._args, self._model, self._plan = args, model, Plan(args)
        self._longest = max(n for n, _ in self._plan.cells) + 64
        self._server_args = self._plan.server_args
        self._seed = args.seed * 100_000
        #: What is known so far; complete when `whole` has returned.
        self.results: dict[str, Any] = {}

    def _undivided(self, setting: Any) -> Any:
        return VllmServer(
            self._model, self._args.logs / f"{setting.name}-undivided.log", cpu=setting.cpus[0],
            args=self._server_args, max_model_len=self._longest,
            env={"VLLM_CPU_KVCACHE_SPACE": str(self._plan.cache_gib)} | setting.env,
        )  # fmt: skip

    def whole(self) -> None:
        for setting in (SETTINGS[s] for s in self._args.settings):
            say(f"{setting.name}: {setting.what}")
            undivided = self._undivided(setting)
            pooled: dict[str, list[float]] = {}
            found: dict[str, Any] = {}
            self.results[setting.name] = {"what": setting.what, "connectors": found}
            try:
                with _closing_at_once([undivided]):
                    for name in self._args.only:
                        began = time.monotonic()
                        found[name] = self._tried(setting, CONNECTORS[name], undivided, pooled)
                        say(f"  {name} took {time.monotonic() - began:.0f} s")
            finally:
                for r in found.values():
                    if "samples" in r:
                        r["handoff_ms"] = rows(r.pop("samples"), pooled)

    def _tried(
        self, setting: Any, connector: Any, undivided: VllmServer, pooled: dict[str, list[float]]
    ) -> dict[str, Any]:
        """One connector, twice if need be: NIXL's workers hang now and then. What failed is in the report."""
        failures: list[str] = []
        while len(failures) < 2:
            try:
                found = self._connector(setting, connector, undivided, pooled, len(failures) + 1)
                return found | ({"failed_before": failures} if failures else {})
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
                say(f"  {connector.name} FAILED: {str(error)[-1500:]}")
        return {"failed": failures}

    def _connector(
        self,
        setting: Any,
        connector: Any,
        undivided: VllmServer,
        pooled: dict[str, list[float]],
        attempt: int,
    ) -> dict[str, Any]:
        say(f"  {connector.name}: starting P and D (logs in {self._args.logs})")
        started: list[VllmServer] = []
        with _closing_at_once(started):
            pair = connector.start(
                started,
                self._model,
                self._args.logs,
                setting,
                self._server_args,
                self._plan.cache_gib,
                self._longest,
                attempt,
            )
            for server in [*started, undivided]:
                server.wait_ready()
            self._seed += 1000
            time.sleep(SPIN_S)
            found = asyncio.run(measure_pair(pair, connector, self._plan, self._seed))
            time.sleep(SPIN_S)
            asyncio.run(measure_undivided(undivided, self._plan, self._seed + 500, pooled))
            time.sleep(SPIN_S)
            vain = None
            if not self._args.no_wait:
                try:
                    vain = wait_in_vain(pair, connector)
                except Exception as error:  # the figures above stand
                    say(f"    waiting in vain could not be measured: {error}")
                else:
                    total = vain["cpu_s_total"]
                    say(f"    waiting in vain: {total} CPU s in {WAIT_S:g} s; {vain['end']}")
        return {"samples": found, "waiting": vain}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="A whole run takes about 25 minutes on two cores, --quick about 8.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (else a table)")
    parser.add_argument(
        "--quick", action="store_true", help="neutral settings, fewer rounds, at most 8 at once"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CONNECTOR",
        help=f"of {', '.join(CONNECTORS)}; default: all but pd-control-tcp",
    )
    parser.add_argument(
        "--settings", nargs="+", choices=("neutral", "shipped"), help="default: both"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="prompt tokens; default 128 1024 4096"
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", help="requests at once; default 1 8 32"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="per cell at one request at a time; fewer at more; default 12 (quick: 8)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--no-wait", action="store_true", help="leave out the request that waits in vain"
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("build/vllm_handoff"), help="folder of the servers' logs"
    )
    args = parser.parse_args()
    try:
        import vllm
    except ImportError:
        parser.error(
            "vLLM is not in this Python; make a venv: tools/vllm_venv.sh .venv-vllm 0.32.0 --peers"
        )
    args.only = args.only or list(USUAL)
    if unknown := sorted(set(args.only) - set(CONNECTORS)):
        parser.error(f"no connector {', '.join(unknown)}; there are {', '.join(CONNECTORS)}")
    args.settings = args.settings or (["neutral"] if args.quick else ["neutral", "shipped"])
    args.lengths = sorted(args.lengths or [128, 1024, 4096])
    args.concurrency = sorted(args.concurrency or ([1, 8] if args.quick else [1, 8, 32]))
    args.rounds = args.rounds or (8 if args.quick else 12)
    args.logs.mkdir(parents=True, exist_ok=True)
    args.logs = args.logs.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, before, is_whole = time.monotonic(), machine(), False
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, benchmark_model(Path(folder) / "model"))
        try:
            run.whole()
            is_whole = True
        except (KeyboardInterrupt, SystemExit):
            say("interrupted; every server is stopped; what was measured follows")
    report = {
        "benchmark": "vllm_handoff",
        "machine": before | {"vllm": vllm.__version__},
        "took_s": round(time.monotonic() - began),
        "is_whole": is_whole,
        "settings": run.results,
        "goals": judge(run.results),
    }
    report["met"] = all_met(report["goals"])
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report)
    if not is_whole:
        return 130
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
