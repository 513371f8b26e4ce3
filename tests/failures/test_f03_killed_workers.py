"""F03, the data side: a worker dies in the middle; nobody waits for ever and nothing stays behind.

`python -m tests.kvt_kills --kills 1000` is the same for longer.
"""

from __future__ import annotations

from tests.kvt_kills import run

KILLS = 50


def test_fifty_killed_workers_leave_nothing() -> None:
    tally = run(KILLS, seed=3)
    assert tally.kills == KILLS
    assert sum(tally.ends.values()) == tally.transfers
    assert tally.leaked == 0
    # The kills came in the middle: some transfers had ended well and some had not.
    assert tally.ends["OK"] > 0
    assert tally.ends["PEER_LOST"] > 0
