"""D: every state × every event, with the state that must follow; then everything must come back.

A pair that EXPECTED does not name must leave the state as it is (the one rule for illegal input).
The request runs under policy FAIL, so a failure ends in CLOSING with the engine told.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_control.codes import Code
from pd_control.messages import Abort, Final, Grant, GrantOp, Started
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.d_request import D_REQUEST, DRequestState
from pd_control.testing.pair import Pair, content

S = DRequestState
PROMPT = content(10)


def in_state(state: DRequestState) -> Pair:
    """A pair whose request "r" is in that state, every effect up to there delivered."""
    pair = Pair()
    pair.add_d_request("r", PROMPT, on_failure=ev.OnFailure.FAIL)
    if state is S.WAITING_BLOCKS:
        return pair
    pair.allocate("r", 10)
    if state is S.LINKING:
        pair.take(fx.OpenLink)
        return pair
    pair.pump_until(fx.WorkerNews)
    if state is S.GRANTING:
        pair.take(fx.WorkerNews)
        return pair
    pair.pump_until(fx.Call)
    calls = pair.take(fx.Call)
    if state is S.REQUESTING:
        return pair
    pair.to_d(ev.CallResult(calls[0].call_id, Code.ACCEPTED))
    if state is S.QUEUED:
        return pair
    if state is S.LOADING:
        pair.to_d(ev.StartedReceived(pair.p_id, Started(pair.key("r"))))
        pair.take(fx.WorkerNews)
        return pair
    assert state is S.CLOSING
    pair.to_d(ev.AbortRequested("r"))
    pair.take(fx.WorkerNews)
    pair.pump()
    return pair


def _link_id(pair: Pair) -> int:
    return next((peer.link_id for peer in pair.d._peers), 1)


def _call_id(pair: Pair) -> int:
    return pair.d._requests["r"].call_id or 999


def _blocks_again(pair: Pair) -> None:
    pair.allocate("r", 10)


def _tick(pair: Pair) -> None:
    at = pair.d._timers.get("r")
    assert at is not None, "nothing waits without a deadline"
    pair.now_s = at
    pair.to_d(ev.Tick())


def _worker(pair: Pair) -> tuple[int, bytes]:
    return 0, pair.d_workers[0]


EVENTS: dict[str, Callable[[Pair], None]] = {
    "added again": lambda p: p.add_d_request("r", PROMPT),
    "blocks": _blocks_again,
    "link up": lambda p: p.to_d(ev.LinkUp(p.p_id, _link_id(p), p.helo("p", _link_id(p)))),
    "link failed": lambda p: p.to_d(
        ev.LinkFailed("p0", _link_id(p), Code.UNREACHABLE, "connection refused")
    ),
    "link down": lambda p: p.to_d(ev.LinkDown(p.p_id, _link_id(p))),
    "grant open": lambda p: p.to_d(ev.GrantAcked(*_worker(p), p.key("r"), 0, Code.OK)),
    "grant refused": lambda p: p.to_d(ev.GrantAcked(*_worker(p), p.key("r"), 0, Code.BUSY)),
    "grant closed": lambda p: p.to_d(ev.GrantAcked(*_worker(p), p.key("r"), 1, Code.OK)),
    "accepted": lambda p: p.to_d(ev.CallResult(_call_id(p), Code.ACCEPTED)),
    "call failed": lambda p: p.to_d(ev.CallResult(_call_id(p), Code.BUSY, "full")),
    "started": lambda p: p.to_d(ev.StartedReceived(p.p_id, Started(p.key("r")))),
    "final ok": lambda p: p.to_d(ev.FinalReceived(p.p_id, Final(p.key("r"), Code.OK, 9))),
    "final error": lambda p: p.to_d(ev.FinalReceived(p.p_id, Final(p.key("r"), Code.GONE, 0))),
    "loaded": lambda p: p.landed(p.key("r"), 9),
    "loaded short": lambda p: p.landed(p.key("r"), 8),
    "load failed": lambda p: p.landed(p.key("r"), 0, Code.CORRUPT),
    "abort": lambda p: p.to_d(ev.AbortRequested("r")),
    "abort from p": lambda p: p.to_d(ev.AbortReceived(p.p_id, Abort(0, p.key("r")))),
    "worker died": lambda p: p.to_d(ev.WorkerDied(*_worker(p))),
    "worker replaced": lambda p: p.to_d(ev.WorkerRegistered(0, b"N" * 16)),
    "deadline": _tick,
    "peer gone": lambda p: p.to_d(ev.PeerGone("p0")),
}

GONE = None  # the request is over and forgotten

EXPECTED: dict[DRequestState, dict[str, DRequestState | None]] = {
    S.WAITING_BLOCKS: {"blocks": S.LINKING, "abort": GONE, "deadline": GONE},
    S.LINKING: {
        "link up": S.GRANTING,
        "link failed": GONE,  # no grant is open: closing takes no time
        "abort": GONE,
        "worker died": GONE,
        "worker replaced": GONE,
        "deadline": GONE,
    },
    S.GRANTING: {
        "grant open": S.REQUESTING,
        "grant refused": S.CLOSING,
        "load failed": S.CLOSING,
        "loaded short": S.CLOSING,
        "link down": S.CLOSING,
        "final error": S.CLOSING,
        "abort": S.CLOSING,
        "worker died": GONE,  # its death closes the only grant
        "worker replaced": GONE,
        "deadline": S.CLOSING,
    },
    S.REQUESTING: {
        "accepted": S.QUEUED,
        "call failed": S.CLOSING,
        "started": S.LOADING,
        "final ok": S.LOADING,
        "final error": S.CLOSING,
        "loaded": GONE,
        "loaded short": S.CLOSING,
        "load failed": S.CLOSING,
        "link down": S.CLOSING,
        "abort": S.CLOSING,
        "worker died": GONE,
        "worker replaced": GONE,
        "deadline": S.CLOSING,
    },
    S.QUEUED: {
        "started": S.LOADING,
        "final ok": S.LOADING,
        "final error": S.CLOSING,
        "loaded": GONE,
        "loaded short": S.CLOSING,
        "load failed": S.CLOSING,
        "link down": S.CLOSING,
        "abort": S.CLOSING,
        "worker died": GONE,
        "worker replaced": GONE,
        "deadline": S.CLOSING,
    },
    S.LOADING: {
        "final error": S.CLOSING,
        "loaded": GONE,
        "loaded short": S.CLOSING,
        "load failed": S.CLOSING,
        "link down": S.CLOSING,
        "abort": S.CLOSING,
        "worker died": GONE,
        "worker replaced": GONE,
        "deadline": S.CLOSING,
    },
    S.CLOSING: {"grant closed": GONE, "worker died": GONE, "worker replaced": GONE},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", EXPECTED, ids=lambda s: s.name)
def test_state_times_event(state: DRequestState, event: str) -> None:
    pair = in_state(state)
    assert pair.d._requests["r"].state is state
    told_before = len(pair.outcomes.get("r", ()))
    EVENTS[event](pair)
    request = pair.d._requests.get("r")
    after = None if request is None else request.state
    assert after is EXPECTED[state].get(event, state)
    # Whatever happened, it can be ended, the engine hears exactly once, and all comes back.
    pair.to_d(ev.AbortRequested("r"))
    if request is not None and request.state is S.CLOSING:
        for rank in sorted(request.grants):
            pair.to_d(
                ev.GrantAcked(rank, pair.d_workers[rank], request.key, GrantOp.CLOSE, Code.OK)
            )
    pair.take(fx.WorkerNews, lambda e: isinstance(e.item, Grant))
    pair.take(fx.OpenLink)
    pair.pump()
    assert len(pair.outcomes["r"]) == 1
    assert told_before <= 1
    pair.advance(1000)
    pair.assert_clean()


@pytest.mark.parametrize("seed", range(60))
def test_any_walk_through_the_events_tells_the_engine_once_and_ends_clean(seed: int) -> None:
    """No order of events, delivered at once or late, raises, leaks or tells twice."""
    rng = random.Random(seed)
    pair = in_state(rng.choice(list(EXPECTED)))
    walked = []
    for _ in range(rng.randrange(2, 30)):
        request = pair.d._requests.get("r")
        if request is None:
            break
        event = rng.choice([name for name in EVENTS if name not in ("added again", "deadline")])
        walked.append(event)
        EVENTS[event](pair)
        pair.d_workers = {rank: info.incarnation for rank, info in pair.d._workers.items()} or {
            0: b"?" * 16
        }
        for _ in range(rng.choice([0, 1, 3, 99])):
            if pair.outbox:
                pair.deliver(*pair.outbox.popleft())
        assert len(pair.outcomes.get("r", ())) <= 1, walked
        if "r" in pair.d._requests and not pair.fatal:
            assert pair.d._timers.get("r") is not None, walked
    pair.to_d(ev.AbortRequested("r"))
    pair.pump()
    pair.to_d(ev.WorkerDied(0, pair.d_workers[0]))  # proof, whatever was muted on the way
    pair.take(fx.OpenLink)
    pair.pump()
    assert len(pair.outcomes["r"]) == 1, walked
    pair.advance(1000)
    assert pair.d.is_idle()
    assert not len(pair.leases)


def test_the_matrix_covers_every_living_state() -> None:
    assert set(EXPECTED) == set(DRequestState) - set(D_REQUEST.final)


def test_every_legal_pair_is_reached_by_some_event() -> None:
    """No row of the table is dead: for each living state its successors are reached above."""
    for state, by_event in EXPECTED.items():
        reachable = {D_REQUEST.after(state, i) for i in D_REQUEST.inputs} - {None, state}
        reached = {after for after in by_event.values() if after is not None}
        # GONE stands for a final state, through CLOSING where no grant is open.
        assert reached <= reachable
        assert not (reachable - reached) - {S.CLOSING, S.READY, S.LINKING, *D_REQUEST.final}
