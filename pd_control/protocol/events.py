"""What happens to a core. Every event is a frozen value; who makes it is in its section.

Fields named `key` are transfer keys (`TransferId.key()`), `rank` is the flattened rank of a worker
of *this* instance unless the name says otherwise, `code` is a `Code`, token ranges are half open.
"""

from __future__ import annotations

import enum
from typing import Any

from pd_control._values import dataclass
from pd_control.codes import Code
from pd_control.ids import Content, PeerId
from pd_control.messages import (
    Abort,
    BlockIds,
    Final,
    HeloAttributes,
    Prefill,
    Renew,
    Started,
    TransferKv,
)

# --- time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have come. Due timers fire on this event only."""


# --- both sides: workers of this instance (from their registration and from process supervision) --


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker process is there. An incarnation other than the one known for this rank proves that
    the old process is dead: it implies its `WorkerDied`."""

    rank: int
    incarnation: bytes
    data_address: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process is gone for certain (reaped, pidfd, or killed by us). A lost connection is not
    that. An incarnation that is not the current one is ignored."""

    rank: int
    incarnation: bytes
    reason: str = ""


# --- both sides: links (from the link layer) ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link stands. D opened it (`link_id` from its `OpenLink`); P accepted it (`link_id` from the
    attributes). On P a second LinkUp from the same instance ends the older link first."""

    peer: PeerId
    link_id: int
    attributes: HeloAttributes


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is lost: closed, failed, or three heartbeats missed. Everything that depends on it
    fails as `code` (PEER_LOST unless the layer below knows better)."""

    peer: PeerId
    link_id: int
    code: Code = Code.PEER_LOST
    reason: str = ""


# --- P: from peers -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillReceived:
    """Call PREF. `peer` is the authenticated caller, never taken from the message."""

    call_ref: int
    peer: PeerId
    message: Prefill


@dataclass(frozen=True, slots=True)
class TransferKvReceived:
    """Call TRKV."""

    call_ref: int
    peer: PeerId
    message: TransferKv


@dataclass(frozen=True, slots=True)
class RenewReceived:
    """News RNEW on a link."""

    peer: PeerId
    message: Renew


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """News ABRT on a link. P acts on it; D ignores and counts it (P says FINAL instead)."""

    peer: PeerId
    message: Abort


# --- P: from its core thread (made by StepPlanner, which documents when) --------------------------


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """The engine has taken a request that has or may get a destination.

    For one admitted by PREFILL (`AdmitRequest`) the same id comes back and `content` must be the
    admitted tokens. `num_takers`: transfers that must succeed before the hold ends.
    """

    request_id: str
    content: Content
    num_takers: int = 1


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The engine would not admit what PREFILL carried."""

    request_id: str
    code: Code
    message: str = ""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One tracked request in one planned step."""

    request_id: str
    residence: int  # from 1; a preemption ends one
    lease_id: int  # the lease on all its blocks of this residence
    first_token: int  # computed or hit before this step
    end_token: int  # computed when the step ends
    added_block_ids: BlockIds  # appended to each group since the residence's last plan
    waits_for_steps: tuple[int, ...] = ()  # unfinished steps that wrote the prefix blocks it hits
    carried_keys: tuple[bytes, ...] = ()  # transfers with a send in this step
    carried_sends: tuple[tuple[int, int], ...] = ()  # their (first_token, end_token), same order


@dataclass(frozen=True, slots=True)
class StepPlanned:
    """A main step was planned and goes to every rank. Steps are numbered upwards from 1 or more,
    never twice. Also says that the step may start at any moment."""

    step: int
    requests: tuple[PlannedRequest, ...]


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One rank reported the end of one step. `ack_substep`: the highest substep that the rank took
    into the step (0 = none); None = the report was lost or did not say. `code` other than OK: the
    forward failed there, and what it should have written is void."""

    step: int
    rank: int
    code: Code = Code.OK
    ack_substep: int | None = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The engine is done with the request and has dropped its own references. OK: its KV is as
    computed and stays held. Another code: failed or aborted by its own client."""

    request_id: str
    code: Code = Code.OK
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine sampled the first token of a request that goes on living on P (optional: a request
    that ends with its first token reports it in `RequestFinished`)."""

    request_id: str
    token: int


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """The engine took the blocks back and will compute the request again from what its prefix cache
    still has. Ends the residence."""

    request_id: str
    residence: int  # the one that ended; 0 if it never was in a step


@dataclass(frozen=True, slots=True)
class RequestForgotten:
    """Answer to `ForgetRequest`: no later `StepPlanned` names the request. `lease_ids` are all that
    it still had; if not `released`, the core is to release each when its readers are done."""

    request_id: str
    lease_ids: tuple[int, ...]
    released: bool


@dataclass(frozen=True, slots=True)
class TransferWithdrawn:
    """Answer to `WithdrawTransfer`: no later `StepPlanned` carries the transfer."""

    key: bytes


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """Requests of this P wait for blocks: this many are missing (0 = none any more)."""

    num_blocks: int


# --- P: from its workers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendDone:
    """News SDON. `incarnation` is the worker's. `target_rank` None answers a cancel."""

    rank: int
    incarnation: bytes
    key: bytes
    target_rank: int | None
    tokens: int
    code: Code
    detail: str = ""


# --- D: from its core thread -------------------------------------------------------------------


class Mode(enum.IntEnum):
    SINGLE = 0  # D hands the request to a P with PREFILL
    DUAL = 1  # the router gave it to both; P knows it as `remote_request_id`


class OnFailure(enum.IntEnum):
    FAIL = 0
    RECOMPUTE = 1
    RETRY = 2


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What D must know of a request whose prompt is to be prefilled elsewhere.

    `None` settings take the engine's. `peer_instance` "" lets the core choose a P (SINGLE only).
    """

    request_id: str
    content: Content
    mode: Mode = Mode.SINGLE
    peer_instance: str = ""
    peer_address: str = ""  # of a peer that discovery need not know
    remote_request_id: str = ""  # DUAL
    payload: Any = None  # SINGLE, and DUAL that may be retried elsewhere
    want_first_token: bool = False  # needs recompute_tail_tokens == 0
    recompute_tail_tokens: int | None = None
    on_failure: OnFailure | None = None
    max_attempts: int | None = None
    after_retries: OnFailure | None = None  # FAIL or RECOMPUTE


@dataclass(frozen=True, slots=True)
class DecodeRequestAdded:
    """The engine (or its front end) has a request for us. It may wait for blocks from now on."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    """The engine has allocated the request's blocks and the core thread has leased them (hits too).
    `cached_tokens`: tokens that D has already."""

    request_id: str
    block_ids: BlockIds
    cached_tokens: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client or the engine wants the request gone. Idempotent."""

    request_id: str
    reason: str = ""


# --- D: peers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerFound:
    """Discovery knows a P, or knows a new address of it."""

    instance: str
    address: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Discovery no longer knows it. Nothing fails by that; new requests go elsewhere."""

    instance: str


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """An `OpenLink` came to nothing."""

    instance: str
    link_id: int
    code: Code
    message: str = ""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The end of a `Call`: ACCEPTED or OK with P's queue depth, or why not."""

    call_id: int
    code: Code
    message: str = ""
    queue_depth: int = 0


@dataclass(frozen=True, slots=True)
class StartedReceived:
    """News STRT."""

    peer: PeerId
    message: Started


@dataclass(frozen=True, slots=True)
class FinalReceived:
    """News FINL."""

    peer: PeerId
    message: Final


# --- D: from its workers ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadDone:
    """News LDON. `incarnation` is the worker's."""

    rank: int
    incarnation: bytes
    key: bytes
    source_rank: int
    tokens: int
    code: Code
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GrantAcked:
    """News GACK. `op` is a `GrantOp`."""

    rank: int
    incarnation: bytes
    key: bytes
    op: int
    code: Code
    detail: str = ""


PrefillEvent = (
    Tick
    | WorkerRegistered
    | WorkerDied
    | LinkUp
    | LinkDown
    | PrefillReceived
    | TransferKvReceived
    | RenewReceived
    | AbortReceived
    | RequestAdded
    | RequestRefused
    | StepPlanned
    | StepFinished
    | RequestFinished
    | FirstToken
    | RequestPreempted
    | RequestForgotten
    | TransferWithdrawn
    | BlocksWanted
    | SendDone
)

DecodeEvent = (
    Tick
    | WorkerRegistered
    | WorkerDied
    | LinkUp
    | LinkDown
    | DecodeRequestAdded
    | BlocksAllocated
    | AbortRequested
    | PeerFound
    | PeerGone
    | LinkFailed
    | CallResult
    | StartedReceived
    | FinalReceived
    | AbortReceived
    | LoadDone
    | GrantAcked
)

Event = PrefillEvent | DecodeEvent
