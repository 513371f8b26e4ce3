"""The runtime's own rules, each alone: order of events, failures, timers, mailboxes, plans on the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.engine import Content, Refusal
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.planner import ScheduledRequest
from pd_control.runtime import wire
from pd_control.runtime.runner import CoreRunner
from pd_control.runtime.sides import DecodeSide, PrefillSide
from pd_control.trace import Stage, Trace

CONTENT = Content((1, 2, 3), b"i" * 32)


class ScriptedCore:
    """A core whose `handle` returns what the test put in."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.effects: dict[Any, list[Any]] = {}
        self.deadline_s: float | None = None

    def handle(self, event: Any, now_s: float) -> list[Any]:
        self.seen.append(event)
        if isinstance(event, ev.Tick):
            self.deadline_s = None
        found = self.effects.get(event, [])
        if isinstance(found, Exception):
            raise found
        return found

    def next_deadline(self) -> float | None:
        return self.deadline_s

    def inspect(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        return None

    def snapshot(self, now_s: float, after: str = "", limit: int = 500) -> dict[str, Any]:
        return {}

    def is_idle(self) -> bool:
        return True


async def test_effects_of_one_event_come_before_the_next_event() -> None:
    """An effect whose execution causes an event at once does not get ahead of its brothers."""
    core = ScriptedCore()
    log: list[Any] = []
    runner = CoreRunner(
        "x",
        core,
        {int: lambda e: (log.append(e), runner.post("second") if e == 1 else None)},
        lambda reason, error: None,
    )
    core.effects = {"first": [1, 2], "second": [3]}
    runner.post("first")
    assert log == [1, 2, 3]
    assert core.seen == ["first", "second"]


@pytest.mark.parametrize("where", ["core", "effect", "no executor"])
async def test_a_failure_stops_the_core_and_is_told_once(where: str) -> None:
    core = ScriptedCore()
    told: list[str] = []

    def fails(_: int) -> None:
        raise OSError("no such thing")

    runner = CoreRunner("x", core, {int: fails}, lambda reason, error: told.append(reason))
    core.effects = {
        "core": KeyError("state"),  # type: ignore[dict-item]
        "effect": [1],
        "no executor": ["?"],
    }
    runner.post(where)
    runner.post("later")
    assert core.seen == [where], "a core that failed is fed nothing more"
    assert len(told) == 1
    assert told[0].startswith("x core: ")


async def test_ticks_come_at_the_deadline_not_before_and_only_once() -> None:
    core = ScriptedCore()
    now = [100.0]
    ticked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Loop:
        """Fires each timer a little early, as a coarse clock does."""

        def __init__(self) -> None:
            self.timers: list[tuple[float, Any]] = []

        def call_later(self, delay_s: float, callback: Any) -> Any:
            self.timers.append((delay_s, callback))
            return loop.call_later(3600, lambda: None)

    timers = Loop()
    runner = CoreRunner(
        "x", core, {}, lambda *_: None, loop=timers, clock_s=lambda: now[0]  # type: ignore[arg-type]
    )  # fmt: skip
    core.deadline_s = 105.0
    runner.post("a")
    core.deadline_s = 107.0
    runner.post("b")  # later than the timer in place: no second timer
    assert [round(delay, 3) for delay, _ in timers.timers] == [5.0]
    now[0] = 104.999
    core.deadline_s = 105.0
    timers.timers.pop()[1]()
    assert ev.Tick() not in core.seen, "a tick must not come early"
    now[0] = 105.0
    timers.timers.pop()[1]()
    assert core.seen[-1] == ev.Tick()
    ticked.set()


class ScriptedEngine:
    """Records what the sides ask of it."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.refusal: Refusal | None = None
        self.fails_on = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.log.append((name, *args))
            if name == self.fails_on:
                raise RuntimeError(name)
            return self.refusal if name == "admit_request" else None

        return call

    def did(self, name: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]


def sides() -> tuple[ScriptedEngine, DecodeSide, PrefillSide, list[Any], list[str]]:
    engine = ScriptedEngine()
    posted: list[Any] = []
    failed: list[str] = []

    def fail(reason: str, error: BaseException) -> None:
        failed.append(reason)

    trace = Trace(64)
    d = DecodeSide(engine, posted.append, fail, trace)  # type: ignore[arg-type]
    p = PrefillSide(engine, 4, posted.append, fail, trace)  # type: ignore[arg-type]
    return engine, d, p, posted, failed


def test_one_command_that_fails_does_not_keep_a_lease() -> None:
    engine, d, _, _, failed = sides()
    d.add(ev.DecodeRequest("r", CONTENT))
    assert d.blocks_allocated("r", ((1, 2),), 0)
    engine.fails_on = "request_failed"
    d.mailbox.put(fx.RequestFailed("r", Code.GONE, "x"))
    d.mailbox.put(fx.ReleaseLease(1))
    assert d.drain() == 2
    assert engine.did("release_blocks") == [(((1, 2),),)]
    assert len(d.leases) == 0
    assert failed == ["executing RequestFailed on the core thread raised"]


def test_outcomes_after_an_abort_are_not_delivered_and_blocks_not_taken() -> None:
    engine, d, _, posted, _ = sides()
    d.add(ev.DecodeRequest("r", CONTENT))
    with pytest.raises(ValueError, match="was added before"):
        d.add(ev.DecodeRequest("r", CONTENT))
    d.abort("r", "gone")
    d.abort("r", "gone")
    assert [type(e) for e in posted] == [ev.DecodeRequestAdded, ev.AbortRequested]
    d.mailbox.put(fx.RequestLoaded("r", 3))
    d.mailbox.put(fx.RequestFailed("r", Code.ABORTED, ""))
    d.drain()
    assert not engine.did("request_loaded")
    assert not engine.did("request_failed")
    assert not d.blocks_allocated("r", ((1,),), 0)
    assert not engine.did("hold_blocks")


def test_the_engine_is_woken_once_for_many_commands() -> None:
    engine, d, _, _, _ = sides()
    d.mailbox.put(fx.VoidRankKv(0, b""))
    d.mailbox.put(fx.VoidRankKv(1, b""))
    assert len(engine.did("wake")) == 1
    d.drain()
    d.mailbox.put(fx.VoidRankKv(0, b""))
    assert len(engine.did("wake")) == 2


def test_a_plan_takes_offers_at_once_and_leaves_the_engine_alone() -> None:
    """The engine is in the middle of its pass: an abort then would pull the rug from under it."""
    engine, _, p, posted, _ = sides()
    p.add("r", CONTENT)
    offer = fx.OfferTransfer(
        "r", 1, b"k" * 16, "d", b"D" * 16, (m.Target(0, b"w" * 16, ""),), ((9,),), 0, 3
    )
    p.mailbox.put(fx.AbortRequest("other", Code.ABORTED, ""))
    p.mailbox.put(offer)
    plan = p.plan_step(1, [ScheduledRequest("r", 0, 3, ((4,),))])
    (send,) = wire.unpack_plan(plan)
    assert (send.key, send.src_block_ids, send.dst_block_ids) == (b"k" * 16, ((4,),), ((9,),))
    assert not engine.did("abort_request")
    assert engine.did("hold_blocks") == [(((4,),),)]
    assert p.drain() == 1
    assert engine.did("abort_request") == [("other", Code.ABORTED, "")]
    planned = [e for e in posted if isinstance(e, ev.StepPlanned)]
    assert planned[0].requests[0].carried_keys == (b"k" * 16,)


def test_an_admission_is_answered_within_its_execution() -> None:
    engine, _, p, posted, _ = sides()
    p.mailbox.put(fx.AdmitRequest("s", CONTENT, {"x": 1}))
    p.drain()
    assert posted == [ev.RequestAdded("s", CONTENT, 1)]
    engine.refusal = Refusal(Code.BUSY, "full")
    p.mailbox.put(fx.AdmitRequest("t", CONTENT, None))
    p.drain()
    assert posted[1:] == [ev.RequestRefused("t", Code.BUSY, "full")]


def test_plans_and_attributes_survive_the_wire_and_garbage_does_not() -> None:
    send = m.Send(
        b"k" * 16, "d", b"D" * 16, (m.Target(1, b"w" * 16, "tcp://h:1"),), ((1, 2),), ((3, 4),),
        0, 8, True,
    )  # fmt: skip
    assert wire.unpack_plan(wire.pack_plan((send, send))) == [send, send]
    assert wire.unpack_plan(wire.pack_plan(())) == []
    for garbage in (b"\xc1", b"\x91\x90", b"\x01", b"\x91\x99" + b"\x00" * 9):
        with pytest.raises(ValueError, match=r"SEND|Send|plan|body"):
            wire.unpack_plan(garbage)
    ranks = tuple(m.RankInfo(r, 0, r, bytes([r]) * 16, f"tcp://h:{r}", "f" * 40) for r in range(32))
    about = m.HeloAttributes(m.Topology(32, num_kv_heads=32), ranks, "model", 7)
    packed = wire.pack_about(about)
    assert all(len(chunk) <= 512 for chunk in packed.values())
    assert wire.unpack_about(packed) == about
    many = tuple(m.RankInfo(r, 0, r, bytes(16), "x" * 90, "f" * 90) for r in range(200))
    with pytest.raises(ValueError, match="200 ranks"):
        wire.pack_about(m.HeloAttributes(m.Topology(200), many))


def test_stage_events_of_the_sides() -> None:
    _, d, _, _, _ = sides()
    d.add(ev.DecodeRequest("r", CONTENT))
    d.blocks_allocated("r", ((1, 2),), 0)
    d.mailbox.put(fx.RequestLoaded("r", 2))
    d.drain()
    stages = [(e.stage, e.value) for e in d._trace.events("r")]
    assert stages == [(Stage.TAKEN_OVER, 0), (Stage.BLOCKS_LEASED, 2), (Stage.ADMITTED, 2)]
