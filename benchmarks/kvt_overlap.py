"""Layer by layer: how long after the last layer's event the KV is there.

    python -m benchmarks.kvt_overlap [--json] [--quick]

A prefill step of 30 layers, each computed for a fixed time (asleep, as a CPU waits for a GPU) and recorded
when it is done; each layer has 8 MiB of KV to send. Measured per step, in this order and taking turns:

    one_layer     one layer, frozen: from the call to LOAD_DONE in the receiver's process
    overlapped    from the last layer's record_event to LOAD_DONE, sent along the step
    afterwards    the same KV sent when the step is over, as a frozen send: what is avoided

The compute time of a layer is chosen above the transfer time of one; if compute is shorter the wire is the
bottleneck and nothing can hide it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from typing import Any

from benchmarks.kvt import cpu_name
from benchmarks.kvt_node import PIECE_BYTES, Node

NUM_LAYERS = 30
PIECES = 256  # a layer: 8 MiB
COMPUTE_S = 0.006  # a layer
GOAL = (
    3.0  # of one layer's transfer, everything included: sleeping threads, the last check, LOAD_DONE
)


def overlapped(node: Node, step: int) -> tuple[float, float]:
    """Seconds from the last record to LOAD_DONE, and of the whole step."""
    (send,) = node.grant(1)
    node.sender.submit_send(step, send)
    begun = time.perf_counter()
    node.sender.start_step(step, node.num)
    for layer in range(NUM_LAYERS):
        time.sleep(COMPUTE_S)
        node.sender.record_event(step, layer)
    recorded = time.perf_counter()
    node.sender.freeze_step(step)
    node.sender.flush_step(step)
    return node.landed() - recorded, recorded - begun


def measure(transport: str, steps: int) -> dict[str, float]:
    node = Node(transport, num=PIECES, layers=NUM_LAYERS)
    single = Node(transport, num=PIECES, layers=1)
    try:
        node.batch()
        single.batch()
        times: dict[str, list[float]] = {"one_layer": [], "overlapped": [], "afterwards": []}
        for step in range(1, steps + 1):
            times["one_layer"].append(single.batch())
            times["overlapped"].append(overlapped(node, step)[0])
            times["afterwards"].append(node.batch())
    finally:
        node.close()
        single.close()
    out = {f"{name}_ms": round(statistics.median(s) * 1e3, 3) for name, s in times.items()}
    out["overlapped_over_one_layer"] = round(out["overlapped_ms"] / out["one_layer_ms"], 2)
    out["afterwards_over_one_layer"] = round(out["afterwards_ms"] / out["one_layer_ms"], 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "kvt_overlap",
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "layers": NUM_LAYERS,
        "layer_bytes": PIECES * PIECE_BYTES,
        "compute_ms": COMPUTE_S * 1e3,
        "transports": {t: measure(t, 8 if options.quick else 40) for t in ("tcp", "cma")},
    }
    result["goals"] = {
        f"{name}.overlapped_over_one_layer": {
            "goal": f"<= {GOAL}",
            "met": figures["overlapped_over_one_layer"] <= GOAL,
        }
        for name, figures in result["transports"].items()
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, figures in result["transports"].items():
        print(name, "  ".join(f"{k} {v}" for k, v in figures.items()))
    for name, goal in result["goals"].items():
        print(f"{name}: goal {goal['goal']}: {'met' if goal['met'] else 'NOT met'}")


if __name__ == "__main__":
    main()
