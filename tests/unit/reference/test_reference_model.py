"""The model: one answer, however the work is cut — chunks, batches, ranks, file formats."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pd_control.reference.checkpoint import CheckpointError, load, random_weights
from pd_control.reference.model import Model, make_batch
from pd_control.reference.sampling import SamplingParams, sample
from pd_control.reference.spec import TINY, ModelSpec

BLOCK = 4
PROMPT = [5, 17, 300, 42, 7, 7, 9, 101, 256, 33, 2, 450, 77]


class ThreadedSum:
    """An all-reduce among threads: the ranks of a test without processes."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._size = size

    def for_rank(self, rank: int):  # type: ignore[no-untyped-def]
        def all_reduce(x: torch.Tensor) -> None:
            self._parts[rank] = x.clone()
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            x.copy_(total)

        return all_reduce


def logits(model: Model, chunks: list[int], prompt: list[int] = PROMPT) -> torch.Tensor:
    cache = model.new_cache(16, BLOCK)
    blocks, done = [9, 3, 14, 1, 6], 0
    for size in chunks:
        part = prompt[done : done + size]
        out = model.forward(make_batch([(part, done, blocks, True)], BLOCK), cache)
        done += size
    assert done == len(prompt)
    return out[0]


@pytest.fixture(scope="module")
def whole() -> Model:
    return Model(TINY, random_weights(TINY, seed=3))


def test_chunks_do_not_change_the_answer(whole: Model) -> None:
    once = logits(whole, [13])
    for chunks in ([12, 1], [5, 5, 3], [1] * 13):
        torch.testing.assert_close(logits(whole, chunks), once, rtol=1e-4, atol=1e-4)


def test_the_whole_context_matters(whole: Model) -> None:
    """The negative control: another first token must show in the last logits."""
    other = [6, *PROMPT[1:]]
    assert (logits(whole, [13], other) - logits(whole, [13])).abs().max() > 0.05


def test_a_batch_is_its_sequences(whole: Model) -> None:
    cache = whole.new_cache(16, BLOCK)
    rows = [(PROMPT, 0, [0, 1, 2, 3], True), (PROMPT[:6], 0, [4, 5], True)]
    both = whole.forward(make_batch(rows, BLOCK), cache)
    torch.testing.assert_close(both[0], logits(whole, [13]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[1], logits(whole, [6], PROMPT[:6]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_agree_with_the_whole(whole: Model, tp_size: int) -> None:
    """TP 4 over two KV heads: pairs of ranks store the same head."""
    reduce = ThreadedSum(tp_size)
    weights = random_weights(TINY, seed=3)

    def rank(r: int) -> torch.Tensor:
        model = Model(TINY, weights, tp_rank=r, tp_size=tp_size, all_reduce=reduce.for_rank(r))
        return logits(model, [8, 5])

    with ThreadPoolExecutor(tp_size) as pool:
        for out in pool.map(rank, range(tp_size)):
            torch.testing.assert_close(out, logits(whole, [13]), rtol=1e-3, atol=1e-3)


def test_each_layer_is_announced_once_its_kv_is_there(whole: Model) -> None:
    cache = whole.new_cache(16, BLOCK)
    seen: list[int] = []

    def done(layer: int) -> None:
        seen.append(layer)
        assert cache[layer][:, 2, 0].abs().sum() > 0
        assert all(cache[later].abs().sum() == 0 for later in range(layer + 1, TINY.num_layers))

    whole.forward(make_batch([(PROMPT[:2], 0, [2], True)], BLOCK), cache, done)
    assert seen == list(range(TINY.num_layers))


def test_ranks_that_cannot_divide_the_model_are_named() -> None:
    with pytest.raises(ValueError, match="tp_size 3 does not divide num_heads 4"):
        TINY.check_tp(3)
    assert [list(TINY.kv_heads_of(r, 4)) for r in range(4)] == [[0], [0], [1], [1]]


def test_a_safetensors_folder_loads_as_saved(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = random_weights(TINY, seed=1)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64,
                "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
                "vocab_size": 512, "max_position_embeddings": 4096, "eos_token_id": [2],
            }
        )
    )  # fmt: skip
    spec, loaded = load(str(tmp_path))
    assert (spec.head_dim, spec.eos_token_id, spec.tied_embeddings) == (16, 2, False)
    assert loaded.keys() == weights.keys()
    torch.testing.assert_close(
        logits(Model(spec, loaded), [13]), logits(Model(TINY, weights), [13])
    )


def test_a_gguf_file_loads_with_its_rotary_rows_put_back(tmp_path: Path) -> None:
    """Written as llama.cpp writes it: Q and K rows interleaved for its rotary pairs."""
    from gguf import GGUFWriter

    weights = random_weights(TINY, seed=1)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(TINY.num_layers)
    writer.add_embedding_length(TINY.hidden)
    writer.add_feed_forward_length(TINY.intermediate)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_rope_dimension_count(TINY.head_dim)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_layer_norm_rms_eps(TINY.norm_eps)
    writer.add_vocab_size(TINY.vocab)
    short = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        array = tensor.numpy()
        if stem in top:
            writer.add_tensor(top[stem] + ".weight", array)
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = array.shape[0] // TINY.head_dim
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{layer}.{short[part]}.weight", array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec, loaded = load(str(tmp_path / "m.gguf"))
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
    assert spec.num_kv_heads == 2


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a \.gguf file"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"pickled \.bin files are never loaded"):
        load(str(tmp_path))


def test_sampling_is_greedy_or_seeded() -> None:
    row = torch.tensor([0.0, 2.0, 1.9, -5.0])
    assert sample(row, SamplingParams(), 0) == 1
    hot = SamplingParams(temperature=1.0, seed=7)
    draws = [sample(row, hot, p) for p in range(200)]
    assert draws == [sample(row, hot, p) for p in range(200)], "same seed and position, same token"
    assert {1, 2} <= set(draws)
    assert {sample(row, SamplingParams(temperature=1.0, top_p=0.4), p) for p in range(50)} == {1}
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)
    assert ModelSpec(**TINY.to_dict()) == TINY  # type: ignore[arg-type]
