"""The fake engine on its own, undivided: its tokens are the oracle's whatever its limits make it do."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from pd_control.testing.fake_engine import EngineError, EngineSpec, FakeEngine
from pd_control.testing.fake_model import Geometry, oracle

GEOMETRY = Geometry(num_layers=2, num_heads=4, head_dim=4, block_size_tokens=8)


@contextlib.contextmanager
def running(**limits: object) -> Iterator[FakeEngine]:
    engine = FakeEngine(EngineSpec(geometry=GEOMETRY, **limits))  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def prompt(n: int, seed: int = 1) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 40, 100])
def test_tokens_are_the_oracles(tp_size: int, num_tokens: int) -> None:
    with running(tp_size=tp_size, max_step_tokens=16) as engine:
        got = engine.generate("r", prompt(num_tokens), 5).result(30)
        assert got == oracle(prompt(num_tokens), 5, GEOMETRY)
        assert engine.call(engine.pool.referenced) == {}


def test_many_requests_share_prefixes_and_survive_preemption() -> None:
    """A pool that is far too small for all: preemption and hits change nothing but the time."""
    with running(num_blocks=24, max_step_tokens=32, max_steps_in_flight=2) as engine:
        prompts = [prompt(60, seed % 3) + prompt(seed, 9) for seed in range(1, 20)]
        futures = [engine.generate(f"r{i}", p, 12) for i, p in enumerate(prompts)]
        for p, f in zip(prompts, futures, strict=True):
            assert f.result(60) == oracle(p, 12, GEOMETRY)
        assert engine.call(engine.pool.referenced) == {}


def test_a_prefix_hit_saves_the_computation() -> None:
    with running(max_step_tokens=8) as engine:
        engine.generate("a", prompt(64), 1).result(30)
        before = engine.num_steps
        assert engine.generate("b", prompt(64), 1).result(30) == oracle(prompt(64), 1, GEOMETRY)
        assert engine.num_steps == before + 1  # the last block only
        engine.generate("c", prompt(64), 1, salt="other").result(30)
        assert engine.num_steps == before + 1 + 8


def test_abort_ends_the_future_and_frees_the_blocks() -> None:
    with running(layer_delay_s=0.01) as engine:
        future = engine.generate("r", prompt(50), 1000)
        engine.abort("r")
        with pytest.raises(EngineError, match="ABORTED"):
            future.result(30)
        engine.generate("s", prompt(9), 1).result(30)
        assert engine.call(engine.pool.referenced) == {}


def test_refused_requests_say_why() -> None:
    with running(num_blocks=4) as engine:
        for n in (0, 100):
            with pytest.raises(EngineError, match="BAD_REQUEST"):
                engine.generate("r", prompt(n), 1).result(30)


def test_an_idle_engine_does_not_turn() -> None:
    with running() as engine:
        engine.generate("r", prompt(9), 2).result(30)
        engine.call(lambda: None)
        wakes, steps = engine.num_wakes, engine.num_steps
        engine.call(lambda: None)
        assert engine.num_steps == steps
        assert engine.num_wakes <= wakes + 1


def test_worker_processes_compute_the_same_and_a_killed_one_is_replaced() -> None:
    with running(
        tp_size=2, workers="process", restart_lost_workers=True, layer_delay_s=0.002
    ) as engine:
        tokens: list[int] = []
        future = engine.generate("r", prompt(50), 20, on_token=tokens.append)
        engine.generate("first", prompt(20, 3), 1).result(60)
        os.kill(engine.workers[1].pid, signal.SIGKILL)
        assert future.result(60) == oracle(prompt(50), 20, GEOMETRY)
        assert engine.generate("s", prompt(50), 2).result(60) == oracle(prompt(50), 2, GEOMETRY)
        assert engine.call(engine.pool.referenced) == {}


def test_without_restart_a_dead_worker_ends_the_engine() -> None:
    with running(workers="process") as engine:
        future = engine.generate("r", prompt(50), 1500)
        os.kill(engine.workers[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="worker 0 died"):
            future.result(60)
