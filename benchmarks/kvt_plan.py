"""How long a plan takes: ``python -m benchmarks.kvt_plan [--json]``.

131,072 tokens in scattered 16-token blocks, 60 layers of one pattern, through the Python face: the time
includes turning two Python lists of block ids into native ones.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

import torch

from kvt_bindings import KvCache, LayoutBuilder, PairPlanner

TOKENS = 131_072
LAYERS = 60
HEADS, DIM = 2, 8  # small: runs do not depend on how long a token's vector is
GOAL_MS = 2.0  # for equal TP


def cache(tp: int, row: str, shape: tuple[int, ...], block_tokens: int = 16) -> KvCache:
    builder = LayoutBuilder(model="m", tp_size=tp)
    group = builder.add_group(block_tokens)
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        builder.add_layer(layer, group, row, [tensor], heads_total=HEADS)
    return builder.build()


def measure(source: KvCache, target: KvCache) -> dict[str, float]:
    planner = PairPlanner(source.layout, target.layout)
    lists = []
    for seed, layout in enumerate((source.layout, target.layout)):
        num = TOKENS // layout.block_tokens[0]
        lists.append([random.Random(seed).sample(range(num * 9 // 8), num)])
    seconds = []
    for _ in range(30):
        begun = time.perf_counter()
        parts = planner.plan(0, 0, *lists, 0, TOKENS, True)
        seconds.append(time.perf_counter() - begun)
    return {"ms": round(statistics.median(seconds) * 1e3, 3), "runs": parts[0].num_runs}


def main() -> None:
    blocks = TOKENS // 16 * 9 // 8
    h, d = HEADS, DIM
    nhd, split_nhd = (cache(tp, "nhd", (2, blocks, 16, h // tp, d)) for tp in (1, 2))
    hnd, split_hnd = (cache(tp, "hnd", (blocks, 2, h // tp, 16, d)) for tp in (1, 2))
    inside = cache(1, "nhd_block_first", (blocks, 2, 16, h, d))
    result = {
        "nhd_block_first, equal TP": measure(inside, inside),
        "nhd, equal TP": measure(nhd, nhd),
        "hnd, TP 1 to 2": measure(hnd, split_hnd),
        "nhd, block size 16 to 64": measure(nhd, cache(1, "nhd", (2, blocks // 4, 64, h, d), 64)),
        "nhd, TP 1 to 2": measure(nhd, split_nhd),
    }
    equal = max(v["ms"] for name, v in result.items() if "equal" in name)
    if "--json" in sys.argv:
        print(json.dumps({"benchmark": "kvt_plan", "plans": result, "goal_met": equal < GOAL_MS}))
    else:
        for name, value in result.items():
            print(f"{name:28} {value['runs']:8} runs {value['ms']:7.3f} ms")


if __name__ == "__main__":
    main()
