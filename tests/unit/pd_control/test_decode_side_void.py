"""A rank's death and a load that crosses it: D's core thread must not run on KV that is gone.

Found by the simulation: blocks with prefix hits are allocated before the death is seen on the core thread,
the loop hears of the allocation after the death, and says LOADED in good faith.
"""

from __future__ import annotations

from typing import Any

from pd_control.codes import Code
from pd_control.ids import Content, identity_digest
from pd_control.protocol import effects as fx
from pd_control.protocol.events import DecodeRequest
from pd_control.runtime.sides import DecodeSide
from pd_control.trace import Trace


class Engine:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append((name, *args))


def side_with(*request_ids: str) -> tuple[DecodeSide, Engine]:
    engine = Engine()
    side = DecodeSide(engine, lambda event: None, lambda why, error: None, Trace(64))  # type: ignore[arg-type]
    for i, request_id in enumerate(request_ids):
        side.add(DecodeRequest(request_id, Content([1, 2, 3], identity_digest("m"))))
        assert side.blocks_allocated(request_id, ((i,),), 2)
    engine.told.clear()
    return side, engine


def test_loaded_after_a_rank_died_is_recomputed() -> None:
    side, engine = side_with("a")
    side.mailbox.put(fx.VoidRankKv(1, b"x" * 16))
    side.mailbox.put(fx.RequestLoaded("a", 2))
    side.drain()
    names = [t[0] for t in engine.told if t[0] not in ("wake",)]
    assert names == ["void_rank", "recompute_request"]
    assert engine.told[-1][1:3] == ("a", Code.PEER_LOST)


def test_what_is_allocated_after_the_death_is_loaded() -> None:
    side, engine = side_with("a")
    side.mailbox.put(fx.VoidRankKv(1, b"x" * 16))
    side.drain()
    side.add(DecodeRequest("b", Content([1, 2, 3], identity_digest("m"))))
    assert side.blocks_allocated("b", ((7,),), 2)
    engine.told.clear()
    side.mailbox.put(fx.RequestLoaded("b", 2))
    side.mailbox.put(fx.RequestFailed("a", Code.PEER_LOST, "rank 1"))
    side.drain()
    assert ("request_loaded", "b", 2, None) in engine.told
    assert ("request_failed", "a", Code.PEER_LOST, "rank 1") in engine.told


def test_nothing_is_remembered_of_what_has_ended() -> None:
    side, _ = side_with("a", "b", "c")
    side.mailbox.put(fx.VoidRankKv(0, b"x" * 16))
    side.mailbox.put(fx.RequestLoaded("a", 2))
    side.mailbox.put(fx.RecomputeRequest("b", Code.PEER_LOST, ""))
    side.drain()
    side.abort("c")
    assert not side._open
    assert not side._allocated
    assert not side._void
