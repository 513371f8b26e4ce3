"""F03, control side: P crashes, hangs or drops the request. D's request ends by its policy, in time,
and every block of D comes back.

The same for workers killed by the thousand under kvt: test_f03_killed_workers.py; each process at
each stage: tests/kill_matrix.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pd_control.config import Config, Deadlines
from pd_control.engine import Mode, OnFailure
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_engine import EngineError, EngineSpec
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node
from pd_control.testing.node_process import NodeError, NodeProcess, NodeSpec

WAIT_S = 60.0


def prompt(seed: int, n: int = 60) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.fixture
def d() -> Iterator[Node]:
    config = Config(instance="d0", role="decode", deadlines=Deadlines(heartbeat_s=0.3))
    with Node(config, EngineSpec(geometry=SMALL), plane="kvt") as node:
        yield node


def p_process(**engine: object) -> NodeProcess:
    spec = EngineSpec(geometry=SMALL, max_step_tokens=16, **engine)  # type: ignore[arg-type]
    return NodeProcess(NodeSpec(Config(instance="p0", role="prefill"), spec))


def test_a_killed_p_ends_ds_requests_by_policy(d: Node) -> None:
    with p_process(layer_delay_s=0.02) as p:
        where = {"peer_instance": p.name, "peer_address": p.address}
        recompute = d.decode("a", prompt(1), 3, on_failure=OnFailure.RECOMPUTE, **where)
        fail = d.decode("b", prompt(2), 3, on_failure=OnFailure.FAIL, **where)
        while len(d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"])) < 2:
            pass
        p.kill(p.pid)
        assert recompute.result(WAIT_S) == oracle(prompt(1), 3, SMALL)
        with pytest.raises(EngineError, match=r"PEER_LOST|UNREACHABLE"):
            fail.result(WAIT_S)
    assert d.wait_clean() == []


def test_a_hung_p_is_noticed_by_its_heartbeat(d: Node) -> None:
    """The process is there, its sockets are open, and nothing comes any more."""
    with p_process(layer_delay_s=0.02) as p:
        where = {"peer_instance": p.name, "peer_address": p.address}
        d.decode("warm", prompt(9), 1, on_failure=OnFailure.FAIL, **where).result(WAIT_S)
        future = d.decode("a", prompt(1, 100), 3, on_failure=OnFailure.RECOMPUTE, **where)
        while not d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"]):
            pass
        os.kill(p.pid, signal.SIGSTOP)
        try:
            assert future.result(WAIT_S) == oracle(prompt(1, 100), 3, SMALL)
            assert d.wait_clean() == []
        finally:
            os.kill(p.pid, signal.SIGCONT)


def test_a_p_that_drops_the_request_silently_is_ended_by_ds_own_clock() -> None:
    """P accepted, its link beats, and it never starts: the queue deadline is D's."""
    with Cluster() as cluster:
        p = cluster.node("p0")
        d = cluster.node("d0", deadlines=Deadlines(queue_s=0.5))
        p.engine.admit_request = lambda *_: None  # type: ignore[method-assign,assignment]
        future = d.decode("r", prompt(1), 2, peer=p, on_failure=OnFailure.FAIL)
        with pytest.raises(EngineError, match=r"TIMEOUT|EXPIRED|queue"):
            future.result(WAIT_S)
        # What P's engine "took" and lost is P's own contract breach; only D must be clean.
        assert d.wait_clean() == []
        cluster.nodes.remove(p)


def test_a_p_whose_engine_dies_leaves_no_request_waiting(d: Node) -> None:
    """A worker's death ends P's engine, as in vLLM; the scheduler process goes with it."""
    with p_process(layer_delay_s=0.02) as p:
        where = {"peer_instance": p.name, "peer_address": p.address}
        future = d.decode("a", prompt(1), 3, on_failure=OnFailure.FAIL, **where)
        while not d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"]):
            pass
        p.kill(p.worker_pid())
        with pytest.raises((EngineError, NodeError)):
            future.result(WAIT_S)
    assert d.wait_clean() == []


def test_dual_mode_too(d: Node) -> None:
    with p_process(layer_delay_s=0.02) as p:
        where = {"peer_instance": p.name, "peer_address": p.address}
        p.submit("prefill", request_id="a", prompt=prompt(1))
        future = d.decode(
            "a", prompt(1), 3, mode=Mode.DUAL, on_failure=OnFailure.RECOMPUTE, **where
        )
        while not d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"]):
            pass
        p.kill(p.pid)
        assert future.result(WAIT_S) == oracle(prompt(1), 3, SMALL)
    assert d.wait_clean() == []
