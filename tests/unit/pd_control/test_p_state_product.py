"""P: every situation × every event, with the states that must follow; then everything comes back.

A situation is the state of a request and of a transfer of it, with what makes a difference for what
may still be read. What EXPECTED does not name must leave both as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_control.codes import Code
from pd_control.ids import Content, TransferId
from pd_control.messages import Abort, AbortKind, CancelSend, DInfo, Renew, TransferKv
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.p_request import PRequestState as R
from pd_control.protocol.p_transfer import PTransferState as T
from pd_control.protocol.planner import ScheduledRequest
from pd_control.testing.pair import Pair, content

PROMPT = content(8)
LINK = 1


def info(pair: Pair, attempt: int = 0) -> DInfo:
    attributes = pair.helo("d", LINK)
    return DInfo(
        "d0",
        pair.d_id.incarnation,
        "d-r",
        attempt,
        attributes.topology,
        attributes.ranks,
        ((1, 2),),
        0,
        7,
        PROMPT.digest(7),
    )


KEY = TransferId("d0", b"D" * 16, "d-r", 0).key()


def transfer_kv(pair: Pair, attempt: int = 0) -> None:
    pair._call_refs[attempt + 1] = -1
    message = TransferKv(LINK, "p-r", info(pair, attempt))
    pair.to_p(ev.TransferKvReceived(attempt + 1, pair.d_id, message))


def linked() -> Pair:
    pair = Pair()
    pair.to_p(ev.LinkUp(pair.d_id, LINK, pair.helo("d", LINK)))
    return pair


def parked() -> Pair:
    pair = linked()
    transfer_kv(pair)
    return pair


def known() -> Pair:
    pair = linked()
    pair.add_p_request("p-r", PROMPT)
    return pair


def known_queued() -> Pair:
    pair = known()
    transfer_kv(pair)
    pair.pump()  # the offer reaches the planner
    return pair


def prefilling_queued() -> Pair:
    pair = known()
    pair.plan(ScheduledRequest("p-r", 0, 4, pair.blocks_for(4)))
    transfer_kv(pair)
    pair.pump()
    return pair


def sending_with_step() -> Pair:
    pair = known_queued()
    pair.plan(ScheduledRequest("p-r", 0, 4, pair.blocks_for(4)))
    pair.pump()
    return pair


def sending_substep() -> Pair:
    pair = known()
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    transfer_kv(pair)
    pair.pump()
    return pair


def held() -> Pair:
    pair = known()
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    pair.pump()
    return pair


def held_sending() -> Pair:
    pair = held()
    transfer_kv(pair)
    pair.pump()
    return pair


def held_draining() -> Pair:
    pair = held_sending()
    pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TRANSFER, KEY)))
    return pair  # the cancel is not delivered


def released() -> Pair:
    pair = held()
    pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TAKER, b"t" * 16, "p-r")))
    return pair  # the command to forget is not delivered


SITUATIONS: dict[str, tuple[Callable[[], Pair], tuple[R | None, T | None]]] = {
    "parked": (parked, (None, T.PARKED)),
    "known": (known, (R.KNOWN, None)),
    "known, queued": (known_queued, (R.KNOWN, T.QUEUED)),
    "prefilling, queued": (prefilling_queued, (R.PREFILLING, T.QUEUED)),
    "sending with a step": (sending_with_step, (R.PREFILLING, T.SENDING)),
    "sending with a substep": (sending_substep, (R.PREFILLING, T.SENDING)),
    "held": (held, (R.HELD, None)),
    "held, sending frozen": (held_sending, (R.HELD, T.SENDING)),
    "held, draining": (held_draining, (R.HELD, T.DRAINING)),
    "released": (released, (R.RELEASED, None)),
}


def states(pair: Pair) -> tuple[R | None, T | None]:
    request = pair.p._requests.get("p-r") or pair.p._forgetting.get("p-r")
    transfer = pair.p._transfers.get(KEY)
    return (
        None if request is None else request.state,
        None if transfer is None else transfer.state,
    )


def add(pair: Pair, what: Content, again: bool = True) -> None:
    """The engine takes the request; one that it has is only announced again."""
    running = pair.planner._running.get("p-r")
    if running is None:
        pair.add_p_request("p-r", what)
    elif again and running.tracked:
        pair.to_p(ev.RequestAdded("p-r", what))


def next_step(pair: Pair) -> None:
    """The engine schedules the rest of what it has of the request (nothing, mostly)."""
    running = pair.planner._running.get("p-r")
    if running is None or running.finished or running.planned_end >= 8:
        pair.plan()
    else:
        first = running.planned_end
        pair.plan(ScheduledRequest("p-r", first, 8, pair.blocks_for(8 - first)))


def end_step(pair: Pair, code: Code = Code.OK, ack: int | None = 0) -> None:
    if pair.step:
        pair.to_p(ev.StepFinished(pair.step, 0, code, ack))


def send_done(pair: Pair, target: int | None, code: Code, tokens: int = 7) -> None:
    pair.to_p(ev.SendDone(0, pair.p_workers[0], KEY, target, tokens, code))


def preempt(pair: Pair) -> None:
    running = pair.planner._running.get("p-r")
    if running is not None and not running.finished:
        pair.preempt_p_request("p-r")


def finish(pair: Pair, code: Code) -> None:
    running = pair.planner._running.get("p-r")
    if running is not None and not running.finished:
        event = pair.planner.finish_request("p-r", code, 42)
        if event is not None:  # else the core thread has let go of it
            pair.to_p(event)


def deadline(pair: Pair) -> None:
    at = pair.p.next_deadline()
    if at is not None:
        pair.now_s = at
        pair.to_p(ev.Tick())


EVENTS: dict[str, Callable[[Pair], None]] = {
    "added": lambda p: add(p, PROMPT),
    "another is added instead": lambda p: add(p, content(8, seed=1), again=False),
    "refused": lambda p: p.to_p(ev.RequestRefused("p-r", Code.BUSY)),
    "next step": next_step,
    "step ends": end_step,
    "step ends, substep taken": lambda p: end_step(p, ack=1),
    "step ends, ack lost": lambda p: end_step(p, ack=None),
    "step fails": lambda p: end_step(p, Code.INTERNAL),
    "unknown step ends": lambda p: p.to_p(ev.StepFinished(77, 0)),
    "finished": lambda p: finish(p, Code.OK),
    "aborted by its client": lambda p: finish(p, Code.ABORTED),
    "first token": lambda p: p.to_p(ev.FirstToken("p-r", 1)),
    "preempted": preempt,
    "withdrawn": lambda p: p.to_p(ev.TransferWithdrawn(KEY)),
    "blocks wanted": lambda p: p.to_p(ev.BlocksWanted(2)),
    "sent": lambda p: send_done(p, 0, Code.OK),
    "sent short": lambda p: send_done(p, 0, Code.OK, 6),
    "send failed": lambda p: send_done(p, 0, Code.UNREACHABLE),
    "given up": lambda p: send_done(p, None, Code.ABORTED),
    "sent to nobody": lambda p: send_done(p, 5, Code.OK),
    "sent by a dead rank": lambda p: p.to_p(ev.SendDone(0, b"x" * 16, KEY, 0, 7, Code.OK)),
    "link down": lambda p: p.to_p(ev.LinkDown(p.d_id, LINK)),
    "new link": lambda p: p.to_p(ev.LinkUp(p.d_id, LINK + 1, p.helo("d", LINK + 1))),
    "asked again": transfer_kv,
    "renewed": lambda p: p.to_p(ev.RenewReceived(p.d_id, Renew(("p-r", "unknown")))),
    "transfer aborted": lambda p: p.to_p(ev.AbortReceived(p.d_id, Abort(AbortKind.TRANSFER, KEY))),
    "taker withdrawn": lambda p: p.to_p(
        ev.AbortReceived(p.d_id, Abort(AbortKind.TAKER, KEY, "p-r"))
    ),
    "nonsense aborted": lambda p: p.to_p(ev.AbortReceived(p.d_id, Abort(9, b"short"))),
    "worker died": lambda p: p.to_p(ev.WorkerDied(0, p.p_workers[0])),
    "worker replaced": lambda p: p.to_p(ev.WorkerRegistered(0, b"N" * 16)),
    "deadline": deadline,
}

LIVE_FAILURES = {  # of a transfer that the only rank may be reading for
    "send failed": T.DONE,  # to its only target: it reads no more
    "given up": T.DONE,
    "link down": T.DRAINING,
    "new link": T.DRAINING,
    "transfer aborted": T.DRAINING,
}
D = T.DONE

EXPECTED: dict[str, dict[str, tuple[R | None, T | None]]] = {
    "parked": {
        "added": (R.KNOWN, T.QUEUED),
        "another is added instead": (R.KNOWN, D),  # the digest tells
        "link down": (None, D),
        "new link": (None, D),
        "transfer aborted": (None, D),
        "deadline": (None, D),
    },
    "known": {
        "next step": (R.PREFILLING, None),
        "finished": (R.RELEASED, None),
        "aborted by its client": (R.RELEASED, None),
        "asked again": (R.KNOWN, T.QUEUED),
        "taker withdrawn": (R.RELEASED, None),
    },
    "known, queued": {
        "next step": (R.PREFILLING, T.SENDING),
        "finished": (R.RELEASED, T.DRAINING),
        "aborted by its client": (R.RELEASED, T.DRAINING),
        "link down": (R.KNOWN, T.DRAINING),  # until the core thread says it plans no more
        "new link": (R.KNOWN, T.DRAINING),
        "transfer aborted": (R.KNOWN, T.DRAINING),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "deadline": (R.KNOWN, T.DRAINING),
        # The core thread may have planned it; SEND_DONE can overtake the news of that.
        "sent": (R.RELEASED, D),
        "sent short": (R.KNOWN, T.DRAINING),
        "send failed": (R.KNOWN, T.DRAINING),
        "given up": (R.KNOWN, T.DRAINING),
    },
    "prefilling, queued": {
        "sent": (R.RELEASED, D),
        "sent short": (R.PREFILLING, T.DRAINING),
        "send failed": (R.PREFILLING, T.DRAINING),
        "given up": (R.PREFILLING, T.DRAINING),
        "next step": (R.PREFILLING, T.SENDING),
        "step fails": (R.RELEASED, T.DRAINING),
        "finished": (R.HELD, T.DRAINING),  # with 4 of 7 wanted tokens
        "aborted by its client": (R.RELEASED, T.DRAINING),
        "preempted": (R.KNOWN, T.QUEUED),
        "link down": (R.PREFILLING, T.DRAINING),
        "new link": (R.PREFILLING, T.DRAINING),
        "transfer aborted": (R.PREFILLING, T.DRAINING),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "worker died": (R.RELEASED, T.DRAINING),
        "worker replaced": (R.RELEASED, T.DRAINING),
        "deadline": (R.PREFILLING, T.DRAINING),
    },
    "sending with a step": {
        **{event: (R.PREFILLING, after) for event, after in LIVE_FAILURES.items()},
        "given up": (R.PREFILLING, T.DRAINING),  # still offered
        "send failed": (R.PREFILLING, T.DRAINING),
        "sent": (R.RELEASED, D),  # overtook the plan of the next chunk
        "step fails": (R.RELEASED, T.DRAINING),
        "finished": (R.HELD, T.DRAINING),
        "aborted by its client": (R.RELEASED, T.DRAINING),
        "preempted": (R.KNOWN, T.SENDING),
        "sent short": (R.PREFILLING, T.DRAINING),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "worker died": (R.RELEASED, T.DRAINING),
        "worker replaced": (R.RELEASED, T.DRAINING),
        "deadline": (R.PREFILLING, T.DRAINING),
    },
    "sending with a substep": {
        **{event: (R.PREFILLING, after) for event, after in LIVE_FAILURES.items()},
        "step ends": (R.HELD, T.SENDING),  # refused, and repaired at once
        "step ends, substep taken": (R.HELD, T.SENDING),
        "step ends, ack lost": (R.HELD, T.DRAINING),
        "step fails": (R.RELEASED, D),  # and the substep was refused: nobody reads
        "finished": (R.HELD, T.SENDING),
        "aborted by its client": (R.RELEASED, T.DRAINING),
        "preempted": (R.KNOWN, T.SENDING),  # from blocks that stay leased
        "sent": (R.RELEASED, D),
        "sent short": (R.PREFILLING, D),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "worker died": (R.RELEASED, D),
        "worker replaced": (R.RELEASED, D),
        "deadline": (R.PREFILLING, T.DRAINING),
    },
    "held": {
        "asked again": (R.HELD, T.SENDING),
        "taker withdrawn": (R.RELEASED, None),
        "worker died": (R.RELEASED, None),
        "worker replaced": (R.RELEASED, None),
        "deadline": (R.RELEASED, None),
    },
    "held, sending frozen": {
        **{event: (R.HELD, after) for event, after in LIVE_FAILURES.items()},
        "sent": (R.RELEASED, D),
        "sent short": (R.HELD, D),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "worker died": (R.RELEASED, D),
        "worker replaced": (R.RELEASED, D),
        "deadline": (R.RELEASED, T.DRAINING),  # the end of the send is the end of `hold_max` too
    },
    "held, draining": {
        "sent": (R.HELD, D),
        "sent short": (R.HELD, D),
        "send failed": (R.HELD, D),
        "given up": (R.HELD, D),
        "taker withdrawn": (R.RELEASED, T.DRAINING),
        "worker died": (R.RELEASED, D),
        "worker replaced": (R.RELEASED, D),
    },
    "released": {},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation_times_event(situation: str, event: str) -> None:
    make, before = SITUATIONS[situation]
    pair = make()
    assert states(pair) == before
    EVENTS[event](pair)
    request, transfer = EXPECTED[situation].get(event, before)
    after = states(pair)
    assert after == (request, None if transfer is T.DONE else transfer)
    if transfer is T.DONE:
        assert pair.p._done.get(KEY, pair.now_s) is not None
    clean_up(pair, fatal=situation == "held, draining" and event == "deadline")


def clean_up(pair: Pair, fatal: bool) -> None:
    """Whatever happened, everything ends within the deadlines, and every block is back."""
    for rank, incarnation in pair.p._workers.items():
        pair.p_workers[rank] = incarnation
    finish(pair, Code.OK)
    pair.pump()
    for step in list(pair.p._steps):
        for rank in list(pair.p._steps[step].ranks_left):
            pair.to_p(ev.StepFinished(step, rank, Code.OK, 99))
        pair.planner.step_finished(step)
    pair.pump()
    pair.advance(1000)
    pair.assert_clean()
    assert bool(pair.fatal) == fatal, "a cancel that is not answered in time is fatal"


@pytest.mark.parametrize("seed", range(60))
def test_any_walk_through_the_events_ends_clean(seed: int) -> None:
    """No order of events, delivered at once or late, raises, leaks or leaves a wait without end."""
    rng = random.Random(seed)
    make, _ = SITUATIONS[rng.choice(list(SITUATIONS))]
    pair = make()
    walked = []
    for _ in range(rng.randrange(2, 30)):
        event = rng.choice(list(EVENTS))
        walked.append(event)
        EVENTS[event](pair)
        for _ in range(rng.choice([0, 1, 3, 99])):
            if pair.outbox:
                pair.deliver(*pair.outbox.popleft())
        for request in pair.p._requests.values():
            for transfer in request.transfers.values():
                waits = pair.p._timers.get(transfer.key) is not None
                assert waits or not transfer.live or not pair.fatal, walked
    clean_up(pair, fatal=bool(pair.fatal))


def test_every_cancel_is_sent_to_those_who_may_read_and_to_nobody_else() -> None:
    pair = held_sending()
    pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TRANSFER, KEY)))
    cancels = pair.take(fx.WorkerNews, lambda e: isinstance(e.item, CancelSend))
    assert [c.rank for c in cancels] == [0]
    pair = known_queued()
    pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TRANSFER, KEY)))
    assert not pair.take(fx.WorkerNews)
