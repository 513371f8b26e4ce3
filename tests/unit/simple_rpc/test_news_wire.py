"""The channel's frames against the hex of docs/news.md, both directions, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgpack
import pytest

from simple_rpc import Code
from simple_rpc._channel_wire import (
    EMPTY_ARRAY,
    LinkRequest,
    check_ackn,
    check_answer,
    check_beat,
    check_news,
    pack,
    pack_fail,
    unpack,
    unpack_fail,
)
from simple_rpc._errors import InvalidMessageError, PeerProtocolError
from simple_rpc._frames import (
    ACKN,
    BEAT,
    FAIL,
    LINK,
    NEWS,
    OKAY,
    FrameDecoder,
    encode_frame,
    head_name,
)
from simple_rpc.news import MAX_FRAME_ITEMS, MAX_SEQ, NewsProtocolError, NewsSender

OPENER = bytes(range(0x10, 0x20))
ACCEPTOR = bytes(range(0x30, 0x40))
KEY = bytes(range(0xA0, 0xB0))

PAGE = Path(__file__).parents[3] / "docs" / "news.md"
EXAMPLES = {
    name: bytes.fromhex(text.replace("\n", " "))
    for name, text in re.findall(r"\(hex: ([a-z-]+)\)\n\n```\n(.*?)```", PAGE.read_text(), re.S)
}


def decode(name: str) -> tuple[int, bytes]:
    """The example as a frame, fed byte by byte with the next frame's first bytes behind it."""
    decoder = FrameDecoder(1 << 20, dict.fromkeys((LINK, OKAY, NEWS, ACKN, BEAT, FAIL), False))
    frame = None
    for index, byte in enumerate(EXAMPLES[name] + b"BEA"):
        decoder.feed(bytes([byte]))
        found = decoder.next_frame()
        if found is not None:
            assert index == len(EXAMPLES[name]) - 1
            frame = found
    assert frame is not None
    head, body = frame
    assert body is not None
    return head, body


def test_the_page_has_every_frame():
    assert set(EXAMPLES) == {"link-request", "link-answer", "news", "ackn", "beat", "fail"}


def test_link_request():
    fields = ["worker", OPENER, 1, 1000, {"rank": 0}]
    assert encode_frame(LINK, pack([3000, fields])) == EXAMPLES["link-request"]
    head, body = decode("link-request")
    assert head == LINK
    request = LinkRequest(unpack(body, "LINK")[1])
    assert (request.kind, request.stream_id, request.next_seq) == ("worker", OPENER, 1)
    assert request.heartbeat_s == 1.0
    assert dict(request.attributes) == {"rank": 0}


def test_link_answer():
    assert encode_frame(OKAY, pack([ACCEPTOR, 1, {"fresh": True}])) == EXAMPLES["link-answer"]
    head, body = decode("link-answer")
    assert head == OKAY
    assert check_answer(unpack(body, "LINK")) == (ACCEPTOR, 1, True)


def test_news():
    sender = NewsSender()
    sender.attach(b"i" * 16, 1, is_fresh=True)
    sender.publish("LDON", [0, KEY, 2, 4096, 0, ""])
    sender.publish("LDON", [0, KEY, 3, 4096, 0, ""])
    sender.publish("SDON", [0, KEY, 1, 512, 9, "peer lost"])
    assert encode_frame(NEWS, sender.next_frame()) == EXAMPLES["news"]
    head, body = decode("news")
    assert head_name(head) == "NEWS"
    first_seq, groups = check_news(unpack(body, "NEWS"))
    assert first_seq == 1
    assert groups == [
        ("LDON", [[0, KEY, 2, 4096, 0, ""], [0, KEY, 3, 4096, 0, ""]]),
        ("SDON", [[0, KEY, 1, 512, 9, "peer lost"]]),
    ]


def test_ackn_beat_fail():
    assert encode_frame(ACKN, pack([4])) == EXAMPLES["ackn"]
    assert check_ackn(unpack(decode("ackn")[1], "ACKN")) == 4
    assert encode_frame(BEAT, EMPTY_ARRAY) == EXAMPLES["beat"]
    check_beat(decode("beat")[1])
    assert encode_frame(FAIL, pack_fail(Code.PEER_LOST, "silent for 3 s")) == EXAMPLES["fail"]
    error = unpack_fail(decode("fail")[1])
    assert error.code is Code.PEER_LOST
    assert "silent for 3 s" in str(error)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ([], "4 fields"),
        (["worker", OPENER, 1], "4 fields"),
        (["", OPENER, 1, 0], "kind"),
        (["x" * 65, OPENER, 1, 0], "kind"),
        ([7, OPENER, 1, 0], "kind"),
        (["worker", OPENER[:15], 1, 0], "stream_id"),
        (["worker", "x" * 16, 1, 0], "stream_id"),
        (["worker", OPENER, 0, 0], "next_seq"),
        (["worker", OPENER, True, 0], "next_seq"),
        (["worker", OPENER, 2**63, 0], "next_seq"),
        (["worker", OPENER, 1, -1], "heartbeat_ms"),
        (["worker", OPENER, 1, 19], "heartbeat_ms"),
        (["worker", OPENER, 1, 60_001], "heartbeat_ms"),
        (["worker", OPENER, 1, 1.5], "heartbeat_ms"),
        (["worker", OPENER, 1, 0, []], "attributes"),
        (["worker", OPENER, 1, 0, {"x": [1]}], "attributes"),
        (["worker", OPENER, 1, 0, {str(i): 0 for i in range(33)}], "attributes"),
    ],
)
def test_a_malformed_link_request_is_refused_by_name(fields, path):
    with pytest.raises(InvalidMessageError, match=path) as caught:
        LinkRequest(fields)
    assert caught.value.code is Code.BAD_REQUEST


def test_later_versions_may_append_fields():
    request = LinkRequest(["worker", OPENER, 1, 0, {}, "from the future", 7])
    assert request.kind == "worker"
    assert check_answer([ACCEPTOR, 5, {}, "more"]) == (ACCEPTOR, 5, False)
    assert check_news([1, [["LDON", [1]]], "more"]) == (1, [("LDON", [1])])
    assert check_ackn([4, "more"]) == 4


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [ACCEPTOR],
        [ACCEPTOR, 0],
        [ACCEPTOR, True],
        [ACCEPTOR, 2**63],
        ["x" * 16, 1],
        [ACCEPTOR, 1, []],
    ],
)
def test_a_malformed_link_answer_is_the_peers_fault(fields):
    with pytest.raises(PeerProtocolError):
        check_answer(fields)


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        [],
        [1],
        [0, [["LDON", [1]]]],
        [True, [["LDON", [1]]]],
        [MAX_SEQ + 1, [["LDON", [1]]]],
        [MAX_SEQ, [["LDON", [1]]]],
        [1, {}],
        [1, []],
        [1, [["LDON", []]]],
        [1, [["LDON"]]],
        [1, [["LDON", [1], 2]]],
        [1, [["LONG!", [1]]]],
        [1, [[b"LDON", [1]]]],
        [1, [["LDON", {"a": 1}]]],
        [1, [["LDON", [0] * (MAX_FRAME_ITEMS + 1)]]],
        [1, [["LDON", [0] * MAX_FRAME_ITEMS], ["SDON", [0]]]],
    ],
)
def test_malformed_news_is_refused_whole(body):
    with pytest.raises(NewsProtocolError):
        check_news(body)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91", b"\x91\x01\x01", msgpack.packb([b"x"])])
def test_malformed_acknowledgements(body):
    with pytest.raises(NewsProtocolError):
        check_ackn(unpack(body, "ACKN"))


@pytest.mark.parametrize("body", [b"", b"\xc0", msgpack.packb([1]), msgpack.packb([1, 2, {}])])
def test_malformed_failures(body):
    with pytest.raises(NewsProtocolError):
        unpack_fail(body)


def test_an_unknown_failure_code_is_internal_not_an_exception():
    assert unpack_fail(msgpack.packb([200, "what", {}])).code is Code.INTERNAL
