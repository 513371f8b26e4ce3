"""The scheduler's view of its workers: who may register, what proves a death, and what does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.runtime import wire
from pd_control.runtime.workers import Workers
from pd_control.trace import Stage, Trace
from simple_rpc import Identity, RpcError


class Channel:
    """The worker's channel, as far as `Workers` uses it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.published: list[tuple[str, Any]] = []
        self.on_lost: Any = None
        self.is_closed = False
        self.sender = type("Sender", (), {"num_unacked": 0})()

    def on(self, head: str, handler: Any) -> None:
        self.handlers[head] = handler

    def publish(self, head: str, item: Any) -> None:
        self.published.append((head, item))

    def close(self, **_: Any) -> None:
        self.is_closed = True


class Rig:
    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.failed: list[str] = []
        self.changed = asyncio.Event()
        self.trace = Trace(64)
        self.workers = Workers(
            m.Topology(2),
            "e0",
            post_decode=self._post,
            post_prefill=None,
            fail=self._fail,
            grace_s=0.05,
            progress_s=7.0,
            trace=self.trace,
            changed=lambda: None,
        )
        self.processes: list[subprocess.Popen[bytes]] = []

    def _post(self, event: Any) -> None:
        self.posted.append(event)
        self.changed.set()

    def _fail(self, reason: str, error: BaseException | None) -> None:
        self.failed.append(reason)
        self.changed.set()

    async def until(self, condition: Any) -> None:
        async def wait() -> None:
            while not condition():
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), 30)

    def process(self) -> int:
        code = "import sys; sys.stdin.read()"
        started = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.processes.append(started)
        return started.pid

    def come(self, rank: int, incarnation: bytes, pid: int) -> Channel:
        identity = Identity(wire.worker_role(rank), "e0", incarnation, {"pid": pid})
        self.workers.register(identity, m.RegisterWorker(rank, incarnation, f"tcp://h:{rank}", "f"))
        channel = Channel()
        self.workers.accept(identity, channel)  # type: ignore[arg-type]
        return channel


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.workers.close()
    for process in rig.processes:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


A, B = b"a" * 16, b"b" * 16


async def test_both_steps_make_a_worker(rig: Rig) -> None:
    rig.come(1, A, os.getpid())
    assert rig.posted == [ev.WorkerRegistered(1, A, "tcp://h:1", "f")]
    assert rig.workers.missing() == [0]
    with pytest.raises(RpcError, match=r"\[0\]"):
        rig.workers.rank_infos()
    rig.come(0, B, os.getpid())
    assert [(r.rank, r.pp_rank, r.tp_rank) for r in rig.workers.rank_infos()] == [
        (0, 0, 0),
        (1, 0, 1),
    ]


@pytest.mark.parametrize(
    ("role", "instance", "rank", "incarnation", "attributes", "words"),
    [
        ("worker/1", "other", 1, A, {"pid": 1}, "expected rank 1"),
        ("worker/0", "e0", 1, A, {"pid": 1}, "expected rank 1"),
        ("scheduler", "e0", 0, A, {"pid": 1}, "expected rank 0"),
        ("worker/2", "e0", 2, A, {"pid": 1}, "0 to 1"),
        ("worker/-1", "e0", -1, A, {"pid": 1}, "0 to 1"),
        ("worker/0", "e0", 0, B, {"pid": 1}, "that of HELLO"),
        ("worker/0", "e0", 0, A, {}, "attributes.pid"),
    ],
)
async def test_who_may_not_register(
    rig: Rig,
    role: str,
    instance: str,
    rank: int,
    incarnation: bytes,
    attributes: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(RpcError, match=words):
        rig.workers.register(
            Identity(role, instance, A, attributes), m.RegisterWorker(rank, incarnation, "", "")
        )
    assert rig.posted == []


async def test_a_channel_without_a_registration_is_refused(rig: Rig) -> None:
    identity = Identity(wire.worker_role(0), "e0", A, {"pid": 1})
    with pytest.raises(RpcError, match="has not registered"):
        rig.workers.accept(identity, Channel())  # type: ignore[arg-type]


async def test_the_death_of_the_process_is_the_proof(rig: Rig) -> None:
    channel = rig.come(0, A, rig.process())
    os.kill(rig.processes[0].pid, signal.SIGKILL)
    await rig.until(lambda: len(rig.posted) == 2)
    died = rig.posted[1]
    assert isinstance(died, ev.WorkerDied)
    assert (died.rank, died.incarnation) == (0, A)
    assert channel.is_closed
    channel.handlers["LDON"]([[0, b"k" * 16, 0, 8, 0, ""]])
    assert len(rig.posted) == 2, "nothing is believed of the dead"
    rig.workers.send(fx.WorkerNews(0, A, m.Grant(1, b"k" * 16)))
    assert channel.published == []


async def test_a_lost_channel_is_no_death_but_must_not_last(rig: Rig) -> None:
    channel = rig.come(0, A, rig.process())
    channel.on_lost(RpcError(Code.PEER_LOST, "reset"))
    assert len(rig.posted) == 1
    await rig.until(lambda: rig.failed)
    assert "lives but cannot be reached" in rig.failed[0]
    assert len(rig.posted) == 1


async def test_a_new_process_of_the_rank_ends_the_old_one(rig: Rig) -> None:
    old = rig.come(0, A, rig.process())
    new = rig.come(0, B, rig.process())
    assert old.is_closed
    assert rig.posted[-1] == ev.WorkerRegistered(0, B, "tcp://h:0", "f")
    rig.workers.send(fx.WorkerNews(0, A, m.Grant(1, b"k" * 16)))
    rig.workers.send(fx.WorkerNews(0, B, m.Grant(1, b"k" * 16)))
    assert [head for head, _ in new.published] == ["GRNT"]
    assert old.published == []
    os.kill(rig.processes[0].pid, signal.SIGKILL)
    rig.processes[0].wait()
    await asyncio.sleep(0)
    assert not [e for e in rig.posted if isinstance(e, ev.WorkerDied)], "its end was known already"


async def test_a_thread_of_this_process_ends_with_its_channel(rig: Rig) -> None:
    channel = rig.come(0, A, os.getpid())
    channel.on_lost(RpcError(Code.PEER_LOST, "closed"))
    assert isinstance(rig.posted[1], ev.WorkerDied)


async def test_news_in_another_ranks_name_is_ignored_and_counted(rig: Rig) -> None:
    channel = rig.come(0, A, os.getpid())
    channel.handlers["LDON"]([[1, b"k" * 16, 0, 8, 0, ""], [0, b"k" * 16, 3, 8, 99, "x"]])
    (event,) = rig.posted[1:]
    assert event == ev.LoadDone(0, A, b"k" * 16, 3, 8, Code.INTERNAL, "x")
    assert rig.workers.num_ignored == 1
    assert [e.rank for e in rig.trace.events() if e.stage is Stage.PLACED] == [0]


async def test_grants_carry_the_progress_deadline(rig: Rig) -> None:
    channel = rig.come(0, A, os.getpid())
    grant = m.Grant(m.GrantOp.OPEN, b"k" * 16, "p", b"P" * 16, ((1,),), 0, 8, (0,))
    rig.workers.send(fx.WorkerNews(0, A, grant))
    ((head, fields),) = channel.published
    assert (head, fields[-1]) == ("GRNT", {"progress_ms": 7000})
    on_the_wire = wire.unpack_body(wire.msgpack.packb(fields))
    assert wire.GRANT.decode(on_the_wire).options == {"progress_ms": 7000}
