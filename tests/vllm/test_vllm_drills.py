"""kill -9 of every process of a real vLLM pair, at chosen points: the survivor answers the next request
rightly, every client gets an answer or an error in time, every block comes back, and a new life takes over.

One death serves several requests at different stages at once, since a new life costs half a minute.
Of the published failures in docs/vllm.md: F03, F04, F08.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pd_control.testing.vllm_kit import FIRST, both_params, p_first, until
from tests.vllm.farm import CORE, GUARD_S, OUT, WORKER, Asked, Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@dataclass
class Busy:
    """A pair with a request at each of three stages, and their clients."""

    held: list[int]  # a prompt that P holds
    params: dict[str, Any]  # what D is to take it with
    middle: list[int]  # of which a part has been computed and sent
    half: Asked  # P's half of it
    asked: Asked  # D's
    vain: Asked  # waits on D for what P never got


@contextlib.contextmanager
def busy(farm: Farm) -> Iterator[Busy]:
    """P's core stands in the middle of a prefill meanwhile."""
    held, middle, vain = farm.new_prompt(150), farm.new_prompt(700), farm.new_prompt(150)
    params = farm.p.ask(held, 1, FIRST).params
    in_vain = farm.ask_d_first(vain, both_params(farm.p, farm.new_id())[1])
    for_p, for_d = both_params(farm.p, farm.new_id())
    with farm.gate("p", "prefill") as gate:
        asked = farm.ask_d_first(middle, for_d)
        half = farm.ask_p(middle, for_p)
        gate.wait_reached()
        farm.wait_sent()
        yield Busy(held, params, middle, half, asked, in_vain)


@pytest.mark.parametrize("part", [CORE, WORKER])
def test_p_dies(farm: Farm, part: str) -> None:
    """While it holds one prompt, is in the middle of prefilling and sending another, and D waits for a third
    that P never got."""
    with busy(farm) as at:
        farm.p.kill(part)
        # D learns it from the connections, not from P's core, which may still stand at the gate.
        assert at.asked.end().status == 500
    assert at.vain.end().status == 500
    assert at.half.end().status in (0, 500)
    farm.check(farm.d.ask(at.middle, OUT), at.middle)
    farm.poke(farm.d)
    until(lambda: farm.pinned(farm.d) == 0, "D's blocks come back")
    assert farm.d.ask(at.held, OUT, at.params).status == 500  # of the dead
    farm.mend()
    assert farm.d.ask(at.held, OUT, at.params).status == 500  # of a former life (F08)
    farm.check(p_first(farm.p, farm.d, at.held, OUT), at.held)
    farm.check_clean()


@pytest.mark.parametrize("part", [WORKER, CORE])
def test_d_dies(farm: Farm, part: str) -> None:
    """While P holds a prompt for it, while it is in the middle of loading another, and while it waits for a
    third that P never got. The last life computes for itself what does not come."""
    with busy(farm) as at:
        farm.d.kill(part)
        for client in (at.asked, at.vain):
            assert client.end().status in (0, 500)
    assert at.half.end().status == 200
    farm.check(farm.p.ask(at.middle, OUT), at.middle)
    until(lambda: farm.pinned(farm.p) == 0, "P lets go of what no D took")
    farm.mend(**({"kv_load_failure_policy": "recompute"} if part == CORE else {}))
    answer = farm.d.ask(at.held, OUT, at.params)  # its hold is over
    if part == CORE:
        farm.check(answer, at.held)
    else:
        assert answer.status == 500
    farm.check_clean()


@pytest.mark.parametrize("length", [1, 33, 300])
def test_a_sleeping_d_is_woken(farm: Farm, length: int) -> None:
    for _ in range(2):
        tokens = farm.new_prompt(length)
        farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)


def test_recompute_gives_right_tokens_when_p_never_gets_its_half(farm: Farm) -> None:
    """F03 under vLLM's other policy; the D of the last drill has it."""
    tokens = farm.new_prompt(150)
    _, for_d = both_params(farm.p, farm.new_id())
    farm.check(farm.d.ask(tokens, OUT, for_d, timeout_s=GUARD_S), tokens)
    until(lambda: farm.pinned(farm.d) == 0, "D's blocks come back")


def test_a_client_leaves_while_d_generates(farm: Farm) -> None:
    tokens = farm.new_prompt(150)
    half = farm.p.ask(tokens, 1, FIRST)
    with farm.gate("d", "decode") as gate:
        client = farm.d.leave(tokens, 200, half.params)
        gate.wait_reached()
        client.close()
    farm.check(farm.d.ask(tokens, OUT), tokens)
    farm.check_clean()


def test_the_proxy_dies_in_the_middle_of_a_prefill(farm: Farm) -> None:
    """Both servers see their client leave; the next proxy finds all as it should be."""
    tokens = farm.new_prompt(700)
    proxy = farm.start_proxy("dual")
    with farm.gate("p", "prefill") as gate:
        asked = Asked(lambda: proxy.ask(tokens, OUT, timeout_s=GUARD_S))
        gate.wait_reached()
        until(lambda: len(farm.waiting()) == 1, "D waits")
        proxy.kill()
        assert asked.end().status == 0
        until(lambda: not farm.waiting(), "D notices")
    farm.check_clean()
    proxy = farm.start_proxy("dual")
    farm.check(proxy.ask(tokens, OUT), tokens)
    proxy.close()


def test_the_proxy_dies_while_p_holds_and_while_d_generates(farm: Farm) -> None:
    proxy = farm.start_proxy("sequential")
    tokens = farm.new_prompt(150)
    with farm.gate("d", "decode") as gate:
        asked = Asked(lambda: proxy.ask(tokens, 200, timeout_s=GUARD_S))
        gate.wait_reached()
        proxy.kill()
        assert asked.end().status == 0
    farm.check(farm.d.ask(tokens, OUT), tokens)
    farm.check_clean()
    proxy = farm.start_proxy("sequential")
    tokens = farm.new_prompt(150)
    farm.check(proxy.ask(tokens, OUT), tokens)
    proxy.close()
