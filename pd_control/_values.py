"""Immutable values that are cheap to make.

`dataclass(frozen=True)` guards each assignment in its own `__init__`, which makes a value of eight
fields four to five times as dear as a mutable one; a request makes some fifty of them on its way. So
messages, events and effects are frozen for the type checker, which is strict here and runs with every
change, and plain at run time. They compare and hash by value either way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, slots: bool) -> Any:
        """`dataclasses.dataclass`, with `frozen` left to the type checker."""
        assert frozen, "a value that may change is an ordinary dataclass"
        return dataclasses.dataclass(slots=slots, unsafe_hash=True)
