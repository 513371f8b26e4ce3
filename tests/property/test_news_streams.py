"""News streams against a model, under any schedule of loss, reconnect, restart and forgetting."""

from __future__ import annotations

import itertools
import os

import msgpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simple_rpc._channel_wire import check_news, unpack
from simple_rpc._errors import BusyError
from simple_rpc.news import Group, NewsProtocolError, NewsReceiver, NewsSender, Slots

MAX_SLOTS = 24
MAX_FRAME_ITEMS = 5
HEADS = ("LDON", "SDON")


class NewsModel(RuleBasedStateMachine):
    """One sender; one receiver process at a time, which restarts and forgets; a wire that is cut.

    The wire is a connection: it keeps the order and loses only what follows the cut. Every item is a
    number of its own. `due` is what the present receiver must get, in order, exactly once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sender = NewsSender(
            max_slots=MAX_SLOTS, max_frame_items=MAX_FRAME_ITEMS, max_frame_bytes=64
        )
        self.numbers = itertools.count()
        self.frames: list[bytes] = []  # on the wire, not yet delivered
        self.acks: list[int] = []
        self.receiver: NewsReceiver | None = None  # None: no memory of the stream
        self.incarnation = os.urandom(16)
        self.was_attached_here = False
        self.delivered: list[tuple[str, int]] = []  # all time, all incarnations
        self.due: list[tuple[str, int]] = []
        self.history: list[tuple[str, int]] = []  # this receiver's: number n is at n - 1
        self.num_model_dropped = 0
        self.slots: list[Slots] = []
        self.num_reserved = 0
        self.sender.on_published = self.flush

    # -- the wire ----------------------------------------------------------------------------------

    def flush(self) -> None:
        body = self.sender.next_frame()
        if body is not None:
            self.frames.append(body)

    @initialize()
    def connect_first(self) -> None:
        self.reconnect()

    @rule()
    def cut(self) -> None:
        self.frames.clear()
        self.acks.clear()
        self.sender.detach()

    @precondition(lambda self: not self.sender.is_attached)
    @rule()
    def reconnect(self) -> None:
        self.frames.clear()
        self.acks.clear()
        is_fresh = self.receiver is None
        if self.receiver is None:
            self.receiver = NewsReceiver()
        is_first_ever = self.sender.receiver_incarnation is None
        num_unacked = self.sender.num_unacked
        attached = self.sender.attach(
            self.incarnation, self.receiver.expected_seq, is_fresh=is_fresh
        )
        assert attached.is_new == is_fresh
        if is_fresh and not is_first_ever:
            assert attached.num_dropped == num_unacked
            self.num_model_dropped += num_unacked
            self.due.clear()  # the owner registers anew; nothing old may arrive any more
        else:
            assert attached.num_dropped == 0
        if is_fresh:
            self.history.clear()
        assert self.sender.next_seq - self.sender.num_unacked == self.receiver.expected_seq
        self.flush()

    @rule()
    def restart_receiver(self) -> None:
        """kill -9 and a new process at the same place."""
        self.cut()
        self.receiver = None
        self.incarnation = os.urandom(16)

    @precondition(lambda self: not self.sender.is_attached)
    @rule()
    def forget(self) -> None:
        """The same process drops the state of a detached stream to make room."""
        self.receiver = None

    @precondition(lambda self: self.frames)
    @rule()
    def deliver(self) -> None:
        first_seq, groups = check_news(unpack(self.frames.pop(0), "NEWS"))
        self.receive(first_seq, groups)

    @precondition(lambda self: self.receiver is not None and self.history)
    @rule(data=st.data(), with_new=st.booleans())
    def deliver_again(self, data: st.DataObject, with_new: bool) -> None:
        """A sender may resend more than it must: items delivered before, alone or before new ones."""
        back = data.draw(st.integers(1, len(self.history)))
        groups = [(head, [item]) for head, item in self.history[-back:]]
        assert self.receiver is not None
        first_seq = self.receiver.expected_seq - back
        num_duplicates = self.receiver.stats.num_duplicates
        if with_new and self.frames:
            groups += check_news(unpack(self.frames.pop(0), "NEWS"))[1]
        if data.draw(st.booleans()):
            groups = [
                (head, [item for _, items in run for item in items])
                for head, run in itertools.groupby(groups, lambda group: group[0])
            ]
        self.receive(first_seq, groups)
        assert self.receiver.stats.num_duplicates == num_duplicates + back

    def receive(self, first_seq: int, groups: list[Group]) -> None:
        assert self.receiver is not None
        for head, items in self.receiver.accept(first_seq, groups):
            for item in items:
                assert self.due, f"{head} {item} was not due: delivered twice, or dropped before"
                assert self.due.pop(0) == (head, item)
                self.delivered.append((head, item))
                self.history.append((head, item))
        if self.sender.is_attached:
            self.acks.append(self.receiver.expected_seq)

    @precondition(lambda self: self.acks)
    @rule()
    def deliver_ack(self) -> None:
        self.sender.acknowledge(self.acks.pop(0))
        self.flush()

    @precondition(lambda self: self.acks)
    @rule()
    def repeat_an_old_ack(self) -> None:
        before = self.sender.num_unacked
        self.sender.acknowledge(self.acks[0] - 1 if self.acks[0] > 1 else 0)
        assert self.sender.num_unacked <= before

    @rule(ahead=st.integers(1, 50))
    def an_ack_from_the_future_is_refused(self, ahead: int) -> None:
        before = repr(self.sender)
        end = self.sender._first_seq + self.sender.num_in_flight
        try:
            self.sender.acknowledge(end + ahead)
        except NewsProtocolError:
            pass
        else:
            raise AssertionError("accepted")
        assert repr(self.sender) == before

    @precondition(lambda self: self.receiver is not None)
    @rule(ahead=st.integers(1, 50))
    def a_gap_is_refused(self, ahead: int) -> None:
        assert self.receiver is not None
        expected = self.receiver.expected_seq
        try:
            self.receiver.accept(expected + ahead, [("LDON", [1])])
        except NewsProtocolError:
            pass
        else:
            raise AssertionError("accepted")
        assert self.receiver.expected_seq == expected

    # -- publishing --------------------------------------------------------------------------------

    @rule(heads=st.lists(st.sampled_from(HEADS), min_size=1, max_size=8))
    def publish(self, heads: list[str]) -> None:
        for head in heads:
            room = self.num_reserved + self.sender.num_unacked < MAX_SLOTS
            item = next(self.numbers)
            self.due.append((head, item))
            try:
                self.sender.publish(head, item)
            except BusyError:
                assert not room
                self.due.pop()
            else:
                assert room

    @rule(num=st.integers(1, 10))
    def reserve(self, num: int) -> None:
        room = MAX_SLOTS - self.num_reserved - self.sender.num_unacked
        try:
            self.slots.append(self.sender.reserve(num))
        except BusyError:
            assert num > room
        else:
            assert num <= room
            self.num_reserved += num

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), head=st.sampled_from(HEADS))
    def publish_reserved(self, data: st.DataObject, head: str) -> None:
        """Never fails, whatever the state of the connection."""
        slots = data.draw(st.sampled_from(self.slots))
        item = next(self.numbers)
        if slots.left:
            self.num_reserved -= 1
            self.due.append((head, item))
            slots.publish(head, item)
        else:
            try:
                slots.publish(head, item)
            except ValueError:
                pass
            else:
                raise AssertionError("published without a slot")

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = data.draw(st.sampled_from(self.slots))
        self.num_reserved -= slots.left
        slots.release()
        slots.release()

    # -- what must always hold ---------------------------------------------------------------------

    @invariant()
    def slots_are_bounded(self) -> None:
        assert self.sender.num_reserved == self.num_reserved
        assert self.num_reserved + self.sender.num_unacked <= MAX_SLOTS

    @invariant()
    def at_most_one_frame_is_in_flight(self) -> None:
        assert len(self.frames) <= 1
        assert self.sender.num_in_flight <= MAX_FRAME_ITEMS
        if self.sender.is_attached and self.sender.num_unacked:
            assert self.sender.num_in_flight, "an idle sender sits on news"

    @invariant()
    def nothing_arrives_twice(self) -> None:
        assert len(set(self.delivered)) == len(self.delivered)

    @invariant()
    def the_books_balance(self) -> None:
        stats = self.sender.stats
        assert stats.num_dropped == self.num_model_dropped
        assert stats.num_published == (
            stats.num_acked + stats.num_dropped + self.sender.num_unacked
        )

    def teardown(self) -> None:
        """With a working wire everything that is due arrives."""
        if not self.sender.is_attached:
            self.reconnect()
        while self.frames or self.acks:
            if self.frames:
                self.deliver()
            if self.acks:
                self.deliver_ack()
        assert not self.due
        assert not self.sender.num_unacked
        assert self.sender.num_free == MAX_SLOTS - self.num_reserved


NewsModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNewsModel = NewsModel.TestCase


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@given(st.lists(st.tuples(st.sampled_from(["LDON", "SDON", "GRNT"]), values), min_size=1))
def test_a_frame_carries_any_items_in_order_and_groups_runs(items):
    sender = NewsSender()
    sender.attach(b"i" * 16, 7, is_fresh=True)
    for head, item in items:
        sender.publish(head, item)
    body = sender.next_frame()
    assert body is not None
    first_seq, groups = check_news(unpack(body, "NEWS"))
    assert first_seq == 7
    assert [(head, item) for head, batch in groups for item in batch] == items
    heads = [head for head, _ in groups]
    assert all(a != b for a, b in itertools.pairwise(heads)), "runs of one head share a group"


json_like = st.recursive(scalars, lambda i: st.lists(i) | st.dictionaries(st.text(), i))


@given(st.binary(max_size=64) | json_like.map(msgpack.packb))
def test_any_body_is_accepted_in_shape_or_refused_as_the_peers_fault(body):
    receiver = NewsReceiver()
    try:
        first_seq, groups = check_news(unpack(body, "NEWS"))
        accepted = receiver.accept(first_seq, groups)
    except NewsProtocolError:
        assert receiver.expected_seq == 1
    else:
        assert all(len(head) == 4 and items for head, items in accepted)
