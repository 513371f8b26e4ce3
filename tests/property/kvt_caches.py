"""Random caches in numpy, addressed by named index: the reference that plans are compared with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvt_bindings import KvCache, LayoutBuilder, Row, TensorRow


@dataclass(frozen=True)
class ViewSpec:
    """Model-wide meaning of one named part of a layer, the same on both sides."""

    name: str
    num_kv: int  # KV indices
    heads: int  # over all ranks; 0: no HEAD dimension
    dim: int
    item_bytes: int
    granularity: str = "tokens"


@dataclass(frozen=True)
class SideSpec:
    """How one side arranges it."""

    tp: int
    stages: int
    block_tokens: tuple[int, ...]  # per group
    num_blocks: int
    orders: dict[str, tuple[str, ...]]  # view name -> dimension order
    split: dict[str, bool]  # view name -> K and V in tensors of their own
    padding: int  # extra bytes at the end of each block and inner dimension


@dataclass
class Tensor:
    """One cache tensor inside a private buffer with padding, indexed by name."""

    array: np.ndarray
    buffer: np.ndarray  # uint8, all of the memory including gaps
    dims: tuple[str, ...]
    spec: ViewSpec
    kv_begin: int

    def index(self, **at: int) -> tuple[object, ...]:
        return tuple(at.get(name, slice(None)) for name in self.dims)


@dataclass
class Rank:
    """All layers of one rank: layer -> tensors, and what kvt knows of them."""

    tp_rank: int
    stage: int
    layers: dict[int, list[Tensor]] = field(default_factory=dict)
    cache: KvCache | None = None


def local_heads(spec: ViewSpec, tp: int, tp_rank: int) -> range:
    """Model-wide numbers of the heads that a rank holds."""
    heads = max(spec.heads, 1)
    if heads >= tp:
        n = heads // tp
        return range(tp_rank * n, (tp_rank + 1) * n)
    first = tp_rank // (tp // heads)
    return range(first, first + 1)


def make_tensor(spec: ViewSpec, side: SideSpec, rank: int, group: int, kv: range) -> Tensor:
    order = side.orders[spec.name]
    sizes = {
        "KV": len(kv),
        "BLOCK": side.num_blocks,
        "TOKEN": side.block_tokens[group],
        "HEAD": len(local_heads(spec, side.tp, rank)),
        "DIM": spec.dim,
    }
    dims = tuple(
        d
        for d in order
        if not (d == "KV" and (side.split[spec.name] or spec.num_kv == 1))
        and not (d == "HEAD" and spec.heads == 0)
        and not (d == "TOKEN" and spec.granularity != "tokens")
    )
    shape = tuple(sizes[d] for d in dims)
    strides = []
    step = spec.item_bytes
    for d, n in zip(reversed(dims), reversed(shape), strict=True):
        strides.append(step)
        step *= n
        if d in ("BLOCK", "TOKEN"):
            step += side.padding * spec.item_bytes
    total = step + 8
    buffer = np.zeros(total, np.uint8)
    dtype = np.dtype(f"u{spec.item_bytes}")
    array = np.ndarray(shape, dtype, buffer, offset=0, strides=tuple(reversed(strides)))
    return Tensor(array, buffer, dims, spec, kv.start)


def fill(t: Tensor, side: SideSpec, tp_rank: int, seed: tuple[int, int]) -> None:
    """Values that depend on the model-wide index only, so that replicas hold the same."""
    names = ("KV", "HEAD", "BLOCK", "TOKEN", "DIM")
    sizes = dict(zip(t.dims, t.array.shape, strict=True))
    shape = (t.spec.num_kv, max(t.spec.heads, 1), *(sizes.get(d, 1) for d in names[2:]))
    rng = np.random.default_rng([*seed, *t.spec.name.encode()])
    whole = rng.integers(0, 1 << (8 * t.spec.item_bytes), shape, np.uint64)
    heads = local_heads(t.spec, side.tp, tp_rank)
    num_kv = sizes.get("KV", 1)
    mine = whole[t.kv_begin : t.kv_begin + num_kv, heads.start : heads.stop]
    mine = mine[tuple(slice(None) if d in t.dims else 0 for d in names)]
    have = [d for d in names if d in t.dims]
    t.array[...] = mine.transpose([have.index(d) for d in t.dims])


def make_instance(
    views: list[ViewSpec], groups_of_layers: list[int], side: SideSpec, seed: int
) -> list[Rank]:
    """One rank object per rank, in flattened order, with random memory."""
    rng = np.random.default_rng(seed)
    ranks = []
    num_layers = len(groups_of_layers)
    for stage in range(side.stages):
        for tp_rank in range(side.tp):
            rank = Rank(tp_rank, stage)
            builder = LayoutBuilder(
                model="m", tp_size=side.tp, tp_rank=tp_rank, pp_size=side.stages, pp_rank=stage
            )
            for tokens in side.block_tokens:
                builder.add_group(tokens)
            for layer, group in enumerate(groups_of_layers):
                if layer * side.stages // num_layers != stage:
                    continue
                tensors: list[Tensor] = []
                for spec in views:
                    parts = (
                        [range(i, i + 1) for i in range(spec.num_kv)]
                        if side.split[spec.name]
                        else [range(spec.num_kv)]
                    )
                    tensors += [make_tensor(spec, side, tp_rank, group, kv) for kv in parts]
                for t in tensors:
                    t.buffer[:] = rng.integers(0, 256, t.buffer.size, np.uint8)
                    fill(t, side, tp_rank, (seed, layer))
                row = Row(
                    tuple(
                        TensorRow(" ".join(t.dims), t.spec.name, t.kv_begin, t.spec.granularity)
                        for t in tensors
                    )
                )
                builder.add_layer(
                    layer,
                    group,
                    row,
                    [t.array for t in tensors],
                    heads_total=[max(t.spec.heads, 1) for t in tensors],
                    cell="kernel-x",
                )
                rank.layers[layer] = tensors
            rank.cache = builder.build()
            ranks.append(rank)
    return ranks


def read(
    ranks: list[Rank],
    layer: int,
    spec: ViewSpec,
    kv: int,
    head: int,
    block: int,
    token: int,
    side: SideSpec,
) -> np.ndarray:
    """The DIM vector at a named index, from any rank that holds it."""
    for rank in ranks:
        heads = local_heads(spec, side.tp, rank.tp_rank)
        if layer in rank.layers and head in heads:
            for t in rank.layers[layer]:
                if t.spec is spec and kv - t.kv_begin in range(
                    t.array.shape[t.dims.index("KV")] if "KV" in t.dims else 1
                ):
                    at = t.index(
                        KV=kv - t.kv_begin, HEAD=head - heads.start, BLOCK=block, TOKEN=token
                    )
                    return t.array[at]
    raise AssertionError("no rank holds it")


def write_reference(
    source: list[Rank],
    source_side: SideSpec,
    target: list[Rank],
    target_side: SideSpec,
    views: list[ViewSpec],
    groups: list[int],
    source_blocks: list[list[int]],
    target_blocks: list[list[int]],
    first: int,
    end: int,
) -> None:
    """Brute force: every wanted element of every target rank, one named index at a time."""
    for rank in target:
        for layer, tensors in rank.layers.items():
            group = groups[layer]
            s_tokens, t_tokens = source_side.block_tokens[group], target_side.block_tokens[group]
            for t in tensors:
                spec = t.spec
                if spec.granularity == "state":
                    places = [(source_blocks[group][-1], 0, target_blocks[group][-1], 0)]
                elif spec.granularity == "cell":
                    blocks = range(first // t_tokens, -(-end // t_tokens))
                    places = [
                        (source_blocks[group][b], 0, target_blocks[group][b], 0) for b in blocks
                    ]
                else:
                    places = [
                        (
                            source_blocks[group][n // s_tokens],
                            n % s_tokens,
                            target_blocks[group][n // t_tokens],
                            n % t_tokens,
                        )
                        for n in range(first, end)
                    ]
                heads = local_heads(spec, target_side.tp, rank.tp_rank)
                num_kv = t.array.shape[t.dims.index("KV")] if "KV" in t.dims else 1
                for sb, so, db, do in places:
                    for kv in range(t.kv_begin, t.kv_begin + num_kv):
                        for head in heads:
                            at = t.index(
                                KV=kv - t.kv_begin, HEAD=head - heads.start, BLOCK=db, TOKEN=do
                            )
                            t.array[at] = read(source, layer, spec, kv, head, sb, so, source_side)


def copy_bytes(source: KvCache, target: KvCache, layer: int, run: tuple[int, int, int]) -> None:
    """What a transport does with one run, through each side's resolve()."""
    src_offset, dst_offset, length = run
    data = b"".join(
        ctypes.string_at(address, n)
        for address, n in source.native.resolve(layer, src_offset, length)
    )
    at = 0
    for address, n in target.native.resolve(layer, dst_offset, length):
        ctypes.memmove(address, data[at : at + n], n)
        at += n


TP_SIZES = (1, 2, 3, 4, 6)


@st.composite
def view_specs(draw: st.DrawFn, tps: tuple[int, int]) -> list[ViewSpec]:
    def heads() -> int:
        fitting = [
            h for h in (1, 2, 4, 6, 12) if all(h % t == 0 if h >= t else t % h == 0 for t in tps)
        ]
        return draw(st.sampled_from([0, *fitting]))

    family = draw(st.sampled_from(["kv", "latent", "latent+indexer", "cell", "kv+state", "state"]))
    dim, item = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    state = [
        ViewSpec("conv", 1, heads(), draw(st.integers(1, 3)), 2, "state"),
        ViewSpec("ssm", 1, heads(), draw(st.integers(1, 4)), 4, "state"),
    ]
    if family == "kv":
        return [ViewSpec("kv", 2, heads(), dim, item)]
    if family == "latent":
        return [ViewSpec("latent", 1, 0, dim, item)]
    if family == "latent+indexer":
        return [ViewSpec("latent", 1, 0, dim, item), ViewSpec("indexer", 1, 0, 2, 1)]
    if family == "cell":
        return [ViewSpec("kv", draw(st.sampled_from([1, 2])), heads(), dim * 4, item, "cell")]
    if family == "kv+state":
        return [ViewSpec("kv", 2, heads(), dim, item), *state]
    return state


@st.composite
def side_specs(
    draw: st.DrawFn,
    views: list[ViewSpec],
    tp: int,
    block_tokens: list[int],
    num_tokens: int,
    num_layers: int,
) -> SideSpec:
    orders = {
        v.name: tuple(draw(st.permutations(["KV", "BLOCK", "TOKEN", "HEAD", "DIM"]))) for v in views
    }
    needed = max(-(-num_tokens // b) for b in block_tokens)
    return SideSpec(
        tp=tp,
        stages=draw(st.integers(1, min(2, num_layers))),
        block_tokens=tuple(block_tokens),
        num_blocks=max(needed, 1) + draw(st.integers(0, 3)),
        orders=orders,
        split={v.name: v.num_kv == 2 and draw(st.booleans()) for v in views},
        padding=draw(st.sampled_from([0, 0, 1, 3])),
    )
