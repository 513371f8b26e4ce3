"""Stage events of several processes become one timeline a request, on one clock."""

from __future__ import annotations

from typing import Any

from pd_control.cli.endpoints import Answer
from pd_control.cli.stages import (
    SideEvents,
    by_request,
    hand_off_s,
    make_sides,
    perfetto,
    stage_times,
)
from pd_control.trace import Stage, TraceEvent

MS = 1_000_000


def event(
    at_ms: float, stage: Stage, request_id: str = "", key: bytes = b"", rank: int = -1
) -> TraceEvent:
    return TraceEvent(int(at_ms * MS), stage, request_id, key, rank, 0)


D = SideEvents(
    "d", 2, 0,
    [
        event(1, Stage.TAKEN_OVER, "r-d"), event(3, Stage.MESSAGE_SENT, "r-d", b"k"),
        event(31, Stage.PLACED, key=b"k", rank=0), event(33, Stage.ADMITTED, "r-d"),
        event(2, Stage.TAKEN_OVER, "other-d"),
    ],
)  # fmt: skip
P = SideEvents(
    "p", 1, 0,
    [
        event(4, Stage.MESSAGE_RECEIVED, "r", b"k"), event(5, Stage.PLANNED, "r", b"k"),
        event(20, Stage.LAYERS_READY, key=b"k", rank=0), event(30, Stage.LAYERS_READY, key=b"k", rank=1),
        event(9, Stage.LAYERS_READY, key=b"x", rank=0),
    ],
)  # fmt: skip


def test_a_transfers_key_joins_both_sides_under_either_id() -> None:
    joined = by_request([D, P])
    stages = [e.stage for _, e, _ in joined["r-d"]]
    assert stages == [
        Stage.TAKEN_OVER, Stage.MESSAGE_SENT, Stage.MESSAGE_RECEIVED, Stage.PLANNED, Stage.LAYERS_READY,
        Stage.LAYERS_READY, Stage.PLACED, Stage.ADMITTED,
    ]  # fmt: skip
    assert [i for _, _, i in joined["r-d"]] == ["d", "d", "p", "p", "p", "p", "d", "d"]
    assert Stage.PLACED in [e.stage for _, e, _ in joined["r"]]
    assert [e.stage for _, e, _ in joined["other-d"]] == [Stage.TAKEN_OVER]


def test_the_hand_off_counts_from_the_last_rank_and_tells_bytes_from_the_rest() -> None:
    times = stage_times([D, P])
    whole, of_bytes, rest = hand_off_s(times["r-d"]) or (0.0, 0.0, 0.0)
    assert (round(whole, 6), round(of_bytes, 6), round(rest, 6)) == (0.003, 0.001, 0.002)
    assert hand_off_s(times["other-d"]) is None


def process(endpoint: str, offset_ns: int) -> Answer:
    body: dict[str, Any] = {"instance": endpoint, "pid": 1, "clock_offset_ns": offset_ns}
    return Answer(endpoint, body)


def test_processes_of_one_host_share_a_clock_and_others_do_not() -> None:
    answers = [
        process("tcp://10.0.0.1:1", 5_000), process("tcp://10.0.0.1:2", 9_000),
        process("tcp://10.0.0.2:1", 7_000), process("tcp://10.0.0.1:3", 5_000_000_000),
    ]  # fmt: skip
    sides = make_sides(answers, [[], [], [], [[1, 1, "r", b"", -1, 0]]])
    assert [s.clock_offset_ns for s in sides] == [5_000, 5_000, 7_000, 5_000_000_000]
    assert sides[3].events == [TraceEvent(1, Stage.TAKEN_OVER, "r", b"", -1, 0)]


def test_the_perfetto_form_has_instants_by_process_and_slices_by_request() -> None:
    events = perfetto([D, P])["traceEvents"]
    assert sum(e["ph"] == "i" for e in events) == 10
    slices = [e for e in events if e["ph"] == "X"]
    assert "message sent → message received" in [e["name"] for e in slices]
    assert all(e["dur"] > 0 for e in slices)
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"r-d", "other-d"}, (
        "P's id is D's by the key; a key without a name is left out"
    )
