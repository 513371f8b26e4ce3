"""What a core wants done. The package docstring says what a driver must do for each.

Effects go to five places: a peer by call, a peer by its link, a worker, the core thread (subclasses
of `CoreCommand`), or the process (`Fatal`).
"""

from __future__ import annotations

from typing import Any

from pd_control._values import dataclass
from pd_control.codes import Code
from pd_control.ids import Content, PeerId
from pd_control.messages import (
    Abort,
    BlockIds,
    CancelSend,
    Final,
    FrozenSends,
    Grant,
    Prefill,
    Renew,
    Started,
    Substep,
    Target,
    TransferKv,
)

# --- to peers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLink:
    """D → P: open a link and report `LinkUp` or `LinkFailed`, the latter at the deadline at the
    latest. `link_id` goes into the link's attributes."""

    instance: str
    address: str
    link_id: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close it; a `LinkDown` for it may follow and is then ignored."""

    peer: PeerId
    link_id: int


@dataclass(frozen=True, slots=True)
class LinkNews:
    """Put one item on the link `link_id`. If that link is gone, drop it: its loss was an event."""

    peer: PeerId
    link_id: int
    item: Started | Final | Renew | Abort


@dataclass(frozen=True, slots=True)
class Call:
    """Call a peer of exactly this incarnation; ends in one `CallResult`."""

    call_id: int
    peer: PeerId
    address: str
    message: Prefill | TransferKv
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the incoming call `call_ref`. OK and ACCEPTED go as `messages.Accepted`, any other
    code as a FAIL with the message."""

    call_ref: int
    code: Code
    message: str = ""
    queue_depth: int = 0


# --- to workers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """Put one item on the stream to this incarnation of a worker. If it is gone, drop it."""

    rank: int
    incarnation: bytes
    item: Grant | Substep | FrozenSends | CancelSend


# --- to the core thread -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoreCommand:
    """Base of what the loop thread asks of the core thread, through one ordered queue."""


@dataclass(frozen=True, slots=True)
class OfferTransfer(CoreCommand):
    """P: plan sends of this transfer in main steps, from `first_token`, while they compute tokens
    that it still wants. Valid for one residence of the request; a later offer of the same key
    replaces it."""

    request_id: str
    residence: int
    key: bytes
    target_instance: str
    target_incarnation: bytes
    targets: tuple[Target, ...]
    dst_block_ids: BlockIds
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class WithdrawTransfer(CoreCommand):
    """P: plan no more sends of it. Answered by one `TransferWithdrawn`, also for an unknown key."""

    request_id: str
    key: bytes


@dataclass(frozen=True, slots=True)
class ReleaseLease(CoreCommand):
    """Nobody can touch these blocks any more: drop the references. Sent exactly once per lease (but
    see `ForgetRequest`, which may release a request's leases by itself)."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class ForgetRequest(CoreCommand):
    """P: the request is over for us. The core thread takes no lease and plans no send for it any
    more, and answers with one `RequestForgotten`.

    `release`: the loop knows of no reader; its leases are released at once, unless a step after
    `seen_step` (the last whose plan the loop had seen) carried a send of it.
    """

    request_id: str
    seen_step: int
    release: bool


@dataclass(frozen=True, slots=True)
class AdmitRequest(CoreCommand):
    """P engine: take this request, prefill it, generate one token. Answered by `RequestAdded` or
    `RequestRefused` with the same id."""

    request_id: str
    content: Content
    payload: Any


@dataclass(frozen=True, slots=True)
class AbortRequest(CoreCommand):
    """P engine: stop this request if it still runs. Its `RequestFinished` may or may not follow."""

    request_id: str
    code: Code
    message: str = ""


@dataclass(frozen=True, slots=True)
class VoidRankKv(CoreCommand):
    """Engine: a worker died; whatever KV the pool held is gone on that rank. Drop the prefix-cache
    entries; compute again or fail whatever still runs on them."""

    rank: int
    incarnation: bytes  # of the process that died


@dataclass(frozen=True, slots=True)
class RequestLoaded(CoreCommand):
    """D engine: tokens [0, num_tokens) are in the blocks; run. `first_token` if P's was wanted."""

    request_id: str
    num_tokens: int
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed(CoreCommand):
    """D engine: tell the client and drop the engine's own references. Also after ABORT (code
    ABORTED). Blocks that may still be written stay leased until `ReleaseLease`."""

    request_id: str
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class RecomputeRequest(CoreCommand):
    """D engine: prefill it here, in blocks allocated anew; drop the references to the old ones,
    which stay leased until `ReleaseLease`."""

    request_id: str
    code: Code
    message: str


# --- to the process -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fatal:
    """This worker has not acknowledged in time: nobody can prove that it leaves the blocks alone.
    The driver calls the embedder's `on_fatal`; the blocks stay leased."""

    rank: int
    incarnation: bytes
    reason: str


Effect = (
    OpenLink
    | CloseLink
    | LinkNews
    | Call
    | Answer
    | WorkerNews
    | OfferTransfer
    | WithdrawTransfer
    | ReleaseLease
    | ForgetRequest
    | AdmitRequest
    | AbortRequest
    | VoidRankKv
    | RequestLoaded
    | RequestFailed
    | RecomputeRequest
    | Fatal
)
