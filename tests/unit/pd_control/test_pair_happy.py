"""Whole lives of requests through both real cores, back to back."""

from __future__ import annotations

import pytest

from pd_control.codes import Code
from pd_control.messages import FrozenSends, Substep, Topology
from pd_control.protocol import effects as fx
from pd_control.protocol.planner import ScheduledRequest
from pd_control.testing.pair import Pair, content

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]


def make(p_tp: int = 1, d_tp: int = 1) -> Pair:
    return Pair(Topology(p_tp, num_kv_heads=4), Topology(d_tp, num_kv_heads=4))


@pytest.mark.parametrize(("p_tp", "d_tp"), TOPOLOGIES)
def test_single_mode_sends_with_the_main_step(p_tp: int, d_tp: int) -> None:
    pair = make(p_tp, d_tp)
    prompt = content(10)
    pair.add_d_request("r", prompt)
    pair.allocate("r", 10)
    pair.pump()
    (admitted,) = pair.admitted
    plan = pair.plan(
        ScheduledRequest(admitted.request_id, 0, 10, pair.blocks_for(10)),
    )
    pair.pump()
    (send,) = plan.sends
    assert (send.first_token, send.end_token, send.last) == (0, 9, True)
    key = pair.key("r")
    view = pair.d.inspect("r", pair.now_s)
    assert view is not None
    assert view["state"] == "LOADING"
    pair.finish_step(1)
    pair.finish_p_request(admitted.request_id, first_token=7)
    pair.landed(key, 9)
    pair.sent(key, 9)
    pair.pump()
    assert [(o.kind, o.tokens, o.first_token) for o in pair.outcomes["r"]] == [("loaded", 9, None)]
    pair.assert_clean()


def test_single_mode_with_first_token_from_p() -> None:
    pair = make()
    pair.add_d_request("r", content(10), want_first_token=True)
    pair.allocate("r", 10)
    pair.pump()
    (admitted,) = pair.admitted
    pair.plan(ScheduledRequest(admitted.request_id, 0, 10, pair.blocks_for(10)))
    pair.pump()
    key = pair.key("r")
    pair.landed(key, 10)
    pair.sent(key, 10)
    pair.pump()
    assert "r" not in pair.outcomes, "P's first token is a member of the expected set"
    pair.finish_step(1)
    pair.finish_p_request(admitted.request_id, first_token=7)
    pair.pump()
    assert [(o.kind, o.tokens, o.first_token) for o in pair.outcomes["r"]] == [("loaded", 10, 7)]
    pair.assert_clean()


@pytest.mark.parametrize("moment", ["before", "running", "complete", "finished"])
@pytest.mark.parametrize(("p_tp", "d_tp"), TOPOLOGIES)
def test_dual_mode_whenever_the_destination_arrives(moment: str, p_tp: int, d_tp: int) -> None:
    pair = make(p_tp, d_tp)
    prompt = content(10)
    blocks = pair.blocks_for(10)

    def destination() -> None:
        pair.add_d_request("d-r", prompt, remote_request_id="p-r")
        pair.allocate("d-r", 10, cached_tokens=4)
        pair.pump()

    if moment == "before":
        destination()  # parked
    pair.add_p_request("p-r", prompt)
    pair.pump()
    plan = pair.plan(ScheduledRequest("p-r", 0, 10, blocks))
    pair.pump()
    if moment == "running":
        destination()
        ways = [e.item for _, e in pair.delivered if isinstance(e, fx.WorkerNews)]
        assert sum(isinstance(item, Substep) for item in ways) == p_tp
    pair.finish_step(1, dict.fromkeys(range(p_tp), 1) if moment == "running" else None)
    pair.pump()
    if moment == "complete":
        destination()
    pair.finish_p_request("p-r")
    pair.pump()
    if moment == "finished":
        destination()
    key = pair.key("d-r")
    frozen = [
        e
        for _, e in pair.delivered
        if isinstance(e, fx.WorkerNews) and isinstance(e.item, FrozenSends)
    ]
    if moment == "before":
        assert [s.first_token for s in plan.sends] == [4]
    if moment in ("complete", "finished"):
        assert len(frozen) == p_tp
    else:
        assert not frozen
    pair.sent(key, 9)
    pair.landed(key, 9)
    pair.pump()
    assert [(o.kind, o.tokens) for o in pair.outcomes["d-r"]] == [("loaded", 9)]
    pair.assert_clean()


def test_chunked_prefill_sends_each_chunk_once_and_contiguously() -> None:
    pair = make()
    pair.add_d_request("r", content(16))
    pair.allocate("r", 16, cached_tokens=2)
    pair.pump()
    request_id = pair.admitted[0].request_id
    ranges = []
    for first in (0, 4, 8, 12):
        plan = pair.plan(ScheduledRequest(request_id, first, first + 4, pair.blocks_for(4)))
        ranges += [(s.first_token, s.end_token, s.last) for s in plan.sends]
        pair.pump()
        pair.finish_step(pair.step)
    assert ranges == [(2, 4, False), (4, 8, False), (8, 12, False), (12, 15, True)]
    key = pair.key("r")
    pair.sent(key, 15)
    pair.landed(key, 15)
    pair.finish_p_request(request_id)
    pair.pump()
    assert pair.outcomes["r"][0].kind == "loaded"
    pair.assert_clean()


def test_nothing_wanted_is_ready_at_once_and_releases_p() -> None:
    pair = make()
    prompt = content(9)
    pair.add_p_request("p-r", prompt)
    pair.plan(ScheduledRequest("p-r", 0, 9, pair.blocks_for(9)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    pair.add_d_request("d-r", prompt, remote_request_id="p-r")
    pair.pump()
    pair.allocate("d-r", 9, cached_tokens=8)
    pair.pump()
    assert [(o.kind, o.tokens) for o in pair.outcomes["d-r"]] == [("loaded", 8)]
    pair.assert_clean()


def test_n_takers_share_one_prompt() -> None:
    pair = make()
    prompt = content(8)
    pair.add_p_request("p-r", prompt, num_takers=3)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    for n in range(3):
        name = f"{n}_r"
        pair.add_d_request(name, prompt, remote_request_id="p-r")
        pair.allocate(name, 8)
        pair.pump()
        assert pair.p_refs.counts, "held until the last taker"
        key = pair.key(name)
        pair.landed(key, 7)
        pair.sent(key, 7)
        pair.pump()
        assert pair.outcomes[name][0].kind == "loaded"
    pair.assert_clean()


def test_a_fourth_taker_is_told_gone() -> None:
    pair = make()
    prompt = content(8)
    pair.add_p_request("p-r", prompt)
    pair.plan(ScheduledRequest("p-r", 0, 8, pair.blocks_for(8)))
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    for name in ("a", "b"):
        pair.add_d_request(name, prompt, remote_request_id="p-r")
        pair.allocate(name, 8)
        pair.pump()
        if name == "a":
            key = pair.key(name)
            pair.landed(key, 7)
            pair.sent(key, 7)
            pair.pump()
    assert pair.outcomes["a"][0].kind == "loaded"
    assert [(o.kind, o.code) for o in pair.outcomes["b"]] == [("recompute", Code.GONE)]
    pair.assert_clean()
