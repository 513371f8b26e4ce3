"""The per-request trace: thirteen stages, always on, in a ring.

`Trace.record` may be called from any thread of the process: the index comes from `next()` on an
`itertools.count` and the slot is filled by one list assignment, both atomic under the GIL, so no
lock is taken and no caller ever waits. A reader sees each slot either old or new, never torn.
When the ring is full the oldest events are overwritten and counted.

Times are `time.monotonic_ns()` of the recording process. On one host all processes share that
clock; between hosts a snapshot carries `clock_offset_ns`, this process's wall clock minus its
monotonic clock, by which a reader puts two processes on one axis as well as their clocks agree.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

NO_RANK = -1  # the event belongs to the scheduler process, not to one rank


class Stage(enum.IntEnum):
    """What happened, in the order in which a request that goes well meets them."""

    TAKEN_OVER = 1  # D core: the engine gave the request to the driver
    BLOCKS_LEASED = 2  # D core: destination blocks leased
    MESSAGE_SENT = 3  # D loop: PREFILL or TRANSFER_KV left, all grants acknowledged
    MESSAGE_RECEIVED = 4  # P loop: it arrived
    PLANNED = 5  # P: a step, substep or frozen send carries it
    BOUND = 6  # P worker: the send is attached to its step's timeline
    LAYERS_READY = 7  # P worker: the last layer that it needs was recorded and reached
    SUBMITTED = 8  # P worker: the last descriptor left
    PLACED = 9  # D worker: the last byte of this rank was placed
    SEND_DONE = 10  # P loop: this rank no longer reads the source blocks
    ALL_RANKS = 11  # D loop: every expected completion is in
    ANSWERED = 12  # D: the outcome was given to the engine's queue
    ADMITTED = 13  # D core: the engine took it; the request is runnable

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One recorded stage. `at_ns` is monotonic; `value` is a count whose meaning the stage gives
    (tokens for PLANNED, PLACED, SEND_DONE and ADMITTED, blocks for BLOCKS_LEASED, for BOUND the
    microseconds until the first layer was handed to its connection, else 0).

    `key` is the transfer's, b"" before there is one; `request_id` is this side's, "" where only the
    key is known (workers). P and D may know a request by different ids; the key joins them.
    """

    at_ns: int
    stage: Stage
    request_id: str
    key: bytes
    rank: int
    value: int


#: `Trace.search` looks at so many at once.
SEARCH_EVENTS = 4096

_Slot = tuple[int, int, str, bytes, int, int]


def _event(slot: _Slot) -> TraceEvent:
    return TraceEvent(slot[0], Stage(slot[1]), slot[2], slot[3], slot[4], slot[5])


def in_order(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Oldest first."""
    return sorted(events, key=lambda e: (e.at_ns, e.stage))


class Trace:
    """A ring of stage events of one process.

    Cost of `record`: one clock read, one tuple, one list store (`benchmarks.control` measures it).
    """

    def __init__(
        self,
        capacity_events: int = 65_536,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if capacity_events < 1:
            raise ValueError(f"capacity_events: expected at least 1, got {capacity_events}")
        self._ring: list[_Slot | None] = [None] * capacity_events
        self._capacity = capacity_events
        self._next = itertools.count()
        self._last = -1
        self._clock_ns = clock_ns
        self.clock_offset_ns = wall_ns() - clock_ns()

    def record(
        self,
        stage: Stage,
        request_id: str = "",
        key: bytes = b"",
        rank: int = NO_RANK,
        value: int = 0,
        at_ns: int | None = None,
    ) -> None:
        """Any thread. `at_ns` (monotonic) is for events that a native thread stamped itself."""
        index = next(self._next)
        self._ring[index % self._capacity] = (
            self._clock_ns() if at_ns is None else at_ns,
            stage,
            request_id,
            key,
            rank,
            value,
        )
        # Racing writers may leave this one short for a moment; it only feeds the counters.
        self._last = index

    @property
    def recorded(self) -> int:
        """Events recorded since the start (approximate while other threads record)."""
        return self._last + 1

    @property
    def overwritten(self) -> int:
        """Events that the ring no longer holds."""
        return max(0, self.recorded - self._capacity)

    def events(self, request_id: str | None = None, keys: Iterable[bytes] = ()) -> list[TraceEvent]:
        """The events still held, oldest first. Any thread.

        Of one request: those that name it, or a transfer of it, or one of `keys`. None: all.
        """
        if request_id is None:
            found = [_event(slot) for slot in list(self._ring) if slot is not None]
        else:
            found = [event for part in self.search(request_id, keys) for event in part]
        return in_order(found)

    def search(self, request_id: str, keys: Iterable[bytes] = ()) -> Iterator[list[TraceEvent]]:
        """The events of one request, as `events` finds them but in no order, in parts that take a
        millisecond or so each: a loop thread turns between them. Of the ring as it is at the first one."""
        ring = list(self._ring)
        parts = [
            range(i, min(i + SEARCH_EVENTS, len(ring))) for i in range(0, len(ring), SEARCH_EVENTS)
        ]
        wanted = set(keys)
        for part in parts:
            wanted.update(
                s[3]
                for s in (ring[i] for i in part)
                if s is not None and s[2] == request_id and s[3]
            )
            yield []
        for part in parts:
            slots = (ring[i] for i in part)
            yield [
                _event(s) for s in slots if s is not None and (s[2] == request_id or s[3] in wanted)
            ]

    def page(self, start: int, limit: int) -> tuple[list[TraceEvent], int]:
        """At most `limit` events as they were recorded, from number `start` on, and the number at which
        the next page starts. Any thread; costs what the page holds, whatever the ring does.

        Numbers count from 0 and never repeat; what is overwritten already is passed over. A page that
        starts at `recorded` is empty.
        """
        end = self.recorded
        first = max(start, end - self._capacity)
        stop = max(first, min(end, first + limit))
        slots = (self._ring[i % self._capacity] for i in range(first, stop))
        return [_event(s) for s in slots if s is not None], stop


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One line of a request's timeline: when, since the first event and since the line before."""

    stage: Stage
    side: str
    rank: int
    value: int
    since_start_s: float
    since_previous_s: float


def timeline(sides: Iterable[tuple[str, int, Iterable[TraceEvent]]]) -> list[TimelineRow]:
    """Joins the events of several processes into one timeline.

    `sides` are (name, clock_offset_ns, events); events are put on the wall clock by their offset.
    """
    rows: list[tuple[int, str, TraceEvent]] = []
    for name, offset_ns, events in sides:
        rows.extend((e.at_ns + offset_ns, name, e) for e in events)
    rows.sort(key=lambda r: (r[0], r[2].stage))
    out: list[TimelineRow] = []
    for i, (at_ns, name, e) in enumerate(rows):
        before = rows[i - 1][0] if i else at_ns
        out.append(
            TimelineRow(
                stage=e.stage,
                side=name,
                rank=e.rank,
                value=e.value,
                since_start_s=(at_ns - rows[0][0]) / 1e9,
                since_previous_s=(at_ns - before) / 1e9,
            )
        )
    return out


def missing_stages(events: Iterable[TraceEvent]) -> list[Stage]:
    """Stages of which no event is there: where a stuck request stands."""
    seen = {e.stage for e in events}
    return [s for s in Stage if s not in seen]


def chrome_events(
    name: str, pid: int, offset_ns: int, events: Iterable[TraceEvent]
) -> Iterator[dict[str, object]]:
    """The events in Chrome/Perfetto JSON form ("traceEvents" items); microseconds of wall clock."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for e in events:
        yield {
            "ph": "i",
            "s": "t",
            "name": e.stage.label,
            "cat": "request",
            "pid": pid,
            "tid": e.rank + 1,
            "ts": (e.at_ns + offset_ns) / 1000,
            "args": {"request_id": e.request_id, "transfer": e.key.hex(), "value": e.value},
        }
