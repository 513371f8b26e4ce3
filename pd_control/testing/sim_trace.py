"""What the simulation remembers of a run: a bounded trace with subjects, and coverage counters.

Recording must cost little when nobody looks, so a record is a tuple and text is made only on demand.
``subject`` is the request (or process) a record is about; a failure report shows the records of the
subjects involved and of the faults injected, which is what "minimal trace" means here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

#: Records kept per run; older ones are dropped. A seed of ordinary size makes fewer.
MAX_RECORDS = 200_000

#: Subjects that are always part of a report: what the fault injector did.
FAULTS = "faults"


class Violation(AssertionError):  # noqa: N818 - it is a finding, not an error of the caller
    """An invariant did not hold. ``subjects`` names what the report should show."""

    def __init__(self, rule: str, detail: str, *subjects: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail
        self.subjects = subjects


class Trace:
    """Ring of (time_s, where, subject, what, detail). Off by default: then only counters are kept."""

    __slots__ = ("counts", "enabled", "records")

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.records: deque[tuple[float, str, str, str, Any]] = deque(maxlen=MAX_RECORDS)
        self.counts: Counter[str] = Counter()

    def record(self, time_s: float, where: str, subject: str, what: str, detail: Any = "") -> None:
        if self.enabled:
            self.records.append((time_s, where, subject, what, detail))

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] += n

    def lines(self, subjects: Iterable[str] | None = None) -> list[str]:
        """The trace as text; with ``subjects``, only what concerns them and the injected faults."""
        wanted = None if subjects is None else {FAULTS, *subjects}
        out = []
        for time_s, where, subject, what, detail in self.records:
            if wanted is not None and subject not in wanted:
                continue
            text = detail if isinstance(detail, str) else repr(detail)
            out.append(f"{time_s:12.6f}  {where:<10} {subject:<12} {what} {text}".rstrip())
        return out
