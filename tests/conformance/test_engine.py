"""What an engine must guarantee to the driver (`pd_control.engine`), checked on real engines.

Each test runs on each harness: those of this repository, and one named by the environment variable
PD_CONTROL_ENGINE_HARNESS ("module:Class").
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.engine import (
    Content,
    DecodeDriver,
    DecodeRequest,
    Mode,
    PrefillDriver,
    RankReport,
    WorkerDriver,
)
from pd_control.testing.engine_harness import (
    EngineHarness,
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedWorker,
)
from pd_control.testing.fake_batch import FakeRequest, State
from pd_control.testing.fake_engine import EngineError, EngineSpec, FakeEngine
from pd_control.testing.fake_model import Geometry
from pd_control.testing.fake_worker import ThreadWorker
from pd_control.testing.reference_harness import ReferenceHarness


class FakeHarness:
    """The fake engine with thread workers."""

    num_blocks = 24
    block_size_tokens = 8
    engine_class: type[FakeEngine] = FakeEngine

    def __init__(self) -> None:
        geometry = Geometry(num_layers=2, num_heads=2, head_dim=4, block_size_tokens=8)
        self._spec = EngineSpec(
            geometry=geometry,
            tp_size=2,
            num_blocks=self.num_blocks,
            max_step_tokens=16,
            max_steps_in_flight=2,
        )
        self.engine: FakeEngine

    def start(
        self, prefill: PrefillDriver, decode: DecodeDriver, worker: Callable[[int], WorkerDriver]
    ) -> None:
        self.engine = self.engine_class(
            self._spec, open_driver=lambda shard, spec: (worker(spec.rank), lambda: None)
        )
        self.engine.attach(prefill=prefill, decode=decode)
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()

    def prefill(self, request_id: str, prompt: Sequence[int]) -> Future[Any]:
        return self.engine.generate(request_id, list(prompt), prefill_half=True)

    def decode(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        remote = DecodeRequest(
            request_id, self.content(prompt), Mode.DUAL, "p", remote_request_id=request_id
        )
        return self.engine.generate(request_id, list(prompt), num_new, remote=remote)

    def local(self, request_id: str, prompt: Sequence[int], num_new: int) -> Future[Any]:
        return self.engine.generate(request_id, list(prompt), num_new)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def content(self, prompt: Sequence[int]) -> Content:
        return self.engine.content_of(list(prompt))

    def references(self, block_id: int) -> int:
        count: int = self.engine.call(lambda: self.engine.pool.refs(block_id))
        return count

    def num_free_blocks(self) -> int:
        count: int = self.engine.call(lambda: self.engine.pool.num_free)
        return count

    def _shards(self) -> list[Any]:
        return [w.shard for w in self.engine.workers if isinstance(w, ThreadWorker)]

    def block_bytes(self, block_id: int) -> bytes:
        return b"".join(
            layer[:, block_id].tobytes() for shard in self._shards() for layer in shard.layers
        )

    def fill_block(self, block_id: int, value: int) -> None:
        for shard in self._shards():
            for layer in shard.layers:
                layer[:, block_id] = value


def harnesses() -> list[type]:
    found: list[type] = [FakeHarness, ReferenceHarness]
    named = os.environ.get("PD_CONTROL_ENGINE_HARNESS", "")
    if named:
        module, _, name = named.partition(":")
        found.append(getattr(importlib.import_module(module), name))
    return found


class Rig:
    """One started engine with scripted drivers."""

    def __init__(self, harness: EngineHarness) -> None:
        self.h = harness
        self.gate = threading.Event()
        self.gate.set()
        self.prefill = ScriptedPrefill()
        self.decode = ScriptedDecode()
        self.workers: dict[int, ScriptedWorker] = {}
        harness.start(self.prefill, self.decode, self._worker)
        self.prefill.engine = self.decode.engine = harness.engine

    def _worker(self, rank: int) -> ScriptedWorker:
        return self.workers.setdefault(rank, ScriptedWorker(rank, self.gate))

    def run(self, side: ScriptedPrefill | ScriptedDecode, function: Callable[[], object]) -> None:
        """Let the driver do this on the core thread, and wait for it."""
        done = threading.Event()
        side.script.append(lambda: (function(), done.set()))
        self.h.engine.wake()
        assert done.wait(30), "wake was not followed by drain"

    def blocks_of(self, request_id: str) -> list[int]:
        self.decode.wait_for(lambda: request_id in self.decode.blocks)
        return list(self.decode.blocks[request_id][0][0])


@pytest.fixture(params=harnesses(), ids=lambda cls: cls.__name__)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param())
    try:
        yield rig
    finally:
        rig.gate.set()
        rig.h.stop()
    assert [w.errors for w in rig.workers.values()] == [[] for _ in rig.workers]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % 251 + 1 for i in range(n)]


def test_leased_blocks_are_not_written_or_handed_out(rig: Rig) -> None:
    waiting = rig.h.decode("d", prompt(40), 2)
    blocks = rig.blocks_of("d")
    assert len(blocks) >= 5
    for i, block in enumerate(blocks):
        rig.h.fill_block(block, 1000 + i)
    before = [rig.h.block_bytes(b) for b in blocks]
    for i in range(12):  # far more than the rest of the pool holds at one time
        rig.h.local(f"l{i}", prompt(50, i + 1), 4).result(60)
    assert [rig.h.block_bytes(b) for b in blocks] == before
    assert not waiting.done()
    rig.h.abort("d")
    rig.run(rig.decode, lambda: rig.decode.release("d"))


def test_only_the_loaded_tokens_are_registered(rig: Rig) -> None:
    """A prefix hit before the load would be a hit on blank blocks; after it, of what was loaded."""
    size = rig.h.block_size_tokens
    tokens = prompt(5 * size)
    rig.h.decode("d", tokens, 1)
    rig.blocks_of("d")
    rig.h.decode("e", tokens, 1)
    rig.blocks_of("e")
    assert rig.decode.blocks["e"][1] == 0, "registered before it was loaded"
    rig.h.abort("e")
    rig.run(rig.decode, lambda: rig.decode.release("e"))
    loaded = 5 * size - 1
    rig.run(rig.decode, lambda: rig.h.engine.request_loaded("d", loaded, None))
    rig.run(rig.decode, lambda: rig.decode.release("d"))
    rig.h.decode("f", tokens, 1)
    rig.blocks_of("f")
    assert rig.decode.blocks["f"][1] == 4 * size
    rig.h.abort("f")
    rig.run(rig.decode, lambda: rig.decode.release("f"))


def test_a_loaded_request_runs_with_what_was_loaded(rig: Rig) -> None:
    """The output follows from the blocks' content: other bytes, other tokens."""
    outputs = []
    for i, value in enumerate((1, 1, 2)):
        name = f"d{i}"
        future = rig.h.decode(name, prompt(20), 1)
        for block in rig.blocks_of(name):
            rig.h.fill_block(block, value)
        rig.run(rig.decode, lambda name=name: rig.h.engine.request_loaded(name, 19, None))
        outputs.append(future.result(30))
        rig.run(rig.decode, lambda name=name: rig.decode.release(name))
        rig.run(rig.decode, lambda: rig.h.engine.void_rank(0))  # no hits for the next one
    assert all(len(tokens) == 1 for tokens in outputs)
    assert outputs[0] == outputs[1]
    assert outputs[1] != outputs[2]


def test_a_void_rank_leaves_nothing_to_hit(rig: Rig) -> None:
    rig.h.local("l", prompt(40), 1).result(30)
    rig.run(rig.decode, lambda: rig.h.engine.void_rank(1))
    rig.h.decode("d", prompt(40), 1)
    rig.blocks_of("d")
    assert rig.decode.blocks["d"][1] == 0
    rig.h.abort("d")
    rig.run(rig.decode, lambda: rig.decode.release("d"))


def test_ps_first_token_is_the_first_of_the_output(rig: Rig) -> None:
    future = rig.h.decode("d", prompt(20), 2)
    rig.blocks_of("d")
    rig.run(rig.decode, lambda: rig.h.engine.request_loaded("d", 20, 77))
    tokens = future.result(30)
    assert len(tokens) == 2
    assert tokens[0] == 77
    rig.run(rig.decode, lambda: rig.decode.release("d"))


def test_every_planned_step_is_finished_once_and_carries_the_acks(rig: Rig) -> None:
    futures = [rig.h.prefill(f"p{i}", prompt(60, i)) for i in range(3)]
    for i in range(3):
        rig.prefill.wait_for(lambda i=i: ("finished", f"p{i}", Code.OK) in rig.prefill.log)
        futures[i].result(30)
        rig.run(rig.prefill, lambda i=i: rig.prefill.release(f"p{i}"))
    rig.prefill.wait_for(lambda: len(rig.prefill.reports) == len(rig.prefill.steps))
    planned = [e[1] for e in rig.prefill.did("plan_step")]
    assert planned == sorted(set(planned)), "steps are numbered upwards, never twice"
    assert len(rig.prefill.did("step_finished")) == len(planned)
    for reports in rig.prefill.reports.values():
        assert sorted(r.rank for r in reports) == sorted(rig.workers)
        assert {r.ack_substep for r in reports} == {7}


def test_the_schedule_tells_every_block_and_token_once(rig: Rig) -> None:
    size = rig.h.block_size_tokens
    rig.h.prefill("p", prompt(60)).result(30)
    parts = [r for s in sorted(rig.prefill.steps) for r in rig.prefill.steps[s]]
    mine = [r for r in parts if r.request_id == "p"]
    assert mine[0].first_token == 0
    for before, after in itertools.pairwise(mine):
        assert after.first_token == before.end_token
    assert mine[-1].end_token == 60
    for i, part in enumerate(mine):
        known = sum(len(r.added_block_ids[0]) for r in mine[: i + 1])
        assert known * size >= part.end_token, "tokens without blocks"
    rig.run(rig.prefill, lambda: rig.prefill.release("p"))


def test_finishing_drops_only_the_engines_own_reference(rig: Rig) -> None:
    rig.h.prefill("p", prompt(40)).result(30)
    blocks = list(rig.prefill.tracked["p"])
    assert len(blocks) == 5
    assert all(rig.h.references(b) == 1 for b in blocks), "our lease, and nobody else's"
    rig.run(rig.prefill, lambda: rig.prefill.release("p"))
    assert all(rig.h.references(b) == 0 for b in blocks)


def test_a_pool_full_of_leases_makes_others_wait_not_fail(rig: Rig) -> None:
    size = rig.h.block_size_tokens
    names = []
    while rig.h.num_free_blocks() > 4:
        names.append(f"p{len(names)}")
        rig.h.prefill(names[-1], prompt(4 * size, len(names))).result(30)
    waiting = rig.h.local("l", prompt(7 * size, 99), 2)
    rig.prefill.wait_for(lambda: any(e[1] > 0 for e in rig.prefill.did("blocks_wanted")))
    assert not waiting.done()
    for name in names:
        rig.run(rig.prefill, lambda name=name: rig.prefill.release(name))
    assert len(waiting.result(60)) == 2
    assert rig.prefill.did("blocks_wanted")[-1] == ("blocks_wanted", 0)


def test_preemption_goes_on_although_leased_blocks_stay(rig: Rig) -> None:
    """Two growing requests in a pool that cannot hold both, one of them leased."""
    size = rig.h.block_size_tokens
    p = rig.h.prefill("p", prompt(6 * size, 1))
    futures = [rig.h.local(f"l{i}", prompt(5 * size, 10 + i), 5 * size) for i in range(3)]
    p.result(60)
    rig.run(rig.prefill, lambda: rig.prefill.release("p"))
    for future in futures:
        assert len(future.result(60)) == 5 * size
    assert rig.h.num_free_blocks() == rig.h.num_blocks


def test_a_running_step_keeps_its_blocks_after_an_abort(rig: Rig) -> None:
    size = rig.h.block_size_tokens
    rig.gate.clear()
    for w in rig.workers.values():
        w.entered.clear()
    p = rig.h.prefill("p", prompt(2 * size))
    for w in rig.workers.values():
        assert w.entered.wait(30)
    (part,) = next(iter(rig.prefill.steps.values()))
    in_flight = set(part.added_block_ids[0])
    rig.h.abort("p")
    with pytest.raises(Exception, match=r"ABORT|abort"):
        p.result(30)
    rig.run(rig.prefill, lambda: rig.prefill.release("p"))
    # A destination that needs the whole pool has to wait for the step: nothing that it still writes
    # may be given away.
    rig.h.decode("d", prompt(rig.h.num_blocks * size - 1, 5), 1)
    rig.run(rig.decode, lambda: None)
    rig.run(rig.decode, lambda: None)
    block_ids, _ = rig.decode.blocks.get("d", (((),), 0))
    assert not set(block_ids[0]) & in_flight
    rig.gate.set()
    rig.blocks_of("d")
    rig.h.abort("d")
    rig.run(rig.decode, lambda: rig.decode.release("d"))


def test_wake_is_never_lost(rig: Rig) -> None:
    """Many wakes at random moments, each alone in bringing its command to execution."""
    for _ in range(300):
        rig.run(rig.decode, lambda: None)
    hits = []
    for i in range(2000):
        rig.prefill.script.append(lambda i=i: hits.append(i))
        rig.h.engine.wake()
    rig.run(rig.prefill, lambda: None)
    assert hits == list(range(2000))


def test_abort_tells_the_driver_and_the_client(rig: Rig) -> None:
    d = rig.h.decode("d", prompt(20), 1)
    blocks = rig.blocks_of("d")
    rig.h.abort("d")
    with pytest.raises(Exception, match=r"ABORT|abort"):
        d.result(30)
    assert ("abort", "d") in rig.decode.log
    assert all(rig.h.references(b) == 1 for b in blocks), "the lease stays until it is released"
    rig.run(rig.decode, lambda: rig.decode.release("d"))
    assert all(rig.h.references(b) == 0 for b in blocks)


def test_a_failed_load_reaches_the_client_with_its_code(rig: Rig) -> None:
    d = rig.h.decode("d", prompt(20), 1)
    blocks = rig.blocks_of("d")
    rig.run(
        rig.decode, lambda: rig.h.engine.request_failed("d", Code.PEER_LOST, "the link is gone")
    )
    with pytest.raises(Exception, match=r"PEER_LOST.*the link is gone"):
        d.result(30)
    assert all(rig.h.references(b) == 1 for b in blocks)
    rig.run(rig.decode, lambda: rig.decode.release("d"))
    assert rig.h.num_free_blocks() == rig.h.num_blocks


def test_recompute_gives_the_undivided_output_in_other_blocks(rig: Rig) -> None:
    d = rig.h.decode("d", prompt(20), 3)
    blocks = rig.blocks_of("d")
    for block in blocks:
        rig.h.fill_block(block, 5)
    before = [rig.h.block_bytes(b) for b in blocks]
    rig.run(rig.decode, lambda: rig.h.engine.recompute_request("d", Code.TIMEOUT, "too late"))
    tokens = d.result(30)
    assert all(rig.h.references(b) == 1 for b in blocks), "the old ones are still leased"
    assert [rig.h.block_bytes(b) for b in blocks] == before, "leased blocks were written"
    rig.run(rig.decode, lambda: rig.decode.release("d"))
    assert tokens == rig.h.local("l", prompt(20), 3).result(30)


def test_admission_of_a_handed_over_request(rig: Rig) -> None:
    answers: list[Any] = []
    rig.prefill.tracked["s"] = []
    content = rig.h.content(prompt(30))
    admit = rig.h.engine.admit_request
    rig.run(rig.prefill, lambda: answers.append(admit("s", content, {})))
    assert answers == [None]
    rig.prefill.wait_for(lambda: ("finished", "s", Code.OK) in rig.prefill.log)
    assert ("add", "s") not in rig.prefill.log, "the driver tracks it already"
    rig.run(rig.prefill, lambda: rig.prefill.release("s"))
    too_long = rig.h.content(prompt(rig.h.num_blocks * rig.h.block_size_tokens + 1))
    rig.run(rig.prefill, lambda: answers.append(admit("t", too_long, {})))
    assert answers[1] is not None
    assert answers[1].message


def test_aborting_what_is_not_there_is_ignored(rig: Rig) -> None:
    rig.run(rig.prefill, lambda: rig.h.engine.abort_request("nobody", Code.ABORTED, ""))
    rig.h.abort("nobody")
    assert len(rig.h.local("l", prompt(9), 2).result(30)) == 2


def test_an_aborted_admission_stops(rig: Rig) -> None:
    rig.gate.clear()
    content = rig.h.content(prompt(60))
    rig.prefill.tracked["s"] = []
    rig.run(rig.prefill, lambda: rig.h.engine.admit_request("s", content, {}))
    for w in rig.workers.values():
        assert w.entered.wait(30)
    rig.run(rig.prefill, lambda: rig.h.engine.abort_request("s", Code.ABORTED, "not wanted"))
    rig.gate.set()
    rig.run(rig.prefill, lambda: rig.prefill.release("s"))
    assert len(rig.h.local("l", prompt(9), 1).result(30)) == 1
    assert not [e for e in rig.prefill.log if e[0] == "finished" and e[1] == "s"]
    assert rig.h.num_free_blocks() == rig.h.num_blocks


# -- the suite itself: engines that break one rule each are caught ----------------------------------


class StepsKeepNoReference(FakeEngine):
    def _hold_written(self, blocks: list[int]) -> None:
        pass

    def _drop_written(self, blocks: list[int]) -> None:
        pass


class RegistersBeforeTheLoad(FakeEngine):
    def _admit(self) -> None:
        super()._admit()
        for request in self._requests.values():
            if request.state is State.WAITING_KV:
                request.num_computed = len(request.tokens)
                self._register(request)


class RecomputesInTheLeasedBlocks(FakeEngine):
    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        request = self._requests[request_id]
        request.num_computed, request.remote = 0, None
        request.state = State.RUNNING
        self._running[request_id] = request


class LosesTheAcks(FakeEngine):
    def _rank_done(self, number: int, report: RankReport) -> None:
        super()._rank_done(number, RankReport(report.rank, None))


class FreesAllAtTheEnd(FakeEngine):
    def _end(self, request: FakeRequest, error: EngineError | None = None) -> None:
        for block in request.blocks:
            while self.pool.refs(block) > 1:
                self.pool.release([block])
        super()._end(request, error)


@pytest.mark.parametrize(
    ("engine", "test"),
    [
        (StepsKeepNoReference, test_a_running_step_keeps_its_blocks_after_an_abort),
        (RegistersBeforeTheLoad, test_only_the_loaded_tokens_are_registered),
        (RecomputesInTheLeasedBlocks, test_recompute_gives_the_undivided_output_in_other_blocks),
        (LosesTheAcks, test_every_planned_step_is_finished_once_and_carries_the_acks),
        (FreesAllAtTheEnd, test_finishing_drops_only_the_engines_own_reference),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_engine_is_caught(
    engine: type[FakeEngine], test: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHarness, "engine_class", engine)
    rig = Rig(FakeHarness())
    try:
        with pytest.raises(AssertionError):
            test(rig)
    finally:
        rig.gate.set()
        rig.h.stop()
