"""The loop thread's contract: order, close, scopes, futures, lag."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import threading
import time

import pytest

from simple_rpc._errors import Code, RpcError
from simple_rpc._lag import LagMonitor
from simple_rpc.loop_thread import Fatal, LoopClosedError, LoopThread, Scope
from simple_rpc.mailbox import Mailbox
from simple_rpc.metrics import Counters

GUARD_S = 30.0  # a deadlock guard, never an expectation


class Fatals:
    """Collects what `on_fatal` gets and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen: list[Fatal] = []
        self.threads: list[str] = []
        self.event = threading.Event()

    def __call__(self, fatal: Fatal) -> None:
        self.seen.append(fatal)
        self.threads.append(threading.current_thread().name)
        self.event.set()

    def wait(self) -> Fatal:
        assert self.event.wait(GUARD_S)
        return self.seen[0]


@pytest.fixture
def fatals():
    return Fatals()


@pytest.fixture
def loop_thread(fatals):
    thread = LoopThread("test-loop", on_fatal=fatals)
    thread.start()
    yield thread
    thread.close()


def run(thread: LoopThread, function, *args):
    """Calls `function` on the loop thread and returns its result."""

    async def body():
        return function(*args)

    return thread.submit(body).result(GUARD_S)


# -- into the loop -----------------------------------------------------------------------------------


def test_calls_run_on_the_loop_thread_in_order(loop_thread, fatals):
    seen: list[tuple[int, str]] = []
    for i in range(1000):
        loop_thread.call(lambda i=i: seen.append((i, threading.current_thread().name)))
    run(loop_thread, lambda: None)
    assert seen == [(i, "test-loop") for i in range(1000)]
    assert not fatals.seen


def test_a_call_from_the_loop_itself_runs_after_what_was_accepted_before(loop_thread):
    seen: list[int] = []

    def first() -> None:
        loop_thread.call(seen.append, 3)
        seen.append(1)

    gate = threading.Event()
    loop_thread.call(gate.wait, GUARD_S)
    loop_thread.call(first)
    loop_thread.call(seen.append, 2)
    gate.set()
    run(loop_thread, lambda: None)
    run(loop_thread, lambda: None)
    assert seen == [1, 2, 3]


def test_a_coroutine_takes_its_first_step_before_what_was_accepted_after_it(loop_thread):
    seen: list[int] = []

    async def step(i: int) -> None:
        seen.append(i)
        await asyncio.sleep(0)

    gate = threading.Event()
    loop_thread.call(gate.wait, GUARD_S)  # everything below is accepted in one turn
    futures = []
    for i in range(0, 300, 3):
        loop_thread.call(seen.append, i)
        futures.append(loop_thread.submit(step, i + 1))
        loop_thread.call(lambda i=i: loop_thread.call(lambda: None) or seen.append(i + 2))
    gate.set()
    for future in futures:
        future.result(GUARD_S)
    run(loop_thread, lambda: None)
    assert seen == list(range(300))


def test_many_threads_each_see_their_own_order_and_nothing_is_lost(loop_thread):
    seen: list[tuple[int, int]] = []
    start = threading.Barrier(8)

    def producer(who: int) -> None:
        start.wait()
        for i in range(2000):
            loop_thread.call(seen.append, (who, i))

    threads = [threading.Thread(target=producer, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(loop_thread, lambda: None)
    assert len(seen) == 16_000
    for who in range(8):
        assert [i for w, i in seen if w == who] == list(range(2000))


@pytest.mark.parametrize("round_number", range(5))
def test_closing_while_many_threads_call_runs_exactly_what_was_accepted(round_number):
    loop_thread = LoopThread("race").start()
    ran: list[tuple[int, int]] = []
    accepted: list[list[int]] = [[] for _ in range(6)]
    start = threading.Barrier(7)

    def producer(who: int) -> None:
        start.wait()
        for i in range(100_000):
            try:
                loop_thread.call(ran.append, (who, i))
            except LoopClosedError:
                return
            accepted[who].append(i)

    threads = [threading.Thread(target=producer, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    start.wait()
    loop_thread.close()
    num_at_close = len(ran)
    for thread in threads:
        thread.join()
    assert len(ran) == num_at_close, "something ran after close returned"
    for who in range(6):
        assert [i for w, i in ran if w == who] == accepted[who]


def test_closing_while_many_threads_submit_settles_every_future():
    loop_thread = LoopThread("race").start()
    futures: list[list[concurrent.futures.Future[int]]] = [[] for _ in range(4)]
    start = threading.Barrier(5)

    async def answer(i: int) -> int:
        await asyncio.sleep(0)
        return i

    def producer(who: int) -> None:
        start.wait()
        with contextlib.suppress(LoopClosedError):
            for i in range(20_000):
                futures[who].append(loop_thread.submit(answer, i))

    threads = [threading.Thread(target=producer, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    loop_thread.close()
    for thread in threads:
        thread.join()
    for mine in futures:
        for i, future in enumerate(mine):
            assert future.done()
            error = future.exception()
            assert isinstance(error, LoopClosedError) if error else future.result() == i


def test_before_start_and_after_close_nothing_is_accepted():
    loop_thread = LoopThread()
    with pytest.raises(LoopClosedError, match="is new"):
        loop_thread.call(print)
    loop_thread.start()
    with pytest.raises(LoopClosedError, match="started before"):
        loop_thread.start()
    loop_thread.close()
    loop_thread.close()
    with pytest.raises(LoopClosedError, match="is closed") as caught:
        loop_thread.call(print)
    assert caught.value.code is Code.ABORTED

    async def never() -> None:
        raise AssertionError("ran after close")

    with pytest.raises(LoopClosedError):
        loop_thread.submit(never)


def test_closing_one_that_never_started_is_fine():
    loop_thread = LoopThread()
    loop_thread.close()
    with pytest.raises(LoopClosedError):
        loop_thread.start()


def test_close_from_the_loop_itself_is_refused(loop_thread):
    with pytest.raises(RuntimeError, match="do not call it from there"):
        run(loop_thread, loop_thread.close)


# -- futures -----------------------------------------------------------------------------------------


def test_submit_gives_result_or_exception(loop_thread, fatals):
    async def divide(a: int, b: int) -> float:
        return a / b

    assert loop_thread.submit(divide, 6, 3).result(GUARD_S) == 2
    with pytest.raises(ZeroDivisionError):
        loop_thread.submit(divide, 6, 0).result(GUARD_S)
    with pytest.raises(TypeError):
        loop_thread.submit(divide).result(GUARD_S)
    assert not fatals.seen, "whoever holds the future has the exception: nothing else suffers"


def test_cancelling_the_future_cancels_the_coroutine(loop_thread, fatals):
    started, ended = threading.Event(), threading.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = loop_thread.submit(hang)
    assert started.wait(GUARD_S)
    assert future.cancel()
    assert ended.wait(GUARD_S)
    assert not fatals.seen


def test_close_ends_what_was_submitted_with_an_error_and_lets_it_clean_up():
    loop_thread = LoopThread().start()
    started = threading.Event()
    cleaned: list[str] = []

    async def hang() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    future = loop_thread.submit(hang)
    assert started.wait(GUARD_S)
    loop_thread.close()
    assert cleaned == ["yes"]
    with pytest.raises(LoopClosedError):
        future.result(0)


def test_a_task_that_ignores_its_cancellation_is_named_and_never_runs_again():
    loop_thread = LoopThread().start()
    started = threading.Event()

    async def stubborn() -> None:
        started.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    future = loop_thread.submit(stubborn)
    assert started.wait(GUARD_S)
    with pytest.raises(RpcError, match=r"ignored their cancellation.*stubborn") as caught:
        loop_thread.close(timeout_s=0.05)
    assert caught.value.code is Code.TIMEOUT
    with pytest.raises(LoopClosedError):
        future.result(0)


def test_a_loop_that_hangs_is_reported_with_the_place_where_it_hangs():
    loop_thread = LoopThread().start()
    gate, entered = threading.Event(), threading.Event()

    def the_place_where_it_hangs() -> None:
        entered.set()
        gate.wait(GUARD_S)

    loop_thread.call(the_place_where_it_hangs)
    assert entered.wait(GUARD_S)
    with pytest.raises(RpcError, match=r"(?s)hangs.*the_place_where_it_hangs"):
        loop_thread.close(timeout_s=0.05)
    gate.set()
    loop_thread.close()


# -- scopes ------------------------------------------------------------------------------------------


def test_a_call_that_raises_is_fatal_and_the_loop_goes_on(loop_thread, fatals):
    def broken() -> None:
        raise KeyError("x")

    loop_thread.call(broken)
    fatal = fatals.wait()
    assert "broken" in fatal.reason
    assert isinstance(fatal.error, KeyError)
    assert fatals.threads == ["test-loop"]
    assert loop_thread.fatal == fatal
    assert run(loop_thread, lambda: 7) == 7


@pytest.mark.parametrize("scope", [Scope.REQUEST, Scope.PEER])
def test_a_failed_request_or_peer_task_tells_its_owner_only(loop_thread, fatals, scope):
    failures: list[BaseException] = []
    told = threading.Event()

    async def broken() -> None:
        raise KeyError("x")

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        told.set()

    def spawn() -> None:
        loop_thread.spawn(broken(), name="broken", scope=scope, on_failure=on_failure)

    loop_thread.call(spawn)
    assert told.wait(GUARD_S)
    assert isinstance(failures[0], KeyError)
    assert not fatals.seen
    counters = loop_thread.metrics
    assert isinstance(counters, Counters)
    assert counters.snapshot().counters[f"loop.failed.{scope.value}"] == 1


def test_a_request_task_may_return(loop_thread, fatals):
    failures: list[BaseException] = []

    async def fine() -> int:
        return 1

    async def spawn_and_wait() -> int:
        return await loop_thread.spawn(
            fine(), name="fine", scope=Scope.REQUEST, on_failure=failures.append
        )

    assert loop_thread.submit(spawn_and_wait).result(GUARD_S) == 1
    assert not failures
    assert not fatals.seen


def test_an_on_failure_that_raises_is_fatal(loop_thread, fatals):
    async def broken() -> None:
        raise KeyError("x")

    def on_failure(_: BaseException) -> None:
        raise OSError("second")

    def spawn() -> None:
        loop_thread.spawn(broken(), name="b", scope=Scope.PEER, on_failure=on_failure)

    loop_thread.call(spawn)
    assert isinstance(fatals.wait().error, OSError)


def test_a_callback_of_the_loop_that_raises_is_fatal(loop_thread, fatals):
    def broken() -> None:
        raise KeyError("x")

    loop_thread.call(lambda: loop_thread.loop.call_soon(broken))
    assert isinstance(fatals.wait().error, KeyError)


def test_scope_and_on_failure_must_agree(loop_thread):
    async def nothing() -> None:
        pass

    with pytest.raises(ValueError, match="on_failure"):
        run(loop_thread, lambda: loop_thread.spawn(nothing(), name="x", scope=Scope.REQUEST))
    with pytest.raises(ValueError, match="on_failure"):
        run(loop_thread, lambda: loop_thread.spawn(nothing(), name="x", on_failure=print))


def test_stopping_a_task_is_no_failure(loop_thread, fatals):
    ended = threading.Event()

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = run(loop_thread, lambda: loop_thread.spawn(background(), name="bg"))
    run(loop_thread, lambda: None)
    loop_thread.call(loop_thread.stop, task)
    assert ended.wait(GUARD_S)
    run(loop_thread, lambda: None)
    assert not fatals.seen


def test_on_fatal_is_called_once_and_may_raise(caplog):
    calls: list[Fatal] = []

    def on_fatal(fatal: Fatal) -> None:
        calls.append(fatal)
        raise RuntimeError("embedder's bug")

    with LoopThread(on_fatal=on_fatal) as loop_thread:
        loop_thread.call(loop_thread.fail, "first")
        loop_thread.call(loop_thread.fail, "second")
        run(loop_thread, lambda: None)
        assert [fatal.reason for fatal in calls] == ["first"]
        assert "first" in repr(loop_thread)
    assert "on_fatal raised" in caplog.text


def test_a_loop_that_dies_is_fatal_and_its_futures_end(fatals):
    loop_thread = LoopThread("dying", on_fatal=fatals).start()

    async def hang() -> None:
        await asyncio.Event().wait()

    def die() -> None:
        raise SystemExit(3)

    future = loop_thread.submit(hang)
    run(loop_thread, lambda: None)
    loop_thread.call(loop_thread.loop.call_soon, die)
    assert "without being asked" in fatals.wait().reason
    with pytest.raises(LoopClosedError):
        future.result(GUARD_S)
    loop_thread.close()
    with pytest.raises(LoopClosedError):
        loop_thread.call(print)


def test_no_thread_and_no_descriptor_is_left_behind():
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    LoopThread().start().close()
    gc.collect()
    threads, descriptors = threading.active_count(), num_descriptors()
    for _ in range(20):
        LoopThread().start().close()
    gc.collect()
    assert threading.active_count() == threads
    assert num_descriptors() <= descriptors


# -- lag ---------------------------------------------------------------------------------------------


def test_a_stall_is_reported_once_and_a_beat_ends_it():
    monitor = LagMonitor(limit_s=1.0, beat_s=0.25)
    assert monitor.check(100.0) is None, "it has not begun to turn"
    assert monitor.beat(0.0) == 0.0
    assert monitor.beat(0.25) == 0.0
    assert monitor.beat(0.6) == pytest.approx(0.1)
    assert monitor.check(1.8) is None
    assert monitor.check(1.9) == pytest.approx(1.05)
    assert monitor.check(5.0) is None, "reported already"
    assert monitor.beat(6.0) == pytest.approx(5.15)
    assert monitor.check(7.0) is None
    assert monitor.check(7.3) == pytest.approx(1.05)


def test_a_lag_limit_below_the_beat_is_refused():
    with pytest.raises(ValueError, match="above the beat"):
        LagMonitor(limit_s=0.1, beat_s=0.25)


def test_a_blocked_loop_is_noticed_while_it_is_blocked():
    reports = []
    noticed = threading.Event()

    def on_lag(report) -> None:
        reports.append(report)
        noticed.set()

    with LoopThread(on_lag=on_lag, lag_limit_s=0.3) as loop_thread:

        def blocks_the_loop() -> None:
            noticed.wait(GUARD_S)

        loop_thread.call(blocks_the_loop)
        assert noticed.wait(GUARD_S)
        run(loop_thread, lambda: None)
    assert len(reports) == 1
    assert reports[0].lag_s >= 0.3
    assert "blocks_the_loop" in reports[0].stack


# -- out of the loop ---------------------------------------------------------------------------------


def test_a_mailbox_wakes_once_until_it_is_emptied():
    wakes: list[int] = []
    box: Mailbox[int] = Mailbox(lambda: wakes.append(1))
    assert all(box.put(i) for i in range(5))
    assert len(wakes) == 1
    assert box.take_all() == [0, 1, 2, 3, 4]
    assert box.take_all() == []
    box.put(5)
    assert len(wakes) == 2
    box.close()
    box.close()
    assert not box.put(6)
    assert box.num_refused == 1
    assert box.take_all() == [5], "what was accepted before close is still there"


def test_a_mailbox_between_a_loop_and_a_sleeping_thread_loses_nothing(loop_thread):
    condition = threading.Condition()
    state = {"woken": False}

    def wake() -> None:
        with condition:
            state["woken"] = True
            condition.notify()

    box: Mailbox[int] = Mailbox(wake)
    taken: list[int] = []

    def put_some(first: int) -> None:
        for i in range(first, first + 10):
            box.put(i)
        if first + 10 < 20_000:
            loop_thread.loop.call_soon(put_some, first + 10)

    loop_thread.call(put_some, 0)
    until_s = time.monotonic() + GUARD_S
    while len(taken) < 20_000 and time.monotonic() < until_s:
        with condition:
            condition.wait_for(lambda: state["woken"], GUARD_S)
            state["woken"] = False
        taken += box.take_all()
    assert taken == list(range(20_000))
