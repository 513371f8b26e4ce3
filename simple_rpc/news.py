"""News streams: one-way, acknowledged, numbered items. Pure: no I/O, no clock, no tasks.

A stream runs from one sender (its random `stream_id`) to one receiver *incarnation*. Items are
numbered from 1. The rules, which docs/news.md states for other languages too:

- at most one NEWS frame is in flight; whatever is published meanwhile travels in the next one;
- an acknowledgement is cumulative: "I expect number n next";
- after a reconnect the unacknowledged items are sent again under the same numbers, and the receiver
  skips those below the number it expects: at least once on the wire, exactly once to the handler;
- a receiver with a new incarnation (or one that forgot the stream) gets none of the old items: they
  are dropped, their number is returned, and the owner registers anew;
- publishing needs a *slot*, reserved ahead, so that it never blocks and never fails for lack of room.
  An item holds its slot until it is acknowledged or dropped.

Threads: every object here belongs to one thread, the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import msgpack

from simple_rpc._errors import BusyError, Code, PeerProtocolError

# Most items are completions of some fifty bytes. The longest is a grant or a send of a million tokens
# (65,536 blocks a group at up to 5 bytes, a few groups, both sides).
MAX_ITEM_BYTES = 2 * 1024 * 1024
# What one frame carries, unless a single item is longer: large enough that a full frame costs under a
# microsecond an item, small enough that handling it (about 1 us an item) does not hold the
# receiver's loop for long.
MAX_FRAME_ITEMS = 8192
MAX_FRAME_BYTES = 1024 * 1024
# Queue bound of one stream: reserved and unacknowledged items together.
MAX_SLOTS = 65_536
# Numbers fit a signed 64-bit integer in every language.
MAX_SEQ = 2**63 - 1

Group = tuple[str, list[Any]]
_first = itemgetter(0)


class NewsProtocolError(PeerProtocolError):
    """The peer broke the rules of news (a gap, an acknowledgement from the future, garbage).

    The channel is answered FAIL and ended; no item of the offending frame reached a handler.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Code.BAD_REQUEST, message)


@dataclass(frozen=True, slots=True)
class Attached:
    """What `NewsSender.attach` found. `is_new`: first contact with this receiver incarnation."""

    is_new: bool
    num_dropped: int


@dataclass(slots=True)
class SenderStats:
    """Running totals of one sender. `num_resent` counts items put on the wire again."""

    num_published: int = 0
    num_frames: int = 0
    num_resent: int = 0
    num_acked: int = 0
    num_dropped: int = 0


class Slots:
    """Room for `left` items, owned by whoever reserved it: a transfer holds one until its end.

    `publish` uses one up and never blocks. `release` gives back what is left; calling it twice, or
    after the channel is gone, does nothing.
    """

    __slots__ = ("_stream", "left")

    def __init__(self, stream: NewsSender, num: int) -> None:
        self._stream = stream
        self.left = num

    def publish(self, head: str, item: object) -> None:
        """Like `NewsSender.publish`, into a slot of this reservation. ValueError if none is left."""
        if self.left < 1:
            raise ValueError("no slot left in this reservation: reserve one per item")
        self._stream._append(head, item)  # raises before anything is counted
        self.left -= 1
        self._stream._num_reserved -= 1
        self._stream._published()

    def release(self) -> None:
        self._stream._num_reserved -= self.left
        self.left = 0

    def __repr__(self) -> str:
        return f"<Slots left={self.left}>"


class NewsSender:
    """The sending end of one stream.

    Life: `attach` when a channel to a receiver stands, `detach` when it is lost, any number of times.
    Items published while detached wait (in their slots) for the next attach.
    """

    def __init__(
        self,
        *,
        max_slots: int = MAX_SLOTS,
        max_frame_items: int = MAX_FRAME_ITEMS,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_item_bytes: int = MAX_ITEM_BYTES,
    ) -> None:
        self.stats = SenderStats()
        self.max_slots = max_slots
        self.max_frame_items = max_frame_items
        self.max_frame_bytes = max_frame_bytes
        self.max_item_bytes = max_item_bytes
        self._packer = msgpack.Packer(autoreset=True)
        self._unacked: deque[tuple[bytes, bytes]] = deque()  # (packed head, packed item)
        self._first_seq = 1  # number of the oldest unacknowledged item
        self._sent_seq = 1  # one above the highest number ever put on the wire to this receiver
        self._num_in_flight = 0
        self._num_reserved = 0
        self._receiver: bytes | None = None
        self._is_attached = False
        self._is_closed = False
        self._heads: dict[str, bytes] = {}
        # Set by the channel: called after each publish, so that the frame leaves in the same tick.
        self.on_published: Callable[[], None] | None = None

    # -- slots and publishing ------------------------------------------------------------------

    @property
    def num_unacked(self) -> int:
        """Published and not yet acknowledged: in flight, or waiting."""
        return len(self._unacked)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_reserved(self) -> int:
        """Slots reserved and not yet used."""
        return self._num_reserved

    @property
    def num_free(self) -> int:
        """Slots that `reserve` could still give."""
        return self.max_slots - self._num_reserved - len(self._unacked)

    @property
    def next_seq(self) -> int:
        """The number that the next published item will get."""
        return self._first_seq + len(self._unacked)

    @property
    def receiver_incarnation(self) -> bytes | None:
        return self._receiver

    @property
    def is_attached(self) -> bool:
        return self._is_attached

    def reserve(self, num: int = 1) -> Slots:
        """Reserves `num` slots, all or none. BusyError if that many are not free."""
        if num < 1:
            raise ValueError(f"slots: expected at least 1, got {num}")
        if num > self.num_free:
            raise BusyError(
                message=f"news stream: {num} slots asked for, {self.num_free} of {self.max_slots} free "
                f"({self._num_reserved} reserved, {len(self._unacked)} unacknowledged)",
            )
        self._num_reserved += num
        return Slots(self, num)

    def publish(self, head: str, item: object) -> None:
        """Queues one item without a reservation. BusyError if no slot is free.

        The item is packed here: changing it afterwards changes nothing, and an item that cannot be
        packed (TypeError) or is too long (ValueError) is refused to its author, with nothing queued.
        """
        if self._num_reserved + len(self._unacked) >= self.max_slots:
            self.reserve(1)  # raises, with the numbers in the message
        self._append(head, item)
        self._published()

    def _append(self, head: str, item: object) -> None:
        if self._is_closed:
            self.stats.num_dropped += 1
            return
        packed_head = self._heads.get(head)
        if packed_head is None:
            packed_head = self._pack_head(head)
        packed = self._packer.pack(item)
        if len(packed) > self.max_item_bytes:
            raise ValueError(
                f"news item {head}: expected at most {self.max_item_bytes} bytes packed, "
                f"got {len(packed)}"
            )
        self._unacked.append((packed_head, packed))
        self.stats.num_published += 1

    def _published(self) -> None:
        if self.on_published is not None and not self._num_in_flight:
            self.on_published()

    def _pack_head(self, head: str) -> bytes:
        if len(head) != 4 or not head.isascii() or not head.isalpha():
            raise ValueError(f"news head: expected four ASCII letters, got {head!r}")
        packed: bytes = self._packer.pack(head)
        self._heads[head] = packed
        return packed

    # -- the wire ------------------------------------------------------------------------------

    def attach(self, receiver: bytes, next_seq: int, *, is_fresh: bool) -> Attached:
        """A channel stands to the receiver incarnation `receiver`, which expects `next_seq` next.

        `is_fresh`: the receiver had no memory of this stream. Items of an older incarnation are
        dropped. Raises NewsProtocolError, with nothing changed, for a number that was never sent.
        """
        if not 1 <= next_seq <= MAX_SEQ:
            raise NewsProtocolError(f"next_seq: expected 1..{MAX_SEQ}, got {next_seq}")
        is_first = self._receiver is None
        is_new = receiver != self._receiver or is_fresh or next_seq < self._first_seq
        if not is_new and next_seq > self._sent_seq:
            raise NewsProtocolError(
                f"next_seq: the receiver expects {next_seq}, but only numbers below "
                f"{self._sent_seq} were ever sent to it"
            )
        num_dropped = 0
        if is_new:
            if not is_first:  # what waits for the very first receiver is meant for it
                num_dropped = len(self._unacked)
                self._unacked.clear()
                self.stats.num_dropped += num_dropped
            self._first_seq = self._sent_seq = next_seq
        else:
            self._pop(next_seq - self._first_seq)
        self._receiver = receiver
        self._num_in_flight = 0
        self._is_attached = True
        return Attached(is_new, num_dropped)

    def detach(self) -> None:
        """The channel is gone. What was in flight is unacknowledged and will be sent again."""
        self._is_attached = False
        self._num_in_flight = 0

    def close(self) -> None:
        """The stream has ended for good: what is unacknowledged is dropped and counted, and so is
        whatever is still published (the producer learns of the end elsewhere, not from an exception
        in the middle of its work)."""
        self.detach()
        self._is_closed = True
        self.stats.num_dropped += len(self._unacked)
        self._first_seq += len(self._unacked)
        self._unacked.clear()

    def next_frame(self) -> bytes | None:
        """The body of the next NEWS frame, which then is in flight; None while one is, or if idle."""
        if self._num_in_flight or not self._unacked or not self._is_attached:
            return None
        items: list[tuple[bytes, bytes]] = []
        num_bytes = 0
        for entry in islice(self._unacked, self.max_frame_items):
            num_bytes += len(entry[1])
            if num_bytes > self.max_frame_bytes and items:
                break
            items.append(entry)
        body = _pack_body(self._packer, self._first_seq, items)
        self._num_in_flight = len(items)
        end = self._first_seq + len(items)
        self.stats.num_frames += 1
        self.stats.num_resent += min(len(items), self._sent_seq - self._first_seq)
        self._sent_seq = max(self._sent_seq, end)
        return body

    def acknowledge(self, next_seq: int) -> int:
        """The receiver has everything below `next_seq`. Returns how many items that settles.

        An old acknowledgement settles nothing. One for numbers not in flight is a
        NewsProtocolError, with nothing changed.
        """
        num = next_seq - self._first_seq
        if num > self._num_in_flight:
            raise NewsProtocolError(
                f"ACKN: expected at most {self._first_seq + self._num_in_flight}, got {next_seq}"
            )
        if num <= 0:
            return 0
        self._num_in_flight -= num
        self._pop(num)
        return num

    def _pop(self, num: int) -> None:
        unacked = self._unacked
        if num == len(unacked):
            unacked.clear()
        else:
            for _ in range(num):
                unacked.popleft()
        self._first_seq += num
        self.stats.num_acked += num

    def __repr__(self) -> str:
        state = "attached" if self._is_attached else "detached"
        return (
            f"<NewsSender {state} next={self.next_seq} unacked={len(self._unacked)} "
            f"in_flight={self._num_in_flight} reserved={self._num_reserved}/{self.max_slots}>"
        )


def _pack_body(packer: Any, first_seq: int, items: Sequence[tuple[bytes, bytes]]) -> bytes:
    parts: list[bytes] = []
    num_groups = 0
    for packed_head, run in groupby(items, _first):
        packed_items = [item for _, item in run]
        parts += (b"\x92", packed_head, packer.pack_array_header(len(packed_items)))
        parts += packed_items
        num_groups += 1
    prefix: bytes = b"\x92" + packer.pack(first_seq) + packer.pack_array_header(num_groups)
    return prefix + b"".join(parts)


@dataclass(slots=True)
class ReceiverStats:
    """Running totals of one receiver."""

    num_received: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0


class NewsReceiver:
    """The receiving end of one stream: what number is expected next, and what to skip."""

    __slots__ = ("expected_seq", "stats")

    def __init__(self) -> None:
        self.expected_seq = 1
        self.stats = ReceiverStats()

    def accept(self, first_seq: int, groups: list[Group]) -> list[Group]:
        """The groups, in order, without the items that were delivered before.

        Everything returned must now be delivered: it will not be returned again. Raises
        NewsProtocolError for a gap, with nothing accepted.
        """
        num = sum(len(items) for _, items in groups)
        skip = self.expected_seq - first_seq
        if skip < 0:
            self.stats.num_gaps += 1
            raise NewsProtocolError(
                f"NEWS: expected number {self.expected_seq} or lower, got {first_seq}: "
                f"{-skip} items are missing"
            )
        if skip == 0:
            self.expected_seq += num
            self.stats.num_received += num
            return groups
        self.stats.num_duplicates += min(skip, num)
        if skip >= num:
            return []
        self.expected_seq += num - skip
        self.stats.num_received += num - skip
        kept: list[Group] = []
        for head, items in groups:
            if skip < len(items):
                kept.append((head, items[skip:]))
            skip = max(0, skip - len(items))
        return kept

    def __repr__(self) -> str:
        return f"<NewsReceiver expected={self.expected_seq} stats={self.stats}>"
