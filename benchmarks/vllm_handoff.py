"""What handing a prompt from P to D costs on real vLLM servers, and what waiting costs.

    .venv-vllm/bin/python -m benchmarks.vllm_handoff [--json] [--tokens 128,1024,4096] [--repeats N]

P, D and a second D with vLLM's stock loop, one thread each, 8 layers, 8 KiB of KV a token, one request
at a time. For each prompt length, medians and p99 in milliseconds:

  floor        one more HTTP round and engine pass on D over KV that is already local
  p_first      from P's HTTP answer to D's first token, P asked first
  both         from asking both at once to D's first token
  whole        from asking an undivided engine to its first token

and the excess: ``p_first − floor``, ``both − whole``. Then the CPU seconds of every process of a D while one
request waits 10 s for KV that does not come, and how that request ends.

A prompt is one token longer than a whole number of blocks, so that a D that has it computes one token, as
after a transfer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pd_control.testing.vllm_kit import (
    BLOCK_TOKENS,
    VllmServer,
    both_params,
    closing,
    free_port,
    prompt,
    tiny_model,
)

WAIT_S = 10.0
SLEEPING = ["--scheduler-cls", "pd_control.vllm.sleeping.make_scheduler"]
SETTINGS: dict[str, Any] = {"deadlines": {"park_s": WAIT_S + 2, "hold_s": 5}}


def first_token_ms(server: VllmServer, tokens: list[int], params: dict[str, Any] | None) -> float:
    """From asking to the answer with one token."""
    answer = server.ask(tokens, 1, params)
    if answer.status != 200:
        raise RuntimeError(f"{server.log}: {answer.body}\n{server.tail()}")
    return answer.seconds * 1000


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(last, 2)}


def measure(p: VllmServer, d: VllmServer, num_tokens: int, repeats: int) -> dict[str, Any]:
    """One prompt length; the four are taken in turn, so that drift of the machine hits all alike."""
    found: dict[str, list[float]] = {"floor": [], "p_first": [], "both": [], "whole": []}
    length = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS + 1
    for i in range(repeats):
        one, other, third = (prompt(length, 1000 * num_tokens + 3 * i + k) for k in range(3))
        half = p.ask(one, 1, {"do_remote_decode": True})
        found["p_first"].append(first_token_ms(d, one, half.params))
        found["floor"].append(first_token_ms(d, one, None))
        for_p, for_d = both_params(p, f"{num_tokens}-{i}")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(p.ask, other, 1, for_p)
            found["both"].append(first_token_ms(d, other, for_d))
            prefill.result()
        found["whole"].append(first_token_ms(p, third, None))
    rows: dict[str, Any] = {name: summary(values) for name, values in found.items()}
    for name, base in (("p_first", "floor"), ("both", "whole")):
        rows[f"{name}_excess"] = round(rows[name]["p50"] - rows[base]["p50"], 2)
    return rows


def wait_in_vain(p: VllmServer, d: VllmServer) -> dict[str, Any]:
    """CPU seconds per process of D over `WAIT_S` of waiting, and the end of the wait."""
    _, for_d = both_params(p, f"vain-{d.port}")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(d.ask, prompt(200, 5), 1, for_d)
        time.sleep(0.2)  # it is D's now; the wait itself is what is measured
        before = d.cpu_seconds()
        time.sleep(WAIT_S)
        used = {k: round(v - before.get(k, 0.0), 2) for k, v in d.cpu_seconds().items()}
        assert not waiting.done(), "the request did not wait"
        answer = waiting.result()
    named = {k.rpartition("/")[2]: v for k, v in used.items()}
    return {
        "cpu_s": named,
        "cpu_s_total": round(sum(used.values()), 2),
        "status": answer.status,
        "ended_after_s": round(answer.seconds, 2),
    }


def run(lengths: list[int], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder / "model", num_layers=8, head_dim=64)
        longest = max(lengths) + 2 * BLOCK_TOKENS
        control = free_port()
        common: dict[str, Any] = {"settings": SETTINGS, "max_model_len": longest}
        budget = ["--max-num-batched-tokens", str(max(512, min(longest, 2048)))]
        args = [*SLEEPING, *budget]
        p = VllmServer(model, folder / "p.log", role="kv_producer", name="p", cpu=0,
                       control_port=control, args=args, **common)  # fmt: skip
        d = VllmServer(
            model, folder / "d.log", role="kv_consumer", name="d", cpu=1, args=args, **common
        )
        stock = VllmServer(model, folder / "s.log", role="kv_consumer", name="stock", cpu=1,
                           args=budget, **common)  # fmt: skip
        with closing([p, d, stock]):
            for server in (p, d, stock):
                server.wait_ready()
            for _ in range(2):  # first requests open links and touch memory
                measure(p, d, min(lengths), 2)
            handoff = {str(n): measure(p, d, n, repeats) for n in lengths}
            vain = {"sleeping": wait_in_vain(p, d), "stock": wait_in_vain(p, stock)}
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "settings": "P pinned to CPU 0, D to CPU 1, one thread each; 8 layers, 8 KiB of KV a token",
        "handoff_ms": handoff,
        "waiting": vain,
        "waiting_ratio": round(
            vain["sleeping"]["cpu_s_total"] / max(0.01, vain["stock"]["cpu_s_total"]), 3
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", default="128,1024,4096")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    result = run([int(n) for n in arguments.tokens.split(",")], arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for length, rows in result["handoff_ms"].items():
        print(f"{length:>6} tokens  " + "  ".join(f"{k} {v}" for k, v in rows.items()))
    for name, row in result["waiting"].items():
        print(f"waiting {WAIT_S:g} s, {name}: {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
