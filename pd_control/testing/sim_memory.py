"""Simulated KV memory in which every element says whose content it is.

A prompt's token ``i`` has the *tag* of its whole prefix ``[0, i]``, as real KV depends on the whole prefix.
Each element of a rank's cache holds (prefix tag, head atom, layer) packed in one int, so a missing, stale,
foreign, misaligned or wrongly sliced element is a plain inequality.

An *atom* is one KV head; a rank holds consecutive ones. A block row is stored atom-major:
``row[atom * block_size + offset]``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pd_control.ids import Content as RequestContent
from pd_control.ids import identity_digest

Row = list[int]
#: One block's share of a payload: (index in the request's block list, low offset, high offset, elements
#: atom-major).
Piece = tuple[int, int, int, Row]

#: What memory holds before anybody wrote it.
POISON = -1

IDENTITY = identity_digest("sim")

_ATOM_BITS = 4
_LAYER_BITS = 3


class Content:
    """The token sequence of a request (prompt and what greedy decoding will append) and its KV image."""

    __slots__ = ("_images", "block_size", "num_prompt_tokens", "request_content", "tags")

    def __init__(self, tags: list[int], num_prompt_tokens: int, block_size: int) -> None:
        self.tags = tags
        self.num_prompt_tokens = num_prompt_tokens
        self.block_size = block_size
        ids = [tag & 0xFFFFFFFF for tag in tags[:num_prompt_tokens]]
        #: The same prompt as the control plane knows it.
        self.request_content = RequestContent(ids, IDENTITY)
        self._images: dict[tuple[int, int, int], list[Row]] = {}

    def next_token(self, position: int) -> int:
        """The token that greedy decoding puts at ``position`` (any fixed function of the prefix)."""
        return self.tags[position - 1] & 0xFFFF

    def image(self, layer: int, atom_lo: int, atom_hi: int) -> list[Row]:
        """Per block, the row a rank with atoms [atom_lo, atom_hi) must hold. Not to be changed."""
        key = (layer, atom_lo, atom_hi)
        rows = self._images.get(key)
        if rows is None:
            size = self.block_size
            tags = self.tags
            padded = tags + [POISON] * (-len(tags) % size)
            rows = []
            for start in range(0, len(padded), size):
                part = padded[start : start + size]
                row: Row = []
                for atom in range(atom_lo, atom_hi):
                    low = (atom << _LAYER_BITS) | layer
                    row += [(t << (_ATOM_BITS + _LAYER_BITS)) | low for t in part]
                rows.append(row)
            self._images[key] = rows
        return rows

    def block_hash(self, block_index: int) -> int | None:
        """The prefix-cache hash of a block, None for one that the content does not fill."""
        last = (block_index + 1) * self.block_size - 1
        return self.tags[last] if last < len(self.tags) else None


def make_tags(rng: random.Random, length: int, prefix: list[int] | None = None) -> list[int]:
    """Chain tags: each depends on all before it. ``prefix`` is shared as is."""
    tags = list(prefix or ())
    last = tags[-1] if tags else 17
    draw = rng.getrandbits
    while len(tags) < length:
        last = (last * 6364136223846793005 + draw(32) + 1) & 0xFFFFFFFFFF
        tags.append(last)
    return tags


class RankMemory:
    """The KV cache of one rank: layers x blocks x (atoms x tokens). Blocks get memory when first written."""

    __slots__ = ("_blank", "atom_hi", "atom_lo", "block_size", "layers", "num_blocks")

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, atom_lo: int, atom_hi: int
    ) -> None:
        self.block_size = block_size
        self.atom_lo = atom_lo
        self.atom_hi = atom_hi
        self.num_blocks = num_blocks
        self._blank = [POISON] * ((atom_hi - atom_lo) * block_size)
        self.layers: list[dict[int, Row]] = [{} for _ in range(num_layers)]

    def wipe(self) -> None:
        """What a restarted worker finds: nothing."""
        for rows in self.layers:
            rows.clear()

    def write(
        self, layer: int, blocks: Sequence[int], first: int, end: int, content: Content
    ) -> None:
        """The forward pass writes the KV of tokens [first, end) of ``content``."""
        size = self.block_size
        rows = self.layers[layer]
        image = content.image(layer, self.atom_lo, self.atom_hi)
        for index in range(first // size, -(-end // size)):
            block, wanted = blocks[index], image[index]
            lo = max(first - index * size, 0)
            hi = min(end - index * size, size)
            if lo == 0 and hi == size:
                rows[block] = wanted  # shared, never changed in place: see _own
            else:
                row = self._own(rows, block)
                for base in range(0, len(row), size):
                    row[base + lo : base + hi] = wanted[base + lo : base + hi]

    def _own(self, rows: dict[int, Row], block: int) -> Row:
        """A row of this block that may be changed in place."""
        row = rows[block] = list(rows.get(block, self._blank))
        return row

    def read(
        self, layer: int, blocks: Sequence[int], first: int, end: int, atom_lo: int, atom_hi: int
    ) -> list[Piece]:
        """What a sender's slice of tokens [first, end) holds now."""
        size = self.block_size
        rows = self.layers[layer]
        base_lo, base_hi = (atom_lo - self.atom_lo) * size, (atom_hi - self.atom_lo) * size
        pieces: list[Piece] = []
        for index in range(first // size, -(-end // size)):
            row = rows.get(blocks[index], self._blank)
            lo = max(first - index * size, 0)
            hi = min(end - index * size, size)
            if lo == 0 and hi == size:
                part = row[base_lo:base_hi]
            else:
                part = []
                for base in range(base_lo, base_hi, size):
                    part += row[base + lo : base + hi]
            pieces.append((index, lo, hi, part))
        return pieces

    def place(
        self,
        layer: int,
        blocks: Sequence[int],
        pieces: list[Piece],
        atom_lo: int,
        atom_hi: int,
    ) -> None:
        """Put a payload that :meth:`read` made on another rank into this rank's blocks."""
        size = self.block_size
        rows = self.layers[layer]
        base_lo, base_hi = (atom_lo - self.atom_lo) * size, (atom_hi - self.atom_lo) * size
        for index, lo, hi, part in pieces:
            row = self._own(rows, blocks[index])
            if lo == 0 and hi == size:
                row[base_lo:base_hi] = part
            else:
                width = hi - lo
                at = 0
                for base in range(base_lo, base_hi, size):
                    row[base + lo : base + hi] = part[at : at + width]
                    at += width

    def first_wrong(
        self, blocks: Sequence[int], num_tokens: int, content: Content
    ) -> tuple[int, int, int, str] | None:
        """(token, layer, atom, what is there) of the first element of [0, num_tokens) that is not the
        content's own, or None."""
        size = self.block_size
        whole, rest = divmod(num_tokens, size)
        blank = self._blank
        for layer, rows in enumerate(self.layers):
            image = content.image(layer, self.atom_lo, self.atom_hi)
            for index in range(whole):
                row = rows.get(blocks[index], blank)
                wanted = image[index]
                if row is not wanted and row != wanted:
                    return self._where(layer, index, size, row, wanted)
            if rest:
                row, wanted = rows.get(blocks[whole], blank), image[whole]
                for base in range(0, len(row), size):
                    if row[base : base + rest] != wanted[base : base + rest]:
                        return self._where(layer, whole, rest, row, wanted)
        return None

    def _where(
        self, layer: int, index: int, upto: int, row: Row, wanted: Row
    ) -> tuple[int, int, int, str]:
        size = self.block_size
        for at, (got, want) in enumerate(zip(row, wanted, strict=True)):
            atom, offset = divmod(at, size)
            if offset < upto and got != want:
                if got == POISON:
                    what = "never written"
                else:
                    tag = got >> (_ATOM_BITS + _LAYER_BITS)
                    low = got & ((1 << (_ATOM_BITS + _LAYER_BITS)) - 1)
                    what = f"tag {tag:x} atom {low >> _LAYER_BITS} layer {low & 7}"
                return (index * size + offset, layer, self.atom_lo + atom, what)
        raise AssertionError("rows differ only outside the range")
