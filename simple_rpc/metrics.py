"""What the library counts, behind an interface of three methods.

A `Metrics` object is handed to `Server`, `Client`, channels and `LoopThread`; they call it on
their own thread, synchronously, on the hot path. `Counters` is the default: plain integers, no
locks, no I/O. `simple_rpc.prometheus` shows the same numbers to a Prometheus server.

Threads: `Counters` is written by one thread (the loop thread). `snapshot()` may be called from any
thread: it copies one dictionary at a time, so numbers of different rows may be a few events apart.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

# Upper bounds in seconds: 20 us to 10 s, about two per decade below 1 ms (where a call lives) and
# enough above to tell "slow" from "stuck". One more bucket, implied, takes everything longer.
LATENCY_BOUNDS_S: tuple[float, ...] = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5, 1.0, 3.0, 10.0,
)  # fmt: skip

# Heads and counter names may come from a peer's bytes (an unknown head). Rows beyond this many are
# added up under OTHER, so that a peer cannot make the tables grow.
MAX_ROWS = 512
OTHER = "other"


class Metrics(Protocol):
    """Implemented by whoever wants the numbers. The methods must not raise and must not block."""

    def call(self, side: str, head: str, code: int, seconds: float) -> None:
        """One call ended. `side` is "client" or "server", `code` the numeric status (0 is OK)."""

    def count(self, name: str, n: int = 1) -> None:
        """Something happened `n` times. Names are dotted: "news.duplicates"."""

    def observe(self, name: str, seconds: float) -> None:
        """One measured duration that is not a call: "loop.lag", "news.ack"."""


@dataclass(slots=True)
class Histogram:
    """Counts per bucket of `LATENCY_BOUNDS_S` (not cumulative; one more for everything longer)."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def num(self) -> int:
        return sum(self.buckets)

    def quantile_s(self, q: float) -> float:
        """Upper bound of the bucket that holds the q-quantile: inf past the last, 0 if empty."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile: expected 0..1, got {q}")
        remaining = q * self.num
        if self.num == 0:
            return 0.0
        for bound, num in zip(LATENCY_BOUNDS_S, self.buckets, strict=False):
            remaining -= num
            if remaining <= 0 and num:
                return bound
        return float("inf")

    def copy(self) -> Histogram:
        return Histogram(list(self.buckets), self.total_s)


@dataclass(slots=True)
class HeadStats:
    """One (side, head) row: how many calls ended with which code, and how long they took."""

    codes: dict[int, int] = field(default_factory=dict)
    latency: Histogram = field(default_factory=Histogram)

    @property
    def num_calls(self) -> int:
        return sum(self.codes.values())

    @property
    def num_errors(self) -> int:
        """Calls that ended with neither OK (0) nor ACCEPTED (1)."""
        return sum(n for code, n in self.codes.items() if code > 1)

    def copy(self) -> HeadStats:
        return HeadStats(dict(self.codes), self.latency.copy())


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """A copy that no longer changes."""

    calls: dict[tuple[str, str], HeadStats]
    counters: dict[str, int]
    durations: dict[str, Histogram]


class Counters:
    """The default `Metrics`: tables of plain integers, bounded to `MAX_ROWS` rows each."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], HeadStats] = {}
        self._counters: dict[str, int] = {}
        self._durations: dict[str, Histogram] = {}

    def call(self, side: str, head: str, code: int, seconds: float) -> None:
        row = self._calls.get((side, head))
        if row is None:
            key = (side, head if len(self._calls) < MAX_ROWS else OTHER)
            row = self._calls.setdefault(key, HeadStats())
        codes, latency = row.codes, row.latency
        codes[code] = codes.get(code, 0) + 1
        latency.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1  # `add`, without a call of it
        latency.total_s += seconds

    def count(self, name: str, n: int = 1) -> None:
        counters = self._counters
        if name not in counters and len(counters) >= MAX_ROWS:
            name = OTHER
        counters[name] = counters.get(name, 0) + n

    def observe(self, name: str, seconds: float) -> None:
        row = self._durations.get(name)
        if row is None:
            key = name if len(self._durations) < MAX_ROWS else OTHER
            row = self._durations.setdefault(key, Histogram())
        row.add(seconds)

    def snapshot(self) -> MetricsSnapshot:
        # dict.copy() is one C call, atomic under the GIL; the rows are copied from that copy.
        return MetricsSnapshot(
            {key: row.copy() for key, row in self._calls.copy().items()},
            self._counters.copy(),
            {key: row.copy() for key, row in self._durations.copy().items()},
        )


class NoMetrics:
    """Counts nothing, at the cost of a call."""

    def call(self, side: str, head: str, code: int, seconds: float) -> None:
        pass

    def count(self, name: str, n: int = 1) -> None:
        pass

    def observe(self, name: str, seconds: float) -> None:
        pass
