"""References that lie, halves that do not come, clients that leave: an error in time or the right answer,
never wrong tokens, and nothing stays behind. On real vLLM servers; none of them dies here.

Of the published failures in docs/vllm.md: F01, F03, F04, F07, F14.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pd_control.cli.app import app
from pd_control.testing.vllm_kit import (
    BLOCK_TOKENS,
    FIRST,
    HOST,
    at_once,
    both_at_once,
    both_params,
    free_port,
    p_first,
    prompt,
    until,
)
from tests.vllm.farm import BLOCKS_OF_P, GUARD_S, OUT, Farm, end_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


# -- references that lie -----------------------------------------------------------------------------


def test_a_reference_to_another_prompt_is_refused(farm: Farm) -> None:
    """F07: P compares the digest of what it holds with that of what D wants."""
    half = farm.p.ask(prompt(150, 60), 1, FIRST)
    assert farm.d.ask(prompt(150, 61), OUT, half.params).status == 500
    # P still has it for whoever wants it rightly.
    farm.check(farm.d.ask(prompt(150, 60), OUT, half.params), prompt(150, 60))


def test_a_reference_to_the_same_tokens_under_another_salt_is_refused(farm: Farm) -> None:
    """Who must not share a prefix cache must not share KV through us either."""
    tokens = farm.new_prompt(150)
    half = farm.p.ask(tokens, 1, FIRST, cache_salt="one tenant")
    assert farm.d.ask(tokens, OUT, half.params, cache_salt="another").status == 500
    farm.check(farm.d.ask(tokens, OUT, half.params, cache_salt="one tenant"), tokens)


def test_a_made_up_or_stale_reference_never_gives_tokens(farm: Farm) -> None:
    """F07."""
    tokens = farm.new_prompt(150)
    half = farm.p.ask(tokens, 1, FIRST)
    farm.check(farm.d.ask(tokens, OUT, half.params), tokens)
    other = farm.new_prompt(150)
    made_up = {"transfer_id": "never", "remote_request_id": "never"}
    for params in (
        half.params,  # stale: taken, and of another prompt
        half.params | made_up,
        half.params | {"remote_port": free_port()},
        half.params | {"remote_port": farm.p.port},  # P's HTTP port is not its control port
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "mode": "single"},
        {
            "do_remote_prefill": True,
            "transfer_id": "x",
            "remote_engine_id": "p0",
            "remote_bootstrap_addr": farm.bootstrap,
        },
    ):
        assert farm.d.ask(other, OUT, params, timeout_s=GUARD_S).status == 500, params
    farm.check(farm.d.ask(other, OUT), other)  # and none of them has left anything in D's cache


def test_a_reference_of_blocks_that_p_has_used_again(farm: Farm) -> None:
    """F07: the hold has ended, the blocks are somebody else's."""
    tokens = farm.new_prompt(150)
    half = farm.p.ask(tokens, 1, FIRST)
    until(lambda: farm.pinned(farm.p) == 0, "the hold ends by itself")
    others = [farm.new_prompt(1000) for _ in range(BLOCKS_OF_P * BLOCK_TOKENS // 1000 + 1)]
    at_once([lambda o=o: farm.p.ask(o, 1) for o in others])  # type: ignore[misc]
    assert farm.d.ask(tokens, OUT, half.params).status == 500


def test_block_ids_of_strangers_are_not_read(farm: Farm) -> None:
    """F07: vLLM's own connectors read blocks by number; here no number of anybody's is believed."""
    answer = farm.d.ask(farm.new_prompt(150), OUT, {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4, 5]], "remote_engine_id": "p0",
        "remote_request_id": "x", "remote_host": HOST, "remote_port": farm.p.control_port,
        "tp_size": 1,
    })  # fmt: skip
    assert answer.status == 500


# -- words that do not come --------------------------------------------------------------------------


def test_without_a_word_from_p_d_answers_and_p_is_free(farm: Farm) -> None:
    """F14: D is ready by its own receivers, P's blocks are free by its own senders."""
    before = farm.counters(farm.p, "prefill").get("deadline.hold", 0)
    with farm.words_lost() as num_lost:
        for number in range(3):
            tokens = farm.new_prompt(150 + 200 * number)
            farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
            tokens = farm.new_prompt(150 + 200 * number)
            farm.check(both_at_once(farm.p, farm.d, tokens, farm.new_id(), OUT), tokens)
        farm.check_clean()
        assert num_lost() >= 6, "at least that each transfer is over"
    assert farm.counters(farm.p, "prefill").get("deadline.hold", 0) == before
    tokens = farm.new_prompt(150)
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)


# -- halves that do not come -------------------------------------------------------------------------


def test_d_ends_with_an_error_when_p_never_gets_its_half(farm: Farm) -> None:
    """F03."""
    _, for_d = both_params(farm.p, "vain")
    assert farm.d.ask(farm.new_prompt(150), OUT, for_d, timeout_s=GUARD_S).status == 500
    farm.check_clean()


def test_p_lets_go_when_d_never_comes(farm: Farm) -> None:
    """F04."""
    assert farm.p.ask(farm.new_prompt(150), 1, FIRST).status == 200
    # P sleeps: nothing but the end of the hold itself may wake it up.
    assert farm.pinned(farm.p) > 0
    until(lambda: farm.pinned(farm.p) == 0, "the hold ends by itself")


# -- what an operator sees ---------------------------------------------------------------------------


def pdctl(*args: str) -> Any:
    """In this process: what it looks at does not last."""
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, (result.output, result.stderr)
    return json.loads(result.stdout)


def test_pdctl_on_live_servers(farm: Farm) -> None:
    """In the middle of a prefill and its transfer."""
    tokens = farm.new_prompt(700)
    for_p, for_d = both_params(farm.p, farm.new_id())
    at = ["-e", farm.d.control, "-e", farm.p.control]
    with farm.gate("p", "prefill") as gate:
        asked = farm.ask_d_first(tokens, for_d)
        half = farm.ask_p(tokens, for_p)
        gate.wait_reached()
        farm.wait_sent()
        rows = {row["side"]: row for row in pdctl("ps", *at)["requests"]}
        assert rows["P"]["request_id"] == for_p["transfer_id"]
        shown = pdctl("show", rows["D"]["request_id"], *at)
        by_instance = {process["instance"]: process for process in shown["processes"]}
        assert by_instance["d0"]["decode_leases"][0]["kind"] == "load"
        assert by_instance["p0"]["prefill_leases"][0]["kind"] == "hold"
        pinned = {process["instance"]: process["sides"] for process in pdctl("blocks", *at)}
        assert pinned["d0"]["decode"]["leases"]
        assert pinned["p0"]["prefill"]["leases"]
    farm.check(asked.end(), tokens)
    assert half.end().status == 200
    assert all(check["ok"] for check in pdctl("doctor", *at))
    farm.check_clean()


# -- clients that leave ------------------------------------------------------------------------------


def test_a_client_leaves_while_d_waits(farm: Farm) -> None:
    tokens = farm.new_prompt(160)
    for_p, for_d = both_params(farm.p, "left")
    client = farm.d.leave(tokens, OUT, for_d)
    until(lambda: len(farm.waiting()) == 1, "the request waits")
    client.close()
    until(lambda: not farm.waiting(), "D notices")
    assert farm.p.ask(tokens, 1, for_p).status == 200
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
    farm.check_clean()


def test_d_s_client_leaves_in_the_middle_of_the_transfer(farm: Farm) -> None:
    """F01: P goes on sending; the next request gets the blocks, and no late byte."""
    tokens = farm.new_prompt(700)
    for_p, for_d = both_params(farm.p, farm.new_id())
    with farm.gate("p", "prefill") as gate:
        client = farm.d.leave(tokens, OUT, for_d)
        until(lambda: farm.parked() == 1, "P knows who waits")
        half = farm.ask_p(tokens, for_p)
        gate.wait_reached()
        farm.wait_sent()
        client.close()
        until(lambda: not farm.waiting(), "D notices")
        after = [farm.new_prompt(700) for _ in range(3)]
        farm.check(farm.d.ask(after[0], OUT), after[0])
    assert half.end().status == 200
    for other in after[1:]:
        farm.check(farm.d.ask(other, OUT), other)
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
    farm.check_clean()


def test_p_s_client_leaves_in_the_middle_of_its_prefill(farm: Farm) -> None:
    """P's request is aborted; D, which has part of it already, is told."""
    tokens = farm.new_prompt(700)
    for_p, for_d = both_params(farm.p, farm.new_id())
    with farm.gate("p", "prefill") as gate:
        asked = farm.ask_d_first(tokens, for_d)
        client = farm.p.leave(tokens, 1, for_p)
        gate.wait_reached()
        farm.wait_sent()
        client.close()
    answer = asked.end()
    # vLLM may have finished the short rest before it noticed.
    if answer.status == 200:
        farm.check(answer, tokens)
    else:
        assert answer.status == 500
    farm.check_clean()


@pytest.mark.parametrize("mode", ["dual", "sequential"])
def test_the_proxy_s_client_leaves_in_the_middle_of_the_prefill(farm: Farm, mode: str) -> None:
    tokens = farm.new_prompt(700)
    proxy = farm.start_proxy(mode)
    with farm.gate("p", "prefill") as gate:
        client = proxy.leave(tokens, OUT)
        gate.wait_reached()
        if mode == "dual":
            until(lambda: len(farm.waiting()) == 1, "D waits")
        client.close()
        until(lambda: not farm.waiting(), "D notices")
    farm.check_clean()
    until(lambda: not farm.held(), "P forgets it")
    farm.check(end_of(lambda: proxy.ask(tokens, OUT)), tokens)
    proxy.close()
