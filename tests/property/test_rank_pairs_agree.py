"""The control plane expects completions from exactly the pairs of ranks that kvt moves bytes between."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from kvt_bindings import Layout, LayoutBuilder, PairPlanner
from pd_control.messages import Topology
from pd_control.protocol.ranks import rank_pairs

NUM_LAYERS = 4
STAGES = {1: (4,), 2: (1, 3), 4: (1, 1, 1, 1)}
BLOCKS, TOKENS, DIM = 2, 4, 2


@cache
def layout(tp_size: int, pp_size: int, heads: int) -> Layout:
    stages = []
    first = 0
    for pp_rank, num in enumerate(STAGES[pp_size]):
        builder = LayoutBuilder(model="m", tp_size=tp_size, pp_size=pp_size, pp_rank=pp_rank)
        group = builder.add_group(TOKENS)
        for layer in range(first, first + num):
            if heads:
                own = max(1, heads // tp_size)
                cells = np.zeros((2, BLOCKS, TOKENS, own, DIM), np.float32)
                builder.add_layer(layer, group, "nhd", [cells], heads_total=heads)
            else:
                builder.add_layer(
                    layer, group, "mla", [np.zeros((BLOCKS, TOKENS, DIM), np.float32)]
                )
        first += num
        stages.append(builder.build())
    return stages[0].joined([s.layout for s in stages]).layout if pp_size > 1 else stages[0].layout


@pytest.mark.parametrize("heads", [0, 2, 8])
def test_both_planners_name_the_same_pairs(heads: int) -> None:
    shapes = list(product((1, 2, 4, 8), (1, 2, 4)))
    for (s_tp, s_pp), (t_tp, t_pp) in product(shapes, shapes):
        source = Topology(s_tp, s_pp, heads, STAGES[s_pp] if s_pp > 1 else ())
        target = Topology(t_tp, t_pp, heads, STAGES[t_pp] if t_pp > 1 else ())
        planner = PairPlanner(layout(s_tp, s_pp, heads), layout(t_tp, t_pp, heads))
        native = {(s, t) for t in range(target.num_ranks) for s in planner.sources_of(t)}
        assert set(rank_pairs(source, target)) == native, (source, target)
