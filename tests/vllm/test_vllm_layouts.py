"""vLLM's cache views as kvt layouts: the right elements move, and what cannot be moved is refused by name.

The tensors are made as vLLM makes them: strided views [B, H, N, C] of one buffer, for the layouts of GPU
kernels as well, whose bytes do not care where they lie.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from kvt_bindings import KvCache, KvtError, PairPlanner
from pd_control.vllm.layouts import LayoutError, build_cache, opaque_kernels
from tests.property.kvt_caches import copy_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NUM_LAYERS, HEADS, CONTENT, NUM_BLOCKS = 2, 2, 6, 12
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)]


def view(order: str, block_tokens: int, heads: int = HEADS) -> dict[str, torch.Tensor]:
    """All layers in one buffer, each as a view [B, H, N, C]; ``order`` names what lies outermost."""
    sizes = {"L": NUM_LAYERS, "B": NUM_BLOCKS, "H": heads, "N": block_tokens, "C": CONTENT}
    buffer = torch.zeros([sizes[d] for d in order])
    whole = buffer.permute([order.index(d) for d in "LBHNC"])
    return {name: whole[i] for i, name in enumerate(NAMES)}


def config(spec: Any) -> Any:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)
    return SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)


def cache(tensors: dict[str, torch.Tensor], block_tokens: int, kernel: str = "") -> KvCache:
    heads = tensors[NAMES[0]].shape[1]
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=CONTENT // 2, dtype=torch.float32
    )
    return build_cache(
        tensors, config(spec), model="m", tp_size=1, tp_rank=0, num_kv_heads=heads,
        cell_kernels=dict.fromkeys(NAMES, kernel) if kernel else {},
    )  # fmt: skip


@pytest.mark.parametrize("source_order", ["LBNHC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("target_order", ["LBNHC", "LBHNC", "BHLNC"])
@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(4, 4), (4, 8), (8, 4)])
def test_every_order_to_every_other(
    source_order: str, target_order: str, source_tokens: int, target_tokens: int
) -> None:
    source, target = view(source_order, source_tokens), view(target_order, target_tokens)
    for i, tensor in enumerate(source.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 10_000 * i + 1)
    a, b = cache(source, source_tokens), cache(target, target_tokens)
    blocks, others = [7, 2, 9, 4, 1, 0], [3, 8, 1, 5, 6, 2]
    first, end = 4, 19
    for part in PairPlanner(a.layout, b.layout).plan(0, 0, [blocks], [others], first, end, True):
        for layer in part.layers:
            for run in part.runs:
                copy_bytes(a, b, layer, run)
    for name in NAMES:
        wanted = torch.zeros_like(target[name])
        for token in range(first, end):
            from_block, from_slot = blocks[token // source_tokens], token % source_tokens
            to_block, to_slot = others[token // target_tokens], token % target_tokens
            wanted[to_block, :, to_slot] = source[name][from_block, :, from_slot]
        assert torch.equal(target[name], wanted)


def test_cells_of_another_kernel_or_block_size_are_refused() -> None:
    mine = cache(view("LBHNC", 4), 4, "cpu_attn:vec")
    for other in (
        cache(view("LBHNC", 4), 4, "cpu_attn:amx"),
        cache(view("LBHNC", 8), 8, "cpu_attn:vec"),
    ):
        with pytest.raises(KvtError):
            PairPlanner(mine.layout, other.layout)
    PairPlanner(mine.layout, cache(view("LBHNC", 4), 4, "cpu_attn:vec").layout)


def test_a_latent_is_one_head_and_a_replica() -> None:
    spec = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=CONTENT, dtype=torch.float32
    )  # fmt: skip
    made = build_cache(
        view("LBHNC", 4, heads=1), config(spec), model="m", tp_size=1, tp_rank=0, num_kv_heads=1,
        cell_kernels={},
    )  # fmt: skip
    PairPlanner(made.layout, made.layout)


def test_state_is_refused_by_name() -> None:
    spec = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=(torch.float32,))
    with pytest.raises(LayoutError, match="MambaSpec"):
        build_cache(
            view("LBHNC", 4), config(spec), model="m", tp_size=1, tp_rank=0, num_kv_heads=2,
            cell_kernels={},
        )  # fmt: skip


def test_a_kernel_that_splits_blocks_is_refused_by_name() -> None:
    tensors = view("LBHNC", 4)
    tensors[NAMES[0]] = tensors[NAMES[0]].reshape(2 * NUM_BLOCKS, HEADS, 2, CONTENT)
    with pytest.raises(LayoutError, match="kernel block"):
        cache(tensors, 4)


def test_only_layers_with_an_isa_are_opaque() -> None:
    context = {
        "a": SimpleNamespace(isa="vec"),
        "b": SimpleNamespace(),
        "c": SimpleNamespace(isa=None),
    }
    assert opaque_kernels(context) == {"a": "cpu_attn:vec"}
