"""Identities: peers, transfers, and what a request's content is.

Pure values, safe to use on any thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import NamedTuple

import msgpack

INCARNATION_BYTES = 16  # random, new at every process start
KEY_BYTES = 16  # what native code and native news use in place of a transfer id
DIGEST_BYTES = 32  # of a request's content; collisions must be out of reach of an attacker
MAX_INSTANCE_CHARS = 64
MAX_REQUEST_ID_CHARS = 256  # engines append suffixes to what a client sent


class PeerId(NamedTuple):
    """One life of one scheduler process: an instance and its incarnation."""

    instance: str
    incarnation: bytes

    def __str__(self) -> str:
        return f"{self.instance}/{self.incarnation.hex()[:8]}"


class TransferId(NamedTuple):
    """Names one try to move the KV of one request to D. Unique for ever: the incarnation sees to
    it over restarts, the attempt over retries."""

    d_instance: str
    d_incarnation: bytes
    request_id: str
    attempt: int

    def key(self) -> bytes:
        """The 16 bytes that stand for this id in native code."""
        return blake2b(msgpack.packb(tuple(self)), digest_size=KEY_BYTES).digest()

    @property
    def peer(self) -> PeerId:
        return PeerId(self.d_instance, self.d_incarnation)

    def __str__(self) -> str:
        return f"{self.d_instance}/{self.d_incarnation.hex()[:8]}/{self.request_id}/{self.attempt}"


def identity_digest(
    model: str,
    *,
    adapter: str = "",
    multimodal_hashes: Sequence[str] = (),
    cache_salt: str = "",
) -> bytes:
    """32 bytes over everything but the token ids that decides what a KV entry holds."""
    fields = (model, adapter, list(multimodal_hashes), cache_salt)
    return blake2b(msgpack.packb(fields), digest_size=DIGEST_BYTES).digest()


class TokenIdsError(ValueError):
    """Token ids that no vocabulary has."""


def _pack(token_ids: Sequence[int]) -> array[int]:
    """A new array of them as little-endian u32. Raises TokenIdsError."""
    try:
        ids = array("I", token_ids)  # checks each at C speed
    except (OverflowError, TypeError) as error:
        raise TokenIdsError(f"expected token ids of 32 bits: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class Content:
    """What a request is: its token ids and the identity they are computed under.

    Holds a reference to the engine's own sequence of token ids and copies nothing; the engine must
    not change the first `num_tokens` of them while the request lives.
    """

    __slots__ = ("_digest", "_identity", "_token_ids", "num_tokens")

    def __init__(self, token_ids: Sequence[int], identity: bytes) -> None:
        self._token_ids = token_ids
        self._identity = identity
        self.num_tokens = len(token_ids)
        self._digest: tuple[int, bytes] = (-1, b"")  # the last one asked for, and of how many

    @property
    def token_ids(self) -> Sequence[int]:
        return self._token_ids

    @property
    def identity(self) -> bytes:
        return self._identity

    @classmethod
    def unpack(cls, packed: bytes, identity: bytes) -> Content:
        """The content whose `packed()` this is. Raises ValueError: no whole number of token ids."""
        ids = array("I")
        ids.frombytes(packed)
        if sys.byteorder == "big":
            ids.byteswap()
        return cls(ids, identity)

    def packed(self) -> bytes:
        """All token ids as little-endian u32. Raises TokenIdsError."""
        return _pack(self._token_ids[: self.num_tokens]).tobytes()

    def digest(self, num_tokens: int, packed: bytes | None = None) -> bytes:
        """Digest over the identity and token ids [0, num_tokens). `packed` is what `packed()` gave,
        if the caller has it: converting the ids costs more than hashing them.

        Raises ValueError if the request has fewer tokens, TokenIdsError as `packed` does.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"expected 0..{self.num_tokens} tokens, got {num_tokens}")
        if self._digest[0] == num_tokens:
            return self._digest[1]
        if packed is None:
            tokens = self._token_ids
            if len(tokens) > 2 * num_tokens:
                tokens = tokens[:num_tokens]  # else converting a few too many is cheaper
            view = memoryview(_pack(tokens)).cast("B")
        else:
            view = memoryview(packed)
        # SHA-256, not BLAKE2: every request is hashed on both sides, and servers do it in hardware.
        h = sha256(self._identity)
        h.update(num_tokens.to_bytes(8, "little"))
        h.update(view[: 4 * num_tokens])
        self._digest = (num_tokens, h.digest())
        return self._digest[1]


def prefill_request_id(request_id: str, key: bytes) -> str:
    """The request id under which P admits what a PREFILL carries: unique per try, whose key this
    is."""
    return f"{request_id}~{key.hex()[:12]}"
