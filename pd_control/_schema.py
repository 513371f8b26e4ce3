"""Reading plain mappings into frozen dataclasses, with errors that say expected, got and where.

Small on purpose: it knows the value types that a configuration needs (str, bool, int, float, Path,
literals, tuples of these, string maps, nested sections, and each of them or None) and refuses a
field of any other type when the schema is first read, so a mistake in `config.py` fails its tests.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

SECRET_MASK = "********"


class ConfigError(ValueError):
    """One wrong setting. `where` is its dotted path and source, `expected` and `got` are text."""

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(f"{where}: expected {expected}, got {got}")
        self.where = where
        self.expected = expected
        self.got = got


class UnknownSettingError(ConfigError):
    """A key that no setting has; `nearest` is the closest valid one, or None."""

    def __init__(self, where: str, valid: Iterable[str], key: str) -> None:
        names = sorted(valid)
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        self.nearest = close[0] if close else None
        hint = (
            f"a known setting (did you mean {self.nearest!r}?)"
            if self.nearest
            else f"one of {', '.join(names)}"
        )
        super().__init__(where, hint, f"unknown key {key!r}")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    secret: bool = False,
    factory: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field with what the documentation and the validation need.

    `low` and `high` are inclusive bounds of a number (or of each element of a tuple of numbers).
    `secret` values never appear in a repr, a snapshot or the output of `pdctl config`.
    """
    metadata = {"doc": doc, "low": low, "high": high, "unit": unit, "secret": secret}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def type_name(kind: Any) -> str:
    """The type as a reader of the documentation would write it."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is Literal:
        return " | ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else type_name(a) for a in args)
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin in (dict, Mapping):
        return f"table of {type_name(args[1])}"
    return {str: "text", bool: "true or false", int: "integer", float: "number", Path: "path"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _number(kind: Any, value: Any, where: str, meta: Mapping[str, Any]) -> Any:
    # bool is an int in Python; `hold_s = true` is a mistake, not one second.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(where, type_name(kind), _show(value))
    if kind is int and not isinstance(value, int):
        raise ConfigError(where, "integer", _show(value))
    result = kind(value)
    if not math.isfinite(result):
        raise ConfigError(where, "a finite number", _show(value))
    low, high = meta.get("low"), meta.get("high")
    unit = f" {meta['unit']}" if meta.get("unit") else ""
    if low is not None and result < low:
        raise ConfigError(where, f"at least {low:g}{unit}", _show(value))
    if high is not None and result > high:
        raise ConfigError(where, f"at most {high:g}{unit}", _show(value))
    return result


def convert(kind: Any, value: Any, where: str, meta: Mapping[str, Any]) -> Any:
    """`value` (from Python or TOML) as `kind`; raises ConfigError naming `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(where, "a table", _show(value))
        return build(kind, value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return convert(inner[0], value, where, meta)
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(where, type_name(kind), _show(value))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise ConfigError(where, type_name(kind), _show(value))
        return tuple(convert(args[0], v, f"{where}[{i}]", meta) for i, v in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(where, type_name(kind), _show(value))
        return {
            convert(args[0], k, f"{where} (key)", {}): convert(args[1], v, f"{where}.{k}", meta)
            for k, v in value.items()
        }
    if kind is bool:
        if isinstance(value, bool):
            return value
    elif kind in (int, float):
        return _number(kind, value, where, meta)
    elif kind is Path:
        if isinstance(value, (str, Path)) and str(value):
            return Path(value)
    elif kind is str:
        if isinstance(value, str):
            return value
    else:
        raise TypeError(f"{where}: a setting cannot have type {kind!r}")
    raise ConfigError(where, type_name(kind), _show(value))


def parse_text(kind: Any, text: str, where: str, meta: Mapping[str, Any]) -> Any:
    """A value from an environment variable, which is always text; lists are comma-separated."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if text.strip().lower() in ("", "none"):
            return None
        kind = next(a for a in args if a is not type(None))
        return parse_text(kind, text, where, meta)
    if origin is tuple:
        parts = [p.strip() for p in text.split(",") if p.strip()]
        return tuple(parse_text(args[0], p, f"{where}[{i}]", meta) for i, p in enumerate(parts))
    if origin in (dict, Mapping):
        table: dict[str, str] = {}
        for part in (p.strip() for p in text.split(",") if p.strip()):
            key, sep, value = part.partition("=")
            if not sep:
                raise ConfigError(where, "name=value, name=value, …", _show(text))
            table[key.strip()] = value.strip()
        return convert(kind, table, where, meta)
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.strip().lower() in words:
            return words[text.strip().lower()]
        raise ConfigError(where, "true or false", _show(text))
    if kind in (int, float):
        try:
            return _number(kind, kind(text), where, meta)
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(where, type_name(kind), _show(text)) from None
    return convert(kind, text, where, meta)


def hints(cls: type) -> dict[str, Any]:
    """Resolved field types of a schema dataclass."""
    return typing.get_type_hints(cls)


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """A `cls` from a mapping. Unknown keys are refused with the nearest valid one.

    Raises ConfigError (and, for a key that does not exist, its subclass UnknownSettingError).
    """
    kinds = hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    out: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if not isinstance(key, str) or key not in fields:
            raise UnknownSettingError(path, fields, str(key))
        out[key] = convert(kinds[key], value, path, fields[key].metadata)
    for name, f in fields.items():
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and name not in out:
            raise ConfigError(f"{where}.{name}" if where else name, "a value", "nothing")
    return cls(**out)


def check(instance: Any, where: str = "") -> None:
    """Validate an object that Python code built directly; called from `__post_init__`.

    Normalises too: an int given for a number becomes a float, a list given for a tuple a tuple.
    """
    kinds = hints(type(instance))
    for f in dataclasses.fields(instance):
        path = f"{where}.{f.name}" if where else f.name
        value = convert(kinds[f.name], getattr(instance, f.name), path, f.metadata)
        object.__setattr__(instance, f.name, value)


def to_mapping(instance: Any, *, show_secrets: bool = False) -> dict[str, Any]:
    """Nested plain values, fit for JSON; secrets are masked unless asked for."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(instance):
        value = getattr(instance, f.name)
        if dataclasses.is_dataclass(value):
            out[f.name] = to_mapping(value, show_secrets=show_secrets)
        elif f.metadata.get("secret") and value is not None and not show_secrets:
            out[f.name] = SECRET_MASK
        elif isinstance(value, Path):
            out[f.name] = str(value)
        elif isinstance(value, tuple):
            out[f.name] = [str(v) if isinstance(v, Path) else v for v in value]
        elif isinstance(value, Mapping):
            out[f.name] = dict(value)
        else:
            out[f.name] = value
    return out
