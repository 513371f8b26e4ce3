"""Workers that live and do not answer: nobody can prove what they will still do to the blocks, so
these stay leased, the engine is told that it is over, and the client is answered all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pd_control.config import Config, Deadlines
from pd_control.engine import OnFailure
from pd_control.testing.cluster import SMALL
from pd_control.testing.fake_engine import EngineError, EngineSpec
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node

WAIT_S = 60.0
PROMPT = [(i * 31) % 997 for i in range(60)]
DEADLINES = Deadlines(grant_s=1.0, progress_s=1.0, send_progress_s=2.0)


def node(name: str, role: str, **engine: object) -> Node:
    config = Config(instance=name, role=role, deadlines=DEADLINES)  # type: ignore[arg-type]
    spec = EngineSpec(geometry=SMALL, workers="process", max_step_tokens=16, **engine)  # type: ignore[arg-type]
    return Node(config, spec, plane="kvt")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_d_worker_that_does_not_acknowledge_is_fatal_for_its_engine() -> None:
    with node("p0", "prefill") as p, node("d0", "decode") as d:
        d.decode("warm", PROMPT[:9], 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        with stopped(d.engine.workers[0].pid):
            future = d.decode("r", PROMPT, 2, peer=p, on_failure=OnFailure.FAIL)
            # The client is answered first, whether the open or the close is what hangs.
            with pytest.raises(EngineError):
                future.result(WAIT_S)
            while not d.runtime.fatal:
                d.on_loop(lambda: None)
            assert "rank 0" in d.runtime.fatal
            assert d.runtime.decode is not None
            assert [lease.request_id for lease in d.runtime.decode.leases] == ["r"]
        assert p.wait_clean() == []


def test_a_p_worker_that_hangs_in_the_middle_costs_d_nothing_but_time() -> None:
    with node("p0", "prefill", layer_delay_s=0.03) as p, node("d0", "decode") as d:
        d.decode("warm", PROMPT[:9], 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        future = d.decode("r", PROMPT, 2, peer=p, on_failure=OnFailure.RECOMPUTE)
        while "LOADING" not in [
            row["state"]
            for row in d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"])
        ]:
            assert not future.done()
        with stopped(p.engine.workers[0].pid):
            assert future.result(WAIT_S) == oracle(PROMPT, 2, SMALL)
            assert d.wait_clean() == []
            while not p.runtime.fatal:  # its cancel is not answered: P's engine cannot go on
                p.on_loop(lambda: None)
            assert "rank 0" in p.runtime.fatal
