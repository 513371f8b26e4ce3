"""The shape of a Llama-family model, and how tensor-parallel ranks divide it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Llama: RMSNorm, rotary positions (half-split), grouped-query attention, SwiGLU.

    Sizes are counts of elements; ``context_tokens`` is the longest sequence the model was made for.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    context_tokens: int = 8192
    tied_embeddings: bool = True
    name: str = "llama"
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is no multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    def check_tp(self, tp_size: int) -> None:
        """Raise ValueError, naming what does not divide, if ``tp_size`` ranks cannot share it."""
        for what, size in (("num_heads", self.num_heads), ("intermediate", self.intermediate)):
            if size % tp_size:
                raise ValueError(f"tp_size {tp_size} does not divide {what} {size} of {self.name}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ValueError(
                f"tp_size {tp_size} and num_kv_heads {self.num_kv_heads} of {self.name}: "
                "one must divide the other"
            )

    def kv_heads_of(self, tp_rank: int, tp_size: int) -> range:
        """The KV heads that a rank stores; with more ranks than heads several store the same one."""
        if tp_size <= self.num_kv_heads:
            per_rank = self.num_kv_heads // tp_size
            return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        head = tp_rank * self.num_kv_heads // tp_size
        return range(head, head + 1)

    def to_dict(self) -> dict[str, int | float | str | bool | None]:
        """Plain values, for a message or a file; ``ModelSpec(**d)`` is the way back."""
        return asdict(self)


#: A context-sensitive toy for tests: a few thousand weights, several heads, quick on a CPU.
TINY = ModelSpec(
    num_layers=4,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=512,
    context_tokens=4096,
    name="tiny",
)
