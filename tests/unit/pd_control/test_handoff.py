"""The queues between core and loop thread: order, no lost wake-up, what happens after close."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pd_control.runtime.handoff import DRAIN_SLICE_ITEMS, ToCore, ToLoop


def test_to_core_wakes_once_for_many_items_and_keeps_order() -> None:
    wakes: list[int] = []
    queue: ToCore[int] = ToCore(lambda: wakes.append(1))
    for i in range(5):
        assert queue.put(i)
    got: list[int] = []
    assert queue.drain(got.append) == 5
    assert (got, len(wakes)) == ([0, 1, 2, 3, 4], 1)
    assert queue.drain(got.append) == 0
    queue.put(5)
    assert len(wakes) == 2


def test_an_item_put_while_draining_waits_and_wakes_again() -> None:
    wakes: list[int] = []
    queue: ToCore[int] = ToCore(lambda: wakes.append(1))
    queue.put(0)
    got: list[int] = []

    def handle(item: int) -> None:
        got.append(item)
        if item < 3:
            queue.put(item + 1)

    assert queue.drain(handle) == 1
    assert (got, len(wakes)) == ([0], 2)


def test_a_raising_handler_leaves_the_rest_with_a_wake() -> None:
    wakes: list[int] = []
    queue: ToCore[int] = ToCore(lambda: wakes.append(1))
    queue.put(0)
    queue.put(1)

    def fail(item: int) -> None:
        raise RuntimeError(str(item))

    with pytest.raises(RuntimeError, match="0"):
        queue.drain(fail)
    assert len(wakes) == 2
    got: list[int] = []
    queue.drain(got.append)
    assert got == [1]


def test_to_core_delivers_what_came_before_close_and_counts_the_rest() -> None:
    queue: ToCore[int] = ToCore(lambda: None)
    queue.put(0)
    queue.close()
    assert not queue.put(1)
    got: list[int] = []
    queue.drain(got.append)
    assert (got, queue.dropped) == ([0], 1)


def test_no_wake_up_is_lost_between_empty_and_sleep() -> None:
    """A consumer that sleeps only on its wake event ends only if every item had a wake after it."""
    woken = threading.Event()
    queue: ToCore[int] = ToCore(woken.set)
    total = 20_000
    got: list[int] = []

    def consume() -> None:
        while len(got) < total:
            assert woken.wait(30), f"asleep with {len(queue)} items queued"
            woken.clear()
            queue.drain(got.append)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for i in range(total):
        queue.put(i)
    consumer.join(60)
    assert got == list(range(total))


async def test_to_loop_runs_on_the_loop_thread_in_order_and_in_slices() -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    got: list[int] = []
    threads: set[int] = set()
    total = DRAIN_SLICE_ITEMS * 3 + 1

    def handle(item: int) -> None:
        threads.add(threading.get_ident())
        got.append(item)
        if len(got) == total:
            done.set()

    queue: ToLoop[int] = ToLoop(loop, handle)
    turns = 0

    def other_work() -> None:
        nonlocal turns
        turns += 1
        if not done.is_set():
            loop.call_soon(other_work)

    loop.call_soon(other_work)
    sender = threading.Thread(target=lambda: [queue.put(i) for i in range(total)])
    sender.start()
    await asyncio.wait_for(done.wait(), 30)
    sender.join()
    assert got == list(range(total))
    assert threads == {threading.get_ident()}
    assert turns >= 3


async def test_to_loop_after_close() -> None:
    got: list[int] = []
    queue: ToLoop[int] = ToLoop(asyncio.get_running_loop(), got.append)
    queue.put(1)
    queue.close()
    assert not queue.put(2)
    await asyncio.sleep(0)
    assert (got, queue.dropped) == ([1], 1)


def test_to_loop_on_a_closed_loop_refuses() -> None:
    loop = asyncio.new_event_loop()
    queue: ToLoop[int] = ToLoop(loop, lambda item: None)
    loop.close()
    assert not queue.put(1)
    assert queue.dropped == 1
