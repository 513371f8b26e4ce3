"""F14: all data landed, but P's word that it did is lost. D is ready by its own receivers (LOAD_DONE),
P's blocks are free by its own senders (SEND_DONE): neither waits for the other's word."""

from __future__ import annotations

from typing import Any

from pd_control.engine import OnFailure
from pd_control.messages import Final, Started
from pd_control.protocol.effects import LinkNews
from pd_control.protocol.events import FinalReceived
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node

WAIT_S = 60.0


def prompt(seed: int, n: int = 60) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


def lose(node: Node, *kinds: type) -> list[Any]:
    """This node's words of these kinds never leave; returns what was lost."""
    peers = node.runtime.prefill_peers
    assert peers is not None
    send, lost = peers.send, []

    def some(effect: LinkNews) -> None:
        if isinstance(effect.item, kinds):
            lost.append(effect.item)
        else:
            send(effect)

    runner = node.runtime.prefill_runner
    assert runner is not None
    runner._executors[LinkNews] = some
    return lost


def test_without_a_word_from_p_d_is_ready_and_p_is_free() -> None:
    with Cluster() as cluster:
        p, d = cluster.node("p0"), cluster.node("d0")
        lost = lose(p, Started, Final)
        for i in range(5):
            got = d.decode(f"r{i}", prompt(i), 2, peer=p, on_failure=OnFailure.FAIL)
            assert got.result(WAIT_S) == oracle(prompt(i), 2, SMALL)
        assert p.wait_clean() == []
        assert d.wait_clean() == []
        assert len([item for item in lost if isinstance(item, Final)]) == 5


def test_ps_ok_without_the_data_makes_nothing_ready() -> None:
    """The reverse: P's word alone is no readiness. The bytes are held up; D waits for them."""
    with Cluster() as cluster:
        p, d = cluster.node("p0"), cluster.node("d0")
        d.decode("warm", prompt(9), 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        cluster.hub.gate.clear()
        future = d.decode("r", prompt(1), 2, peer=p, on_failure=OnFailure.FAIL)
        state = ""
        while state not in ("QUEUED", "LOADING"):
            seen = d.on_loop(lambda: d.runtime.decode_core.inspect("r", 0.0))
            state = seen["state"] if seen is not None else ""
        key = bytes.fromhex(d.on_loop(lambda: d.runtime.decode_core.inspect("r", 0.0))["key"])
        (link,) = d.runtime.decode_peers._links  # type: ignore[union-attr]
        word = FinalReceived(link[0], Final(key, 0, 59))
        d.on_loop(lambda: d.runtime.decode_runner.post(word))  # type: ignore[union-attr]
        assert not future.done()
        state = d.on_loop(lambda: d.runtime.decode_core.inspect("r", 0.0))["state"]
        assert state in ("QUEUED", "LOADING")
        cluster.hub.gate.set()
        assert future.result(WAIT_S) == oracle(prompt(1), 2, SMALL)
