"""Deadlines and the one timer for many waits, on a clock that moves only when told to."""

from __future__ import annotations

import math

from simple_rpc import Deadline
from simple_rpc._deadline import Watchdog
from simple_rpc.testing import ManualClock


class Item:
    def __init__(self, due_s: float, log: list[tuple[str, float]], name: str = "") -> None:
        self.due_s = due_s
        self.log = log
        self.name = name

    def due_at_s(self) -> float:
        return self.due_s

    def on_due(self, now_s: float) -> None:
        self.log.append((self.name, now_s))
        self.due_s = math.inf


def test_a_deadline_is_absolute():
    clock = ManualClock(100.0)
    deadline = Deadline.after(3.0, clock)
    assert (deadline.remaining_s(clock), deadline.has_passed(clock)) == (3.0, False)
    clock.advance(2.0)
    assert deadline.remaining_s(clock) == 1.0
    clock.advance(1.0)
    assert (deadline.remaining_s(clock), deadline.has_passed(clock)) == (0.0, True)
    clock.advance(1.0)
    assert deadline.remaining_s(clock) == 0.0
    assert Deadline(5.0).earlier(Deadline(4.0)) == Deadline(4.0)
    assert not Deadline.never().has_passed(clock)


def test_each_item_is_told_at_its_time():
    clock, log = ManualClock(0.0), []
    dog: Watchdog[Item] = Watchdog(clock)
    for name, due_s in (("b", 2.0), ("a", 1.0), ("never", math.inf), ("c", 3.0)):
        dog.watch(Item(due_s, log, name))
    clock.advance(10.0)
    assert log == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert clock.next_due_s is None  # nothing is due: no timer runs


def test_a_wait_that_moves_later_costs_one_spurious_look():
    clock, log = ManualClock(0.0), []
    dog: Watchdog[Item] = Watchdog(clock)
    item = Item(1.0, log, "x")
    dog.watch(item)
    item.due_s = 5.0
    clock.advance(4.9)
    assert log == []
    clock.advance(0.1)
    assert log == [("x", 5.0)]


def test_a_wait_that_moves_earlier_is_expected():
    clock, log = ManualClock(0.0), []
    dog: Watchdog[Item] = Watchdog(clock)
    item = Item(10.0, log, "x")
    dog.watch(item)
    item.due_s = 2.0
    dog.expect(2.0)
    clock.advance(2.0)
    assert log == [("x", 2.0)]


def test_unwatched_and_closed_hear_nothing():
    clock, log = ManualClock(0.0), []
    dog: Watchdog[Item] = Watchdog(clock)
    item = Item(1.0, log)
    dog.watch(item)
    dog.unwatch(item)
    clock.advance(5.0)
    dog.watch(Item(6.0, log))
    dog.close()
    clock.advance(5.0)
    assert log == []
    assert len(dog) == 0


def test_an_item_told_may_unwatch_another_that_is_due_too():
    clock, log = ManualClock(0.0), []
    dog: Watchdog[Item] = Watchdog(clock)
    items = [Item(1.0, log, "x"), Item(1.0, log, "y")]

    def on_due(now_s: float) -> None:
        log.append(("told", now_s))
        for item in items:
            dog.unwatch(item)

    for item in items:
        item.on_due = on_due  # type: ignore[method-assign]
        dog.watch(item)
    clock.advance(1.0)
    assert log == [("told", 1.0)]
