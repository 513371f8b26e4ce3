"""F08, on whole engines: P restarts at the same address. What was in flight with the old one fails as
PEER_LOST; nothing of the old one is mistaken for the new one, which serves the next request.

On the level of connections: test_f08_restarted_peer.py.
"""

from __future__ import annotations

import re

import pytest

from pd_control.config import Config, Deadlines, Network
from pd_control.engine import Mode, OnFailure
from pd_control.testing.cluster import SMALL
from pd_control.testing.fake_engine import EngineError, EngineSpec
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node
from pd_control.testing.node_process import NodeProcess, NodeSpec

WAIT_S = 60.0


def prompt(seed: int, n: int = 60) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


def p_at(address: str) -> NodeProcess:
    config = Config(
        instance="p0",
        role="prefill",
        network=Network(listen=address),
        deadlines=Deadlines(park_s=0.5),
    )
    spec = EngineSpec(geometry=SMALL, max_step_tokens=16, layer_delay_s=0.02)
    return NodeProcess(NodeSpec(config, spec)).wait_ready()


def test_a_restart_at_the_same_address() -> None:
    config = Config(instance="d0", role="decode")
    with Node(config, EngineSpec(geometry=SMALL), plane="kvt") as d:
        old = p_at("tcp://127.0.0.1:0")
        try:
            where = {"peer_instance": "p0", "peer_address": old.address}
            first = d.decode("warm", prompt(1, 9), 1, on_failure=OnFailure.FAIL, **where)
            first.result(WAIT_S)
            old.ask("prefill", request_id="held", prompt=prompt(2))
            in_flight = d.decode("lost", prompt(3), 2, on_failure=OnFailure.FAIL, **where)
            while not d.on_loop(lambda: d.runtime.decode_core.snapshot(0.0)["requests"]):
                pass
            old.kill(old.pid)
        finally:
            old.stop()
        with pytest.raises(EngineError, match=r"PEER_LOST|UNREACHABLE"):
            in_flight.result(WAIT_S)
        new = p_at(old.address)
        try:
            assert new.address == old.address
            # The old one's reference means nothing to the new one, and is not answered with KV.
            stale = d.decode(
                "stale", prompt(2), 2, mode=Mode.DUAL, remote_request_id="held",
                on_failure=OnFailure.RECOMPUTE, **where,
            )  # fmt: skip
            after = d.decode("after", prompt(4), 2, on_failure=OnFailure.FAIL, **where)
            assert after.result(WAIT_S) == oracle(prompt(4), 2, SMALL)
            assert stale.result(WAIT_S) == oracle(prompt(2), 2, SMALL)
        finally:
            new.stop()
        assert d.wait_clean() == []
        counters = d.runtime.decode_core.snapshot(0.0, "", 0)["counters"]
        lost = [n for n in counters if re.search("PEER_LOST|UNREACHABLE", n)]
        assert lost, counters
