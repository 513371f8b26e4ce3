"""The messages of `pd_control.messages` as methods and news items of simple_rpc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack

from pd_control import messages as m
from simple_rpc import InvalidMessageError, Method
from simple_rpc._codec import Schema, unpack_body

T = TypeVar("T")

ROLE_SCHEDULER = "scheduler"
KIND_LINK = "link"  # channel between two schedulers
KIND_WORKER = "worker"  # channel between a worker and its scheduler
ABOUT_HEAD = "ABOU"  # first news on a link, P → D: P's HeloAttributes
ABOUT_CHUNK_BYTES = 500  # an attribute holds 512; HELLO and LINK take scalars only
MAX_ABOUT_CHUNKS = 30


def worker_role(rank: int) -> str:
    """A worker's role in HELLO. The rank is in it because a new incarnation of the same (role,
    instance) counts as a restart, and every rank of an engine bears the engine's instance."""
    return f"worker/{rank}"


def is_worker(role: str) -> bool:
    return role.startswith("worker/")


PREFILL: Method[m.Prefill, m.Accepted] = Method(
    m.Prefill.HEAD, m.Prefill, m.Accepted, idempotent=True
)
TRANSFER_KV: Method[m.TransferKv, m.Accepted] = Method(
    m.TransferKv.HEAD, m.TransferKv, m.Accepted, idempotent=True
)
REGISTER_WORKER: Method[m.RegisterWorker, None] = Method(
    m.RegisterWorker.HEAD, m.RegisterWorker, None
)


@dataclass(frozen=True, slots=True)
class DataRequest:
    """DATA: a P worker's call to a D worker's own server, answered by native code with GO."""

    source_rank: int
    target_rank: int


DATA: Method[DataRequest, None] = Method("DATA", DataRequest, None)


class ItemCodec(Generic[T]):
    """One kind of news item: a dataclass to a positional array and back."""

    def __init__(self, cls: type[T], head: str) -> None:
        self._schema: Schema[T] = Schema(cls)
        self.head = head

    def encode(self, item: T) -> tuple[Any, ...]:
        return self._schema.encode(item)

    def decode(self, fields: Any) -> T:
        """Raises InvalidMessageError naming the path."""
        return self._schema.decode(fields)


STARTED = ItemCodec(m.Started, m.Started.HEAD)
FINAL = ItemCodec(m.Final, m.Final.HEAD)
RENEW = ItemCodec(m.Renew, m.Renew.HEAD)
ABORT = ItemCodec(m.Abort, m.Abort.HEAD)
GRANT = ItemCodec(m.Grant, m.Grant.HEAD)
GRANT_ACK = ItemCodec(m.GrantAck, m.GrantAck.HEAD)
SUBSTEP = ItemCodec(m.Substep, m.Substep.HEAD)
SEND = ItemCodec(m.Send, "SEND")
CANCEL_SEND = ItemCodec(m.CancelSend, m.CancelSend.HEAD)
SEND_DONE = ItemCodec(m.SendDoneItem, m.SendDoneItem.HEAD)
LOAD_DONE = ItemCodec(m.LoadDoneItem, m.LoadDoneItem.HEAD)
ABOUT = ItemCodec(m.HeloAttributes, ABOUT_HEAD)


def _pack_frozen(item: m.FrozenSends) -> list[Any]:
    """FRZN is the list of sends itself: native code reads it without a wrapper."""
    return [SEND.encode(send) for send in item.sends]


LINK_ITEMS: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    m.Started: (STARTED.head, STARTED.encode),
    m.Final: (FINAL.head, FINAL.encode),
    m.Renew: (RENEW.head, RENEW.encode),
    m.Abort: (ABORT.head, ABORT.encode),
}
WORKER_ITEMS: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    m.Grant: (GRANT.head, GRANT.encode),
    m.Substep: (SUBSTEP.head, SUBSTEP.encode),
    m.FrozenSends: (m.FrozenSends.HEAD, _pack_frozen),
    m.CancelSend: (CANCEL_SEND.head, CANCEL_SEND.encode),
}


def pack_plan(sends: tuple[m.Send, ...]) -> bytes:
    """What rides a main step to its workers; empty for no sends."""
    if not sends:
        return b""
    packed: bytes = msgpack.packb([SEND.encode(send) for send in sends])
    return packed


def unpack_plan(plan: bytes) -> list[m.Send]:
    """Raises ValueError for anything that `pack_plan` did not make."""
    if not plan:
        return []
    try:
        values = unpack_body(plan)
        if not isinstance(values, list):
            raise InvalidMessageError(message="plan: expected an array of sends")
        return [SEND.decode(value) for value in values]
    except InvalidMessageError as error:
        raise ValueError(str(error)) from None


def pack_about(about: m.HeloAttributes) -> dict[str, bytes]:
    """As attributes of a LINK call, which are bounded scalars."""
    raw: bytes = msgpack.packb(ABOUT.encode(about))
    chunks = [raw[i : i + ABOUT_CHUNK_BYTES] for i in range(0, len(raw), ABOUT_CHUNK_BYTES)]
    if len(chunks) > MAX_ABOUT_CHUNKS:
        raise ValueError(f"{len(about.ranks)} ranks do not fit into a LINK call")
    return {f"about{i}": chunk for i, chunk in enumerate(chunks)}


def unpack_about(attributes: Mapping[str, Any]) -> m.HeloAttributes:
    """Raises InvalidMessageError."""
    raw = b""
    for i in range(MAX_ABOUT_CHUNKS):
        chunk = attributes.get(f"about{i}")
        if chunk is None:
            break
        if not isinstance(chunk, bytes):
            raise InvalidMessageError(message=f"LINK.attributes.about{i}: expected bytes")
        raw += chunk
    return ABOUT.decode(unpack_body(raw))
