"""What follows a failure on D, whom it asks next, aborts from everywhere, and references that lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.ids import Content
from pd_control.messages import (
    Abort,
    AbortKind,
    Final,
    HeloAttributes,
    Prefill,
    Topology,
    TransferKv,
)
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.checks import MAX_EARLY_TAKERS, MAX_TEXT_CHARS
from pd_control.protocol.events import OnFailure
from pd_control.protocol.planner import ScheduledRequest
from pd_control.protocol.settings import Settings
from pd_control.testing.pair import Pair, content

PROMPT = content(10)


def make(**settings: object) -> Pair:
    return Pair(settings=Settings(**settings))  # type: ignore[arg-type]


def told(pair: Pair, request_id: str = "r") -> list[tuple[str, Code]]:
    return [(o.kind, o.code) for o in pair.outcomes.get(request_id, [])]


def hold_p(pair: Pair, request_id: str = "p-r", num_takers: int = 1) -> None:
    pair.add_p_request(request_id, PROMPT, num_takers)
    pair.plan(ScheduledRequest(request_id, 0, 10, pair.blocks_for(10)))
    pair.finish_step(pair.step)
    pair.finish_p_request(request_id)
    pair.pump()


def loading(pair: Pair, **settings: object) -> bytes:
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r", **settings)
    pair.allocate("r", 10)
    pair.pump()
    return pair.key("r")


def calls(pair: Pair, kind: type) -> list[fx.Call]:
    return [e for _, e in pair.delivered if isinstance(e, fx.Call) and isinstance(e.message, kind)]


# --- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind"), [(OnFailure.FAIL, "failed"), (OnFailure.RECOMPUTE, "recompute")]
)
def test_the_engine_is_told_at_once_and_the_blocks_come_back_on_the_acks(
    policy: OnFailure, kind: str
) -> None:
    pair = make(on_failure=policy)
    key = loading(pair)
    pair.landed(key, 0, Code.CORRUPT)
    closes = pair.take(fx.WorkerNews)
    pair.pump()
    assert told(pair) == [(kind, Code.CORRUPT)]
    assert len(pair.leases) == 1, "the grant is not closed yet"
    for close in closes:
        pair.deliver("d", close)
    pair.advance(200)
    pair.assert_clean()


def test_a_request_may_carry_its_own_policy() -> None:
    pair = make(on_failure=OnFailure.FAIL)
    key = loading(pair, on_failure=OnFailure.RECOMPUTE)
    pair.landed(key, 0, Code.CORRUPT)
    pair.pump()
    assert told(pair) == [("recompute", Code.CORRUPT)]


def test_retry_at_the_same_p_that_still_holds() -> None:
    pair = make(on_failure=OnFailure.RETRY)
    first = loading(pair)
    pair.landed(first, 0, Code.CORRUPT)
    pair.pump()
    second = pair.key("r")
    assert second != first
    assert len(calls(pair, TransferKv)) == 2
    assert told(pair) == []
    pair.landed(first, 9)  # of the old try: only counted
    pair.sent(second, 9)
    pair.landed(second, 9)
    pair.pump()
    assert told(pair) == [("loaded", Code.OK)]
    pair.advance(10)
    pair.assert_clean()


def test_retry_is_bounded_and_then_the_other_policy_holds() -> None:
    pair = make(on_failure=OnFailure.RETRY, max_attempts=3, after_retries=OnFailure.FAIL)
    loading(pair)
    for _ in range(3):
        assert told(pair) == []
        pair.landed(pair.key("r"), 0, Code.CORRUPT)
        pair.pump()
    assert told(pair) == [("failed", Code.CORRUPT)]
    pair.advance(200)
    pair.assert_clean()


def test_retry_on_another_p_is_always_a_prefill() -> None:
    pair = make(on_failure=OnFailure.RETRY)
    loading(pair)
    pair.to_d(ev.PeerFound("p1", "tcp://p1"))
    pair.lose_link()
    pair.take(fx.LinkNews)
    pair.pump_until(fx.OpenLink)
    (link,) = pair.take(fx.OpenLink)
    assert link.instance == "p1"
    p1 = pair.p_id._replace(instance="p1")
    pair.to_d(ev.LinkUp(p1, link.link_id, pair.helo("p", link.link_id)))
    pair.pump_until(fx.Call)
    (call,) = pair.take(fx.Call)
    assert call.peer == p1
    assert isinstance(call.message, Prefill)
    assert call.message.tokens == PROMPT.packed()
    assert call.message.info.attempt == 1
    pair.to_d(ev.AbortRequested("r"))
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]


def test_what_can_only_fail_again_is_not_retried() -> None:
    pair = make(on_failure=OnFailure.RETRY, after_retries=OnFailure.FAIL)
    hold_p(pair)
    pair.add_d_request("r", content(10, seed=3), remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    assert told(pair) == [("failed", Code.BAD_REQUEST)]


def test_an_abort_during_closing_for_a_retry_ends_it() -> None:
    pair = make(on_failure=OnFailure.RETRY)
    key = loading(pair)
    pair.landed(key, 0, Code.CORRUPT)
    closes = pair.take(fx.WorkerNews)
    pair.to_d(ev.AbortRequested("r"))
    for close in closes:
        pair.deliver("d", close)
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]
    pair.advance(200)
    pair.assert_clean()


def test_without_any_p_the_policy_holds() -> None:
    pair = make(on_failure=OnFailure.RETRY, after_retries=OnFailure.RECOMPUTE)
    pair.to_d(ev.PeerGone("p0"))
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump()
    assert told(pair) == [("recompute", Code.UNREACHABLE)]
    pair.assert_clean()


def test_a_dead_worker_of_d_is_not_retried_on_the_blocks_it_took_with_it() -> None:
    pair = make(on_failure=OnFailure.RETRY, after_retries=OnFailure.FAIL)
    loading(pair)
    pair.to_d(ev.WorkerDied(0, pair.d_workers[0], "killed"))
    pair.pump()
    assert told(pair) == [("failed", Code.PEER_LOST)]
    assert not len(pair.leases), "its death closed its grants"


# --- aborts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["single", "dual"])
@pytest.mark.parametrize("steps", range(12))
def test_an_abort_at_any_point_brings_everything_back_on_both_sides(mode: str, steps: int) -> None:
    pair = make(on_failure=OnFailure.FAIL)
    if mode == "dual":
        pair.add_p_request("p-r", PROMPT)
        pair.plan(ScheduledRequest("p-r", 0, 10, pair.blocks_for(10)))
        pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    else:
        pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    for _ in range(steps):
        if pair.outbox:
            pair.deliver(*pair.outbox.popleft())
    pair.to_d(ev.AbortRequested("r"))
    pair.to_d(ev.AbortRequested("r"))  # idempotent
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]
    if mode == "dual":
        pair.finish_step(1, {0: 1})
        pair.finish_p_request("p-r")
    pair.pump()
    assert not pair.p_refs.counts, "D withdrew: P need not hold"
    pair.advance(200)
    pair.assert_clean()


def test_a_client_that_is_gone_before_d_sees_the_request() -> None:
    pair = make()
    pair.to_d(ev.AbortRequested("r", "gone"))
    pair.add_d_request("r", PROMPT)
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]
    hold_p(pair)
    pair.advance(31)
    assert not pair.p_refs.counts, "the hold ends by itself"
    pair.advance(100)
    pair.assert_clean()


def test_the_client_of_p_aborts() -> None:
    pair = make(on_failure=OnFailure.FAIL)
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 4, pair.blocks_for(4)))
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    event = pair.planner.finish_request("p-r", Code.ABORTED)
    assert event is not None
    pair.to_p(event)
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]
    pair.finish_step(1)
    pair.advance(100)
    pair.assert_clean()


def test_an_abort_that_overtakes_its_taker_is_remembered() -> None:
    """Dual mode: D gives up before the router's request has reached P."""
    pair = make(on_failure=OnFailure.FAIL)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.pump()
    pair.to_d(ev.AbortRequested("r"))
    pair.pump()
    pair.advance(1)
    pair.add_p_request("p-r", PROMPT)
    pair.pump()
    assert not pair.planner.leases.acquired[next(iter(pair.planner.leases.acquired))]
    pair.advance(100)
    pair.assert_clean()


def test_one_withdrawal_of_several_takers_is_one() -> None:
    pair = make(on_failure=OnFailure.FAIL)
    hold_p(pair, num_takers=2)
    pair.add_d_request("a", PROMPT, remote_request_id="p-r")
    pair.pump()
    pair.to_d(ev.AbortRequested("a"))
    pair.pump()
    key = pair.key("a")
    pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TAKER, key, "p-r")))  # repeated
    assert pair.p_refs.counts, "the other is still to come"
    pair.add_d_request("b", PROMPT, remote_request_id="p-r")
    pair.allocate("b", 10)
    pair.pump()
    pair.sent(pair.key("b"), 9)
    pair.landed(pair.key("b"), 9)
    pair.pump()
    assert told(pair, "b") == [("loaded", Code.OK)]
    pair.assert_clean()


# --- references that lie, and peers that are not who they were --------------------------------------


def test_a_reference_that_names_another_request_is_refused() -> None:
    """F07: the answer to somebody else's prompt must never come back."""
    pair = make(on_failure=OnFailure.FAIL)
    hold_p(pair)
    pair.add_d_request("r", content(10, seed=9), remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    assert told(pair) == [("failed", Code.BAD_REQUEST)]
    assert "another request" in pair.outcomes["r"][0].message


def test_a_transfer_in_somebody_elses_name_is_refused() -> None:
    pair = make()
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump_until(fx.Call)
    (call,) = pair.take(fx.Call)
    assert isinstance(call.message, TransferKv)
    forged = replace(call.message, info=replace(call.message.info, instance="d7"))
    pair._call_refs[1] = -1
    effects = pair.p.handle(ev.TransferKvReceived(1, pair.d_id, forged), pair.now_s)
    (answer,) = effects
    assert isinstance(answer, fx.Answer)
    assert answer.code is Code.BAD_REQUEST


def test_a_repeated_call_joins_the_running_transfer_and_is_answered_after_its_end() -> None:
    pair = make()
    loading(pair)
    (call,) = calls(pair, TransferKv)
    before = len(pair.p._transfers)
    (answer,) = pair.p.handle(ev.TransferKvReceived(9, pair.d_id, call.message), pair.now_s)  # type: ignore[arg-type]
    assert isinstance(answer, fx.Answer)
    assert (answer.code, len(pair.p._transfers)) == (Code.ACCEPTED, before)
    key = pair.key("r")
    pair.sent(key, 9)
    pair.landed(key, 9)
    pair.pump()
    (answer,) = pair.p.handle(ev.TransferKvReceived(9, pair.d_id, call.message), pair.now_s)  # type: ignore[arg-type]
    assert isinstance(answer, fx.Answer)
    assert answer.code is Code.OK, "its final word, not a second transfer"


def test_a_call_that_belongs_to_an_older_link_is_refused() -> None:
    pair = make()
    loading(pair)
    (call,) = calls(pair, TransferKv)
    pair.to_p(ev.LinkUp(pair.d_id, 77, pair.helo("d", 77)))
    pair.take(fx.LinkNews)
    message = call.message
    assert isinstance(message, TransferKv)
    later = replace(message, info=replace(message.info, attempt=5))
    (answer,) = [
        e
        for e in pair.p.handle(ev.TransferKvReceived(9, pair.d_id, later), pair.now_s)
        if isinstance(e, fx.Answer)
    ]
    assert answer.code is Code.PEER_LOST


def test_a_new_incarnation_of_d_ends_everything_of_the_old_one() -> None:
    """F08."""
    pair = make()
    loading(pair)
    reborn = pair.d_id._replace(incarnation=b"E" * 16)
    pair.to_p(ev.LinkUp(reborn, 1, pair.helo("d", 1)))
    assert not any(t.live for t in pair.p._transfers.values())
    pair.take(fx.LinkNews)
    pair.pump()
    assert not pair.p._transfers
    assert "p-r" in pair.p._requests, "held: the new one may ask for it"


def test_news_from_another_peer_is_not_believed() -> None:
    pair = make()
    key = loading(pair)
    stranger = pair.p_id._replace(incarnation=b"X" * 16)
    pair.to_d(ev.FinalReceived(stranger, Final(key, Code.ABORTED, 0)))
    assert told(pair) == []
    assert pair.d.counters["final.unknown"] == 1
    other = pair.d_id._replace(instance="d9")
    pair.to_p(ev.AbortReceived(other, Abort(AbortKind.TRANSFER, key)))
    assert pair.p._transfers[key].live
    assert pair.p.counters["abort.foreign"] == 1


def test_incompatible_models_are_named_when_the_link_opens() -> None:
    """F12."""
    pair = make(on_failure=OnFailure.FAIL)
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    (link,) = pair.take(fx.OpenLink)
    attributes = replace(pair.helo("p", link.link_id), model="llama")
    pair.to_d(ev.LinkUp(pair.p_id, link.link_id, attributes))
    pair.pump()
    assert told(pair) == [("failed", Code.INCOMPATIBLE)]
    assert "expected model '', got 'llama'" in pair.outcomes["r"][0].message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"attempt": -1}, "attempt"),
        ({"cached_tokens": -5}, "token counts"),
        ({"max_tokens": 1 << 40}, "token counts"),
        ({"digest": b"short"}, "digest"),
        ({"block_ids": ()}, "blocks"),
        ({"block_ids": ((1, -2),)}, "block ids"),
        ({"block_ids": ((1, 1 << 40),)}, "block ids"),
        ({"block_ids": ((1,),) * 65}, "groups"),
        ({"ranks": ()}, "ranks"),
        ({"topology": Topology(0)}, "tp_size"),
        ({"topology": Topology(3, num_kv_heads=8)}, "divide"),
        ({"request_id": ""}, "request id"),
        ({"request_id": "x" * 1000}, "request id"),
    ],
)
def test_what_a_message_says_is_bounded_and_checked(change: dict[str, object], word: str) -> None:
    """R7: answered with an error that names expected and got, and counted."""
    pair = make()
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump_until(fx.Call)
    (call,) = pair.take(fx.Call)
    message = call.message
    assert isinstance(message, TransferKv)
    bad = replace(message, info=replace(message.info, **change))
    (answer,) = pair.p.handle(ev.TransferKvReceived(1, pair.d_id, bad), pair.now_s)
    assert isinstance(answer, fx.Answer)
    assert answer.code is Code.BAD_REQUEST
    assert word in answer.message
    assert "expected" in answer.message
    assert pair.p.counters["calls.refused.BAD_REQUEST"] == 1
    assert not pair.p._transfers


# --- choosing a P ------------------------------------------------------------------------------------


def up(pair: Pair, instance: str) -> None:
    for link in pair.take(fx.OpenLink, lambda e: e.instance == instance):
        peer = pair.p_id._replace(instance=instance)
        helo: HeloAttributes = pair.helo("p", link.link_id)
        pair.to_d(ev.LinkUp(peer, link.link_id, helo))


def test_the_least_loaded_p_is_chosen_and_a_sick_one_avoided() -> None:
    pair = make()
    for n in (1, 2):
        pair.to_d(ev.PeerFound(f"p{n}", f"tcp://p{n}"))
    for n in range(9):
        pair.add_d_request(f"r{n}", PROMPT)
        pair.allocate(f"r{n}", 10)
    load = {peer.instance: len(peer.waiting) for peer in pair.d._peers}
    assert load == {"p0": 3, "p1": 3, "p2": 3}
    (sick,) = pair.take(fx.OpenLink, lambda e: e.instance == "p1")
    pair.to_d(ev.LinkFailed("p1", sick.link_id, Code.UNREACHABLE, "refused"))
    for n in range(9, 13):
        pair.add_d_request(f"r{n}", PROMPT)
        pair.allocate(f"r{n}", 10)
    load = {peer.instance: len(peer.waiting) for peer in pair.d._peers}
    assert load == {"p0": 5, "p1": 0, "p2": 5}


def test_round_robin_takes_turns() -> None:
    pair = make(choose="round_robin")
    pair.to_d(ev.PeerFound("p1", "tcp://p1"))
    for n in range(6):
        pair.add_d_request(f"r{n}", PROMPT)
        pair.allocate(f"r{n}", 10)
    assert {peer.instance: len(peer.waiting) for peer in pair.d._peers} == {"p0": 3, "p1": 3}


@pytest.mark.parametrize("cut", [1, 8, 1 << 20])
def test_token_ids_of_a_prefill_are_checked(cut: int) -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump_until(fx.Call)
    (call,) = pair.take(fx.Call)
    assert isinstance(call.message, Prefill)
    bad = replace(call.message, tokens=call.message.tokens[:-cut])
    (answer,) = pair.p.handle(ev.PrefillReceived(1, pair.d_id, bad), pair.now_s)
    assert isinstance(answer, fx.Answer)
    assert (answer.code, "token ids of 4 bytes" in answer.message) == (Code.BAD_REQUEST, True)


@pytest.mark.parametrize("token", [-1, 1 << 32, None])
@pytest.mark.parametrize("dual", [True, False])
def test_token_ids_of_no_vocabulary_fail_their_own_request_only(token: Any, dual: bool) -> None:
    pair = make(on_failure=OnFailure.RETRY)
    wrong = Content([1, 2, token, 4], PROMPT.identity)
    asked = {"remote_request_id": "p-r"} if dual else {}
    pair.add_d_request("r", wrong, **asked)
    pair.allocate("r", 4)
    pair.pump()
    assert told(pair) == [("recompute", Code.BAD_REQUEST)]
    pair.advance(200)
    pair.assert_clean()


def test_token_ids_of_no_vocabulary_on_p_take_no_transfer() -> None:
    pair = make(on_failure=OnFailure.FAIL)
    pair.add_p_request("p-r", Content([1, 2, -1, 4], PROMPT.identity))
    pair.add_d_request("r", Content([1, 2, 3, 4], PROMPT.identity), remote_request_id="p-r")
    pair.allocate("r", 4)
    pair.pump()
    assert told(pair) == [("failed", Code.BAD_REQUEST)]


def test_what_a_peer_makes_p_remember_is_bounded() -> None:
    pair = make()
    pair.to_p(ev.LinkUp(pair.d_id, 1, pair.helo("d", 1)))
    pair.to_p(
        ev.AbortReceived(pair.d_id, Abort(AbortKind.TRANSFER, b"k" * 16, reason="x" * 10_000))
    )
    (mark,) = pair.p._aborted._entries.values()
    assert len(mark[1]) == MAX_TEXT_CHARS
    for n in range(MAX_EARLY_TAKERS + 10):
        key = n.to_bytes(16, "little")
        pair.to_p(ev.AbortReceived(pair.d_id, Abort(AbortKind.TAKER, key, "unknown")))
    (takers,) = pair.p._early_takers._entries.values()
    assert len(takers[1]) == MAX_EARLY_TAKERS
    long = Abort(AbortKind.TAKER, b"k" * 16, "y" * 10_000)
    pair.to_p(ev.AbortReceived(pair.d_id, long))
    assert pair.p.counters["abort.bad"] == 1
