"""F15: a background task dies or is collected while it waits, and the loop looks healthy.

Here: tasks are held strongly, and the death of one is noticed and reported, whatever killed it.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from simple_rpc.loop_thread import Fatal, LoopThread, Scope

GUARD_S = 30.0


class _Reader:
    """Waits for a future that only the waiting task itself references: a cycle ready to collect."""

    async def read_for_ever(self) -> None:
        self.future = asyncio.get_running_loop().create_future()
        await self.future


@pytest.fixture
def fatal_events():
    return []


@pytest.fixture
def loop_thread(fatal_events):
    noticed = threading.Event()

    def on_fatal(fatal: Fatal) -> None:
        fatal_events.append(fatal)
        noticed.set()

    thread = LoopThread("f15", on_fatal=on_fatal).start()
    thread.noticed = noticed  # type: ignore[attr-defined]
    yield thread
    thread.close()


def on_loop(thread: LoopThread, function):
    async def body():
        result = function()
        await asyncio.sleep(0)  # what was started takes its first step
        await asyncio.sleep(0)
        return result

    return thread.submit(body).result(GUARD_S)


def test_the_collector_cannot_take_a_spawned_task(loop_thread, fatal_events):
    def spawn() -> weakref.ref:
        return weakref.ref(loop_thread.spawn(_Reader().read_for_ever(), name="reader"))

    ref = on_loop(loop_thread, spawn)
    on_loop(loop_thread, gc.collect)
    task = ref()
    assert task is not None
    assert not task.done()
    assert not fatal_events


def test_a_task_started_past_the_thread_and_collected_is_reported(loop_thread, fatal_events):
    """The published failure itself: a bare create_task, whose reference nobody kept."""

    def start() -> weakref.ref:
        return weakref.ref(loop_thread.loop.create_task(_Reader().read_for_ever()))

    ref = on_loop(loop_thread, start)
    gc.collect()
    assert ref() is None, "the fault was not produced: the task is still alive"
    assert loop_thread.noticed.wait(GUARD_S)
    assert "destroyed" in fatal_events[0].reason


@pytest.mark.parametrize("how", ["cancelled", "raised", "returned"])
def test_a_killed_background_task_is_noticed_and_named(loop_thread, fatal_events, how):
    async def background() -> None:
        await asyncio.sleep(0)
        if how == "raised":
            raise ConnectionResetError("read failed")
        if how == "cancelled":
            await asyncio.get_running_loop().create_future()

    task = on_loop(loop_thread, lambda: loop_thread.spawn(background(), name="news reader"))
    if how == "cancelled":
        loop_thread.call(task.cancel)  # somebody else's hand, not loop_thread.stop
    assert loop_thread.noticed.wait(GUARD_S)
    assert "news reader" in fatal_events[0].reason
    assert how in fatal_events[0].reason
    assert loop_thread.fatal is fatal_events[0]


def test_the_death_of_a_peers_task_reaches_the_peers_owner(loop_thread, fatal_events):
    told = threading.Event()
    errors: list[BaseException] = []

    def on_failure(error: BaseException) -> None:
        errors.append(error)
        told.set()

    task = on_loop(
        loop_thread,
        lambda: loop_thread.spawn(
            _Reader().read_for_ever(), name="peer", scope=Scope.PEER, on_failure=on_failure
        ),
    )
    loop_thread.call(task.cancel)
    assert told.wait(GUARD_S)
    assert isinstance(errors[0], asyncio.CancelledError)
    assert not fatal_events
