"""F07: a stale, consumed, foreign or made-up reference is refused by name. Never wrong bytes.

The references are used as a router would, or as somebody who guesses; the outcome without a policy
that hides it (FAIL) is the code, with RECOMPUTE the right tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_control.config import Deadlines
from pd_control.engine import Mode, OnFailure
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_engine import EngineError
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node

WAIT_S = 60.0


def prompt(seed: int, n: int = 60) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with Cluster() as cluster:
        deadlines = Deadlines(park_s=0.5, hold_s=2)
        yield cluster.node("p0", deadlines=deadlines), cluster.node("d0", deadlines=deadlines)


def use(d: Node, p: Node, name: str, tokens: list[int], reference: str) -> None:
    """D presents `reference` for these tokens and insists on it."""
    d.decode(
        name, tokens, 2, mode=Mode.DUAL, peer=p, remote_request_id=reference,
        on_failure=OnFailure.FAIL,
    ).result(WAIT_S)  # fmt: skip


def test_a_made_up_reference_is_not_found(pair: tuple[Node, Node]) -> None:
    p, d = pair
    with pytest.raises(EngineError, match="NOT_FOUND"):
        use(d, p, "a", prompt(1), "nobody-knows-this")


def test_a_consumed_reference_is_gone(pair: tuple[Node, Node]) -> None:
    p, d = pair
    p.prefill("r", prompt(1))
    use(d, p, "a", prompt(1), "r")
    with pytest.raises(EngineError, match="GONE"):
        use(d, p, "b", prompt(1), "r")


def test_somebody_elses_reference_is_a_bad_request(pair: tuple[Node, Node]) -> None:
    """The request is there, its KV complete, and it is not the caller's prompt."""
    p, d = pair
    p.prefill("theirs", prompt(1)).result(WAIT_S)
    with pytest.raises(EngineError, match="BAD_REQUEST"):
        use(d, p, "mine", prompt(2), "theirs")
    longer = [*prompt(1), 5, 6, 7, 8]
    with pytest.raises(EngineError, match="BAD_REQUEST"):
        use(d, p, "longer", longer, "theirs")
    use(d, p, "owner", prompt(1), "theirs")


def test_another_salt_is_another_content(pair: tuple[Node, Node]) -> None:
    p, d = pair
    p.prefill("r", prompt(1), salt="tenant-a").result(WAIT_S)
    with pytest.raises(EngineError, match="BAD_REQUEST"):
        d.decode(
            "x", prompt(1), 2, mode=Mode.DUAL, peer=p, remote_request_id="r", salt="tenant-b",
            on_failure=OnFailure.FAIL,
        ).result(WAIT_S)  # fmt: skip


def test_a_reference_from_before_a_restart_is_not_found() -> None:
    with Cluster() as cluster:
        d = cluster.node("d0")
        old = cluster.node("p0")
        old.prefill("r", prompt(1)).result(WAIT_S)
        cluster.stop(old)
        new = cluster.node("p0", deadlines=Deadlines(park_s=0.5))
        with pytest.raises(EngineError, match="NOT_FOUND"):
            use(d, new, "a", prompt(1), "r")


def test_with_recompute_every_such_answer_is_still_right(pair: tuple[Node, Node]) -> None:
    p, d = pair
    p.prefill("theirs", prompt(1)).result(WAIT_S)
    for i, reference in enumerate(("theirs", "nobody", "theirs")):
        got = d.decode(
            f"r{i}", prompt(50 + i), 3, mode=Mode.DUAL, peer=p, remote_request_id=reference,
            on_failure=OnFailure.RECOMPUTE,
        )  # fmt: skip
        assert got.result(WAIT_S) == oracle(prompt(50 + i), 3, SMALL)
