"""The frame decoder: every stream whole, byte by byte, split anywhere, trailing, truncated, wrong."""

from __future__ import annotations

import pytest

from simple_rpc._frames import (
    RESERVED_HEADS,
    FrameDecoder,
    FrameError,
    encode_frame,
    head_from_name,
    head_name,
)

PREF, TRKV, RAWX = (head_from_name(name) for name in ("PREF", "TRKV", "RAWX"))
HEADS = {PREF: False, TRKV: False, RAWX: True}
STREAM = encode_frame(PREF, b"\x90") + encode_frame(TRKV, b"") + encode_frame(PREF, b"x" * 300)
FRAMES = [(PREF, b"\x90"), (TRKV, b""), (PREF, b"x" * 300)]


def decoder(max_body_bytes: int = 1000) -> FrameDecoder:
    return FrameDecoder(max_body_bytes, HEADS)


def drain(frames: FrameDecoder) -> list[tuple[int, bytes | None]]:
    got = []
    while (frame := frames.next_frame()) is not None:
        got.append(frame)
    return got


def test_a_head_reads_as_its_letters_on_the_wire():
    assert encode_frame(PREF, b"abc") == b"PREF\x03\x00\x00\x00abc"
    assert head_from_name("PREF") == 0x46455250
    assert head_name(PREF) == "PREF"
    assert head_name(0x01020304) == "0x04030201"


@pytest.mark.parametrize("name", ["", "ABC", "ABCDE", "AB1C", "AB C", "ÄBCD", "AB\nC"])
def test_a_head_is_four_ascii_letters(name):
    with pytest.raises(ValueError, match="four ASCII letters"):
        head_from_name(name)


def test_whole():
    frames = decoder()
    frames.feed(STREAM)
    assert drain(frames) == FRAMES
    assert frames.buffered_bytes == 0


def test_byte_by_byte():
    frames = decoder()
    got = []
    for index in range(len(STREAM)):
        frames.feed(STREAM[index : index + 1])
        got += drain(frames)
    assert got == FRAMES
    assert frames.buffered_bytes == 0


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_split_anywhere(at):
    frames = decoder()
    frames.feed(STREAM[:at])
    got = drain(frames)
    frames.feed(STREAM[at:])
    assert got + drain(frames) == FRAMES


def test_trailing_bytes_stay_buffered():
    frames = decoder()
    frames.feed(STREAM + b"PREF\x05\x00\x00\x00abc")
    assert drain(frames) == FRAMES
    assert frames.buffered_bytes == 11


@pytest.mark.parametrize("num_bytes", [4, 5, 7])
def test_a_truncated_prefix_waits(num_bytes):
    frames = decoder()
    frames.feed(b"PREF\x00\x00\x00\x00"[:num_bytes])
    assert frames.next_frame() is None


def test_an_unknown_head_is_refused_after_four_bytes_and_stays_refused():
    frames = decoder()
    frames.feed(b"NOP")
    assert frames.next_frame() is None
    frames.feed(b"E")
    with pytest.raises(FrameError, match="NOPE is not known") as failure:
        frames.next_frame()
    assert failure.value.reason == "unknown_head"
    frames.feed(STREAM)
    assert frames.buffered_bytes == 0  # a poisoned decoder keeps nothing
    with pytest.raises(FrameError, match="NOPE"):
        frames.next_frame()


def test_an_oversized_body_is_refused_before_any_of_it_arrives():
    frames = decoder(max_body_bytes=300)
    frames.feed(b"PREF" + (301).to_bytes(4, "little"))
    with pytest.raises(FrameError, match="301 bytes, at most 300") as failure:
        frames.next_frame()
    assert failure.value.reason == "body_too_large"
    assert frames.buffered_bytes == 0


def test_the_largest_body_is_taken():
    frames = decoder(max_body_bytes=300)
    frames.feed(encode_frame(PREF, b"x" * 300))
    assert drain(frames) == [(PREF, b"x" * 300)]


def test_a_raw_head_ends_framing_and_what_follows_is_handed_over():
    frames = decoder()
    frames.feed(encode_frame(PREF, b"1") + b"RAWXany bytes")
    assert frames.next_frame() == (PREF, b"1")
    assert frames.next_frame() == (RAWX, None)
    assert frames.take_buffered() == b"any bytes"
    assert frames.buffered_bytes == 0


def test_heads_may_change_between_frames():
    frames = FrameDecoder(1000, {PREF: False})
    frames.feed(encode_frame(PREF, b"1") + encode_frame(TRKV, b"2"))
    assert frames.next_frame() == (PREF, b"1")
    frames.heads = {TRKV: False}
    assert frames.next_frame() == (TRKV, b"2")


def test_the_protocols_own_heads():
    names = {head_name(head) for head in RESERVED_HEADS}
    assert names == {"OKAY", "FAIL", "HELO", "AUTH", "LINK", "NEWS", "ACKN", "BEAT"}
