"""Text ↔ token ids, from the tokenizer that lies with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from pd_control.reference.checkpoint import CheckpointError, smollm2_path


class Tokenizer(Protocol):
    """What the engine's front needs; ``decode`` of a prefix of ids may end in a partial character."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """The tiny model's: one id a UTF-8 byte; other ids decode to nothing readable."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) if 32 <= i < 127 else f"⟨{i}⟩" for i in ids)


class _FastTokenizer:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=True))


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model source (see :func:`checkpoint.load`).

    Raises:
        CheckpointError: the source has none, or the package ``tokenizers`` is missing.
    """
    if source.partition(":")[0] == "tiny":
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError as error:
        raise CheckpointError(
            f"the tokenizer of {source!r} needs the package tokenizers "
            "(pip install 'pd-control[demo]')"
        ) from error
    path = smollm2_path() if source == "smollm2" else Path(source)
    if path is not None and path.suffix == ".gguf":
        return _FastTokenizer(_from_gguf(path))
    if path is not None and (path / "tokenizer.json").is_file():
        return _FastTokenizer(tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")))
    raise CheckpointError(f"no tokenizer.json beside the model at {source!r}")


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer inside a GGUF file as ``tokenizer.json``, with the little file that tells other
    engines how to load it."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    _from_gguf(gguf).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | special, indent=1))


def _from_gguf(path: Path) -> Any:
    """A byte-level BPE from the vocabulary and merges that a GGUF carries."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    if (kind := fields["tokenizer.ggml.model"].contents()) != "gpt2":
        raise CheckpointError(f"{path.name}: tokenizer model {kind!r}; expected byte-level BPE")
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"].contents()]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    steps: list[Any] = []
    if fields["tokenizer.ggml.pre"].contents() == "smollm":  # digits one by one, then GPT-2's rule
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    inner.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == control]
    )
    return inner
