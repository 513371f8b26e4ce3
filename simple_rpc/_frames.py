"""Frames: bytes in, frames out. No I/O, no clock.

On the wire a frame is ``head (4 bytes) | length (u32 little-endian) | body (length bytes)``. The
head is a u32, little-endian, whose four bytes are ASCII letters in reading order, so that a packet
dump shows names. The head decides what follows it: a *framed* head is followed by a length and a
body, a *raw* head by whatever its callback reads.

The decoder never allocates ahead of the bytes that have really arrived, and refuses an unknown head
after four bytes and an oversized body after eight, before any of the body is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

HEAD_BYTES = 4
PREFIX_BYTES = 8  # head and length

_PREFIX = struct.Struct("<II")
_pack_prefix = _PREFIX.pack


def head_from_name(name: str) -> int:
    """The u32 of a four-letter name. Raises ``ValueError`` unless it is four ASCII letters."""
    raw = name.encode("ascii", "replace")
    if len(raw) != HEAD_BYTES or not raw.isalpha():
        raise ValueError(f"a head is four ASCII letters, got {name!r}")
    return int.from_bytes(raw, "little")


def head_name(head: int) -> str:
    """The four letters of a head, or its hex when a peer sent something else."""
    raw = head.to_bytes(HEAD_BYTES, "little")
    return raw.decode("ascii") if raw.isalpha() else f"0x{raw.hex()}"


def encode_frame(head: int, body: bytes) -> bytes:
    """One whole frame. The caller has checked the body's size against the peer's limit."""
    return _pack_prefix(head, len(body)) + body


Frame = tuple[int, "bytes | None"]
"""``(head, body)``; ``body`` is None for a raw head: the bytes that follow belong to its callback."""


class FrameError(Exception):
    """The peer's bytes are not a frame that is allowed now. ``reason`` is a short counter label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FrameDecoder:
    """An incremental decoder for one direction of one connection.

    ``heads`` maps each head that is allowed now to whether it is raw. It is consulted anew for each frame,
    so the owner may replace or mutate it between frames; so may it change ``max_body_bytes``. After a
    ``FrameError`` the decoder is poisoned: it raises the same error again and keeps no bytes.
    """

    __slots__ = ("_error", "buffered", "heads", "max_body_bytes")

    def __init__(self, max_body_bytes: int, heads: Mapping[int, bool]) -> None:
        self.max_body_bytes = max_body_bytes
        self.heads = heads
        self.buffered = bytearray()
        """Bytes received and not yet returned: empty exactly between two frames with nothing read ahead.
        Read-only for others."""
        self._error: FrameError | None = None

    @property
    def buffered_bytes(self) -> int:
        return len(self.buffered)

    def feed(self, data: bytes) -> None:
        """Append received bytes. Dropped after an error."""
        if self._error is None:
            self.buffered += data

    def next_frame(self) -> Frame | None:
        """The next frame, or None if more bytes are needed. Raises ``FrameError``."""
        if self._error is not None:
            raise self._error
        buffer = self.buffered
        if len(buffer) < HEAD_BYTES:
            return None
        head = int.from_bytes(buffer[:HEAD_BYTES], "little")
        is_raw = self.heads.get(head)
        if is_raw is None:
            self._fail("unknown_head", f"head {head_name(head)} is not known here")
        if is_raw:
            del buffer[:HEAD_BYTES]
            return head, None
        if len(buffer) < PREFIX_BYTES:
            return None
        length = int.from_bytes(buffer[HEAD_BYTES:PREFIX_BYTES], "little")
        if length > self.max_body_bytes:
            self._fail(
                "body_too_large",
                f"{head_name(head)}: body of {length} bytes, at most {self.max_body_bytes} allowed",
            )
        end = PREFIX_BYTES + length
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[PREFIX_BYTES:end])
        del buffer[:end]
        return head, body

    def take_buffered(self) -> bytes:
        """All bytes read ahead, which are then no longer the decoder's: for a raw callback."""
        data = bytes(self.buffered)
        self.buffered.clear()
        return data

    def _fail(self, reason: str, message: str) -> None:
        self.buffered.clear()
        self._error = FrameError(reason, message)
        raise self._error


OKAY = head_from_name("OKAY")
FAIL = head_from_name("FAIL")
HELO = head_from_name("HELO")
AUTH = head_from_name("AUTH")
LINK = head_from_name("LINK")
NEWS = head_from_name("NEWS")
ACKN = head_from_name("ACKN")
BEAT = head_from_name("BEAT")

RESERVED_HEADS = frozenset({OKAY, FAIL, HELO, AUTH, LINK, NEWS, ACKN, BEAT})
"""Heads that mean something to the protocol itself: no method may be registered under them."""
