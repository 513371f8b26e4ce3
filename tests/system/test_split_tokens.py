"""The split engine says what the undivided one says, token for token, whatever its shape.

A small context-sensitive model; P with 1, 2 and 4 ranks (4 ranks over two KV heads), D with 1 and 2; block
sizes equal and not; chunked and whole prefills; prefix hits on either side; both modes; tcp and cma. The
negative control shows that KV of another prompt would be noticed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pd_control.reference.cluster import Cluster
from tests.system.split_kit import Farm, open_farm, tokens

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

#: name → (role, tp, block tokens, transports)
ENGINES = {
    "p1": ("prefill", 1, 16, "cma,tcp"),
    "p2": ("prefill", 2, 16, "cma,tcp"),
    "p4": ("prefill", 4, 16, "cma,tcp"),
    "p1b8": ("prefill", 1, 8, "cma,tcp"),
    "d1tcp": ("decode", 1, 16, "tcp"),
    "d1cma": ("decode", 1, 16, "cma"),
    "d2tcp": ("decode", 2, 16, "tcp"),
    "d2cma": ("decode", 2, 16, "cma"),
}
PAIRS = [
    ("p1", "d1tcp"), ("p1", "d1cma"), ("p2", "d1tcp"), ("p2", "d1cma"), ("p1", "d2tcp"),
    ("p1", "d2cma"), ("p2", "d2tcp"), ("p2", "d2cma"), ("p4", "d2tcp"), ("p4", "d2cma"),
    ("p4", "d1tcp"), ("p1b8", "d1tcp"), ("p1b8", "d1cma"), ("p1b8", "d2tcp"),
]  # fmt: skip
#: One token, less than a block, a block, its neighbours, several blocks, more than a step's budget (64).
LENGTHS = [1, 2, 7, 16, 17, 33, 64, 65, 150]
OUT = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = Cluster(model="tiny:5", engine_args=["--blocks", "256", "--step-tokens", "64"])
    async with open_farm(cluster) as farm:
        await farm.start("undivided", "undivided", "--split-last-token")
        for name, (role, tp, block, transports) in ENGINES.items():
            await farm.start(
                name, role, "--tp", str(tp), "--block-tokens", str(block),
                "--transports", transports,
            )  # fmt: skip
        yield farm


@pytest.mark.parametrize(("p", "d"), PAIRS)
async def test_every_pair_and_length_agrees(farm: Farm, p: str, d: str) -> None:
    seed = PAIRS.index((p, d)) * 100
    for n in LENGTHS:
        prompt = tokens(seed + n, n)
        split = await farm.split(p, d, prompt, OUT)
        whole = await farm.whole(prompt, OUT)
        assert (split.error, whole.error) == ("", "")
        assert split.tokens == whole.tokens, f"{n} prompt tokens"
    await farm.wait_unpinned(p, d)


@pytest.mark.parametrize(
    ("p", "d"), [("p1", "d1cma"), ("p2", "d1tcp"), ("p1", "d2tcp"), ("p4", "d2cma")]
)
async def test_single_mode_agrees(farm: Farm, p: str, d: str) -> None:
    for n in (1, 17, 150):
        prompt = tokens(90_000 + n + PAIRS.index((p, d)) * 10, n)
        split = await farm.split(p, d, prompt, OUT, mode="single")
        assert (split.error, split.tokens) == ("", (await farm.whole(prompt, OUT)).tokens)
    await farm.wait_unpinned(p, d)


@pytest.mark.parametrize("late", ["p", "d"])
async def test_either_half_may_come_first(farm: Farm, late: str) -> None:
    for i, (p, d) in enumerate([("p1", "d1tcp"), ("p2", "d2cma")]):
        prompt = tokens(50_000 + i + 10 * (late == "p"), 90)
        delays = {f"{late}_delay_s": 0.3}
        split = await farm.split(p, d, prompt, OUT, **delays)  # type: ignore[arg-type]
        assert split.tokens == (await farm.whole(prompt, OUT)).tokens


async def test_prefix_hits_on_either_side_agree(farm: Farm) -> None:
    """P computes a prefix once; D keeps what it got and asks only for the rest."""
    shared = tokens(70_000, 96)
    for i, (p, d) in enumerate(
        [("p1", "d1cma"), ("p2", "d1cma"), ("p1b8", "d2tcp"), ("p4", "d2tcp")]
    ):
        for tail in (20, 50):
            prompt = shared + tokens(71_000 + 10 * i + tail, tail)
            split = await farm.split(p, d, prompt, OUT)
            assert split.tokens == (await farm.whole(prompt, OUT)).tokens, (p, d, tail)
    # The same prompt again: D has all but the last block, and P is told to let go.
    again = await farm.split("p1", "d1cma", prompt, OUT)
    assert again.tokens == split.tokens
    assert again.cached_tokens >= 96
    await farm.wait_unpinned()


async def test_sampling_with_a_seed_agrees(farm: Farm) -> None:
    prompt = tokens(80_000, 40)
    fields = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    split = await farm.split("p2", "d2tcp", prompt, 16, **fields)
    assert split.tokens == (await farm.whole(prompt, 16, **fields)).tokens
    assert split.tokens != (await farm.whole(prompt, 16, **fields | {"seed": 12})).tokens


async def test_kv_of_another_prompt_would_be_noticed(farm: Farm) -> None:
    """The negative control: one different token at the start changes what comes out at the end."""
    prompt = tokens(85_000, 120)
    other = [(prompt[0] + 1) % 500, *prompt[1:]]
    assert (await farm.whole(prompt, OUT)).tokens != (await farm.whole(other, OUT)).tokens


async def test_kv_of_other_weights_is_noticed(farm: Farm) -> None:
    """The negative control of the whole path: a P that claims to be this model and is not. Its bytes
    arrive, and the tokens show it."""
    await farm.start("impostor", "prefill", "--model", "tiny:6")
    prompt = tokens(86_000, 120)
    split = await farm.split("impostor", "d1tcp", prompt, OUT)
    assert split.error == ""
    assert split.tokens != (await farm.whole(prompt, OUT)).tokens
    await farm.wait_unpinned("impostor", "d1tcp")
    del farm.info["impostor"]
    await farm.cluster.stop("impostor")


async def test_a_reference_to_somebody_elses_request_is_refused(farm: Farm) -> None:
    """F07: D names a request that P has, for another prompt; it never gets those bytes."""
    mine, theirs = tokens(60_000, 50), tokens(60_001, 50)
    status, _ = await farm.prefill_half("p1", "f07-theirs", theirs)
    assert status == 200
    params = farm.remote("p1", "f07-theirs", on_failure="fail")
    body = {"prompt": mine, "max_tokens": 4, "kv_transfer_params": params}
    url = farm.child("d1tcp").url + "/v1/completions"
    async with farm.http.post(url, json=body) as answer:
        text = await answer.text()
        assert answer.status == 500, text
        assert "BAD_REQUEST" in text
        assert "digest" in text
    body["kv_transfer_params"] = farm.remote("p1", "f07-nobody", on_failure="fail")
    params = farm.remote("p1", "f07-theirs", on_failure="fail")
    async with farm.http.post(
        url, json=body | {"prompt": theirs, "kv_transfer_params": params}
    ) as answer:
        assert answer.status == 200, "the rightful taker still gets it"
    async with farm.http.post(
        url, json=body | {"prompt": theirs, "kv_transfer_params": params}
    ) as answer:
        text = await answer.text()
        assert answer.status in (200, 500)
        assert answer.status == 200 or "GONE" in text, "taken once: the reference is used up"


async def test_many_at_once_through_different_pairs(farm: Farm) -> None:
    import asyncio

    work = [(p, d, tokens(95_000 + i, 20 + 7 * i)) for i, (p, d) in enumerate(PAIRS)]
    splits = await asyncio.gather(*(farm.split(p, d, prompt, OUT) for p, d, prompt in work))
    for (p, d, prompt), split in zip(work, splits, strict=True):
        assert split.tokens == (await farm.whole(prompt, OUT)).tokens, (p, d)
    await farm.wait_unpinned()
