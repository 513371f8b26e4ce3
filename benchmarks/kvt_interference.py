"""What a busy Python worker does to kvt, and kvt to it.

    python -m benchmarks.kvt_interference [--json] [--quick]

A worker process sends KV (batches of 32 MiB transfers, 32 KiB pieces) to a second process while one of its
threads is busy: with pure Python (it holds the GIL whenever it can), or with native work of the same
appetite that does not hold it (PBKDF2). The difference between those two is what the GIL costs; the
difference between either and `idle` is what a third busy thread costs on the cores there are. The same with
a plain Python thread as the sender (`python_thread`), to show why kvt's is native.

The other way round: how long an iteration of the Python loop takes alone, beside kvt, and beside native
memcpy processes that load as many cores as kvt does (2 for tcp: sender and receiver; 1 for cma: the
receiver).

And `record_event`, called as an engine does, 32 layers a step.

Bias to know about: on two cores tcp with a busy thread beside it is three busy threads, so it cannot keep its
idle figure, whoever holds what lock; `over_native_busy` is the ratio without that. Variants of one kind take
turns, so that a slow minute of the machine falls on all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.kvt import cpu_name, floors_binary
from benchmarks.kvt_node import PIECE_BYTES, Node, order
from kvt_bindings import CompletionQueue, DataClient, Sender

BATCH = 8  # transfers handed over in one call: the busy thread is asked for the GIL once
ITERATION_STEPS = 4_000  # of the Python loop: a few hundred microseconds
NUM_LAYERS = 32
GOALS = {
    "cma.python_busy_over_idle": (">=", 0.9),
    "tcp.python_busy_over_native_busy": (">=", 0.9),
    "loop_p99.tcp_over_memcpy": ("<=", 1.1),
    "loop_p99.cma_over_memcpy": ("<=", 1.1),
    "record_event_us.median": ("<=", 2.0),
}


# -- busy threads ------------------------------------------------------------------------------------


def spin(stop: threading.Event, seconds: list[float]) -> None:
    """Pure Python, timed in iterations."""
    clock = time.perf_counter
    while not stop.is_set():
        begun = clock()
        x = 0
        for i in range(ITERATION_STEPS):
            x += i * i
        seconds.append(clock() - begun)


def spin_natively(stop: threading.Event, seconds: list[float]) -> None:
    """As busy, without the GIL; it comes up for air 50 times a second."""
    while not stop.is_set():
        hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 40_000)


@contextmanager
def busy(work: Callable[[threading.Event, list[float]], None] | None) -> Iterator[list[float]]:
    seconds: list[float] = []
    if work is None:
        yield seconds
        return
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop, seconds))
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()


BUSY = {"idle": None, "native_busy": spin_natively, "python_busy": spin}


# -- throughput --------------------------------------------------------------------------------------


def python_receiver(pipe: Any, num: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    sock, _ = listener.accept()
    memory = np.ones((num, PIECE_BYTES), np.uint8)
    pieces = [memoryview(memory[i]) for i in order(num, 2)]
    while (total := pipe.recv()) is not None:
        pipe.send(True)
        left = total
        while left:
            at = 0
            inside = 0
            while at < num:
                got = sock.recvmsg_into([pieces[at][inside:], *pieces[at + 1 : at + 1024]])[0]
                done, inside = divmod(got + inside, PIECE_BYTES)
                at += done
            left -= 1
        pipe.send(time.perf_counter())


class PythonThreadSender:
    """The same pieces through a socket by a Python thread of the worker process."""

    def __init__(self, num: int) -> None:
        self._pipe, theirs = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(
            target=python_receiver, args=(theirs, num), daemon=True
        )
        process.start()
        self._sock = socket.create_connection(("127.0.0.1", self._pipe.recv()))
        memory = np.ones((num, PIECE_BYTES), np.uint8)
        self._pieces = [memoryview(memory[i]) for i in order(num, 1)]
        self.bytes_per_batch = BATCH * num * PIECE_BYTES

    def batch(self) -> float:
        self._pipe.send(BATCH)
        self._pipe.recv()
        begun = time.perf_counter()
        thread = threading.Thread(target=self._send)
        thread.start()
        thread.join()
        return float(self._pipe.recv()) - begun

    def _send(self) -> None:
        for _ in range(BATCH):
            at = 0
            inside = 0
            while at < len(self._pieces):
                views = [self._pieces[at][inside:], *self._pieces[at + 1 : at + 1024]]
                done, inside = divmod(self._sock.sendmsg(views) + inside, PIECE_BYTES)
                at += done

    def close(self) -> None:
        self._pipe.send(None)
        self._sock.close()


def throughput(sender: Node | PythonThreadSender, rounds: int) -> dict[str, float]:
    """GB/s beside each kind of thread."""
    seconds: dict[str, list[float]] = {name: [] for name in BUSY}
    sender.batch()
    for _ in range(rounds):
        for name, work in BUSY.items():
            with busy(work):
                seconds[name].append(sender.batch())
    return {
        name: round(sender.bytes_per_batch / statistics.median(s) / 1e9, 3)
        for name, s in seconds.items()
    }


# -- the busy loop's own view ------------------------------------------------------------------------


@contextmanager
def memcpy_load(num_processes: int, run_s: float) -> Iterator[None]:
    command = [str(floors_binary()), "memcpy", str(PIECE_BYTES), "1024", str(run_s + 1.0)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(num_processes)]
    time.sleep(0.3)  # they fill their memory first
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def iterations(run_s: float, load: Callable[[], object] | None) -> list[float]:
    with busy(spin) as seconds:
        end = time.perf_counter() + run_s
        while time.perf_counter() < end:
            if load is None:
                time.sleep(max(0.0, end - time.perf_counter()))
            else:
                load()
    return seconds


def loop_times(nodes: dict[str, Node], rounds: int, run_s: float) -> dict[str, dict[str, float]]:
    """Milliseconds of an iteration, by what runs beside it."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds.setdefault("alone", []).extend(iterations(run_s, None))
        for name, node in nodes.items():
            seconds.setdefault(f"kvt_{name}", []).extend(iterations(run_s, node.batch))
            with memcpy_load(2 if name == "tcp" else 1, run_s):
                seconds.setdefault(f"memcpy_{name}", []).extend(iterations(run_s, None))
    out = {}
    for name, s in seconds.items():
        s.sort()
        out[name] = {
            "median": round(statistics.median(s) * 1e3, 4),
            "p99": round(s[int(0.99 * len(s))] * 1e3, 4),
            "iterations": len(s),
        }
    return out


# -- record_event ------------------------------------------------------------------------------------


def record_event_us(node: Node, steps: int) -> dict[str, float]:
    """Per call, with no send in the step and with one that needs every layer."""
    cache = node.make_cache(num=64, layers=NUM_LAYERS)
    client = DataClient(cache.native)
    sender = Sender(cache.native, CompletionQueue(), client)
    sender.begin_scheduler(b"P" * 16)
    out: dict[str, float] = {}
    step = 0
    for name in ("median", "median_with_a_send"):
        times = []
        for _ in range(steps):
            step += 1
            if name != "median":  # to nobody: it waits for its connection, and is given up
                sender.submit_send(step, node.send_to_nobody(step, num=64))
            sender.start_step(step, 1)
            for layer in range(NUM_LAYERS):
                begun = time.perf_counter_ns()
                sender.record_event(step, layer)
                times.append(time.perf_counter_ns() - begun)
            sender.freeze_step(step)
            sender.flush_step(step)
            if name != "median":
                sender.cancel(step.to_bytes(16, "big"))
        times.sort()
        out[name] = round(statistics.median(times) / 1e3, 3)
        out[name.replace("median", "p99")] = round(times[int(0.99 * len(times))] / 1e3, 3)
    sender.close()
    client.close()
    return out


# -- all of it ---------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 9
    rates: dict[str, dict[str, float]] = {}
    nodes = {name: Node(name, num=1024, batch=BATCH) for name in ("tcp", "cma")}
    try:
        for name, node in nodes.items():
            rates[name] = throughput(node, rounds)
        plain = PythonThreadSender(1024)
        rates["python_thread"] = throughput(plain, rounds)
        plain.close()
        loops = loop_times(nodes, 1 if quick else 3, 1.5)
        events = record_event_us(nodes["tcp"], 100 if quick else 1000)
    finally:
        for node in nodes.values():
            node.close()
    ratios: dict[str, float] = {}
    for name, rate in rates.items():
        ratios[f"{name}.python_busy_over_idle"] = rate["python_busy"] / rate["idle"]
        ratios[f"{name}.python_busy_over_native_busy"] = rate["python_busy"] / rate["native_busy"]
    for name in nodes:
        ratios[f"loop_p99.{name}_over_memcpy"] = (
            loops[f"kvt_{name}"]["p99"] / loops[f"memcpy_{name}"]["p99"]
        )
    ratios["record_event_us.median"] = events["median"]
    return {
        "benchmark": "kvt_interference",
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "gb_per_s": rates,
        "loop_ms": loops,
        "record_event_us": events,
        "ratios": {k: round(v, 3) for k, v in ratios.items()},
        "goals": {
            k: {
                "goal": f"{op} {bound}",
                "met": ratios[k] >= bound if op == ">=" else ratios[k] <= bound,
            }
            for k, (op, bound) in GOALS.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    result = measure(options.quick)
    if options.json:
        print(json.dumps(result))
        return
    for name, rate in result["gb_per_s"].items():
        print(f"{name:14} " + "  ".join(f"{k} {v:.2f} GB/s" for k, v in rate.items()))
    for name, loop in result["loop_ms"].items():
        print(f"loop {name:10} median {loop['median']} ms, p99 {loop['p99']} ms")
    print(f"record_event  {result['record_event_us']} us")
    for name, ratio in result["ratios"].items():
        goal = result["goals"].get(name)
        said = f" (goal {goal['goal']}: {'met' if goal['met'] else 'NOT met'})" if goal else ""
        print(f"{name}: {ratio}{said}")


if __name__ == "__main__":
    main()
