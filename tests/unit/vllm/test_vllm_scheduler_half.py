"""The scheduler half over the real drivers of the core thread, called as vLLM's scheduler calls it.

What the loop thread would decide is put into the drivers' mailboxes by hand; what they post to it is kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.runtime.sides import DecodeSide, PrefillSide
from pd_control.trace import Trace
from pd_control.vllm.scheduler_half import SchedulerHalf

BLOCK = 4


class Pool:
    """vLLM's block pool as far as a connector may use it: references, and nothing below zero."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=1, is_null=i == 0) for i in range(64)]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def held(self) -> set[int]:
        """Blocks with a reference that is not the engine's own."""
        return {b.block_id for b in self.blocks if b.ref_cnt > 1}


class Rig:
    def __init__(self, policy: str = "fail") -> None:
        self.posted: list[Any] = []
        self.wakes = 0
        self.pool = Pool()
        self.half = half = SchedulerHalf(
            prefill=None, decode=None, model="m", block_tokens=BLOCK, tp_size=1,
            on_load_failure=policy, public=lambda: ("h", 5600, "p0"), wake=self._wake,
        )  # fmt: skip
        trace = Trace(64)
        half.decode = self.decode = DecodeSide(half, self.posted.append, self._fail, trace)
        half.prefill = self.prefill = PrefillSide(
            half, BLOCK, self.posted.append, self._fail, trace
        )
        half.bind_pool(self.pool)  # type: ignore[arg-type]

    def _wake(self) -> None:
        self.wakes += 1

    @staticmethod
    def _fail(reason: str, error: BaseException) -> None:
        raise AssertionError(reason) from error

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.posted if isinstance(e, kind)]

    def lease(self) -> int:
        found = self.of(ev.BlocksAllocated)[-1].lease_id
        assert isinstance(found, int)
        return found

    def arrive(self, request: Any, cached: int = 0) -> tuple[int | None, bool]:
        """As the scheduler does it: arrival, question, blocks for what waits."""
        self.half.new_request(request)
        found, waits = self.half.matched_tokens(request, cached)
        if found is not None:
            self.half.allocated(request, ((1, 2, 3),), found)
        return found, waits

    def step(self, **scheduled: Any) -> tuple[int, bytes | None, list[str]]:
        output = SimpleNamespace(
            preempted_req_ids=scheduled.get("preempted", set()),
            num_scheduled_tokens=scheduled.get("counts", {}),
            scheduled_new_reqs=scheduled.get("new", []),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[]
            ),
        )
        return self.half.build_metadata(output)  # type: ignore[arg-type]


def request(request_id: str, num_tokens: int = 10, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=request_id, kv_transfer_params=params or None, num_prompt_tokens=num_tokens,
        num_tokens=num_tokens, prompt_token_ids=list(range(num_tokens)), lora_request=None,
        mm_features=None, cache_salt=None, output_token_ids=[42],
    )  # fmt: skip


def for_d(request_id: str, num_tokens: int = 10, transfer_id: str = "t") -> Any:
    return request(
        request_id, num_tokens, do_remote_prefill=True, transfer_id=transfer_id,
        remote_host="h", remote_port=1,
    )  # fmt: skip


# -- D -----------------------------------------------------------------------------------------------


def test_d_waits_for_all_but_the_last_token_and_is_reported_once() -> None:
    rig = Rig()
    assert rig.arrive(for_d("r")) == (9, True)
    added = rig.of(ev.DecodeRequestAdded)[0].request
    assert (added.remote_request_id, added.peer_address) == ("t", "tcp://h:1")
    assert rig.pool.held() == {1, 2, 3}
    rig.decode.mailbox.put(fx.RequestLoaded("r", 9))
    rig.decode.mailbox.put(fx.ReleaseLease(rig.lease()))
    assert rig.half.has_news
    assert rig.half.take_loaded() == {"r"}
    assert rig.half.take_loaded() == set()
    stats = rig.half.take_stats()
    assert stats is not None
    assert (stats["ended"], stats["tokens"], len(stats["seconds"])) == ({"OK": 1}, 9, 1)
    assert rig.half.take_stats() is None
    assert rig.pool.held() == set()
    # Asked again after a preemption: the load is used up.
    assert rig.half.matched_tokens(for_d("r"), 0) == (0, False)


def test_a_hit_on_d_shortens_what_is_wanted() -> None:
    rig = Rig()
    assert rig.arrive(for_d("r"), cached=8) == (1, True)
    assert rig.of(ev.BlocksAllocated)[0].cached_tokens == 8


def test_p_is_told_when_d_has_everything() -> None:
    rig = Rig()
    assert rig.arrive(for_d("r", 9), cached=8) == (0, False)
    assert rig.of(ev.BlocksAllocated)[0].cached_tokens == 8
    rig.decode.mailbox.put(fx.RequestLoaded("r", 8))
    assert not rig.half.has_news  # vLLM does not wait for it, and must not hear of it
    assert rig.half.take_loaded() == set()


def test_p_is_told_of_a_prompt_of_one_token() -> None:
    rig = Rig()
    assert rig.arrive(for_d("r", 1)) == (0, False)
    assert rig.of(ev.BlocksAllocated)[0].cached_tokens == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_is_reported_through_the_workers_once(policy: str) -> None:
    rig = Rig(policy)
    rig.arrive(for_d("r"))
    command = fx.RequestFailed if policy == "fail" else fx.RecomputeRequest
    rig.decode.mailbox.put(command("r", Code.PEER_LOST, "gone"))
    assert rig.half.has_news
    assert rig.step()[2] == ["r"]
    assert rig.step()[2] == []
    stats = rig.half.take_stats()
    assert stats is not None
    assert stats["ended"] == {"PEER_LOST": 1}
    assert rig.half.take_loaded() == set()
    assert rig.half.matched_tokens(for_d("r"), 0) == (0, False)


def test_a_failure_before_there_were_blocks_waits_for_them() -> None:
    rig = Rig()
    asked = for_d("r")
    rig.half.new_request(asked)
    rig.decode.mailbox.put(fx.RequestFailed("r", Code.UNREACHABLE, "no link"))
    assert rig.half.matched_tokens(asked, 0) == (9, True)
    assert rig.step()[2] == []  # vLLM takes a failure only of what waits for KV
    rig.half.allocated(asked, ((1,),), 9)
    assert rig.step()[2] == ["r"]
    assert rig.of(ev.BlocksAllocated) == []


def test_an_abort_gives_the_blocks_back_to_vllm_and_keeps_the_lease() -> None:
    rig = Rig()
    asked = for_d("r")
    rig.arrive(asked)
    rig.half.finished(asked, succeeded=False)
    assert rig.of(ev.AbortRequested)
    assert rig.half.take_loaded() == {"r"}  # or vLLM would keep its blocks for ever
    assert rig.pool.held() == {1, 2, 3}
    rig.decode.mailbox.put(fx.RequestLoaded("r", 9))  # too late: nobody hears of it
    rig.decode.mailbox.put(fx.ReleaseLease(rig.lease()))
    assert not rig.half.has_news
    assert rig.pool.held() == set()


def test_samples_of_one_prompt_load_it_once() -> None:
    rig = Rig()
    first, second = for_d("0_r"), for_d("1_r")
    assert rig.arrive(first) == (9, True)
    assert rig.arrive(second) == (None, False)
    rig.decode.mailbox.put(fx.RequestLoaded("0_r", 9))
    # Landed, but not registered in vLLM's prefix cache before the first is admitted.
    assert rig.half.matched_tokens(second, 0) == (None, False)
    rig.half.allocated(first, ((1, 2, 3),), 0)
    assert rig.half.matched_tokens(second, 8) == (0, False)
    assert len(rig.of(ev.DecodeRequestAdded)) == 1


@pytest.mark.parametrize("leaves_early", [False, True])
def test_what_a_sample_does_not_find_of_a_loaded_prompt_it_computes(leaves_early: bool) -> None:
    """P gives a prompt once; D may have had to use its blocks again before the other sample got any."""
    rig = Rig()
    first, second = for_d("0_r"), for_d("1_r")
    rig.arrive(first)
    rig.arrive(second)
    rig.decode.mailbox.put(fx.RequestLoaded("0_r", 9))
    rig.half.drain()
    if leaves_early:
        rig.half.finished(first, succeeded=False)
    else:
        rig.half.allocated(first, ((1, 2, 3),), 0)
    assert rig.half.matched_tokens(second, 0) == (0, False)
    assert len(rig.of(ev.DecodeRequestAdded)) == 1


def test_a_sample_that_comes_when_the_prompt_has_been_loaded_does_not_ask_for_it() -> None:
    rig = Rig()
    first = for_d("0_r")
    rig.arrive(first)
    rig.decode.mailbox.put(fx.RequestLoaded("0_r", 9))
    rig.half.drain()
    rig.half.allocated(first, ((1, 2, 3),), 0)
    rig.half.finished(first, succeeded=True)
    assert rig.arrive(for_d("1_r")) == (0, False)
    assert len(rig.of(ev.DecodeRequestAdded)) == 1
    assert rig.arrive(for_d("0_s")) == (9, True)  # another request's


def test_samples_do_not_wait_for_one_that_has_everything() -> None:
    rig = Rig()
    first, second = for_d("0_r"), for_d("1_r")
    rig.half.new_request(first)
    rig.half.new_request(second)
    assert rig.half.matched_tokens(first, 9) == (0, False)
    rig.half.allocated(first, ((1, 2, 3),), 0)
    assert rig.half.matched_tokens(second, 9) == (0, False)
    assert len(rig.of(ev.DecodeRequestAdded)) == 1


def test_another_request_with_the_same_reference_is_a_taker_of_its_own() -> None:
    rig = Rig()
    assert rig.arrive(for_d("r")) == (9, True)
    assert rig.arrive(for_d("s")) == (9, True)
    assert [e.request.request_id for e in rig.of(ev.DecodeRequestAdded)] == ["r", "s"]


def test_vllm_s_word_of_an_error_does_not_give_up_what_p_has_refused() -> None:
    """It comes as a request that is aborted at once; of an answer that never got here it does count."""
    rig = Rig()
    rig.arrive(for_d("r"))
    rig.decode.mailbox.put(fx.RequestFailed("r", Code.BAD_REQUEST, "another request's"))
    rig.half.drain()
    for transfer_id, told in (("t", 0), ("u", 1)):
        word = for_d("word", 1, transfer_id)
        word.abort_immediately = True
        rig.half.new_request(word)
        rig.half.finished(word, succeeded=False)
        assert len(rig.of(ev.AbortRequested)) == told


def test_a_sample_whose_leader_is_aborted_loads_for_itself() -> None:
    rig = Rig()
    first, second = for_d("0_r"), for_d("1_r")
    rig.arrive(first)
    rig.arrive(second)
    rig.half.finished(first, succeeded=False)
    assert rig.half.matched_tokens(second, 0) == (9, True)
    assert len(rig.of(ev.DecodeRequestAdded)) == 2


def test_samples_fail_with_their_leader() -> None:
    rig = Rig()
    rig.arrive(for_d("0_r"))
    second = for_d("1_r")
    rig.arrive(second)
    rig.decode.mailbox.put(fx.RequestFailed("0_r", Code.GONE, "released"))
    assert rig.half.matched_tokens(second, 0) == (9, True)
    rig.half.allocated(second, ((4,),), 9)
    assert rig.step()[2] == ["0_r", "1_r"]


@pytest.mark.parametrize(("policy", "found"), [("fail", (9, True)), ("recompute", (0, False))])
def test_bad_parameters_never_pass_for_a_load(policy: str, found: tuple[int, bool]) -> None:
    rig = Rig(policy)
    assert rig.arrive(request("r", do_remote_prefill=True)) == found
    assert rig.step()[2] == (["r"] if policy == "fail" else [])
    assert rig.of(ev.DecodeRequestAdded) == []


# -- P -----------------------------------------------------------------------------------------------


def scheduled(request_id: str, blocks: tuple[int, ...]) -> Any:
    return SimpleNamespace(req_id=request_id, num_computed_tokens=0, block_ids=(list(blocks),))


def test_p_holds_the_prompt_after_vllm_has_finished_and_says_where() -> None:
    rig = Rig()
    asked = request("cmpl-1", do_remote_decode=True)
    rig.arrive(asked)
    step, plan, _ = rig.step(new=[scheduled("cmpl-1", (1, 2, 3))], counts={"cmpl-1": 10})
    assert plan is not None
    rig.half.step_reported(step, {0: 0})
    said = rig.half.finished(asked, succeeded=True)
    assert said is not None
    assert said["remote_request_id"] == "cmpl-1"
    assert (said["remote_host"], said["remote_port"]) == ("h", 5600)
    assert rig.pool.held() == {1, 2, 3}
    finished = rig.of(ev.RequestFinished)[0]
    assert (finished.code, finished.first_token) == (Code.OK, 42)


def test_an_aborted_request_of_p_says_nothing() -> None:
    rig = Rig()
    asked = request("cmpl-1", do_remote_decode=True)
    rig.arrive(asked)
    rig.step(new=[scheduled("cmpl-1", (1,))], counts={"cmpl-1": 4})
    assert rig.half.finished(asked, succeeded=False) is None
    assert rig.of(ev.RequestFinished)[0].code is Code.ABORTED


def test_every_sample_on_p_names_the_one_that_is_held() -> None:
    rig = Rig()
    params = {"do_remote_decode": True}
    first, second = request("0_r", **params), request("1_r", **params)
    for asked in (first, second):
        rig.arrive(asked)
    new = [scheduled("0_r", (1, 2)), scheduled("1_r", (1, 3))]
    rig.step(new=new, counts={"0_r": 8, "1_r": 8})
    said = [rig.half.finished(asked, succeeded=True) for asked in (second, first)]
    assert [s and s["remote_request_id"] for s in said] == ["r", "r"]
    assert len(rig.of(ev.RequestAdded)) == 1
    assert len(rig.of(ev.RequestFinished)) == 1
    assert rig.pool.held() == {1, 2}


def test_requests_of_others_leave_nothing_behind_on_p() -> None:
    rig = Rig()
    asked = request("plain")
    rig.arrive(asked)
    step, _, _ = rig.step(new=[scheduled("plain", (1, 2))], counts={"plain": 8})
    rig.half.step_reported(step, {0: 0})
    assert rig.half.finished(asked, succeeded=True) is None
    assert rig.pool.held() == set()
    assert rig.prefill.planner._running == {}


def test_requests_that_got_no_blocks_press_on_old_holds() -> None:
    rig = Rig()
    asked = request("r", num_tokens=10)
    rig.half.new_request(asked)
    assert rig.half.matched_tokens(asked, 0) == (0, False)
    rig.step()
    assert rig.of(ev.BlocksWanted)[0].num_blocks == 3
    rig.half.matched_tokens(asked, 0)
    rig.half.allocated(asked, ((1, 2, 3),), 0)
    rig.step()
    assert rig.of(ev.BlocksWanted)[-1].num_blocks == 0


def test_a_sample_that_comes_when_the_first_has_finished_names_the_same_hold() -> None:
    rig = Rig()
    for request_id in ("0_r", "1_r"):
        asked = request(request_id, do_remote_decode=True)
        rig.arrive(asked)
        rig.step(new=[scheduled(request_id, (1, 2))], counts={request_id: 8})
        said = rig.half.finished(asked, succeeded=True)
        assert said is not None
        assert said["remote_request_id"] == "r"
    assert len(rig.of(ev.RequestAdded)) == 1
    assert rig.pool.held() == {1, 2}


def test_single_request_mode_is_refused_by_name() -> None:
    refusal = Rig().half.admit_request("r", None, None)  # type: ignore[arg-type]
    assert refusal is not None
    assert refusal.code is Code.BAD_REQUEST


def test_a_dead_driver_ends_the_engine_at_the_next_hook() -> None:
    rig = Rig()
    rig.half.on_fatal("a worker is stuck")
    assert rig.wakes == 1
    with pytest.raises(RuntimeError, match="a worker is stuck"):
        rig.half.new_request(request("r"))
