"""Frames and bodies for any input: no split changes what is decoded, no garbage raises anything unnamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import hypothesis.strategies as st
import msgpack
from hypothesis import given, settings

from simple_rpc import Identity, InvalidMessageError, MaxLen, Range, RpcError, Secret
from simple_rpc._codec import Schema, new_pack, unpack_body
from simple_rpc._frames import (
    FAIL,
    HELO,
    OKAY,
    FrameDecoder,
    FrameError,
    encode_frame,
    head_from_name,
)
from simple_rpc.hello import ClientHandshake, ServerHandshake
from simple_rpc.methods import unpack_call, unpack_fail

NAMES = ["PREF", "TRKV", "OKAY", "abcd"]
HEADS = {head_from_name(name): False for name in NAMES} | {head_from_name("RAWX"): True}
MAX_BODY = 200
frames_of_any_kind = st.lists(
    st.tuples(st.sampled_from(NAMES).map(head_from_name), st.binary(max_size=MAX_BODY)), max_size=6
)


def feed(decoder: FrameDecoder, data: bytes) -> tuple[list[tuple[int, bytes | None]], str]:
    got: list[tuple[int, bytes | None]] = []
    decoder.feed(data)
    try:
        while (frame := decoder.next_frame()) is not None:
            got.append(frame)
            if frame[1] is None:
                decoder.take_buffered()
    except FrameError as error:
        return got, error.reason
    return got, ""


@given(frames_of_any_kind, st.lists(st.integers(1, 40), max_size=40), st.binary(max_size=7))
def test_no_split_changes_the_frames(frames, sizes, tail):
    stream = b"".join(encode_frame(head, body) for head, body in frames) + tail
    decoder = FrameDecoder(MAX_BODY, HEADS)
    got: list[tuple[int, bytes | None]] = []
    at = 0
    for size in [*sizes, len(stream)]:
        some, reason = feed(decoder, stream[at : at + size])
        got += some
        at += size
        if reason:
            assert reason == "unknown_head"  # of the tail
            break
    whole = FrameDecoder(MAX_BODY, HEADS)
    expected, _ = feed(whole, stream)
    assert got[: len(frames)] == frames
    assert got == expected


@given(st.lists(st.binary(max_size=64), max_size=30))
def test_garbage_is_refused_with_a_reason_and_bounded(pieces):
    decoder = FrameDecoder(MAX_BODY, HEADS)
    for piece in pieces:
        _, reason = feed(decoder, piece)
        assert reason in ("", "unknown_head", "body_too_large")
        assert decoder.buffered_bytes <= 8 + MAX_BODY + len(piece)


@dataclass(frozen=True, slots=True)
class Inner:
    a: int
    b: bytes = b""


@dataclass(frozen=True, slots=True)
class Outer:
    name: Annotated[str, MaxLen(20)]
    level: Annotated[int, Range(-5, 5)]
    ids: list[int]
    ratio: float
    inner: Inner
    more: tuple[Inner, ...] = ()
    maybe: bool | None = None
    table: dict[str, int] | None = None


SCHEMA = Schema(Outer)
inners = st.builds(Inner, st.integers(-(2**63), 2**64 - 1), st.binary(max_size=5))
outers = st.builds(
    Outer,
    st.text(max_size=20),
    st.integers(-5, 5),
    st.lists(st.integers(0, 2**32)),
    st.floats(allow_nan=False),
    inners,
    st.lists(inners, max_size=3).map(tuple),
    st.none() | st.booleans(),
    st.none() | st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=3),
)
json_like: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(outers)
def test_every_value_survives_the_wire(value):
    assert SCHEMA.decode(unpack_body(new_pack()(SCHEMA.encode(value)))) == value


@given(json_like)
def test_any_value_is_decoded_or_refused_by_name(value):
    try:
        decoded = SCHEMA.decode(unpack_body(msgpack.packb(value)))
    except InvalidMessageError as error:
        assert error.message
    else:
        assert isinstance(decoded, Outer)
        assert all(type(item) is int for item in decoded.ids)


@given(outers, st.data())
def test_one_wrong_field_is_the_one_that_is_named(value, data):
    fields = msgpack.unpackb(msgpack.packb(SCHEMA.encode(value)))
    index = data.draw(st.integers(0, 4))
    fields[index] = {"not": "this"}
    try:
        SCHEMA.decode(fields)
    except InvalidMessageError as error:
        assert error.message.startswith(f"Outer.{SCHEMA.field_names[index]}: expected ")
    else:
        raise AssertionError("accepted")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_as_any_body(body):
    secret = Secret(b"0123456789abcdef")
    own = Identity("scheduler", "s")
    for parse in (
        unpack_body,
        unpack_call,
        unpack_fail,
        lambda body: ServerHandshake(own, secret).receive(HELO, body),
        lambda body: ClientHandshake(own, secret).receive(OKAY, body),
        lambda body: ClientHandshake(own, secret).receive(FAIL, body),
    ):
        try:
            parse(body)
        except RpcError as error:
            assert error.message
