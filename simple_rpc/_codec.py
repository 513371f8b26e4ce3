"""Bodies: msgpack in, checked values out; dataclasses to positional arrays and back.

Nothing here trusts its input. A body is unpacked with bounds on every length, without extension types
and without trailing bytes; then each value is checked against the type its field declares. Both checks
raise :class:`InvalidMessageError` with the path of the value, what was expected and what came.

The declared types a field may have: ``int``, ``float``, ``bool``, ``str``, ``bytes``, ``None``,
``Any``, ``X | None``, ``list[X]``, ``tuple[X, ...]``, ``dict[str, X]``, an ``enum.Enum``, another
such dataclass, and ``Annotated[X, Range(...)]`` or ``Annotated[X, MaxLen(...)]``. Types are exact: a
bool is no int, and an int is taken for a float only where a float is declared.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgpack

from ._errors import InvalidMessageError, RpcError, shown
from ._limits import MAX_ARRAY_ITEMS, MAX_MAP_ITEMS

T = TypeVar("T")
Check = Callable[[Any], Any]
Encode = Callable[[Any], Any]

MAX_SCHEMA_DEPTH = 16  # of dataclasses in dataclasses: a recursive type would never end

_unpackb = msgpack.unpackb


@dataclasses.dataclass(frozen=True)
class Range:
    """For ``Annotated[int, Range(lo, hi)]``: both ends included."""

    lo: int
    hi: int


@dataclasses.dataclass(frozen=True)
class MaxLen:
    """For ``Annotated[str | bytes | list | tuple | dict, MaxLen(n)]``: at most n characters, bytes, items."""

    n: int


def new_pack() -> Callable[[Any], bytes]:
    """A pack function that reuses its buffer; for one thread."""
    pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack
    return pack


def _no_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def unpack_body(
    body: bytes, max_array_items: int = MAX_ARRAY_ITEMS, max_map_items: int = MAX_MAP_ITEMS
) -> Any:
    """The value of a body, which must be exactly one. Raises ``InvalidMessageError``."""
    try:
        # Text and bytes cannot be longer than the body. Map keys are str or bytes (the default).
        return _unpackb(
            body,
            ext_hook=_no_ext,
            max_ext_len=0,
            max_array_len=max_array_items,
            max_map_len=max_map_items,
        )
    except (ValueError, msgpack.UnpackException) as error:
        # StackError, FormatError, ExtraData and UnicodeDecodeError are among these.
        what = str(error) or type(error).__name__
        raise InvalidMessageError(message=f"body: expected one msgpack value: {what}") from None


class _Mismatch(Exception):  # noqa: N818
    """Raised inside out: each level that knows a step of the path puts it in front."""

    def __init__(self, expected: str, got: object, path: str = "") -> None:
        self.expected = expected
        self.got = got
        self.path = path

    def under(self, step: str) -> _Mismatch:
        self.path = step + self.path
        return self

    def as_error(self, root: str) -> InvalidMessageError:
        got = f"{type(self.got).__name__} {shown(self.got)}"
        return InvalidMessageError(
            message=f"{root}{self.path}: expected {self.expected}, got {got}",
            details={"path": f"{root}{self.path}", "expected": self.expected},
        )


class Schema(Generic[T]):
    """Compiled once per dataclass: ``encode`` to a positional tuple, ``decode`` from a list.

    Fields are positional in declaration order. A peer with a newer version may send more fields (they are
    ignored) and one with an older version fewer (their defaults apply): so new fields go last, with defaults.
    """

    def __init__(self, cls: type[T], _depth: int = 0) -> None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"expected a dataclass, got {cls!r}")
        if _depth > MAX_SCHEMA_DEPTH:
            raise TypeError(f"{cls.__name__}: dataclasses nested deeper than {MAX_SCHEMA_DEPTH}")
        self.cls = cls
        self.name = cls.__name__
        fields = [field for field in dataclasses.fields(cls) if field.init]
        hints = typing.get_type_hints(cls, include_extras=True)
        coded = []
        for field in fields:
            try:
                coded.append(_compile(hints[field.name], _depth + 1))
            except TypeError as error:
                raise TypeError(f"{self.name}.{field.name}: {error}") from None
        self.field_names = tuple(field.name for field in fields)
        self._checks: tuple[Check, ...] = tuple(check for check, _ in coded)
        self._encoders = tuple(
            (index, encode) for index, (_, encode) in enumerate(coded) if encode is not None
        )
        self._num_required = 0
        for index, field in enumerate(fields):
            if (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                self._num_required = index + 1
        self._get = _field_getter(self.field_names)
        # The usual case at C speed: as many fields as we know, each of the one wire type it can have; then
        # only the fields whose contents need a look are checked one by one.
        self._wire_types = tuple(_wire_type(hints[field.name]) for field in fields)
        self._is_exact = None not in self._wire_types
        self._inner_checks = tuple(
            (index, check)
            for index, check in enumerate(self._checks)
            if check not in _SCALARS.values()
        )

    def encode(self, value: T) -> tuple[Any, ...]:
        """What goes on the wire. Raises ``InvalidMessageError`` if ``value`` is not a ``cls``."""
        if type(value) is not self.cls:
            raise _Mismatch(self.name, value).as_error(self.name)
        values = self._get(value)
        if self._encoders:
            items = list(values)
            for index, encode in self._encoders:
                items[index] = encode(items[index])
            return tuple(items)
        return values

    def decode(self, values: Any) -> T:
        """A ``cls`` from an unpacked array. Raises ``InvalidMessageError`` that names the path."""
        try:
            if (
                self._is_exact
                and type(values) is list
                and tuple(map(type, values)) == self._wire_types
            ):
                args = values
                if self._inner_checks:
                    args = values.copy()
                    for index, check in self._inner_checks:
                        args[index] = check(args[index])
                return self.cls(*args)
        except Exception:
            pass  # found and named below
        try:
            return self._decode(values)
        except _Mismatch as mismatch:
            raise mismatch.as_error(self.name) from None

    def _decode(self, values: Any) -> T:
        """``decode`` for every case, also inside of another value. Raises ``_Mismatch``."""
        if type(values) is not list:
            raise _Mismatch("an array of fields", values)
        if len(values) < self._num_required:
            missing = self.field_names[len(values)]
            raise _Mismatch(
                f"at least {self._num_required} fields ({missing} is missing)", len(values)
            )
        args: list[Any] = []
        try:
            # zip stops at the shorter: unknown trailing fields are dropped, missing ones get defaults.
            for check, value in zip(self._checks, values):  # noqa: B905
                args.append(check(value))
        except _Mismatch as mismatch:
            raise mismatch.under(f".{self.field_names[len(args)]}") from None
        try:
            return self.cls(*args)
        except RpcError as error:  # from __post_init__, which knows its own fields
            raise _Mismatch(f"valid fields: {error.message}", values) from None
        except (ValueError, TypeError) as error:
            raise _Mismatch(f"valid fields: {error}", values) from None


def _wire_type(hint: Any) -> type | None:
    """The one exact type that msgpack gives for a declared type, or None if there are several."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _wire_type(typing.get_args(hint)[0])
    if hint in (int, str, bytes, bool):
        return typing.cast(type, hint)
    if origin in (list, tuple):
        return list
    if origin in (dict, Mapping):
        return dict
    return None


def _field_getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda value: ()
    get = operator.attrgetter(*names)
    if len(names) == 1:
        return lambda value: (get(value),)
    return get


def _compile(hint: Any, depth: int) -> tuple[Check, Encode | None]:
    """The check and the encoder (None: as it is) for one declared type."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *notes = typing.get_args(hint)
        check, encode = _compile(base, depth)
        for note in notes:
            check = _bounded(check, note)
        return check, encode
    if hint is Any or hint is object:
        return _anything, None
    if hint in _SCALARS:
        return _SCALARS[hint], None
    if origin in (typing.Union, types.UnionType):
        return _compile_optional(hint, depth)
    if origin is list or origin is tuple:
        return _compile_sequence(origin, hint, depth)
    if origin in (dict, Mapping):
        return _compile_map(hint, depth)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_check(hint), operator.attrgetter("value")
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        schema: Schema[Any] = Schema(hint, depth)
        return schema._decode, schema.encode
    raise TypeError(f"type {hint!r} is not supported")


def _anything(value: Any) -> Any:
    return value


def _exactly(wanted: type, name: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is wanted:
            return value
        raise _Mismatch(name, value)

    return check


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _Mismatch("float", value)


_SCALARS: dict[Any, Check] = {
    int: _exactly(int, "int"),
    float: _float,
    bool: _exactly(bool, "bool"),
    str: _exactly(str, "str"),
    bytes: _exactly(bytes, "bytes"),
    type(None): _exactly(type(None), "nil"),
    None: _exactly(type(None), "nil"),
    list: _exactly(list, "array"),
    dict: _exactly(dict, "map"),
}


def _bounded(check: Check, note: Any) -> Check:
    if isinstance(note, Range):
        lo, hi = note.lo, note.hi

        def in_range(value: Any) -> Any:
            value = check(value)
            if value is None or lo <= value <= hi:
                return value
            raise _Mismatch(f"{lo}..{hi}", value)

        return in_range
    if isinstance(note, MaxLen):
        n = note.n

        def short(value: Any) -> Any:
            # Before the items are checked one by one.
            if hasattr(value, "__len__") and len(value) > n:
                raise _Mismatch(f"a length of at most {n}, got {len(value)}", value)
            return check(value)

        return short
    return check  # somebody else's annotation


def _compile_optional(hint: Any, depth: int) -> tuple[Check, Encode | None]:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if len(members) != 1 or len(typing.get_args(hint)) != 2:
        raise TypeError(f"of unions only X | None is supported, got {hint!r}")
    check_inner, encode_inner = _compile(members[0], depth)

    def check(value: Any) -> Any:
        return None if value is None else check_inner(value)

    if encode_inner is None:
        return check, None
    encode: Encode = encode_inner
    return check, lambda value: None if value is None else encode(value)


def _compile_sequence(
    origin: type[list[Any]] | type[tuple[Any, ...]], hint: Any, depth: int
) -> tuple[Check, Encode | None]:
    args = typing.get_args(hint)
    if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        raise TypeError(f"of tuples only tuple[X, ...] is supported, got {hint!r}")
    check_item, encode_item = _compile(args[0], depth)
    # Exact scalars are checked at C speed: block lists have tens of thousands of items.
    only = args[0] if args[0] in (int, str, bytes, bool) else None

    def check(value: Any) -> Any:
        if type(value) is not list:
            raise _Mismatch("an array", value)
        if only is not None and list(map(type, value)).count(only) == len(value):
            return value if origin is list else tuple(value)
        items = []
        for index, item in enumerate(value):
            try:
                items.append(check_item(item))
            except _Mismatch as mismatch:
                raise mismatch.under(f"[{index}]") from None
        return items if origin is list else tuple(items)

    if encode_item is None:
        return check, None
    encode: Encode = encode_item
    return check, lambda value: [encode(item) for item in value]


def _compile_map(hint: Any, depth: int) -> tuple[Check, Encode | None]:
    key_hint, value_hint = typing.get_args(hint)
    if key_hint is not str:
        raise TypeError(f"map keys are str, got {hint!r}")
    check_item, encode_item = _compile(value_hint, depth)

    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch("a map", value)
        items = {}
        for key, item in value.items():
            if type(key) is not str:
                raise _Mismatch("str keys", key)
            try:
                items[key] = check_item(item)
            except _Mismatch as mismatch:
                raise mismatch.under(f"[{shown(key)}]") from None
        return items

    if encode_item is None:
        return check, lambda value: value if type(value) is dict else dict(value)
    encode: Encode = encode_item
    return check, lambda value: {key: encode(item) for key, item in value.items()}


def _enum_check(cls: type[enum.Enum]) -> Check:
    # By exact type and value: 1 == True == 1.0, and a set lookup would take one for the other.
    members = {(type(member.value), member.value): member for member in cls}
    expected = f"one of {[member.value for member in cls]}"

    def check(value: Any) -> Any:
        try:
            member = members.get((type(value), value))
        except TypeError:
            member = None
        if member is None:
            raise _Mismatch(expected, value)
        return member

    return check
