"""F10, on whole engines: a P that accepts connections and never says a word costs only its own
requests. Those of other P's go on meanwhile, and its own end by their connect deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pd_control.config import Deadlines
from pd_control.engine import OnFailure
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_engine import EngineError
from pd_control.testing.fake_model import oracle

WAIT_S = 60.0


def prompt(seed: int, n: int = 40) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.fixture
def hole() -> Iterator[str]:
    """Listens, and lets the kernel accept; nobody ever reads."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_a_black_hole_costs_only_its_own_requests(hole: str) -> None:
    with Cluster() as cluster:
        good = cluster.node("p0")
        d = cluster.node("d0", deadlines=Deadlines(connect_s=2.0))
        into_the_hole = [
            d.decode(
                f"h{i}", prompt(i), 1, peer_instance="p9", peer_address=hole,
                on_failure=OnFailure.FAIL,
            )
            for i in range(5)
        ]  # fmt: skip
        for i in range(20):
            got = d.decode(f"g{i}", prompt(100 + i), 2, peer=good, on_failure=OnFailure.FAIL)
            assert got.result(WAIT_S) == oracle(prompt(100 + i), 2, SMALL)
        for future in into_the_hole:
            with pytest.raises(EngineError, match=r"UNREACHABLE|TIMEOUT"):
                future.result(WAIT_S)


def test_by_policy_the_prompt_is_computed_here(hole: str) -> None:
    with Cluster() as cluster:
        d = cluster.node("d0", deadlines=Deadlines(connect_s=0.5))
        got = d.decode(
            "h", prompt(1), 2, peer_instance="p9", peer_address=hole,
            on_failure=OnFailure.RECOMPUTE,
        )  # fmt: skip
        assert got.result(WAIT_S) == oracle(prompt(1), 2, SMALL)
