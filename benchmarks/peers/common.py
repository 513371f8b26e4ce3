"""Shared by the runners of this folder, which run in venvs of their own (numpy only).

A runner moves `num` pieces of `piece` bytes from one process to another, from and to places in random
order, as KV blocks lie in a pool. It prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

LATENCY_PIECES = (32 * 1024, 2)  # 64 KiB


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pieces", required=True, help="JSON: [[piece_bytes, num_pieces], ...]")
    parser.add_argument("--min-s", type=float, default=0.4, help="measure each for so long")
    parser.add_argument("--latency", type=int, default=0, help="repetitions of 64 KiB; 0: none")
    options = parser.parse_args()
    options.pieces = [tuple(p) for p in json.loads(options.pieces)]
    return options


def order(num: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num)


def source_memory(total: int) -> np.ndarray:
    """The same bytes in both processes, so that the target can check what it got."""
    block = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
    return np.tile(block, -(-total // block.size))[:total].copy()


def is_right(target: np.ndarray, piece: int, num: int) -> bool:
    """Whether `target` holds the source's pieces, each in its place."""
    source = source_memory(piece * num).reshape(num, piece)
    return bool(
        (target[: piece * num].reshape(num, piece)[order(num, 2)] == source[order(num, 1)]).all()
    )


def repeat(once: Callable[[], None], min_s: float) -> list[float]:
    """Seconds of each repetition, after two that are not counted."""
    once()
    once()
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < 5 or (time.perf_counter() - start < min_s and len(seconds) < 2000):
        t = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - t)
    return seconds


def report(piece: int, num: int, seconds: list[float], right: bool, note: str = "") -> None:
    result = {"piece_bytes": piece, "num_pieces": num, "seconds": seconds, "right": right}
    print(json.dumps(result | ({"note": note} if note else {})), flush=True)


def report_failure(piece: int, num: int, error: str) -> None:
    print(json.dumps({"piece_bytes": piece, "num_pieces": num, "error": error}), flush=True)


def report_latency(seconds: list[float], what: str) -> None:
    print(json.dumps({"latency_s": seconds, "what": what}), flush=True)
