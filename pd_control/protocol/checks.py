"""What a message from a peer must fulfil before a state machine looks at it (R7).

Each function returns None or a sentence with expected and got. Shapes and types were checked when
the frame was decoded; here it is counts, ranges and agreement.
"""

from __future__ import annotations

from pd_control.ids import (
    DIGEST_BYTES,
    INCARNATION_BYTES,
    KEY_BYTES,
    MAX_INSTANCE_CHARS,
    MAX_REQUEST_ID_CHARS,
    PeerId,
)
from pd_control.messages import (
    Abort,
    AbortKind,
    BlockIds,
    DInfo,
    HeloAttributes,
    Prefill,
    RankInfo,
    TransferKv,
)
from pd_control.protocol.ranks import topology_problem

MAX_RANKS = 1 << 16  # of one instance; far above any real one
MAX_GROUPS = 64  # KV cache groups of one model
MAX_BLOCKS = 1 << 20  # of one request, all groups: 16 M tokens in blocks of 16
MAX_BLOCK_ID = (1 << 32) - 1  # kvt's width of a block id
MAX_TOKENS = 1 << 31  # of one request
MAX_ATTEMPT = 1 << 16
MAX_TEXT_CHARS = 512  # of a reason or message of a peer that is kept; the rest is cut off
MAX_EARLY_TAKERS = 1024  # remembered for one request that P does not know
MAX_RENEWALS = 4096  # request ids in one RENEW: well below a frame at any length of id


def attributes_problem(attributes: HeloAttributes) -> str | None:
    """What is wrong with a peer's description of itself."""
    problem = topology_problem(attributes.topology)
    if problem is None and attributes.topology.num_ranks > MAX_RANKS:
        problem = f"expected at most {MAX_RANKS} ranks, got {attributes.topology.num_ranks}"
    return problem or _ranks_problem(attributes.ranks, attributes.topology.num_ranks)


def prefill_problem(message: Prefill, peer: PeerId) -> str | None:
    """What is wrong with a PREF from `peer`, as far as it shows without hashing the tokens."""
    problem = _dinfo_problem(message.info, peer)
    if problem is not None:
        return problem
    num_bytes = len(message.tokens)
    if num_bytes % 4 or num_bytes < 4 * max(message.info.max_tokens, 1):
        return (
            f"expected at least {max(message.info.max_tokens, 1)} token ids of 4 bytes, "
            f"got {num_bytes} bytes"
        )
    if len(message.identity) != DIGEST_BYTES:
        return f"expected an identity of {DIGEST_BYTES} bytes, got {len(message.identity)}"
    return None


def transfer_kv_problem(message: TransferKv, peer: PeerId) -> str | None:
    """What is wrong with a TRKV from `peer`, as far as it shows without knowing the request."""
    if not 1 <= len(message.request_id) <= MAX_REQUEST_ID_CHARS:
        return f"expected a request id of 1..{MAX_REQUEST_ID_CHARS} characters, got {len(message.request_id)}"
    return _dinfo_problem(message.info, peer)


def abort_problem(message: Abort) -> str | None:
    """What is wrong with an ABRT."""
    if len(message.key) != KEY_BYTES:
        return f"expected a key of {KEY_BYTES} bytes, got {len(message.key)}"
    if message.kind not in (AbortKind.TRANSFER, AbortKind.TAKER):
        return f"expected an abort of kind 0 or 1, got {message.kind}"
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        return f"expected at most {MAX_REQUEST_ID_CHARS} characters, got {len(message.request_id)}"
    return None


def _dinfo_problem(info: DInfo, peer: PeerId) -> str | None:
    if (info.instance, info.incarnation) != peer:
        named = PeerId(info.instance, info.incarnation)
        return f"expected the transfer of the caller {peer}, got one of {named}"
    if not 1 <= len(info.instance) <= MAX_INSTANCE_CHARS:
        return (
            f"expected an instance of 1..{MAX_INSTANCE_CHARS} characters, got {len(info.instance)}"
        )
    if not 1 <= len(info.request_id) <= MAX_REQUEST_ID_CHARS:
        return f"expected a request id of 1..{MAX_REQUEST_ID_CHARS} characters, got {len(info.request_id)}"
    if not 0 <= info.attempt <= MAX_ATTEMPT:
        return f"expected an attempt of 0..{MAX_ATTEMPT}, got {info.attempt}"
    if not 0 <= info.cached_tokens <= MAX_TOKENS or not 0 <= info.max_tokens <= MAX_TOKENS:
        return f"expected token counts of 0..{MAX_TOKENS}, got {info.cached_tokens} and {info.max_tokens}"
    if len(info.digest) != DIGEST_BYTES:
        return f"expected a digest of {DIGEST_BYTES} bytes, got {len(info.digest)}"
    problem = topology_problem(info.topology)
    if problem is not None:
        return problem
    return _ranks_problem(info.ranks, info.topology.num_ranks) or _blocks_problem(info)


def _ranks_problem(ranks: tuple[RankInfo, ...], num_ranks: int) -> str | None:
    if len(ranks) != num_ranks:
        return f"expected {num_ranks} ranks, got {len(ranks)}"
    for expected, info in enumerate(ranks):
        if info.rank != expected:
            return f"expected rank {expected} in place {expected}, got {info.rank}"
        if len(info.incarnation) != INCARNATION_BYTES:
            return (
                f"expected an incarnation of {INCARNATION_BYTES} bytes for rank {expected}, "
                f"got {len(info.incarnation)}"
            )
    return None


def _blocks_problem(info: DInfo) -> str | None:
    block_ids: BlockIds = info.block_ids
    if len(block_ids) > MAX_GROUPS:
        return f"expected at most {MAX_GROUPS} cache groups, got {len(block_ids)}"
    total = sum(map(len, block_ids))
    if total > MAX_BLOCKS:
        return f"expected at most {MAX_BLOCKS} block ids, got {total}"
    if total == 0 and info.max_tokens > info.cached_tokens:
        return f"expected blocks for tokens up to {info.max_tokens}, got none"
    for group in block_ids:
        if group and not (min(group) >= 0 and max(group) <= MAX_BLOCK_ID):
            return f"expected block ids of 0..{MAX_BLOCK_ID}, got {min(group)}..{max(group)}"
    return None
