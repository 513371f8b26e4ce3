"""vLLM's cache tensors as a kvt layout: read from the tensors, never from an environment variable.

Since 0.29 a layer's cache is a strided view ``[B, H, N, C]`` of one buffer: blocks, head slots, tokens, and
the content of one token and head. The strides tell NHD from HND; C is K and V side by side (FlashAttention,
FlashInfer, Triton), or the latent (MLA, H = 1, a replica on every rank). On CPU only the kernel knows what
is inside a (block, head) cell, so the cell is opaque and both sides must run the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvt_bindings import KvCache, LayoutBuilder, Row, TensorRow

_TOKENS = Row((TensorRow("BLOCK HEAD TOKEN DIM"),))
_LATENT = Row((TensorRow("BLOCK HEAD TOKEN DIM", name="latent"),))
_CELLS = Row((TensorRow("BLOCK HEAD DIM DIM", granularity="cell"),))


class LayoutError(RuntimeError):
    """A cache that cannot be transferred; the message names the layer and what it is."""


def build_cache(
    tensors: Mapping[str, Any],
    kv_cache_config: Any,
    *,
    model: str,
    tp_size: int,
    tp_rank: int,
    num_kv_heads: int,
    cell_kernels: Mapping[str, str],
) -> KvCache:
    """One worker's cache as kvt sees it.

    Args:
        tensors: layer name → tensor, as vLLM registers them.
        num_kv_heads: of the whole model.
        cell_kernels: layer name → kernel (ISA), for layers whose cells are opaque.

    Raises:
        LayoutError: a layer is of a kind that is not supported.
    """
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    builder = LayoutBuilder(model=model, tp_size=tp_size, tp_rank=tp_rank)
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise LayoutError(
                f"{group.layer_names[0]}: {type(spec).__name__} is not supported: only attention "
                "caches can be transferred"
            )
        number = builder.add_group(block_tokens=spec.block_size)
        for name in group.layer_names:
            tensor = tensors.get(name)
            if tensor is None:
                raise LayoutError(f"{name}: vLLM registered no cache tensor for it")
            if tensor.shape[0] != kv_cache_config.num_blocks:
                raise LayoutError(
                    f"{name}: {tensor.shape[0]} kernel blocks for {kv_cache_config.num_blocks} blocks; "
                    "a kernel block size other than --block-size is not supported"
                )
            latent = isinstance(spec, MLAAttentionSpec)
            kernel = cell_kernels.get(name, "")
            builder.add_layer(
                extract_layer_index(name),
                number,
                _LATENT if latent else _CELLS if kernel else _TOKENS,
                [tensor],
                heads_total=1 if latent else num_kv_heads,
                cell=f"{kernel}/{tensor.dtype}/{spec.block_size}" if kernel else "",
            )
    return builder.build()


def opaque_kernels(static_forward_context: Mapping[str, Any]) -> dict[str, str]:
    """Layer name → ISA of the CPU attention kernel, for the layers that have one."""
    found = {}
    for name, layer in static_forward_context.items():
        isa = getattr(layer, "isa", None)
        if isinstance(isa, str):
            found[name] = f"cpu_attn:{isa}"
    return found
