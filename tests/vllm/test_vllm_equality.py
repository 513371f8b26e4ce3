"""Real vLLM, divided in two by the connector, says what an undivided vLLM says.

P, D and the undivided engine are API servers in processes of their own, with a small model whose output
depends on the whole context. D runs vLLM's stock scheduler here; in the drills it sleeps while it waits.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from pd_control.testing.vllm_kit import (
    BLOCK_TOKENS,
    FIRST,
    MAX_MODEL_LEN,
    Answer,
    at_once,
    both_at_once,
    p_first,
    pdctl,
    prompt,
)
from tests.vllm.farm import OUT, Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LENGTHS = [1, 2, 31, 32, 33, 34, 64, 65, 300, 513, MAX_MODEL_LEN - OUT]


def test_the_output_depends_on_the_first_block(farm: Farm) -> None:
    """The negative control: KV of another prompt, even of one block, would be noticed."""
    one = prompt(200, 1)
    other = prompt(BLOCK_TOKENS, 2) + one[BLOCK_TOKENS:]
    assert farm.expected(one) != farm.expected(other)


@pytest.mark.parametrize("length", LENGTHS)
def test_p_first(farm: Farm, length: int) -> None:
    tokens = prompt(length, 1000 + length)
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_both_at_once(farm: Farm, length: int) -> None:
    tokens = prompt(length, 3000 + length)
    farm.check(both_at_once(farm.p, farm.d, tokens, f"both-{length}", OUT), tokens)


def test_a_router_of_mooncakes_convention(farm: Farm) -> None:
    """It asks P's bootstrap server who P is, and then P and D at once with what it was told."""
    with urllib.request.urlopen(farm.bootstrap + "/query", timeout=10) as found:
        (entry,) = json.load(found).values()
    tokens, transfer_id = prompt(300, 25), "xfer-1"
    for_p = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    for_d = {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id,
        "remote_bootstrap_addr": farm.bootstrap, "remote_engine_id": entry["engine_id"],
    }  # fmt: skip
    before = farm.loaded_tokens()
    half, answer = at_once(
        [lambda: farm.p.ask(tokens, 1, for_p), lambda: farm.d.ask(tokens, OUT, for_d)]
    )
    assert half.status == 200, half.body
    farm.check(answer, tokens)
    assert farm.loaded_tokens() - before == len(tokens) - 1
    assert set(entry["worker_addr"]) == {"0"}  # one rank


def test_shared_prefixes(farm: Farm) -> None:
    base = prompt(130, 20)
    for tail in (0, 1, 31, 40):
        tokens = base + prompt(tail, 21 + tail)
        farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
        farm.check(both_at_once(farm.p, farm.d, tokens, f"again-{tail}", OUT), tokens)


def test_what_d_has_was_loaded_and_not_computed(farm: Farm) -> None:
    """By vLLM's own metrics: all of the prompt but the last token came from P."""
    before = farm.loaded_tokens()
    tokens = prompt(300, 24)
    farm.check(both_at_once(farm.p, farm.d, tokens, "counted", OUT), tokens)
    assert farm.loaded_tokens() - before == len(tokens) - 1


def test_many_at_once(farm: Farm) -> None:
    """F17: three times as many as vLLM runs at once; they queue, and none is lost."""
    prompts = [prompt(20 + 19 * i, 30 + i) for i in range(48)]
    wanted = [farm.expected(p) for p in prompts]

    def one(i: int) -> Answer:
        if i % 2:
            return both_at_once(farm.p, farm.d, prompts[i], f"many-{i}", OUT)
        return p_first(farm.p, farm.d, prompts[i], OUT)

    answers = at_once([lambda i=i: one(i) for i in range(len(prompts))])  # type: ignore[misc]
    assert [a.status for a in answers] == [200] * len(prompts)
    assert [a.tokens for a in answers] == wanted


def test_several_samples_take_one_prompt(farm: Farm) -> None:
    # Short enough for one chunk: vLLM's CPU runner cannot seed a sampler whose prompt comes in two.
    tokens = prompt(70, 50)
    sampling: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    half = farm.p.ask(tokens, 1, {"do_remote_decode": True}, **sampling)
    answer = farm.d.ask(tokens, OUT, half.params, **sampling)
    assert answer.status == 200, answer.body
    assert answer.tokens == farm.p.ask(tokens, OUT, **sampling).tokens
    assert len({tuple(t) for t in answer.tokens}) > 1  # samples that differ


def test_streaming(farm: Farm) -> None:
    tokens = prompt(170, 51)
    farm.check(p_first(farm.p, farm.d, tokens, OUT, stream=True), tokens)


def test_several_takers(farm: Farm) -> None:
    """One held prompt, two requests of D at once; a third comes too late."""
    tokens = prompt(230, 52)
    half = farm.p.ask(tokens, 1, {**FIRST, "num_takers": 2})
    assert half.status == 200, half.body
    taken = at_once([lambda: farm.d.ask(tokens, OUT, half.params)] * 2)
    for answer in taken:
        farm.check(answer, tokens)
    farm.check_clean()
    late = prompt(230, 53)  # nothing of it is in D's prefix cache
    assert farm.d.ask(late, OUT, half.params).status == 500


def test_several_takers_one_after_the_other(farm: Farm) -> None:
    tokens = prompt(230, 54)
    params = farm.p.ask(tokens, 1, {**FIRST, "num_takers": 2}).params
    for _ in range(2):
        farm.check(farm.d.ask(tokens, OUT, params), tokens)
    farm.check_clean()


def test_nothing_stays_pinned_after_good_requests(farm: Farm) -> None:
    """F16: and it was the takers that released every hold, not its end."""
    farm.check_clean()
    for server in (farm.p, farm.d):
        (found,) = pdctl("blocks", "-e", server.control)
        assert not found["error"]
        assert [side["leases"] for side in found["sides"].values()] == [[]]
    assert farm.counters(farm.p, "prefill").get("deadline.hold", 0) == 0
