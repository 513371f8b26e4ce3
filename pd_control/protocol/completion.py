"""Adds up completions until all are in, one has failed, or somebody is found missing."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from pd_control.codes import Code

Member = tuple[int, int]
"""(rank that reports, rank at the other side of that slice)."""

FINAL_MEMBER: Member = (1 << 30, 1 << 30)
"""P's FINAL, where D wants P's first token. No rank is numbered like this (`checks.MAX_RANKS`)."""


NO_RANKS: frozenset[int] = frozenset()
"""Sets of ranks are frozen ones: most are empty or shared, and an own empty set costs 216 bytes."""


class Verdict(enum.Enum):
    """What one report did."""

    PENDING = "pending"  # good, others are missing
    WHOLE = "whole"  # good, and it was the last; none had failed
    FAILED = "failed"  # this report made the whole fail
    LATE = "late"  # taken, but the whole had failed before
    DUPLICATE = "duplicate"  # ignored
    UNKNOWN = "unknown"  # not a member: ignored


class Completion:
    """One expected set. Any error wins and the first is kept; tokens = minimum over all reports."""

    __slots__ = (
        "_missing",
        "code",
        "detail",
        "duplicates",
        "expected",
        "failed_by",
        "tokens",
        "unknown",
    )

    def __init__(self, expected: frozenset[Member]) -> None:
        self.expected = expected  # shared between transfers of the same pair of instances
        self._missing: set[Member] | frozenset[Member] = expected  # shared until the first report
        self.code = Code.OK
        self.detail = ""
        self.failed_by: Member | None = None
        self.tokens: int | None = None  # None until somebody reported
        self.duplicates = 0
        self.unknown = 0

    def report(self, member: Member, tokens: int, code: Code, detail: str = "") -> Verdict:
        """Take one report; the verdict says what it did."""
        if member not in self._missing:
            if member in self.expected:
                self.duplicates += 1
                return Verdict.DUPLICATE
            self.unknown += 1
            return Verdict.UNKNOWN
        missing = self._missing
        if not isinstance(missing, set):
            missing = self._missing = set(missing)
        missing.discard(member)
        self.tokens = tokens if self.tokens is None else min(self.tokens, tokens)
        if self.code is not Code.OK:
            return Verdict.LATE
        if code is not Code.OK:
            self.code = code
            self.detail = detail
            self.failed_by = member
            return Verdict.FAILED
        return Verdict.PENDING if self._missing else Verdict.WHOLE

    @property
    def whole(self) -> bool:
        """Everybody reported, nobody failed (also: nobody was expected)."""
        return not self._missing and self.code is Code.OK

    def missing(self) -> list[Member]:
        """Who has not reported, in order."""
        return sorted(self._missing)

    def is_missing(self, member: Member) -> bool:
        return member in self._missing

    def rank_missing(self, rank: int) -> bool:
        """Whether some report of `rank` is not in."""
        return any(member[0] == rank for member in self._missing)


def members(pairs: Iterable[Member], with_final: bool = False) -> frozenset[Member]:
    """The expected set for these pairs."""
    found = set(pairs)
    if with_final:
        found.add(FINAL_MEMBER)
    return frozenset(found)
