"""TRANSFER_KV at random times of P's steps: every token right, nothing left, every counter adds up.

`python -m tests.system.storm` is the same at any length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.system.split_kit import Farm, open_farm
from tests.system.storm import (
    COMBINATIONS,
    VOCAB,
    Tally,
    audit,
    draw,
    make_cluster,
    start,
    storm,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

REQUESTS = 250  # a combination
WITH_ABORTS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = make_cluster()
    async with open_farm(cluster) as farm:
        await start(farm, list(COMBINATIONS))
        yield farm


@pytest.mark.parametrize("combination", COMBINATIONS)
async def test_every_token_is_right_and_every_counter_adds_up(farm: Farm, combination: str) -> None:
    tally = await storm(farm, combination, REQUESTS)
    assert tally.problems == []
    assert tally.right == REQUESTS
    for way in ("step", "substep", "frozen"):  # each moment of a step was met
        assert tally.p.get(f"ways.{way}"), tally.p


@pytest.mark.parametrize("combination", COMBINATIONS)
async def test_clients_that_leave_early_harm_nobody(farm: Farm, combination: str) -> None:
    tally = await storm(farm, combination, WITH_ABORTS, seed=2, abort_share=0.3)
    assert tally.problems == []
    assert tally.aborted
    assert tally.right == WITH_ABORTS - tally.aborted


async def test_a_wrong_token_and_a_missing_one_would_be_noticed(farm: Farm) -> None:
    """The negative control of the comparison."""
    drop = max(draw(1, "2x1-tcp", 20, 0.0), key=lambda d: len(d.prompt))
    other = [(drop.prompt[0] + 1) % VOCAB, *drop.prompt[1:]]
    assert (await farm.whole(drop.prompt, 3)).tokens != (await farm.whole(other, 3)).tokens


async def test_counters_that_do_not_add_up_are_named() -> None:
    tally = Tally("2x1-tcp", 2, p={"p_transfer.ok": 1}, d={"d_request.ready": 2})
    assert audit(tally, 2, {}) == ["transfers served by P: 1 != 2"]
    tally = Tally("2x1-tcp", 1, aborted=1, p={"sends.substep": 3, "substeps.pushed": 5})
    assert audit(tally, 2, {}) == ["ranks a substep was for: 5 != 6"]
