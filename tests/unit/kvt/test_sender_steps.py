"""The sender's face: steps and substeps against a model of the rules, and arguments of every kind.

No receiver: sends here wait for a step or for a connection that nobody makes, so what is tested is
what the calls answer and that everything ends once. tests/integration has the bytes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvt_bindings import CompletionQueue, DataClient, HostStream, KvtError, Send, Sender, code_name
from tests.kvt_kit import Shape, key_of, make_cache

SHAPE = Shape(layers=2, blocks=4)
SCHEDULER = b"1" * 16
BAD_REQUEST, BUSY, ABORTED, GONE = 12, 4, 5, 3


def make_sender(**options: Any) -> tuple[Sender, CompletionQueue]:
    cache = make_cache(SHAPE)
    queue = CompletionQueue()
    sender = Sender(cache.native, queue, DataClient(cache.native), **options)
    sender.begin_scheduler(SCHEDULER)
    return sender, queue


def make_send(key: int, **changes: Any) -> Send:
    fields: dict[str, Any] = {
        "key": key_of(key),
        "target_instance": "d0",
        "target_incarnation": b"d" * 16,
        "targets": [(0, b"w" * 16, "tcp://127.0.0.1:1"), (1, b"v" * 16, "tcp://127.0.0.1:2")],
        "src_blocks": [[1]],
        "dst_blocks": [[2]],
        "first_token": 0,
        "end_token": 16,
    }
    return Send(**{**fields, **changes})


class Steps(RuleBasedStateMachine):
    """Verdicts and freeze answers follow from who came when; each taken send completes once."""

    def __init__(self) -> None:
        super().__init__()
        self.sender, self.queue = make_sender(early_s=600.0)
        self.key = 0
        self.last_started = 0
        self.open: set[int] = set()
        self.frozen: dict[int, int] = {}
        self.arrived: dict[int, dict[int, int]] = {}  # step → substep → key, not refused
        self.owed: set[int] = set()  # keys whose sends were taken
        self.drained: list[tuple[int, int]] = []

    def next_key(self) -> int:
        self.key += 1
        return self.key

    def taken(self, step: int) -> int:
        n = 0
        while n + 1 in self.arrived.get(step, {}):
            n += 1
        return n

    @rule(ahead=st.integers(1, 3))
    def start(self, ahead: int) -> None:
        step = self.last_started + ahead
        for passed in range(self.last_started + 1, step):
            self.arrived.pop(passed, None)
        self.sender.start_step(step, 8)
        self.last_started = step
        self.open.add(step)

    @rule(behind=st.integers(0, 3))
    def start_again(self, behind: int) -> None:
        if self.last_started > behind:
            with pytest.raises(KvtError, match="steps ascend"):
                self.sender.start_step(self.last_started - behind)

    @rule(offset=st.integers(-2, 3), substep=st.integers(1, 4))
    def substep(self, offset: int, substep: int) -> None:
        step = self.last_started + offset
        if step < 1:
            return
        key = self.next_key()
        verdict = self.sender.start_substep(step, substep, [make_send(key)])
        here = self.arrived.setdefault(step, {})
        if step in self.frozen:
            expected = "duplicate" if substep <= self.frozen[step] else "late"
        elif step <= self.last_started and step not in self.open:
            expected = "late"  # passed over
        elif substep in here:
            expected = "duplicate"
        else:
            here[substep] = key
            is_open = step in self.open
            expected = "taken" if is_open and substep <= self.taken(step) else "kept"
        assert verdict == expected

    @precondition(lambda self: self.open)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def record(self, data: st.DataObject, layer: int) -> None:
        self.sender.record_event(data.draw(st.sampled_from(sorted(self.open))), layer)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.open)))
        answer = self.sender.freeze_step(step)
        if step not in self.frozen:
            self.frozen[step] = self.taken(step)
        assert answer == self.frozen[step]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.open)))
        self.frozen.setdefault(step, self.taken(step))
        self.sender.flush_step(step)
        self.open.discard(step)
        assert self.sender.freeze_step(step) == self.frozen[step]
        with pytest.raises(KvtError):
            self.sender.record_event(step, 0)

    @invariant()
    def completions_come_once(self) -> None:
        for _, key, _, target, _, code, _ in self.queue.drain():
            assert code_name(code) != "OK"
            self.drained.append((int.from_bytes(key, "big"), target))
        assert len(set(self.drained)) == len(self.drained)

    def teardown(self) -> None:
        self.sender.close()
        self.completions_come_once()
        owed = set()
        for step, here in self.arrived.items():
            limit = self.frozen.get(step, self.taken(step) if step in self.open else 0)
            owed |= {key for substep, key in here.items() if substep <= limit}
        assert set(self.drained) == {(key, target) for key in owed for target in (0, 1)}
        assert self.queue.stats()["reserved"] == 0
        assert self.queue.stats()["pushed_unreserved"] == 0


Steps.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSteps = Steps.TestCase

small = st.integers(-2, 5)
ids = st.one_of(st.binary(max_size=20), st.just(b"k" * 16))
lists = st.lists(st.lists(st.integers(-1, 2**33), max_size=4), max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    key=ids,
    incarnation=ids,
    targets=st.lists(st.tuples(small, ids, st.text(max_size=5)), max_size=3),
    src=lists,
    dst=lists,
    first=st.integers(-1, 2**33),
    end=st.integers(-1, 2**33),
    last=st.booleans(),
)
def test_any_send_is_taken_or_refused_in_words(
    shared_sender: tuple[Sender, CompletionQueue], **fields: Any
) -> None:
    """What the face cannot hold is a TypeError, what makes no sense a KvtError; nothing else."""
    sender, _ = shared_sender
    refused: KvtError | None = None
    try:
        send = Send(
            key=fields["key"],
            target_instance="d",
            target_incarnation=fields["incarnation"],
            targets=fields["targets"],
            src_blocks=fields["src"],
            dst_blocks=fields["dst"],
            first_token=fields["first"],
            end_token=fields["end"],
            last=fields["last"],
        )
        sender.send_frozen([send])
    except TypeError:
        pass
    except KvtError as error:
        refused = error
    assert refused is None or (refused.code == BAD_REQUEST and str(refused))


@pytest.fixture(scope="module")
def shared_sender() -> Any:
    sender, queue = make_sender()
    yield sender, queue
    sender.close()
    queue.drain(1 << 20)
    assert queue.stats()["reserved"] == 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_unpack_or_are_refused(item: bytes) -> None:
    code = BAD_REQUEST
    try:
        Send.unpack(item)
    except KvtError as error:
        code = error.code
    assert code == BAD_REQUEST


def test_wrong_calls_say_what_is_wrong() -> None:
    sender, _ = make_sender()
    for call, words in (
        (lambda: sender.record_event(1, 0), "step 1 recorded, but the step is not open"),
        (lambda: sender.freeze_step(1), "step 1 has not started"),
        (lambda: sender.flush_step(1), "step 1 has not started"),
        (lambda: sender.start_step(1, records_per_layer=0), "records_per_layer"),
        (lambda: sender.start_step(1, scheduler=b"short"), "expected 16 bytes"),
        (lambda: sender.submit_send(1, make_send(1, targets=[])), "no target ranks"),
        (lambda: sender.submit_send(1, make_send(1, first_token=9, end_token=3)), r"\[9, 3\)"),
    ):
        with pytest.raises(KvtError, match=words) as caught:
            call()
        assert caught.value.code == BAD_REQUEST
    sender.start_step(3)
    with pytest.raises(KvtError, match="layer 9 is not of this rank"):
        sender.record_event(3, 9)
    with pytest.raises(KvtError, match="no host stream 12345678"):
        sender.record_event(3, 0, 12345678)
    with pytest.raises(KvtError, match="submitted before"):
        sender.submit_send(3, make_send(1))
    with pytest.raises(KvtError, match="event_wait"):
        make_sender(event_wait="spin")
    sender.close()
    sender.close()
    with pytest.raises(KvtError, match="closed") as caught:
        sender.start_step(4)
    assert caught.value.code == ABORTED


def test_too_many_open_steps_is_busy() -> None:
    sender, _ = make_sender(max_open_steps=2)
    sender.start_step(1)
    sender.start_step(2)
    with pytest.raises(KvtError, match="the oldest is step 1") as caught:
        sender.start_step(3)
    assert caught.value.code == BUSY
    sender.flush_step(1)
    sender.start_step(3)
    sender.close()


def test_a_scheduler_that_has_ended_is_gone() -> None:
    sender, queue = make_sender()
    sender.submit_send(1, make_send(1))
    sender.start_step(1)
    sender.start_step(1, scheduler=b"2" * 16)  # another one speaks: everything of the first ends
    with pytest.raises(KvtError) as caught:
        sender.start_step(2, scheduler=SCHEDULER)
    assert caught.value.code == GONE
    assert sender.start_substep(2, 1, [make_send(2)], scheduler=SCHEDULER) == "stale"
    sender.end_scheduler(SCHEDULER)  # no longer the current one: nothing happens
    assert sender.freeze_step(1) == 0
    sender.close()
    assert {(c[1], code_name(c[5])) for c in queue.drain()} == {(key_of(1), "ABORTED")}


def test_the_snapshot_says_what_a_send_waits_for() -> None:
    sender, _ = make_sender()
    stream = HostStream()
    stream.submit()
    sender.submit_send(4, make_send(7))
    sender.start_step(4, 100)
    sender.record_event(4, 1, stream.handle)
    snapshot = sender.snapshot()
    while not snapshot["transfers"]:  # the sending thread has it in a moment
        snapshot = sender.snapshot()
    (step,) = snapshot["steps"]
    assert (step["step"], step["sched_tokens"], step["num_sends"]) == (4, 100, 1)
    assert (step["missing_layers"], step["pending_layers"]) == ([0], [1])
    (transfer,) = snapshot["transfers"]
    assert transfer["key"] == key_of(7)
    assert transfer["num_sends_waiting"] == 1
    assert [t["state"] for t in transfer["targets"]] == ["connecting", "connecting"]
    assert snapshot["scheduler"] == SCHEDULER
    stream.complete(1)
    sender.close()


def test_threads_may_start_substeps_while_the_engine_steps() -> None:
    """Four threads, one step after the other: the answers add up (the C++ stress test has more)."""
    sender, queue = make_sender(early_s=600.0)
    verdicts: dict[tuple[int, int], str] = {}
    num_steps, num_threads = 40, 4

    def bypass(substep: int) -> None:
        for step in range(1, num_steps + 1):
            key = step * 10 + substep
            verdicts[step, substep] = sender.start_substep(step, substep, [make_send(key)])

    threads = [threading.Thread(target=bypass, args=(n + 1,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    answers = {}
    for step in range(1, num_steps + 1):
        sender.start_step(step)
        for layer in range(SHAPE.layers):
            sender.record_event(step, layer)
        answers[step] = sender.freeze_step(step)
        sender.flush_step(step)
    for thread in threads:
        thread.join()
    sender.close()
    for (step, substep), verdict in verdicts.items():
        if verdict == "taken":
            assert substep <= answers[step]
        if verdict == "late":
            assert substep > answers[step]
    taken = {
        key_of(step * 10 + substep) for step, n in answers.items() for substep in range(1, n + 1)
    }
    completions = [(c[1], c[3]) for c in queue.drain(1 << 20)]
    assert len(set(completions)) == len(completions)
    assert set(completions) == {(key, target) for key in taken for target in (0, 1)}
