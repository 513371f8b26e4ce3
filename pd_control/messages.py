"""What the control plane says, as plain values.

Each class is one message or news item; its fields, in order, are the positional fields of the wire
format (docs/wire.md). Nothing here packs, sends or trusts: `pd_control.protocol.checks` bounds what
came from a socket before a state machine sees it.

Block lists hold one tuple per KV cache group and always start at token 0 of the request, on both
sides, so a partial prefix hit cannot misalign them. Token ranges are half open.
"""

from __future__ import annotations

import enum
from dataclasses import field
from typing import Any

from pd_control._values import dataclass
from pd_control.ids import TransferId

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, from token 0 of the request."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One worker of an instance, as others must know it. `rank` is pp_rank * tp_size + tp_rank."""

    rank: int
    pp_rank: int
    tp_rank: int
    incarnation: bytes
    data_address: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """How an instance cuts the model: enough to know which ranks exchange bytes.

    `num_kv_heads` is that of the whole model; 0 means that every TP rank holds all of it (MLA).
    `pp_layers` is the number of layers of each pipeline rank, () when there is only one.
    """

    tp_size: int
    pp_size: int = 1
    num_kv_heads: int = 0
    pp_layers: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class HeloAttributes:
    """What a scheduler says of itself in HELLO and when a link is opened."""

    topology: Topology
    ranks: tuple[RankInfo, ...]
    model: str = ""
    link_id: int = 0  # LINK only: which link of this pair of incarnations, counted by its opener


@dataclass(frozen=True, slots=True)
class DInfo:
    """Where KV goes, and what it must be.

    `max_tokens` is the end of the wanted range and `cached_tokens` its beginning (D has those);
    equal means that D wants nothing and only lets P release. `digest` is `Content.digest` over the
    first `max_tokens` tokens.
    """

    instance: str
    incarnation: bytes
    request_id: str  # D's own; with instance, incarnation and attempt the transfer id
    attempt: int
    topology: Topology
    ranks: tuple[RankInfo, ...]
    block_ids: BlockIds
    cached_tokens: int
    max_tokens: int
    digest: bytes
    want_first_token: bool = False

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(self.instance, self.incarnation, self.request_id, self.attempt)


@dataclass(frozen=True, slots=True)
class Prefill:
    """PREF: prefill this and send it here. Idempotent: the same transfer id joins."""

    link_id: int  # the link on which STARTED and FINAL are to come
    info: DInfo
    tokens: bytes  # little-endian u32 each, `Content.packed`
    identity: bytes  # 32 bytes, `ids.identity_digest`
    payload: Any = None  # opaque to the control plane: what P's engine needs to admit the request

    HEAD = "PREF"


@dataclass(frozen=True, slots=True)
class TransferKv:
    """TRKV: my blocks are ready, send the KV of your request `request_id`. Idempotent."""

    link_id: int
    request_id: str  # P's
    info: DInfo

    HEAD = "TRKV"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to PREF and TRKV. `queue_depth`: transfers P has accepted and not started."""

    code: int
    queue_depth: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """STRT, P → D: the transfer left the queue."""

    key: bytes

    HEAD = "STRT"


@dataclass(frozen=True, slots=True)
class Final:
    """FINL, P → D: P's final word on a transfer. `tokens` is the end of what it sent."""

    key: bytes
    code: int
    tokens: int
    message: str = ""
    first_token: int | None = None

    HEAD = "FINL"


@dataclass(frozen=True, slots=True)
class Renew:
    """RNEW, D → P: keep holding these of your requests."""

    request_ids: tuple[str, ...]

    HEAD = "RNEW"


class AbortKind(enum.IntEnum):
    """What an ABORT takes back."""

    TRANSFER = 0  # one try, by key; a request admitted by its PREFILL goes with it
    TAKER = 1  # D will not take P's request `request_id`: one taker fewer to wait for


@dataclass(frozen=True, slots=True)
class Abort:
    """ABRT, scheduler to scheduler: best effort, idempotent, never waited for."""

    kind: int
    key: bytes  # TRANSFER: its key. TAKER: the key of the D request's first attempt (0)
    request_id: str = ""  # TAKER: P's request
    code: int = 5  # Code.ABORTED
    reason: str = ""

    HEAD = "ABRT"


@dataclass(frozen=True, slots=True)
class SendDoneItem:
    """SDON, P worker → P scheduler: this rank no longer reads for this target. `target_rank` None:
    for no target of this transfer, now and for ever (the answer to a cancel)."""

    rank: int
    key: bytes
    target_rank: int | None
    tokens: int
    code: int
    detail: str = ""

    HEAD = "SDON"


@dataclass(frozen=True, slots=True)
class LoadDoneItem:
    """LDON, D worker → D scheduler: the slice from one source rank has landed up to `tokens`, or
    will not. The worker has closed that slice of the grant before it says so."""

    rank: int
    key: bytes
    source_rank: int
    tokens: int
    code: int
    detail: str = ""

    HEAD = "LDON"


@dataclass(frozen=True, slots=True)
class SaveDoneItem:
    """SVON, worker → scheduler: this rank's KV is saved to the store `source`."""

    rank: int
    request_id: str
    source: str
    tokens: int
    code: int
    detail: str = ""

    HEAD = "SVON"


class GrantOp(enum.IntEnum):
    OPEN = 0
    CLOSE = 1
    START = 2  # P says that it began: the worker's progress clock may run. Not acknowledged.


@dataclass(frozen=True, slots=True)
class Grant:
    """GRNT, D scheduler → D worker: open, close or clock one transfer's right to write."""

    op: int
    key: bytes
    sender_instance: str = ""
    sender_incarnation: bytes = b""
    block_ids: BlockIds = ()
    first_token: int = 0
    end_token: int = 0
    source_ranks: tuple[int, ...] = ()  # those that send to this worker; others may not
    options: dict[str, Any] = field(default_factory=dict)

    HEAD = "GRNT"


@dataclass(frozen=True, slots=True)
class GrantAck:
    """GACK, D worker → D scheduler. A close is acknowledged only when no byte can land any more."""

    rank: int
    key: bytes
    op: int
    code: int
    detail: str = ""

    HEAD = "GACK"


@dataclass(frozen=True, slots=True)
class Target:
    """One D worker as a P worker must address it."""

    rank: int
    incarnation: bytes
    data_address: str


@dataclass(frozen=True, slots=True)
class Send:
    """One submission to the senders of P: tokens [first_token, end_token) of a transfer.

    The same value goes to every rank it concerns; each rank works out its own byte ranges. `last`
    says that no token follows: when it is done the rank reports SEND_DONE for each of its targets.
    """

    key: bytes
    target_instance: str
    target_incarnation: bytes
    targets: tuple[Target, ...]
    src_block_ids: BlockIds
    dst_block_ids: BlockIds
    first_token: int
    end_token: int
    last: bool


@dataclass(frozen=True, slots=True)
class Substep:
    """SUBS, P scheduler → P worker: attach these to the running step's own timeline."""

    scheduler_incarnation: bytes
    step: int
    substep: int  # from 1, without gaps, within its step
    sends: tuple[Send, ...]

    HEAD = "SUBS"


@dataclass(frozen=True, slots=True)
class FrozenSends:
    """FRZN, P scheduler → P worker: complete KV; all layers are ready, no step is involved."""

    sends: tuple[Send, ...]

    HEAD = "FRZN"


@dataclass(frozen=True, slots=True)
class CancelSend:
    """ABRT, P scheduler → P worker: stop sending this transfer and refuse more of it. Every target
    still open at that rank then ends in a SEND_DONE; with none open one arrives with no target."""

    key: bytes
    code: int

    HEAD = "ABRT"


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """REGW, worker → its scheduler."""

    rank: int
    incarnation: bytes
    data_address: str
    fingerprint: str

    HEAD = "REGW"


@dataclass(frozen=True, slots=True)
class Inspect:
    """INSP: a page of live requests; `after` is the last request id of the page before."""

    request_id: str = ""  # one request by id, or "" for a page
    after: str = ""
    limit: int = 500

    HEAD = "INSP"
