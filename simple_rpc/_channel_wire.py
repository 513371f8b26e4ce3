"""The bodies of a channel's frames: checked in, packed out. Pure.

Everything that arrives is checked here before anybody uses it; the items of news are left to their
handlers. What fails is a NewsProtocolError (the peer's fault) that says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from ._codec import unpack_body
from ._errors import Code, InvalidMessageError, PeerProtocolError, RemoteError, RpcError, shown
from ._frames import ACKN, BEAT, FAIL, NEWS
from ._heartbeat import MAX_HEARTBEAT_S, MIN_HEARTBEAT_S
from ._limits import MAX_BODY_BYTES, MAX_ERROR_TEXT_CHARS
from .identity import MAX_NAME_CHARS, _checked_attributes
from .news import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ITEMS,
    MAX_ITEM_BYTES,
    MAX_SEQ,
    Group,
    NewsProtocolError,
)

STREAM_ID_BYTES = 16
# The largest NEWS frame: one longest item (or MAX_FRAME_BYTES of shorter ones), and up to 11 bytes
# for the head and count of each group.
MAX_CHANNEL_BODY_BYTES = MAX_BODY_BYTES
assert max(MAX_FRAME_BYTES, MAX_ITEM_BYTES) + 16 * MAX_FRAME_ITEMS < MAX_CHANNEL_BODY_BYTES

# The heads a channel takes after LINK, none of them raw (see `FrameDecoder.heads`).
CHANNEL_HEADS: Mapping[int, bool] = {NEWS: False, ACKN: False, BEAT: False, FAIL: False}
EMPTY_ARRAY = b"\x90"


class LinkRequest:
    """The checked fields of a LINK call: `[kind, stream_id, next_seq, heartbeat_ms, attributes]`."""

    __slots__ = ("attributes", "heartbeat_s", "kind", "next_seq", "stream_id")

    def __init__(self, fields: Sequence[Any]) -> None:
        if len(fields) < 4:
            raise _invalid("", "at least 4 fields", len(fields))
        kind, stream_id, next_seq, heartbeat_ms = fields[:4]
        if not isinstance(kind, str) or not 1 <= len(kind) <= MAX_NAME_CHARS:
            raise _invalid("kind", f"1 to {MAX_NAME_CHARS} characters", kind)
        if not isinstance(stream_id, bytes) or len(stream_id) != STREAM_ID_BYTES:
            raise _invalid("stream_id", f"{STREAM_ID_BYTES} bytes", stream_id)
        if type(next_seq) is not int or not 1 <= next_seq <= MAX_SEQ:
            raise _invalid("next_seq", f"a number in 1..{MAX_SEQ}", next_seq)
        low, high = int(MIN_HEARTBEAT_S * 1000), int(MAX_HEARTBEAT_S * 1000)
        if type(heartbeat_ms) is not int or not (heartbeat_ms == 0 or low <= heartbeat_ms <= high):
            raise _invalid("heartbeat_ms", f"0 or {low}..{high}", heartbeat_ms)
        self.kind = kind
        self.stream_id = stream_id
        self.next_seq = next_seq
        self.heartbeat_s = heartbeat_ms / 1000
        self.attributes: Mapping[str, Any] = _checked_attributes(
            fields[4] if len(fields) > 4 else {}
        )


def check_answer(fields: list[Any]) -> tuple[bytes, int, bool]:
    """The fields of LINK's OKAY: the acceptor's stream, what it expects next, whether we are new."""
    if (
        len(fields) < 2
        or not isinstance(fields[0], bytes)
        or len(fields[0]) != STREAM_ID_BYTES
        or type(fields[1]) is not int
        or not 1 <= fields[1] <= MAX_SEQ
        or (len(fields) > 2 and not isinstance(fields[2], dict))
    ):
        raise PeerProtocolError(
            Code.BAD_REQUEST, "LINK: expected the answer [stream_id, next_seq, attributes]"
        )
    attributes = fields[2] if len(fields) > 2 else {}
    return fields[0], fields[1], attributes.get("fresh") is True


def check_news(body: object, max_items: int = MAX_FRAME_ITEMS) -> tuple[int, list[Group]]:
    """Checks an unpacked NEWS body `[first_seq, [[head, [item, ...]], ...]]`.

    The items themselves are the handlers' to check. Raises NewsProtocolError, which says where.
    """
    if not isinstance(body, (list, tuple)) or len(body) < 2:
        raise NewsProtocolError("NEWS: expected an array of first_seq and groups")
    first_seq, groups = body[0], body[1]
    if type(first_seq) is not int or not 1 <= first_seq <= MAX_SEQ:
        raise NewsProtocolError(f"NEWS[0]: expected a number in 1..{MAX_SEQ}")
    if not isinstance(groups, (list, tuple)):
        raise NewsProtocolError("NEWS[1]: expected an array of groups")
    num_items = 0
    checked: list[Group] = []
    for index, group in enumerate(groups):
        if (
            not isinstance(group, (list, tuple))
            or len(group) != 2
            or not isinstance(group[0], str)
            or len(group[0]) != 4
            or not isinstance(group[1], (list, tuple))
            or not group[1]
        ):
            raise NewsProtocolError(f"NEWS[1][{index}]: expected a head and a non-empty array")
        num_items += len(group[1])
        checked.append((group[0], group[1] if isinstance(group[1], list) else list(group[1])))
    if not 1 <= num_items <= max_items:
        raise NewsProtocolError(f"NEWS: expected 1..{max_items} items, got {num_items}")
    if first_seq + num_items > MAX_SEQ:
        raise NewsProtocolError(f"NEWS: numbers end at {MAX_SEQ}")
    return first_seq, checked


def unpack(body: bytes, what: str) -> Any:
    """The one bounded value of a body. NewsProtocolError if it is not that."""
    try:
        return unpack_body(body)
    except InvalidMessageError as error:
        raise NewsProtocolError(f"{what}: {error.message}") from None


def pack(fields: list[Any]) -> bytes:
    body: bytes = msgpack.packb(fields)
    return body


def check_ackn(body: object) -> int:
    if not isinstance(body, list) or not body or type(body[0]) is not int:
        raise NewsProtocolError("ACKN: expected an array of one number")
    return body[0]


def check_beat(body: bytes) -> None:
    if not isinstance(unpack(body, "BEAT"), list):
        raise NewsProtocolError("BEAT: expected an array")


def pack_fail(code: Code, message: str) -> bytes:
    return pack([int(code), message[:MAX_ERROR_TEXT_CHARS], {}])


def unpack_fail(body: bytes) -> RpcError:
    fields = unpack(body, "FAIL")
    if not isinstance(fields, list) or len(fields) < 2 or not isinstance(fields[1], str):
        raise NewsProtocolError("FAIL: expected [code, message, details]")
    return RemoteError(
        Code.from_wire(fields[0]), f"the peer ended the channel: {fields[1][:MAX_ERROR_TEXT_CHARS]}"
    )


def _invalid(path: str, expected: str, got: object) -> InvalidMessageError:
    return InvalidMessageError(message=f"LINK.{path}: expected {expected}, got {shown(got)}")
