"""Greedy and seeded sampling. The draw for a token depends on (seed, position) only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only workers compute; a scheduler process does not load it
    import torch

#: Dividing logits by less could leave the range of a double, and draws the same token anyway.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` 0 is greedy. ``seed`` (64 bits) makes sampling repeatable, on whichever engine it
    runs."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 10.0:
            raise ValueError(f"temperature must lie in [0, 10], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed must be of 64 bits, got one of {self.seed.bit_length()}")


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token after ``position``, from its logits ``(vocab,)`` in float32."""
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    import torch

    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    ordered, index = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    ordered[before >= params.top_p] = 0.0
    generator = torch.Generator().manual_seed((params.seed * 1_000_003 + position) % (1 << 63))
    return int(index[torch.multinomial(ordered, 1, generator=generator)])
