"""A Llama decoder in plain torch over a paged KV cache, one tensor-parallel rank of it.

Shapes: N tokens of all sequences of a step lie one behind the other; H heads and G KV heads of *this
rank*; D head_dim. The KV cache of a layer is ``(2, num_blocks, block_tokens, G, D)``; a token's slot is
``block * block_tokens + offset``. Runs on the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from pd_control.reference.spec import ModelSpec

if TYPE_CHECKING:
    from pd_control.reference.checkpoint import Weights

#: Sums a tensor over the tensor-parallel ranks, in place.
AllReduce = Callable[[torch.Tensor], None]
#: Told after each layer's attention that this layer's KV of the step is in the cache.
LayerDone = Callable[[int], None]


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's part of a step: ``num_tokens`` new tokens after ``context`` cached ones."""

    start: int  # of its tokens in the flat batch
    num_tokens: int
    context: int  # tokens whose KV is in the cache before this step
    block_ids: list[int]


@dataclass(frozen=True)
class Batch:
    """The flat inputs of a step. ``logits_at`` are the flat indices whose logits are wanted."""

    token_ids: torch.Tensor  # (N,) int64
    positions: torch.Tensor  # (N,) int64
    slots: torch.Tensor  # (N,) int64
    sequences: list[SequenceSlice]
    logits_at: torch.Tensor  # (M,) int64


def make_batch(rows: list[tuple[list[int], int, list[int], bool]], block_tokens: int) -> Batch:
    """A batch from rows of (new token ids, tokens cached before, block ids, logits wanted?)."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences: list[SequenceSlice] = []
    logits_at: list[int] = []
    for new, context, blocks, wanted in rows:
        sequences.append(SequenceSlice(len(ids), len(new), context, blocks))
        ids += new
        here = range(context, context + len(new))
        positions += here
        slots += [blocks[p // block_tokens] * block_tokens + p % block_tokens for p in here]
        if wanted:
            logits_at.append(len(ids) - 1)
    as_tensor = [torch.tensor(v, dtype=torch.int64) for v in (ids, positions, slots, logits_at)]
    return Batch(as_tensor[0], as_tensor[1], as_tensor[2], sequences, as_tensor[3])


class Model:
    """The weights of one rank and the forward pass over its part of the cache.

    Args:
        weights: whole tensors under their Hugging Face names; each rank keeps its slices.
        all_reduce: sum over the ranks; never called when ``tp_size`` is 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        device: str = "cpu",
        all_reduce: AllReduce | None = None,
    ) -> None:
        spec.check_tp(tp_size)
        if tp_size > 1 and all_reduce is None:
            raise ValueError("all_reduce is needed when tp_size > 1")
        self.spec, self.tp_rank, self.tp_size, self.device = spec, tp_rank, tp_size, device
        self._all_reduce = all_reduce
        self.kv_heads = spec.kv_heads_of(tp_rank, tp_size)
        self.num_heads = spec.num_heads // tp_size
        self._embed = weights["model.embed_tokens.weight"].to(device)
        self._norm = weights["model.norm.weight"].to(device)
        head = weights["lm_head.weight"]
        tied = head is weights["model.embed_tokens.weight"]
        self._head = self._embed if tied else head.to(device)
        self._layers = [self._shard(weights, i) for i in range(spec.num_layers)]
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device)
        self._inv_freq = spec.rope_theta ** (-half / spec.head_dim)

    def _shard(self, weights: Weights, layer: int) -> dict[str, torch.Tensor]:
        spec, at, d = self.spec, f"model.layers.{layer}.", self.spec.head_dim
        first_q = self.tp_rank * self.num_heads * d
        q_rows = slice(first_q, first_q + self.num_heads * d)
        kv_rows = slice(self.kv_heads.start * d, self.kv_heads.stop * d)
        wide = spec.intermediate // self.tp_size
        mlp = slice(self.tp_rank * wide, (self.tp_rank + 1) * wide)

        def get(name: str) -> torch.Tensor:
            return weights[at + name + ".weight"]

        parts = {
            "attn_norm": get("input_layernorm"),
            "mlp_norm": get("post_attention_layernorm"),
            "qkv": torch.cat(
                [
                    get("self_attn.q_proj")[q_rows],
                    get("self_attn.k_proj")[kv_rows],
                    get("self_attn.v_proj")[kv_rows],
                ]
            ),
            "o": get("self_attn.o_proj")[:, q_rows],
            "gate_up": torch.cat([get("mlp.gate_proj")[mlp], get("mlp.up_proj")[mlp]]),
            "down": get("mlp.down_proj")[:, mlp],
        }
        return {k: v.contiguous().to(self.device) for k, v in parts.items()}

    def new_cache(self, num_blocks: int, block_tokens: int) -> list[torch.Tensor]:
        """One zeroed cache tensor a layer, ``(2, num_blocks, block_tokens, G, D)``."""
        shape = (2, num_blocks, block_tokens, len(self.kv_heads), self.spec.head_dim)
        dtype = self._embed.dtype
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in self._layers]

    def forward(
        self, batch: Batch, cache: list[torch.Tensor], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        """Logits ``(M, vocab)`` in float32 at ``batch.logits_at``; writes the step's KV to ``cache``.

        ``layer_done(i)`` is called when layer i's KV of this step lies in the cache, before its MLP.
        """
        with torch.inference_mode():
            return self._forward(batch, cache, layer_done)

    def _forward(
        self, batch: Batch, cache: list[torch.Tensor], layer_done: LayerDone | None
    ) -> torch.Tensor:
        x = self._embed[batch.token_ids.to(self.device)]
        cos, sin = self._rotary(batch.positions.to(self.device))
        slots = batch.slots.to(self.device)
        for i, w in enumerate(self._layers):
            h = _rms_norm(x, w["attn_norm"], self.spec.norm_eps)
            a = self._attention(h, w, cos, sin, slots, batch, cache[i])
            if layer_done is not None:
                layer_done(i)
            x = x + self._reduced(a @ w["o"].T)
            h = _rms_norm(x, w["mlp_norm"], self.spec.norm_eps)
            gate, up = (h @ w["gate_up"].T).chunk(2, dim=-1)
            x = x + self._reduced((F.silu(gate) * up) @ w["down"].T)
        wanted = _rms_norm(x[batch.logits_at.to(self.device)], self._norm, self.spec.norm_eps)
        return (wanted @ self._head.T).float()

    def _attention(
        self,
        h: torch.Tensor,
        w: dict[str, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        batch: Batch,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        n, d, g = h.shape[0], self.spec.head_dim, len(self.kv_heads)
        q, k, v = (h @ w["qkv"].T).split([self.num_heads * d, g * d, g * d], dim=-1)
        q = _rotate(q.view(n, self.num_heads, d), cos, sin)
        k = _rotate(k.view(n, g, d), cos, sin)
        flat = cache.view(2, -1, g, d)
        flat[0, slots] = k
        flat[1, slots] = v.view(n, g, d)
        out = torch.empty(n, self.num_heads * d, dtype=h.dtype, device=h.device)
        for s in batch.sequences:
            rows = slice(s.start, s.start + s.num_tokens)
            out[rows] = self._attend(q[rows], cache, s)
        return out

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, s: SequenceSlice) -> torch.Tensor:
        """Causal attention of one sequence's new tokens over all of its KV."""
        g, d = len(self.kv_heads), self.spec.head_dim
        total = s.context + s.num_tokens
        blocks = torch.tensor(s.block_ids, dtype=torch.int64, device=q.device)
        kv = cache[:, blocks].reshape(2, -1, g, d)[:, :total].transpose(1, 2)  # (2, G, total, D)
        group = self.num_heads // g
        k, v = (kv[i].unsqueeze(1).expand(g, group, total, d) for i in (0, 1))
        grouped = q.view(s.num_tokens, g, group, d).permute(1, 2, 0, 3)
        mask = None
        if s.num_tokens > 1 and s.context:
            mask = torch.ones(s.num_tokens, total, dtype=torch.bool, device=q.device)
            mask = mask.tril(diagonal=s.context)
        causal = s.num_tokens > 1 and not s.context
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=causal)
        return out.permute(2, 0, 1, 3).reshape(s.num_tokens, -1)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[:, None].float() * self._inv_freq
        angle = torch.cat([angle, angle], dim=-1)[:, None, :]
        return angle.cos().to(self._embed.dtype), angle.sin().to(self._embed.dtype)

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_size > 1 and self._all_reduce is not None:
            self._all_reduce(x)
        return x


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin
