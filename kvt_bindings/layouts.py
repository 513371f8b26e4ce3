"""From an engine's cache tensors to a `Layout`: the table of attention families and a builder.

A family is a row of `ROWS`: for each tensor of a layer the names of its dimensions. An engine with
another arrangement passes its own `Row`; nothing else has to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvt_bindings._kvt import Layout, RankCache, View
from kvt_bindings._tensors import TensorInfo, tensor_info

DIMENSIONS = ("KV", "BLOCK", "TOKEN", "HEAD", "DIM")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One cache tensor of a layer.

    `dims` names its dimensions in order, e.g. ``"BLOCK KV TOKEN HEAD DIM"``; what is not named is
    absent. Adjacent dimensions of the same name are taken as one (they must be contiguous).
    `name` is what peers match by: a K tensor and a V tensor are both ``"kv"`` with `kv_begin` 0
    and 1. `granularity` is ``tokens``, ``cell`` (whole blocks of `block_tokens` in an order that only
    the kernel `cell` knows) or ``state`` (one slot per request).
    """

    dims: str
    name: str = "kv"
    kv_begin: int = 0
    granularity: str = "tokens"


@dataclass(frozen=True, slots=True)
class Row:
    """One attention family: the tensors of a layer, in order."""

    tensors: tuple[TensorRow, ...]


def _one(dims: str, **options: Any) -> Row:
    return Row((TensorRow(dims, **options),))


ROWS: dict[str, Row] = {
    # MHA / GQA, tokens before heads
    "nhd": _one("KV BLOCK TOKEN HEAD DIM"),
    "nhd_block_first": _one("BLOCK KV TOKEN HEAD DIM"),
    "ragged": _one("BLOCK TOKEN KV HEAD DIM"),
    "nhd_split": Row(
        (TensorRow("BLOCK TOKEN HEAD DIM"), TensorRow("BLOCK TOKEN HEAD DIM", kv_begin=1))
    ),
    # heads before tokens
    "hnd": _one("BLOCK KV HEAD TOKEN DIM"),
    "hnd_kv_first": _one("KV BLOCK HEAD TOKEN DIM"),
    "hnd_split": Row(
        (TensorRow("BLOCK HEAD TOKEN DIM"), TensorRow("BLOCK HEAD TOKEN DIM", kv_begin=1))
    ),
    # (block, head, cell): what is inside a cell only the kernel knows
    "cell": _one("BLOCK HEAD DIM", granularity="cell"),
    "cell_kv_first": _one("KV BLOCK HEAD DIM", granularity="cell"),
    # MLA: one latent for all heads, the same on every rank; DSA adds an indexer cache
    "mla": _one("BLOCK TOKEN DIM", name="latent"),
    "mla_indexer": Row(
        (TensorRow("BLOCK TOKEN DIM", name="latent"), TensorRow("BLOCK TOKEN DIM", name="indexer"))
    ),
    # (latent, indexer values, indexer scales): the latter two may be views of one tensor
    "mla_indexer_scaled": Row(
        (
            TensorRow("BLOCK TOKEN DIM", name="latent"),
            TensorRow("BLOCK TOKEN DIM", name="indexer"),
            TensorRow("BLOCK TOKEN DIM", name="indexer_scale"),
        )
    ),
    # Per-request state. HEAD is what is shared out over ranks: channels of the convolution window,
    # heads of the recurrent state.
    "ssm": Row(
        (
            TensorRow("BLOCK HEAD DIM", name="conv", granularity="state"),
            TensorRow("BLOCK HEAD DIM DIM", name="ssm", granularity="state"),
        )
    ),
    # GDN's window holds q, k and v channels side by side, each shared out by itself: give three
    # slices of that tensor, or unequal TP sizes would mix them up.
    "gdn": Row(
        (
            TensorRow("BLOCK HEAD DIM", name="conv_q", granularity="state"),
            TensorRow("BLOCK HEAD DIM", name="conv_k", granularity="state"),
            TensorRow("BLOCK HEAD DIM", name="conv_v", granularity="state"),
            TensorRow("BLOCK HEAD DIM DIM", name="ssm", granularity="state"),
        )
    ),
}


@dataclass(slots=True)
class _Layer:
    layer: int
    group: int
    pattern: int
    memory: list[tuple[int, int]]


class LayoutBuilder:
    """Collects one worker's cache tensors. One thread.

    >>> builder = LayoutBuilder(model="m", tp_size=2, tp_rank=0)
    >>> group = builder.add_group(block_tokens=16)
    >>> builder.add_layer(0, group, "nhd", [k_and_v], heads_total=8)
    >>> cache = builder.build()          # .layout goes to the peers, .native to Sender and Receiver
    """

    def __init__(
        self,
        *,
        model: str,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        scales: str = "",
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank {tp_rank} of {tp_size}")
        if not 0 <= pp_rank < pp_size:
            raise ValueError(f"pp_rank {pp_rank} of {pp_size}")
        self._model = model
        self._scales = scales
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._pp_size, self._pp_rank = pp_size, pp_rank
        self._groups: list[int] = []
        self._patterns: list[tuple[list[int], list[View]]] = []
        self._pattern_keys: dict[Any, int] = {}
        self._layers: dict[int, _Layer] = {}
        self._devices: set[int | None] = set()
        self._tensors: list[Any] = []

    def add_group(self, block_tokens: int) -> int:
        """A set of layers that share one block list; returns its index."""
        self._groups.append(block_tokens)
        return len(self._groups) - 1

    def add_layer(
        self,
        layer: int,
        group: int,
        row: str | Row,
        tensors: Sequence[Any],
        *,
        heads_total: int | Sequence[int] = 1,
        cell: str = "",
    ) -> None:
        """Describe layer number `layer` (global) by its tensors, in the row's order.

        `heads_total` counts the model's KV heads over all ranks, for each tensor if they differ; it
        does not matter for a tensor without HEAD. Raises ValueError naming tensor and dimension;
        nothing is added then.
        """
        if layer in self._layers:
            raise ValueError(f"layer {layer} was added before")
        if not 0 <= group < len(self._groups):
            raise ValueError(f"layer {layer}: group {group} of {len(self._groups)}")
        rows = ROWS[row].tensors if isinstance(row, str) else row.tensors
        if len(rows) != len(tensors):
            raise ValueError(f"layer {layer}: {len(tensors)} tensors, row {row} has {len(rows)}")
        heads = [heads_total] * len(rows) if isinstance(heads_total, int) else list(heads_total)
        if len(heads) != len(rows):
            raise ValueError(f"layer {layer}: {len(heads)} head counts for {len(rows)} tensors")
        infos = [tensor_info(t) for t in tensors]
        views: list[View] = []
        for i, (spec, info) in enumerate(zip(rows, infos, strict=True)):
            try:
                views.append(_view(spec, info, i, heads[i], cell))
            except ValueError as error:
                raise ValueError(f"layer {layer}, tensor {i} ({spec.name}): {error}") from None
        extents = [info.extent_bytes for info in infos]
        key = (tuple(extents), tuple(_view_key(v) for v in views))
        pattern = self._pattern_keys.setdefault(key, len(self._patterns))
        if pattern == len(self._patterns):
            self._patterns.append((extents, views))
        memory = [(info.address, info.extent_bytes) for info in infos]
        self._layers[layer] = _Layer(layer, group, pattern, memory)
        self._devices.update(info.cuda_device for info in infos)
        self._tensors.extend(tensors)

    def build(self) -> KvCache:
        """Raises KvtError(BAD_REQUEST) naming the field, ValueError for tensors on two devices."""
        if len(self._devices) > 1:
            raise ValueError(f"cache tensors are on several devices: {self._devices}")
        ordered = [self._layers[n] for n in sorted(self._layers)]
        layout = Layout(
            model=self._model,
            scales=self._scales,
            groups=self._groups,
            patterns=self._patterns,
            layers=[(e.layer, e.group, e.pattern, self._pp_rank) for e in ordered],
            tp_size=self._tp_size,
            pp_size=self._pp_size,
        )
        memory = tuple((e.layer, tuple(e.memory)) for e in ordered)
        native = RankCache(
            layout,
            self._pp_rank * self._tp_size + self._tp_rank,
            memory,
            next(iter(self._devices), None),
        )
        return KvCache(layout, native, tuple(self._tensors), memory)


@dataclass(frozen=True, slots=True)
class KvCache:
    """One rank's cache: its layout, where it lies, and the tensors themselves, kept alive."""

    layout: Layout
    native: RankCache
    tensors: tuple[Any, ...]
    memory: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @property
    def rank(self) -> int:
        return self.native.rank

    def joined(self, stages: Sequence[Layout]) -> KvCache:
        """The same memory under the layout of the whole instance, for pipeline ranks.

        `stages`: the layout of every stage, this one's among them. A peer compares whole instances, so
        with pp_size > 1 this is what Sender and Receiver are made with. Raises KvtError.
        """
        layout = Layout.merge_stages(stages)
        native = RankCache(layout, self.rank, self.memory, self.native.cuda_device)
        return KvCache(layout, native, self.tensors, self.memory)


def _view(spec: TensorRow, info: TensorInfo, index: int, heads_total: int, cell: str) -> View:
    names = spec.dims.split()
    if len(names) != len(info.shape):
        raise ValueError(f"shape {info.shape} for dimensions {spec.dims}")
    axes: dict[str, tuple[int, int]] = {}
    for name, size, stride in zip(names, info.shape, info.strides_bytes, strict=True):
        if name not in DIMENSIONS:
            raise ValueError(f"dimension {name} is none of {', '.join(DIMENSIONS)}")
        if name not in axes:
            axes[name] = (size, stride)
            continue
        outer_size, outer_stride = axes[name]
        if outer_size > 1 and size > 1 and outer_stride != size * stride:
            raise ValueError(f"the {name} dimensions are not contiguous, so cannot be taken as one")
        axes[name] = (outer_size * size, stride if size > 1 else outer_stride)

    def axis(name: str) -> tuple[int, int]:
        size, stride = axes.get(name, (1, 0))
        return (size, stride if size > 1 else 0)

    return View(
        name=spec.name,
        dtype=info.dtype,
        item_bytes=info.item_bytes,
        kv=axis("KV"),
        block=axis("BLOCK"),
        token=axis("TOKEN"),
        head=axis("HEAD"),
        dim=axis("DIM"),
        heads_total=heads_total if "HEAD" in axes else 1,
        tensor=index,
        kv_begin=spec.kv_begin,
        granularity=spec.granularity,
        cell=cell if spec.granularity == "cell" else "",
    )


def _view_key(v: View) -> tuple[Any, ...]:
    return (
        *(v.name, v.dtype, v.granularity, v.cell, v.item_bytes, v.tensor, v.kv_begin, v.offset),
        *(v.heads_total, v.kv, v.block, v.token, v.head, v.dim),
    )


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)


__all__ = [
    "DIMENSIONS",
    "ROWS",
    "KvCache",
    "LayoutBuilder",
    "Row",
    "TensorRow",
    "blocks_for",
]
