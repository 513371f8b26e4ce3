"""What a long run of the simulation must have exercised; a run that never did proves less than it says."""

from __future__ import annotations

from collections.abc import Mapping

#: Runs of at least this many seeds are judged.
MIN_SEEDS = 2000

REQUIRED = (
    "abort.decode",
    "abort.prefill",
    "call.PREF",
    "call.TRKV",
)


def missing(counts: Mapping[str, int]) -> list[str]:
    """Names of what never happened."""
    return [name for name in REQUIRED if not counts.get(name)]
