"""What ``pdctl`` says of a transfer's way, from the fields of P's view."""

from __future__ import annotations

from pd_control.cli.endpoints import Answer
from pd_control.cli.ways import WAY_COLUMNS, way_lines, way_rows


def test_nothing_is_said_of_a_transfer_that_waits() -> None:
    assert way_lines({"ways": [], "refusals": []}) == []


def test_chunks_then_a_substep_that_one_rank_refused() -> None:
    transfer = {
        "ways": ["step 1033", "substep 1034.2", "repair of rank 1"],
        "refusals": ["substep 1034.2 by rank 1"],
        "refused": [],
    }
    assert way_lines(transfer) == [
        ("went by", "step 1033, substep 1034.2"),
        ("refused", "substep 1034.2 by rank 1"),
        ("repaired", "sent frozen to rank 1"),
    ]


def test_a_repair_that_waits_for_the_other_ranks() -> None:
    transfer = {"ways": ["substep 7.1"], "refusals": ["substep 7.1 by rank 0"], "refused": [0]}
    assert way_lines(transfer)[-1] == ("to repair", "rank 0, as soon as its steps have ended")


def test_rows_are_of_processes_with_a_prefill_side() -> None:
    counters = {"ways.substep": 3, "substeps.refused": 1, "p_transfer.failed.GONE": 2}
    p = Answer("x", {"instance": "p", "sides": {"prefill": {"core": {"counters": counters}}}})
    d = Answer("y", {"instance": "d", "sides": {"decode": {"core": {"counters": {}}}}})
    dead = Answer("z", {}, "no answer")
    (row,) = way_rows([p, d, dead])
    by_name = dict(zip(["INSTANCE", *WAY_COLUMNS, "FAILED"], row, strict=True))
    assert (by_name["INSTANCE"], by_name["SUBSTEP"], by_name["REFUSED"]) == ("p", "3", "1")
    assert (by_name["FAILED"], by_name["STEP"]) == ("2", "0")
