"""Plans against a brute-force reference by named index, over random layouts, ranks and ranges."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvt_bindings import KvtError, Layout, PairPlanner
from tests.property.kvt_caches import (
    TP_SIZES,
    Rank,
    SideSpec,
    ViewSpec,
    copy_bytes,
    make_instance,
    side_specs,
    view_specs,
    write_reference,
)

SLOW_DATA = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class Case:
    views: list[ViewSpec]
    groups: list[int]  # of each layer
    source_side: SideSpec
    target_side: SideSpec
    source_blocks: list[list[int]]
    target_blocks: list[list[int]]
    first: int
    end: int
    cuts: list[int]
    seed: int


def block_lists(draw: st.DrawFn, side: SideSpec, num_tokens: int) -> list[list[int]]:
    """A list per group: distinct blocks, scattered, in runs or backwards."""
    lists = []
    for tokens in side.block_tokens:
        need = max(1, -(-num_tokens // tokens))
        ids = draw(st.permutations(range(side.num_blocks)))[:need]
        how = draw(st.sampled_from(["scattered", "ascending", "descending"]))
        if how != "scattered":
            ids = sorted(ids, reverse=how == "descending")
        lists.append(list(ids))
    return lists


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tps = (draw(st.sampled_from(TP_SIZES)), draw(st.sampled_from(TP_SIZES)))
    views = draw(view_specs(tps))
    num_layers = draw(st.integers(1, 3))
    num_groups = draw(st.integers(1, 2))
    groups = [draw(st.integers(0, num_groups - 1)) for _ in range(num_layers)]
    sizes = [draw(st.integers(1, 5)) for _ in range(num_groups)]
    cell = any(v.granularity == "cell" for v in views)
    same = cell or draw(st.booleans())
    other = sizes if same else [draw(st.integers(1, 5)) for _ in range(num_groups)]
    end = draw(st.integers(1, 14))
    first = draw(st.integers(0, end - 1))
    if cell:  # a transfer of whole blocks begins at one, in every group
        first = 0 if len(set(sizes)) > 1 else first - first % sizes[0]
    source_side = draw(side_specs(views, tps[0], sizes, end, num_layers))
    target_side = draw(side_specs(views, tps[1], other, end, num_layers))
    return Case(
        views,
        groups,
        source_side,
        target_side,
        block_lists(draw, source_side, end),
        block_lists(draw, target_side, end),
        first,
        end,
        sorted(draw(st.lists(st.integers(first, end), max_size=3))),
        draw(st.integers(0, 2**32 - 1)),
    )


def merged(ranks: list[Rank]) -> Layout:
    return Layout.merge_stages([r.cache.layout for r in ranks])


def joinable(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] + a[2] == b[0] and a[1] + a[2] == b[1]


@given(cases())
@SLOW_DATA
def test_plans_move_exactly_the_named_elements(case: Case) -> None:
    source = make_instance(case.views, case.groups, case.source_side, case.seed)
    target = make_instance(case.views, case.groups, case.target_side, case.seed + 1)
    wanted = make_instance(case.views, case.groups, case.target_side, case.seed + 1)
    write_reference(
        source, case.source_side, wanted, case.target_side, case.views, case.groups,
        case.source_blocks, case.target_blocks, case.first, case.end,
    )  # fmt: skip
    planner = PairPlanner(merged(source), merged(target))
    edges = [case.first, *case.cuts, case.end]
    event(f"tp {case.source_side.tp} to {case.target_side.tp}")

    for d, target_rank in enumerate(target):
        written: dict[int, list[tuple[int, int]]] = {}
        for s, source_rank in enumerate(source):
            expected = planner.expected(s, d, case.target_blocks, case.first, case.end)
            from_this: dict[int, list[tuple[int, int]]] = {}
            # Sends of a chunked prefill: they follow one another, the final one is `last`.
            for i, (a, b) in enumerate(itertools.pairwise(edges)):
                parts = planner.plan(
                    s, d, case.source_blocks, case.target_blocks, a, b, i == len(edges) - 2
                )
                for part in parts:
                    runs = part.runs
                    assert sum(n for _, _, n in runs) == part.bytes_per_layer
                    assert runs == sorted(runs)
                    assert not any(joinable(x, y) for x in runs for y in runs)
                    for layer in part.layers:
                        for run in runs:
                            copy_bytes(source_rank.cache, target_rank.cache, layer, run)
                            from_this.setdefault(layer, []).append((run[1], run[1] + run[2]))
            assert (s in planner.sources_of(d)) == bool(from_this)
            assert (d in planner.targets_of(s)) == bool(from_this)
            # The receiver, which knows neither the source's blocks nor the cuts, expects just that.
            want = {
                layer: [(o, o + n) for _, o, n in part.runs]
                for part in expected
                for layer in part.layers
            }
            assert {k: union(v) for k, v in from_this.items()} == {
                k: union(v) for k, v in want.items()
            }
            for layer, ranges in from_this.items():
                written.setdefault(layer, []).extend(ranges)
        for ranges in written.values():
            union(ranges)  # no byte has two sources
        for layer, tensors in target_rank.layers.items():
            for got, reference in zip(tensors, wanted[d].layers[layer], strict=True):
                assert got.buffer.tobytes() == reference.buffer.tobytes()


def union(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch, joined; fails if any two overlap."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        assert not out or out[-1][1] <= a, "a byte is written twice"
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


KV = ViewSpec("kv", 2, 2, 1, 1)


def plain_side(tp: int, block_tokens: int, num_blocks: int = 24) -> SideSpec:
    order = {"kv": ("BLOCK", "KV", "TOKEN", "HEAD", "DIM")}
    return SideSpec(tp, 1, (block_tokens,), num_blocks, order, {"kv": False}, 0)


@pytest.mark.parametrize(
    ("source_tokens", "target_tokens"), [(1, 1), (4, 4), (3, 4), (4, 2), (5, 8)]
)
def test_f05_partial_prefix_never_misaligns(source_tokens: int, target_tokens: int) -> None:
    """All (cached, wanted): what D has stays, what it lacks arrives at its own place."""
    for wanted in range(18):
        for cached in range(wanted + 1):
            sides = plain_side(1, source_tokens), plain_side(1, target_tokens)
            source = make_instance([KV], [0], sides[0], 1)
            target = make_instance([KV], [0], sides[1], 2)
            reference = make_instance([KV], [0], sides[1], 2)
            blocks = (
                [[(7 * i + 3) % 24 for i in range(18)]],
                [[(5 * i + 1) % 24 for i in range(18)]],
            )
            write_reference(
                source, sides[0], reference, sides[1], [KV], [0], *blocks, cached, wanted
            )
            planner = PairPlanner(merged(source), merged(target))
            for part in planner.plan(0, 0, *blocks, cached, wanted, True):
                for run in part.runs:
                    copy_bytes(source[0].cache, target[0].cache, 0, run)
            got, want = target[0].layers[0][0].buffer, reference[0].layers[0][0].buffer
            assert got.tobytes() == want.tobytes(), (cached, wanted)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_layout_bytes_from_a_peer_are_bounded(noise: bytes, at: int, value: int) -> None:
    layout = make_instance([KV], [0, 0], plain_side(2, 4), 0)[0].cache.layout
    good = layout.serialize()
    assert Layout.parse(good) == layout
    assert Layout.parse(good).serialize() == good
    changed = bytearray(good)
    changed[at % len(good)] = value
    for data in (bytes(changed), noise, b"KVL1" + noise, good + noise[:1], good[: at % len(good)]):
        parsed = parse_or_none(data)
        assert parsed is None or parsed.serialize() == data


def parse_or_none(data: bytes) -> Layout | None:
    """None if refused, which must be as BAD_REQUEST."""
    try:
        return Layout.parse(data)
    except KvtError as error:
        if error.code != 12:
            raise
        return None
