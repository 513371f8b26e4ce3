"""Engines of different shape: two ranks to one and one to two, and block sizes that cannot be matched.

Two servers that play both roles, so that each is the other's P and D. What an answer is compared with is the
P's own continuation of the prompt that it has computed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_control.testing.vllm_kit import (
    BLOCK_TOKENS,
    FIRST,
    VllmServer,
    at_once,
    both_at_once,
    free_port,
    p_first,
    prompt,
    tiny_model,
)
from tests.vllm.farm import GUARD_S, OUT, SETTINGS, SLEEPING, Asked, Watched

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LENGTHS = [1, 33, 300, 900]
FEW_BLOCKS = ["--num-gpu-blocks-override", "400"]  # else each rank takes a gigabyte


class Shapes(Watched):
    """``two`` has two ranks, ``one`` has one; ``wide`` has one and larger blocks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        VllmServer.close_all()  # those of other modules: memory is short
        model = tiny_model(folder / "tiny")
        self.servers: list[VllmServer] = []

        def start(name: str, tp_size: int, block_tokens: int = BLOCK_TOKENS) -> VllmServer:
            server = VllmServer(
                model, folder / f"{name}.log", role="kv_both", name=name, control_port=free_port(),
                settings=SETTINGS, args=[*SLEEPING, *FEW_BLOCKS, "--tensor-parallel-size", str(tp_size)],
                block_tokens=block_tokens,
            )  # fmt: skip
            self.servers.append(server)
            return server

        try:
            self.two, self.one, self.wide = (
                start("two", 2), start("one", 1), start("wide", 1, 2 * BLOCK_TOKENS),
            )  # fmt: skip
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.inspect.close()

    def pair(self, p_ranks: int) -> tuple[VllmServer, VllmServer]:
        """(P, D)."""
        return (self.one, self.two) if p_ranks == 1 else (self.two, self.one)

    def check_clean(self) -> None:
        self.check_all_let_go(self.two, self.one)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    made = Shapes(tmp_path_factory.mktemp("ranks"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("p_ranks", [1, 2])
def test_unequal_ranks(shapes: Shapes, p_ranks: int, length: int) -> None:
    p, d = shapes.pair(p_ranks)
    for seed, ask in (
        (1, p_first),
        (2, lambda *a: both_at_once(*a[:3], f"r{p_ranks}-{length}", OUT)),
    ):
        tokens = prompt(length, 1000 * p_ranks + 10 * length + seed)
        answer = ask(p, d, tokens, OUT)
        assert answer.status == 200, answer.body
        assert answer.tokens == p.ask(tokens, OUT).tokens


def test_both_ways_at_once(shapes: Shapes) -> None:
    """Each is P of some requests and D of others at the same time."""
    prompts = [prompt(100 + 40 * i, 500 + i) for i in range(8)]
    answers = at_once([
        lambda i=i, t=t: p_first(*shapes.pair(1 + i % 2), t, OUT)  # type: ignore[misc]
        for i, t in enumerate(prompts)
    ])  # fmt: skip
    for i, (answer, tokens) in enumerate(zip(answers, prompts, strict=True)):
        assert answer.status == 200, answer.body
        assert answer.tokens == shapes.pair(1 + i % 2)[0].ask(tokens, OUT).tokens
    shapes.check_clean()


def test_one_of_p_s_ranks_stands_still(shapes: Shapes) -> None:
    """F06: the other rank's part has landed; the request fails in time, the blocks are free only when nobody
    can write them, and what the rank sends when it goes on lands nowhere."""
    p, d = shapes.pair(2)
    tokens = prompt(600, 77)
    params = p.ask(tokens, 1, FIRST).params
    p.signal("VLLM::Worker_TP1", signal.SIGSTOP)
    try:
        asked = Asked(lambda: d.ask(tokens, OUT, params, timeout_s=GUARD_S))
        assert asked.end().status == 500
        others = [prompt(600, 770 + i) for i in range(3)]
        before = [d.ask(other, OUT) for other in others]
    finally:
        p.signal("VLLM::Worker_TP1", signal.SIGCONT)
    shapes.check_clean()
    for other, answer in zip(others, before, strict=True):
        assert answer.status == 200, answer.body
        # D's own words, of KV in its prefix cache by now, and P's, which has computed it by itself.
        assert d.ask(other, OUT).tokens == answer.tokens == p.ask(other, OUT).tokens
    tokens = prompt(600, 78)
    assert p_first(p, d, tokens, OUT).tokens == p.ask(tokens, OUT).tokens


def test_blocks_of_another_size_are_refused_by_name(shapes: Shapes) -> None:
    """F12: on CPU only the kernel knows what is inside a block, so there is no way to cut one in two."""
    answer = p_first(shapes.one, shapes.wide, prompt(300, 5), OUT)
    assert answer.status == 500
    assert "INCOMPATIBLE" in shapes.wide.log.read_text()
    # It is as good as any other server without a P.
    tokens = prompt(300, 6)
    assert shapes.wide.ask(tokens, OUT).tokens == shapes.one.ask(tokens, OUT).tokens
    shapes.check_clean()
