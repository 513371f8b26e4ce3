"""The timeline's picture: well-formed, to scale, and an error by name if an event is missing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pd_control.cli.picture import LEFT, RIGHT, WIDTH, PictureError, timeline_svg
from pd_control.cli.stages import SideEvents
from pd_control.trace import Stage, TraceEvent

SVG = "{http://www.w3.org/2000/svg}"
TIMES_MS = {
    Stage.TAKEN_OVER: 0, Stage.BLOCKS_LEASED: 1, Stage.MESSAGE_SENT: 2, Stage.MESSAGE_RECEIVED: 3,
    Stage.PLANNED: 10, Stage.BOUND: 12, Stage.LAYERS_READY: 900, Stage.SUBMITTED: 901, Stage.PLACED: 902,
    Stage.SEND_DONE: 904, Stage.ALL_RANKS: 903, Stage.ANSWERED: 903, Stage.ADMITTED: 904,
}  # fmt: skip


def sides(without: Stage | None = None) -> list[SideEvents]:
    events = [
        TraceEvent(ms * 1_000_000, stage, "r-d" if stage in (1, 3, 13) else "", b"k", 0, 1234)
        for stage, ms in TIMES_MS.items()
        if stage is not without
    ]
    second_step = TraceEvent(450_000_000, Stage.PLANNED, "", b"k", -1, 2000)
    return [SideEvents("d", 1, 0, events), SideEvents("p", 2, 0, [second_step])]


def test_the_picture_is_to_scale_and_says_what_it_shows() -> None:
    root = ElementTree.fromstring(timeline_svg(sides(), "r-d"))
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert any("1,234 prompt tokens, 904.00 ms" in t for t in texts)
    assert any("4.00 ms from P's last layer" in t for t in texts)
    assert sum(line.attrib["stroke"] == "white" for line in root.iter(f"{SVG}line")) == 2, (
        "two steps"
    )
    computing, sending, holding = root.iter(f"{SVG}rect")
    whole = WIDTH - LEFT - RIGHT
    assert float(computing.attrib["x"]) == pytest.approx(LEFT + whole * 3 / 922, abs=1)
    assert float(computing.attrib["width"]) == pytest.approx(whole * 897 / 922, abs=1)
    assert float(sending.attrib["x"]) == pytest.approx(LEFT + whole * 13.2 / 922, abs=1)
    assert float(holding.attrib["width"]) == pytest.approx(whole * 903 / 922, abs=1)


@pytest.mark.parametrize("stage", [Stage.PLACED, Stage.BOUND, Stage.ADMITTED])
def test_what_is_missing_is_named(stage: Stage) -> None:
    with pytest.raises(PictureError, match=f"no event '{stage.label}' of request 'r-d'"):
        timeline_svg(sides(without=stage), "r-d")
