"""F04: D crashes or never shows up. P's hold is a matter of seconds, renewed only by a live D that
wants the request, and what pins blocks can be seen."""

from __future__ import annotations

import time
from typing import Any

from pd_control.config import Deadlines
from pd_control.engine import Mode, OnFailure
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_model import oracle
from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.node import Node

WAIT_S = 60.0


def prompt(seed: int, n: int = 60) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


def counters(node: Node) -> dict[str, int]:
    core = node.runtime.prefill_core
    found: dict[str, int] = node.on_loop(lambda: core.snapshot(0.0, "", 0)["counters"])
    return found


def until_idle(node: Node) -> None:
    assert node.wait_clean() == []


def test_a_d_that_never_comes_costs_one_hold() -> None:
    with Cluster() as cluster:
        p = cluster.node("p0", deadlines=Deadlines(hold_s=0.5, hold_max_s=60))
        p.prefill("r", prompt(1)).result(WAIT_S)
        with InspectClient() as inspect:
            body = inspect.ask(p.address, "leases", side="prefill")
            assert [(lease["kind"], lease["request_id"]) for lease in body["leases"]] == [
                ("hold", "r")
            ]
            assert body["leases"][0]["num_blocks"] == 8
            seen: dict[str, Any] = inspect.ask(p.address, "request", request_id="r")["prefill"]
            assert seen["state"] == "HELD"
            assert seen["why_held"] == "1 taker(s) to come"
            assert seen["deadline"]["name"] == "hold"
        until_idle(p)
        assert counters(p)["p_request.expired.hold"] == 1


def test_a_reference_used_after_that_is_gone_not_stale() -> None:
    with Cluster() as cluster:
        p = cluster.node("p0", deadlines=Deadlines(hold_s=0.3, hold_max_s=60))
        d = cluster.node("d0")
        p.prefill("r", prompt(1)).result(WAIT_S)
        until_idle(p)
        got = d.decode("r", prompt(1), 2, mode=Mode.DUAL, peer=p, on_failure=OnFailure.RECOMPUTE)
        assert got.result(WAIT_S) == oracle(prompt(1), 2, SMALL)
        assert counters(p)["calls.refused.GONE"] == 1


def test_a_live_d_that_waits_for_blocks_renews_the_hold() -> None:
    """D knows the request and has no room yet: P holds on, several hold times long."""
    with Cluster() as cluster:
        deadlines = Deadlines(hold_s=1.0, hold_max_s=60)
        p = cluster.node("p0", deadlines=deadlines)
        d = cluster.node("d0", spec={"num_blocks": 16}, deadlines=deadlines)
        # A request that fills D's cache, held up by the gate, so that the next has to wait.
        cluster.hub.gate.clear()
        first = d.decode("first", prompt(1, 110), 2, peer=p, on_failure=OnFailure.FAIL)
        p.prefill("second", prompt(2)).result(WAIT_S)
        second = d.decode("second", prompt(2), 2, mode=Mode.DUAL, peer=p, on_failure=OnFailure.FAIL)
        held = p.runtime.prefill_core
        ages_s: list[float] = []
        while not ages_s or ages_s[-1] < 2.5:  # older than two holds
            rows = p.on_loop(lambda: held.snapshot(time.monotonic())["requests"])
            ages_s += [row["age_s"] for row in rows if row["request_id"] == "second"]
            assert rows, counters(p)
        cluster.hub.gate.set()
        assert first.result(WAIT_S) == oracle(prompt(1, 110), 2, SMALL)
        assert second.result(WAIT_S) == oracle(prompt(2), 2, SMALL)


def test_renewals_end_at_hold_max() -> None:
    with Cluster() as cluster:
        p = cluster.node("p0", deadlines=Deadlines(hold_s=0.3, hold_max_s=1.0))
        d = cluster.node("d0", spec={"num_blocks": 16})
        cluster.hub.gate.clear()
        first = d.decode("first", prompt(1, 110), 2, peer=p, on_failure=OnFailure.FAIL)
        p.prefill("second", prompt(2)).result(WAIT_S)
        second = d.decode(
            "second", prompt(2), 2, mode=Mode.DUAL, peer=p, on_failure=OnFailure.RECOMPUTE
        )
        while not any("expired" in name for name in counters(p)):
            p.on_core(lambda: None)
        cluster.hub.gate.set()
        assert first.result(WAIT_S) == oracle(prompt(1, 110), 2, SMALL)
        assert second.result(WAIT_S) == oracle(prompt(2), 2, SMALL)
