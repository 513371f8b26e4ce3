"""Transition tables as data, and the one rule for what is not in them.

A table lists every legal (state, input) pair with the state that follows. A pair that it does not
list changes nothing and is counted under `ignored.<machine>.<STATE>.<INPUT>`. The tables themselves
are in `p_request`, `p_transfer` and `d_request`; `tools/gen_state_docs.py` prints them for the docs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


class TableEnum(enum.Enum):
    """Base of states and inputs. Members are singletons, so they hash by identity: at C speed,
    where `enum.Enum` hashes the name in Python."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=enum.Enum)
I = TypeVar("I", bound=enum.Enum)  # noqa: E741  the letter that a transition table uses


@dataclass(frozen=True, slots=True)
class Row(Generic[S, I]):
    """From each of `states`, `input` leads to `to`; `why` says when and what goes with it."""

    states: tuple[S, ...]
    input: I
    to: S
    why: str


class Table(Generic[S, I]):
    """One machine: its rows, indexed."""

    __slots__ = ("final", "initial", "inputs", "name", "next", "rows", "states")

    def __init__(
        self,
        name: str,
        states: type[S],
        inputs: type[I],
        initial: tuple[S, ...],
        final: tuple[S, ...],
        rows: Sequence[Row[S, I]],
    ) -> None:
        self.name = name
        self.states = states
        self.inputs = inputs
        self.initial = initial
        self.final = final
        self.rows = tuple(rows)
        self.next: dict[tuple[S, I], S] = {}  # what is not in it is illegal
        for row in self.rows:
            for state in row.states:
                if (state, row.input) in self.next:
                    raise ValueError(f"{name}: {state.name} × {row.input.name} listed twice")
                if state in final:
                    raise ValueError(f"{name}: {state.name} is final and has a row")
                self.next[state, row.input] = row.to

    def after(self, state: S, given: I) -> S | None:
        """The state that follows, or None where the pair is illegal."""
        return self.next.get((state, given))


class Counters(dict[str, int]):
    """Named counts, created on first use. Part of every snapshot."""

    def add(self, name: str, by: int = 1) -> None:
        self[name] = self.get(name, 0) + by
