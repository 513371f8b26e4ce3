"""What one direction of a wire does wrong. Pure: bytes in, actions out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Faults:
    """All offsets count the bytes written into this direction since the connection began.

    delay_s   each piece arrives that much later; the order is kept
    split     pieces of at most so many bytes; 0 leaves them as written
    corrupt   offset → mask, which is XORed onto that byte
    drop      [start, end) ranges that vanish; an end of None means for ever (a black hole)
    cut_at    the connection is reset before the byte at this offset arrives; None means never
    """

    delay_s: float = 0.0
    split: int = 0
    corrupt: Mapping[int, int] = field(default_factory=dict)
    drop: Sequence[tuple[int, int | None]] = ()
    cut_at: int | None = None

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.split < 0:
            raise ValueError(f"faults: expected no negative delay or split, got {self}")


@dataclass(frozen=True, slots=True)
class Delayed:
    """`data` is to arrive `delay_s` after it was written."""

    delay_s: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is to be reset, `delay_s` after now; nothing arrives after it."""

    delay_s: float


class FaultFilter:
    """Applies `Faults` to a stream of bytes. `offset` counts what has been fed."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.offset = 0
        self.is_cut = False

    def feed(self, data: bytes) -> list[Delayed | Cut]:
        """What happens to `data`, in order. Nothing after the cut."""
        faults = self.faults
        if self.is_cut:
            return []
        start = self.offset
        self.offset += len(data)
        out: list[Delayed | Cut] = []
        if faults.cut_at is not None and self.offset > faults.cut_at:
            data = data[: max(0, faults.cut_at - start)]
            self.is_cut = True
        piece = self._changed(data, start)
        size = faults.split or max(1, len(piece))
        out += [Delayed(faults.delay_s, piece[at : at + size]) for at in range(0, len(piece), size)]
        if self.is_cut:
            out.append(Cut(faults.delay_s))
        return out

    def _changed(self, data: bytes, start: int) -> bytes:
        faults = self.faults
        if not faults.corrupt and not faults.drop:
            return data
        kept = bytearray()
        for offset, byte in enumerate(data, start):
            if any(
                first <= offset < (math.inf if end is None else end) for first, end in faults.drop
            ):
                continue
            kept.append(byte ^ faults.corrupt.get(offset, 0))
        return bytes(kept)
