"""Bodies: what is refused, what the errors say, and how versions meet."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgpack
import pytest

from simple_rpc import Code, InvalidMessageError, MaxLen, Method, Range, RpcError
from simple_rpc._codec import Schema, new_pack, unpack_body
from simple_rpc.methods import pack_fail, unpack_call, unpack_fail


class Mode(enum.IntEnum):
    PREFILL = 1
    DUAL = 2


class Kind(str, enum.Enum):
    A = "a"


@dataclass(frozen=True, slots=True)
class Rank:
    tp: int
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Everything:
    name: Annotated[str, MaxLen(8)]
    key: bytes
    count: Annotated[int, Range(0, 10)]
    ratio: float
    flag: bool
    blocks: list[int]
    groups: tuple[tuple[int, ...], ...]
    rank: Rank
    ranks: list[Rank]
    mode: Mode
    kind: Kind | None = None
    maybe: int | None = None
    options: dict[str, int] = field(default_factory=dict)
    anything: Any = None


EVERYTHING = Everything(
    "a", b"k", 3, 0.5, True, [1, 2], ((1,), (2, 3)), Rank(1, 2), [Rank(0)], Mode.DUAL,
    Kind.A, 7, {"x": 1}, ["free", {"form": 1}],
)  # fmt: skip
SCHEMA = Schema(Everything)


def wire(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


def fields_with(**changes: Any) -> list[Any]:
    fields = wire(SCHEMA.encode(EVERYTHING))
    for name, value in changes.items():
        fields[SCHEMA.field_names.index(name)] = value
    return fields


def test_round_trip():
    assert SCHEMA.decode(wire(SCHEMA.encode(EVERYTHING))) == EVERYTHING


def test_missing_trailing_fields_have_their_defaults():
    old = wire(SCHEMA.encode(EVERYTHING))[:10]
    assert SCHEMA.decode(old).options == {}
    assert SCHEMA.decode(old).maybe is None


def test_unknown_trailing_fields_are_ignored():
    assert SCHEMA.decode([*fields_with(), "from", "the", "future"]) == EVERYTHING


def test_a_missing_required_field_is_named():
    with pytest.raises(InvalidMessageError, match="at least 10 fields \\(mode is missing\\)"):
        SCHEMA.decode(fields_with()[:9])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 5}, r"Everything\.name: expected str, got int 5"),
        ({"name": "123456789"}, r"Everything\.name: expected a length of at most 8, got 9"),
        ({"key": "text"}, r"Everything\.key: expected bytes, got str 'text'"),
        ({"count": True}, r"Everything\.count: expected int, got bool True"),
        ({"count": 11}, r"Everything\.count: expected 0\.\.10, got int 11"),
        ({"count": -1}, r"Everything\.count: expected 0\.\.10, got int -1"),
        ({"ratio": "1"}, r"Everything\.ratio: expected float, got str '1'"),
        ({"flag": 1}, r"Everything\.flag: expected bool, got int 1"),
        ({"blocks": 1}, r"Everything\.blocks: expected an array, got int 1"),
        ({"blocks": [1, "2"]}, r"Everything\.blocks\[1\]: expected int, got str '2'"),
        ({"blocks": [1, True]}, r"Everything\.blocks\[1\]: expected int, got bool True"),
        ({"groups": [[1], [2, None]]}, r"Everything\.groups\[1\]\[1\]: expected int, got NoneType"),
        ({"rank": []}, r"Everything\.rank: expected at least 1 fields \(tp is missing\)"),
        ({"rank": [1, "x"]}, r"Everything\.rank\.pp: expected int, got str 'x'"),
        ({"ranks": [[1], ["y"]]}, r"Everything\.ranks\[1\]\.tp: expected int, got str 'y'"),
        ({"mode": 3}, r"Everything\.mode: expected one of \[1, 2\], got int 3"),
        ({"mode": True}, r"Everything\.mode: expected one of \[1, 2\], got bool True"),
        ({"mode": [1]}, r"Everything\.mode: expected one of \[1, 2\], got list"),
        ({"kind": "b"}, r"Everything\.kind: expected one of \['a'\], got str 'b'"),
        ({"maybe": "x"}, r"Everything\.maybe: expected int, got str 'x'"),
        ({"options": {"a": "b"}}, r"Everything\.options\['a'\]: expected int, got str 'b'"),
        ({"options": [1]}, r"Everything\.options: expected a map, got list"),
        ({"options": {b"a": 1}}, r"Everything\.options: expected str keys, got bytes b'a'"),
    ],
)
def test_an_error_says_path_expected_and_got(changes, message):
    with pytest.raises(InvalidMessageError, match=message) as failure:
        SCHEMA.decode(fields_with(**changes))
    assert failure.value.code is Code.BAD_REQUEST
    assert failure.value.details["path"].startswith("Everything.")


@pytest.mark.parametrize("value", [None, 1, "x", {}, b"y"])
def test_fields_are_an_array(value):
    with pytest.raises(InvalidMessageError, match="Everything: expected an array of fields"):
        SCHEMA.decode(value)


def test_a_wrong_value_is_cut_in_the_message():
    with pytest.raises(InvalidMessageError) as failure:
        SCHEMA.decode(fields_with(count="x" * 100_000))
    assert len(failure.value.message) < 200


@dataclass(frozen=True)
class Checked:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError("value must not be negative")


@dataclass(frozen=True)
class Refusing:
    value: int

    def __post_init__(self) -> None:
        raise RpcError(Code.GONE, "not today")


def test_what_a_dataclass_itself_refuses_is_a_bad_request():
    with pytest.raises(
        InvalidMessageError, match="Checked: expected valid fields: value must not be"
    ):
        Schema(Checked).decode([-1])
    with pytest.raises(InvalidMessageError, match="not today"):
        Schema(Refusing).decode([1])


def test_an_int_is_taken_for_a_declared_float():
    assert SCHEMA.decode(fields_with(ratio=2)).ratio == 2.0


def test_encoding_a_value_of_another_class_is_an_error():
    with pytest.raises(InvalidMessageError, match="Everything: expected Everything, got Rank"):
        SCHEMA.encode(Rank(1))  # type: ignore[arg-type]


@dataclass
class Unions:
    value: int | str


@dataclass
class Sets:
    value: set[int]


@dataclass
class Keys:
    value: dict[int, int]


@dataclass
class Pairs:
    value: tuple[int, str]


@dataclass
class Recursive:
    value: Recursive | None


@pytest.mark.parametrize("cls", [Unions, Sets, Keys, Pairs, int, Recursive])
def test_types_that_cannot_work_are_refused_at_definition(cls):
    with pytest.raises(TypeError):
        Schema(cls)


# msgpack


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="reserved"),
        pytest.param(b"\x92\x01", id="truncated"),
        pytest.param(b"\x01\x02", id="two values"),
        pytest.param(b"\xa1\xff", id="text that is not utf-8"),
        pytest.param(b"\x81\x01\x02", id="int key"),
        pytest.param(b"\x81\x90\x02", id="array key"),
        pytest.param(b"\xd4\x01\x00", id="ext"),
        pytest.param(b"\xc7\x00\x05", id="empty ext"),
        pytest.param(b"\xd6\xff\x00\x00\x00\x00", id="timestamp"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of four billion"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="bytes of four gigabytes"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="text of four gigabytes"),
        pytest.param(b"\x91" * 5000 + b"\x00", id="nested too deep"),
    ],
)
def test_hostile_msgpack_is_one_kind_of_error(body):
    with pytest.raises(InvalidMessageError, match="body: expected one msgpack value"):
        unpack_body(body)


def test_array_and_map_bounds():
    assert unpack_body(msgpack.packb([0] * 10), max_array_items=10) == [0] * 10
    with pytest.raises(InvalidMessageError, match="exceeds max_array_len"):
        unpack_body(msgpack.packb([0] * 11), max_array_items=10)
    with pytest.raises(InvalidMessageError, match="exceeds max_map_len"):
        unpack_body(msgpack.packb({str(n): n for n in range(11)}), max_map_items=10)


# Methods


def test_a_method_packs_what_its_other_end_unpacks():
    method = Method("EVRY", Everything, Rank)
    body = method.pack_request(new_pack(), 1500, EVERYTHING)
    assert msgpack.unpackb(body)[0] == 1500
    assert method.unpack_request(body) == (1500, EVERYTHING)
    assert method.unpack_response(method.pack_response(new_pack(), Rank(4))) == Rank(4)


def test_a_method_without_fields():
    method: Method[None, None] = Method("PING", None, None)
    assert method.unpack_request(method.pack_request(new_pack(), 5, None)) == (5, None)
    assert method.unpack_response(b"\x90") is None
    assert method.unpack_response(b"\x93\x01\x02\x03") is None  # a newer peer
    with pytest.raises(InvalidMessageError):
        method.unpack_response(b"\x80")
    with pytest.raises(InvalidMessageError, match="expected None"):
        method.pack_request(new_pack(), 5, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["OKAY", "HELO", "LINK", "NEWS", "abc", "1234"])
def test_heads_that_a_method_cannot_have(head):
    with pytest.raises(ValueError):
        Method(head, None, None)


def test_a_value_that_cannot_be_packed_is_refused_and_the_packer_is_unharmed():
    method = Method("RANK", Rank, None)
    pack = new_pack()
    for wrong in (object(), 2**70, {1, 2}):
        with pytest.raises(InvalidMessageError, match="RANK: cannot be packed"):
            method.pack_request(pack, 5, Rank(wrong))  # type: ignore[arg-type]
    assert method.unpack_request(method.pack_request(pack, 5, Rank(1))) == (5, Rank(1))


@pytest.mark.parametrize(
    "value", [1, [], [1], ["x", []], [-1, []], [True, []], [2**60, []], {"a": 1}, [1.5, []]]
)
def test_a_call_is_timeout_and_fields(value):
    with pytest.raises(InvalidMessageError, match="call"):
        unpack_call(msgpack.packb(value))


# FAIL


def test_fail_round_trip():
    error = RpcError(Code.GONE, "it was here", {"key": b"k", "n": 3})
    assert unpack_fail(pack_fail(new_pack(), error)) == (
        Code.GONE,
        "it was here",
        {"key": b"k", "n": 3},
    )


def test_a_fail_always_travels():
    error = RpcError(Code.BUSY, "x" * 100_000, {"object": object(), "big": b"y" * 100_000, "n": 1})
    body = pack_fail(new_pack(), error)
    assert len(body) <= 4096
    assert unpack_fail(body)[0] is Code.BUSY
    assert unpack_fail(pack_fail(new_pack(), RpcError(Code.BUSY, "\ud800 half")))[0] is Code.BUSY
    assert unpack_fail(pack_fail(new_pack(), RpcError(Code.BUSY, "", {"n": 2**80})))[0] is Code.BUSY


def test_an_unknown_code_and_a_failure_called_ok_are_internal():
    assert unpack_fail(msgpack.packb([99, "new", {}]))[0] is Code.INTERNAL
    assert unpack_fail(msgpack.packb([0, "ok?", {}]))[0] is Code.INTERNAL


@pytest.mark.parametrize("value", [[], [1], [1, "x"], ["1", "x", {}], [1, 2, {}], [1, "x", []], 5])
def test_a_malformed_fail(value):
    with pytest.raises(InvalidMessageError, match="FAIL"):
        unpack_fail(msgpack.packb(value))


def test_codes_are_wire_format():
    assert [(code.name, int(code)) for code in Code] == [
        ("OK", 0), ("ACCEPTED", 1), ("NOT_FOUND", 2), ("GONE", 3), ("BUSY", 4), ("ABORTED", 5),
        ("EXPIRED", 6), ("INCOMPATIBLE", 7), ("UNREACHABLE", 8), ("PEER_LOST", 9), ("TIMEOUT", 10),
        ("CORRUPT", 11), ("BAD_REQUEST", 12), ("UNAUTHORIZED", 13), ("INTERNAL", 14),
    ]  # fmt: skip
