"""INSPECT on live engines: documented fields, pages, bounds, and that looking changes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_control.engine import Mode, OnFailure
from pd_control.runtime.inspect import MAX_REQUESTS_PAGE
from pd_control.testing.cluster import Cluster
from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.node import Node
from simple_rpc import RpcError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text()
WAIT_S = 60.0


def prompt(seed: int, n: int = 40) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.fixture
def live() -> Iterator[tuple[Node, Node, InspectClient]]:
    """One D request that waits for bytes, one P request that is held."""
    with Cluster() as cluster, InspectClient() as inspect:
        p, d = cluster.node("p0"), cluster.node("d0")
        cluster.hub.gate.clear()
        waiting = d.decode("r", prompt(1), 1, peer=p, on_failure=OnFailure.FAIL)
        p.prefill("held", prompt(2)).result(WAIT_S)
        while (
            inspect.ask(p.address, "process")["sides"]["prefill"]["core"]["tables"]["transfers"] < 1
        ):
            pass
        while any(row["state"] != "HELD" for row in inspect.requests(p.address, "prefill")):
            pass  # P's last step is told: from here on nothing happens but what a test asks for
        yield p, d, inspect
        cluster.hub.gate.set()
        waiting.result(WAIT_S)
        d.decode("held", prompt(2), 1, mode=Mode.DUAL, peer=p, on_failure=OnFailure.FAIL).result(
            WAIT_S
        )


def documented(what: str) -> set[str]:
    """The names in backquotes of the page's row for `what`."""
    row = re.search(rf"^\| `{what}`.*$", PAGE, re.M)
    assert row is not None, what
    return set(re.findall(r"`([a-z_]+)`", row.group()))


def test_the_fields_are_those_of_the_page(live: tuple[Node, Node, InspectClient]) -> None:
    p, d, inspect = live
    assert set(inspect.ask(d.address, "process")) <= documented("process") | {"sides"}
    for what, side in (("requests", "decode"), ("leases", "prefill"), ("workers", "")):
        body = inspect.ask(d.address if side == "decode" else p.address, what, side=side)
        rows = body[what]
        assert rows, what
        if what != "requests":
            assert set(rows[0]) <= documented(what), what
    row = inspect.ask(d.address, "request", request_id="r")["decode"]
    text = PAGE[PAGE.index("A request on D:") : PAGE.index("Fields are added")]
    named = set(re.findall(r"`([a-z_]+)`", text))
    assert set(row) - {"block_ids"} <= named, set(row) - named


def test_it_answers_who_waits_for_what(live: tuple[Node, Node, InspectClient]) -> None:
    p, d, inspect = live
    mine = inspect.ask(d.address, "request", request_id="r")
    assert mine["decode"]["missing"] == [[0, 0]]
    assert mine["decode"]["deadline"]["in_s"] > 0
    assert mine["decode_leases"][0]["kind"] == "load"
    assert mine["decode_leases"][0]["block_ids"] == mine["decode"]["block_ids"]
    keys = {e[3] for e in mine["events"] if e[3]}
    theirs = inspect.ask(p.address, "request", request_id="nobody", key=keys.pop())
    assert {e[1] for e in theirs["events"]} >= {4, 5}
    held = inspect.ask(p.address, "request", request_id="held")["prefill"]
    assert (held["state"], held["takers"]) == ("HELD", [0, 1])


def test_bad_questions_are_answered_by_name(live: tuple[Node, Node, InspectClient]) -> None:
    p, d, inspect = live
    for address, what, fields, words in (
        (d.address, "everything", {}, "one of process"),
        (d.address, "requests", {"side": "middle"}, "decode or prefill"),
        (d.address, "requests", {"side": "prefill"}, "no prefill side"),
        (d.address, "request", {"request_id": "nobody"}, "no request"),
        (p.address, "events", {"limit": -1}, "0 or more"),
        (p.address, "__init__", {}, "one of process"),
    ):
        with pytest.raises(RpcError, match=words):
            inspect.ask(address, what, **fields)


def test_config_masks_secrets(live: tuple[Node, Node, InspectClient]) -> None:
    _, d, inspect = live
    assert inspect.ask(d.address, "config")["config"]["instance"] == "d0"


def settled(snapshot: dict[str, Any]) -> Any:
    """What only a decision changes: the tables, and each request without the time that passes."""
    told = [
        {k: v for k, v in row.items() if k not in ("age_s", "deadline", "transfers")}
        for row in snapshot["requests"]
    ]
    return snapshot["tables"], snapshot["workers"], told


def test_looking_changes_nothing(live: tuple[Node, Node, InspectClient]) -> None:
    p, d, inspect = live

    def state() -> Any:
        for node in (p, d):
            node.on_core(lambda: None)  # what the core threads had to say has been posted
        return [
            node.on_loop(lambda r=runner: (r.core.next_deadline(), settled(r.core.snapshot(0.0))))
            for node, runner in ((p, p.runtime.prefill_runner), (d, d.runtime.decode_runner))
        ], [node.on_core(node.engine.pool.referenced) for node in (p, d)]

    def look() -> None:
        for node, side in ((p, "prefill"), (d, "decode")):
            for what in ("process", "workers", "events", "config"):
                inspect.ask(node.address, what)
            inspect.requests(node.address, side)
            inspect.ask(node.address, "leases", side=side)
        inspect.ask(d.address, "request", request_id="r")

    def num_events() -> int:
        return sum(
            node.on_loop(lambda r=runner: r.num_events)
            for node, runner in ((p, p.runtime.prefill_runner), (d, d.runtime.decode_runner))
        )

    before, events_before = state(), num_events()
    for _ in range(5):
        look()
    assert state() == before
    # P's STARTED may come as late as here; a look that is an event would have been five.
    assert num_events() - events_before <= 1


def test_stage_events_come_in_pages_from_the_oldest_on(
    live: tuple[Node, Node, InspectClient],
) -> None:
    p, _, inspect = live
    latest = inspect.ask(p.address, "events")
    assert set(latest) == documented("events") - {"0"}
    assert latest["after"] == "", "the latest page is the last one"
    assert inspect.ask(p.address, "events", limit=2)["events"] == latest["events"][-2:]
    seen, after = [], "0"
    while after:
        page = inspect.ask(p.address, "events", after=after, limit=2)
        assert len(page["events"]) <= 2
        seen += page["events"]
        after = page["after"]
    assert seen == latest["events"]
    assert inspect.ask(p.address, "events", after="1000000")["events"] == []


def test_an_operators_abort_ends_the_request() -> None:
    with Cluster() as cluster, InspectClient() as inspect:
        p, d = cluster.node("p0"), cluster.node("d0")
        cluster.hub.gate.clear()
        future = d.decode("r", prompt(1), 1, peer=p, on_failure=OnFailure.FAIL)
        while not inspect.requests(d.address, "decode"):
            pass
        assert inspect.abort(d.address, "r")
        with pytest.raises(Exception, match="ABORTED"):
            future.result(WAIT_S)
        while inspect.abort(d.address, "r"):  # until its grant is closed
            pass


def test_ten_thousand_requests_come_in_pages() -> None:
    """Requests that wait for blocks, so that they cost an engine nothing."""
    with Cluster() as cluster, InspectClient() as inspect:
        d = cluster.node("d0", spec={"num_blocks": 4})
        blocker = d.decode(
            "blocker", prompt(0, 24), 1, peer_address="tcp://127.0.0.1:9", peer_instance="x"
        )
        for i in range(10_000):
            d.decode(
                f"r{i:05d}", prompt(i, 24), 1, peer_address="tcp://127.0.0.1:9", peer_instance="x"
            )
        while (
            inspect.ask(d.address, "process")["sides"]["decode"]["core"]["tables"]["requests"]
            < 9_000
        ):
            time.sleep(0.01)
        first = inspect.ask(d.address, "requests", side="decode")["requests"]
        assert len(first) == d.config.inspect.page_requests
        most = inspect.ask(d.address, "requests", side="decode", limit=100_000)["requests"]
        assert len(most) == MAX_REQUESTS_PAGE
        ids = [row["request_id"] for row in inspect.requests(d.address, "decode")]
        assert ids == sorted(ids)
        assert len(ids) == len(set(ids)) >= 9_000
        cluster.nodes.remove(
            d
        )  # it is stopped with its requests: they end, but nothing drains them
        assert blocker is not None
