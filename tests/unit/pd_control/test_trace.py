"""The ring of stage events: order, bounds, threads, and the joined timeline."""

from __future__ import annotations

import threading

import pytest

from pd_control.trace import SEARCH_EVENTS, Stage, Trace, chrome_events, missing_stages, timeline


def make(capacity: int = 16) -> tuple[Trace, list[int]]:
    now = [0]
    return Trace(capacity, clock_ns=lambda: now[0], wall_ns=lambda: 1_000_000 + now[0]), now


def test_there_are_thirteen_stages_in_order() -> None:
    assert [int(s) for s in Stage] == list(range(1, 14))
    assert Stage.TAKEN_OVER.label == "taken over"


def test_events_of_one_request_in_time_order() -> None:
    trace, now = make()
    for i, stage in enumerate(Stage):
        now[0] = i * 10
        trace.record(stage, "r1", value=i)
        trace.record(stage, "other")
    assert [e.stage for e in trace.events("r1")] == list(Stage)[-8:]  # 26 records, ring of 16
    trace, now = make(64)
    now[0] = 7
    trace.record(Stage.SEND_DONE, "r1", rank=1, value=5)
    trace.record(Stage.PLACED, "r1", rank=0, at_ns=3)
    assert [(e.stage, e.at_ns, e.rank) for e in trace.events("r1")] == [
        (Stage.PLACED, 3, 0),
        (Stage.SEND_DONE, 7, 1),
    ]


def test_a_transfer_key_joins_what_workers_and_the_other_side_know() -> None:
    trace, _ = make()
    trace.record(Stage.MESSAGE_RECEIVED, "p-id", key=b"k1")
    trace.record(Stage.BOUND, key=b"k1", rank=0)
    trace.record(Stage.BOUND, key=b"k2", rank=0)
    assert [e.stage for e in trace.events("p-id")] == [Stage.MESSAGE_RECEIVED, Stage.BOUND]
    assert [e.key for e in trace.events("d-id", [b"k1"])] == [b"k1", b"k1"]
    assert trace.events("d-id") == []


def test_a_search_in_parts_finds_what_is_far_apart() -> None:
    """The event that tells the key may come last, and be in the last part."""
    trace, now = make(3 * SEARCH_EVENTS)
    for i in range(5 * SEARCH_EVENTS // 2):
        now[0] = i
        if i % 1000 == 7:
            trace.record(Stage.PLANNED, key=b"k1", value=i)
        else:
            trace.record(Stage.PLANNED, "other", key=b"k2")
    trace.record(Stage.MESSAGE_RECEIVED, "p-id", key=b"k1")
    found = trace.events("p-id")
    assert [e.value for e in found[:-1]] == list(range(7, 5 * SEARCH_EVENTS // 2, 1000))
    assert found[-1].request_id == "p-id"
    parts = list(trace.search("p-id"))
    assert len(parts) == 6
    assert sum(map(len, parts)) == len(found)


def test_the_ring_forgets_the_oldest_and_counts() -> None:
    trace, now = make(4)
    for i in range(10):
        now[0] = i
        trace.record(Stage.PLANNED, f"r{i}")
    assert [e.request_id for e in trace.events()] == ["r6", "r7", "r8", "r9"]
    assert (trace.recorded, trace.overwritten) == (10, 6)
    with pytest.raises(ValueError, match="capacity"):
        Trace(0)


def test_pages_hold_every_event_once_and_cost_what_they_hold() -> None:
    trace, now = make(8)
    assert trace.page(0, 4) == ([], 0)
    for i in range(12):
        now[0] = i
        trace.record(Stage.PLANNED, f"r{i}")
    seen, start = [], 0
    while start < trace.recorded:
        events, start = trace.page(start, 3)
        assert len(events) <= 3
        seen += [e.request_id for e in events]
    assert seen == [f"r{i}" for i in range(4, 12)], "the four oldest are overwritten"
    assert trace.page(trace.recorded, 3) == ([], 12)
    assert trace.page(99, 3) == ([], 99)


def test_writers_on_several_threads_lose_nothing() -> None:
    trace = Trace(40_000)

    def write(name: str) -> None:
        for i in range(5_000):
            trace.record(Stage.BOUND, name, value=i)

    threads = [threading.Thread(target=write, args=(f"t{i}",)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(8):
        assert sorted(e.value for e in trace.events(f"t{i}")) == list(range(5_000))


def test_timeline_joins_two_clocks_and_names_what_is_missing() -> None:
    d, d_now = make(32)
    d.record(Stage.TAKEN_OVER, "r")
    d_now[0] = 2_000_000
    d.record(Stage.MESSAGE_SENT, "r")
    p = Trace(32, clock_ns=lambda: 10_000_000, wall_ns=lambda: 4_000_000)
    p.record(Stage.MESSAGE_RECEIVED, "r")
    rows = timeline(
        [("D", d.clock_offset_ns, d.events("r")), ("P", p.clock_offset_ns, p.events("r"))]
    )
    assert [(r.side, r.stage) for r in rows] == [
        ("D", Stage.TAKEN_OVER),
        ("D", Stage.MESSAGE_SENT),
        ("P", Stage.MESSAGE_RECEIVED),
    ]
    assert rows[2].since_start_s == pytest.approx(0.003)
    assert rows[2].since_previous_s == pytest.approx(0.001)
    assert Stage.PLANNED in missing_stages(d.events("r"))
    assert Stage.TAKEN_OVER not in missing_stages(d.events("r"))


def test_chrome_events_share_one_axis() -> None:
    trace, now = make()
    now[0] = 5_000
    trace.record(Stage.PLACED, "r", rank=2)
    meta, event = chrome_events("D", 7, trace.clock_offset_ns, trace.events())
    assert meta["ph"] == "M"
    assert event["ts"] == (1_000_000 + 5_000) / 1000
    assert event["tid"] == 3
