"""The undivided reference engine as it runs: real worker processes, one to four ranks."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pd_control.reference.engine import Engine, EngineConfig, Output, Request
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.spec import TINY
from pd_control.reference.worker_group import WorkerDiedError

PROMPTS = [[(7 * i + 3 * j) % 500 for j in range(n)] for i, n in enumerate([1, 5, 16, 33, 90])]


class Running:
    """An engine and a place where its outputs are collected by request."""

    def __init__(self, **config: object) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self._ended: queue.Queue[str] = queue.Queue()
        self.fatal: queue.Queue[str] = queue.Queue()
        self.first_token = threading.Event()
        self.engine = Engine(
            EngineConfig(**config),  # type: ignore[arg-type]
            TINY,
            self._on_output,
            self.fatal.put,
        )
        self.engine.start()

    def _on_output(self, output: Output) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)
        if output.tokens:
            self.first_token.set()
        if output.finish_reason:
            self._ended.put(output.request_id)

    def wait_ended(self, count: int) -> None:
        for _ in range(count):
            self._ended.get(timeout=60)

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.outputs[request_id] for t in o.tokens]


@pytest.fixture(params=[1, 2, 4])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    running = Running(tp_size=request.param, num_blocks=128, block_tokens=8, max_step_tokens=64)
    yield running
    running.engine.close()


def test_requests_together_get_what_each_gets_alone(running: Running) -> None:
    params = SamplingParams(max_tokens=6)
    for i, prompt in enumerate(PROMPTS):
        running.engine.submit(Request(f"together{i}", prompt, params))
    running.wait_ended(len(PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        running.engine.submit(Request(f"alone{i}", prompt, params))
        running.wait_ended(1)
    for i in range(len(PROMPTS)):
        assert running.tokens(f"together{i}") == running.tokens(f"alone{i}")
        assert len(running.tokens(f"alone{i}")) == 6
    assert running.engine.pool.num_held == 0


@pytest.fixture
def single() -> Iterator[Running]:
    running = Running(num_blocks=64, block_tokens=8)
    yield running
    running.engine.close()


def test_an_abort_ends_the_request_once_and_frees_its_blocks(single: Running) -> None:
    single.engine.submit(Request("a", PROMPTS[3], SamplingParams(max_tokens=400)))
    assert single.first_token.wait(60)
    single.engine.abort("a")
    single.engine.abort("a")
    single.wait_ended(1)
    assert [o.finish_reason for o in single.outputs["a"] if o.finish_reason] == ["abort"]
    single.engine.submit(Request("b", PROMPTS[1], SamplingParams(max_tokens=2)))
    single.wait_ended(1)
    assert single.engine.pool.num_held == 0


def test_a_bad_request_is_told_and_harms_nobody(single: Running) -> None:
    single.engine.submit(Request("empty", []))
    single.engine.submit(Request("range", [10_000]))
    single.engine.submit(Request("long", [1] * 500, SamplingParams(max_tokens=500)))
    single.engine.submit(Request("good", PROMPTS[1], SamplingParams(max_tokens=2)))
    single.wait_ended(4)
    assert "at least one token" in single.outputs["empty"][-1].error
    assert "[0, 512)" in single.outputs["range"][-1].error
    assert "the pool holds 512" in single.outputs["long"][-1].error
    assert len(single.tokens("good")) == 2


def test_a_killed_worker_ends_every_request_with_its_name(single: Running) -> None:
    single.engine.submit(Request("a", PROMPTS[3], SamplingParams(max_tokens=400)))
    assert single.first_token.wait(60)
    os.kill(single.engine.worker_pids[0], signal.SIGKILL)
    assert "rank 0" in single.fatal.get(timeout=60)
    single.wait_ended(1)
    last = single.outputs["a"][-1]
    assert last.finish_reason == "error"
    assert "SIGKILL" in last.error


def test_a_worker_killed_while_nothing_runs_ends_the_engine(single: Running) -> None:
    os.kill(single.engine.worker_pids[0], signal.SIGKILL)
    assert "SIGKILL" in single.fatal.get(timeout=60)


def test_an_idle_engine_sleeps(single: Running) -> None:
    """Nothing to compute costs nothing: its thread's CPU clock stands still over many scheduler ticks."""
    single.engine.submit(Request("a", PROMPTS[1], SamplingParams(max_tokens=2)))
    single.wait_ended(1)
    clock = time.pthread_getcpuclockid(single.engine.core_thread_ident)
    single.engine.abort("nobody")  # the last wake; after it the core must come to rest
    before = time.clock_gettime(clock)
    for _ in range(200):
        os.sched_yield()
    time.sleep(0.5)  # measured, not waited for: an engine that ticks burns CPU in it
    assert time.clock_gettime(clock) - before < 0.05


def test_close_leaves_no_process_behind() -> None:
    running = Running(tp_size=2)
    pids = running.engine.worker_pids
    running.engine.submit(Request("a", PROMPTS[3], SamplingParams(max_tokens=400)))
    assert running.first_token.wait(60)
    running.engine.close()
    running.wait_ended(1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_cannot_start_says_why() -> None:
    engine = Engine(EngineConfig(source="/nowhere"), TINY, lambda output: None)
    with pytest.raises(WorkerDiedError, match="worker of rank 0: no model at '/nowhere'"):
        engine.start()
    engine.close()


def test_close_ends_a_start_that_is_under_way() -> None:
    engine = Engine(EngineConfig(tp_size=2), TINY, lambda output: None)
    failures: list[Exception] = []

    def start() -> None:
        try:
            engine.start()
        except WorkerDiedError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while not engine.worker_pids and thread.is_alive():
        os.sched_yield()
    pids = engine.worker_pids
    engine.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert failures, "they were still loading"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
