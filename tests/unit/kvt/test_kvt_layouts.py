"""Rows of the layout table, the builder, and what it says when a tensor does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvt_bindings as kvt
from kvt_bindings import KvtError, LayoutBuilder, PairPlanner, Row, TensorRow

B, T, H, D = 6, 4, 2, 8


def cache_of(row: str | Row, *tensors: object, heads: object = H, **options: object) -> kvt.KvCache:
    builder = LayoutBuilder(model="m", **options)  # type: ignore[arg-type]
    group = builder.add_group(T)
    builder.add_layer(0, group, row, tensors, heads_total=heads, cell="amx-bf16")  # type: ignore[arg-type]
    return builder.build()


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


FAMILIES = {
    "nhd": [(2, B, T, H, D)],
    "nhd_block_first": [(B, 2, T, H, D)],
    "ragged": [(B, T, 2, H, D)],
    "nhd_split": [(B, T, H, D), (B, T, H, D)],
    "hnd": [(B, 2, H, T, D)],
    "hnd_kv_first": [(2, B, H, T, D)],
    "hnd_split": [(B, H, T, D), (B, H, T, D)],
    "cell": [(B, H, T * D)],
    "cell_kv_first": [(2, B, H, T * D)],
    "mla": [(B, T, D)],
    "mla_indexer": [(B, T, D), (B, T, 4)],
    "mla_indexer_scaled": [(B, T, D), (B, T, 4), (B, T, 1)],
    "ssm": [(B, H, 3), (B, H, 4, 4)],
    "gdn": [(B, H, 3), (B, H, 3), (B, H, 3), (B, H, 4, 4)],
}


def test_every_row_of_the_table_is_tried() -> None:
    assert set(FAMILIES) == set(kvt.ROWS)


@pytest.mark.parametrize("row", FAMILIES)
def test_rows_take_their_tensors_and_plan(row: str) -> None:
    source = cache_of(row, *[zeros(*s) for s in FAMILIES[row]])
    target = cache_of(row, *[zeros(*s) for s in FAMILIES[row]])
    parts = PairPlanner(source.layout, target.layout).plan(0, 0, [[1, 2]], [[3, 4]], 0, 2 * T, True)
    per_block = sum(int(np.prod(s)) for s in FAMILIES[row]) * 2 // B
    slots = 1 if row in ("ssm", "gdn") else 2
    assert [p.bytes_per_layer for p in parts] == [slots * per_block]


NHD_SPLIT = ["nhd_split", "nhd", "nhd_block_first", "ragged", "hnd", "hnd_split"]


@pytest.mark.parametrize("source_row", NHD_SPLIT)
@pytest.mark.parametrize("target_row", NHD_SPLIT)
def test_arrangements_of_the_same_kv_fit_each_other(source_row: str, target_row: str) -> None:
    source = cache_of(source_row, *[zeros(*s) for s in FAMILIES[source_row]])
    target = cache_of(target_row, *[zeros(*s) for s in FAMILIES[target_row]])
    assert kvt.incompatibilities(source.layout, target.layout) == []


def test_layers_that_look_the_same_share_a_pattern() -> None:
    builder = LayoutBuilder(model="m")
    group = builder.add_group(T)
    for layer in range(40):
        builder.add_layer(layer, group, "nhd", [zeros(2, B, T, H, D)], heads_total=H)
    layout = builder.build().layout
    assert len(layout.patterns) == 1
    assert len(layout.serialize()) < 100
    parts = PairPlanner(layout, layout).plan(0, 0, [[1]], [[2]], 0, T, True)
    assert [p.layers for p in parts] == [list(range(40))]


def test_views_of_one_buffer_shared_by_all_layers() -> None:
    """Layers inside the block: each layer's tensor is a strided view."""
    shared = zeros(B, 3, 2, T, H, D)
    builder = LayoutBuilder(model="m")
    group = builder.add_group(T)
    for layer in range(3):
        builder.add_layer(layer, group, "nhd_block_first", [shared[:, layer]], heads_total=H)
    cache = builder.build()
    ((_, runs),) = [(p.layers, p.runs) for p in PairPlanner(cache.layout, cache.layout).plan(
        0, 0, [[1, 2]], [[3, 4]], 0, 2 * T, True)]  # fmt: skip
    one = 2 * T * H * D * 2
    assert runs == [
        (3 * one, 9 * one, one),
        (6 * one, 12 * one, one),
    ]  # never another layer's bytes
    assert cache.native.resolve(2, 3 * one, 1)[0][0] == shared[1, 2].data_ptr()


def test_numpy_torch_and_dlpack_say_the_same() -> None:
    class OnlyDlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)  # type: ignore[arg-type]

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    array = np.zeros((B, 2, T, H, D), np.float32)[::2]
    infos = [kvt.tensor_info(x) for x in (array, torch.from_numpy(array), OnlyDlpack(array))]
    assert infos[0] == infos[1] == infos[2]
    assert infos[0].dtype == "float32"
    assert infos[0].strides_bytes[0] == 2 * array[0].nbytes
    assert infos[0].extent_bytes == 5 * array[0].nbytes


@pytest.mark.parametrize(
    ("row", "shape", "heads", "says"),
    [
        (
            "nhd",
            (2, B, T, H),
            H,
            r"tensor 0 \(kv\): shape .* for dimensions KV BLOCK TOKEN HEAD DIM",
        ),
        ("nhd", (2, B, 0, H, D), H, "empty"),
        (Row((TensorRow("BLOCK TOKEN WORD"),)), (B, T, D), 1, "dimension WORD is none of"),
        (Row((TensorRow("BLOCK DIM TOKEN DIM"),)), (B, 2, T, 2), 1, "not contiguous"),
        ("mla_indexer", (B, T, D), 1, "1 tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(row, shape, heads, says) -> None:
    with pytest.raises(ValueError, match=says):
        cache_of(row, zeros(*shape), heads=heads)


@pytest.mark.parametrize(
    ("shape", "heads", "tp", "says"),
    [
        ((2, B, T, 3, D), 4, 2, "3 heads on a rank, want 2 of 4"),
        ((2, B, T, 2, D), 3, 2, "3 heads do not divide over 2 ranks"),
        ((2, B, T + 1, 2, D), 4, 2, "5 tokens in a block, but its group has 4"),
    ],
)
def test_what_the_layout_cannot_be_is_refused_by_name(shape, heads, tp, says) -> None:
    with pytest.raises(KvtError, match=says) as caught:
        cache_of("nhd", zeros(*shape), heads=heads, tp_size=tp)
    assert caught.value.code == 12


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="list is no tensor"):
        kvt.tensor_info([1, 2])


def test_f12_incompatible_pairs_name_both_values() -> None:
    ours = cache_of("nhd", zeros(2, B, T, H, D))
    fewer = cache_of("nhd", zeros(2, B, T, 4, D), heads=4)
    reasons = kvt.incompatibilities(ours.layout, fewer.layout)
    assert len(reasons) == 1
    assert "2 heads" in reasons[0]
    assert "4 heads" in reasons[0]
    floats = cache_of("nhd", zeros(2, B, T, H, D).float())
    with pytest.raises(KvtError, match=r"bfloat16.*float32") as caught:
        PairPlanner(ours.layout, floats.layout)
    assert caught.value.code == 7
    other = cache_of("cell", zeros(B, H, T * D))
    assert 'cell "amx-bf16"' in kvt.incompatibilities(ours.layout, other.layout)[0]


def test_pipeline_ranks_join_their_layouts() -> None:
    def stage(pp_rank: int) -> kvt.KvCache:
        builder = LayoutBuilder(model="m", pp_size=2, pp_rank=pp_rank)
        group = builder.add_group(T)
        for layer in (2 * pp_rank, 2 * pp_rank + 1):
            builder.add_layer(layer, group, "nhd", [zeros(2, B, T, H, D)], heads_total=H)
        return builder.build()

    stages = [stage(0), stage(1)]
    whole = cache_of_layers(4)
    assert kvt.incompatibilities(stages[1].layout, whole.layout)  # half a model fits none
    joined = [s.joined([t.layout for t in stages]) for s in stages]
    assert joined[0].layout == joined[1].layout
    assert [j.rank for j in joined] == [0, 1]
    planner = PairPlanner(joined[0].layout, whole.layout)
    assert planner.sources_of(0) == [0, 1]
    (part,) = planner.plan(1, 0, [[1]], [[2]], 0, T, True)
    assert part.layers == [2, 3]
    assert joined[1].native.resolve(2, 0, 1) == stages[1].native.resolve(2, 0, 1)


def cache_of_layers(num: int) -> kvt.KvCache:
    builder = LayoutBuilder(model="m")
    group = builder.add_group(T)
    for layer in range(num):
        builder.add_layer(layer, group, "nhd", [zeros(2, B, T, H, D)], heads_total=H)
    return builder.build()


def test_layouts_are_values() -> None:
    a, b = (cache_of("nhd", zeros(2, B, T, H, D)).layout for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a.fingerprint == b.fingerprint
    assert a != cache_of("nhd", zeros(2, B + 1, T, H, D)).layout
    assert a != "something else"


def test_crc32c_known_value() -> None:
    assert kvt.crc32c(b"123456789") == 0xE3069283
    assert kvt.crc32c(b"6789", kvt.crc32c(b"12345")) == 0xE3069283
