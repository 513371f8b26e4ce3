"""Real vLLM, divided in two by the connector, says what an undivided vLLM says; or it says an error.

P, D and the undivided engine are API servers in processes of their own, with a small model whose output
depends on the whole context. The tests run in order: the later ones kill engines and start new ones.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.vllm_kit import (
    BLOCK_TOKENS,
    HOST,
    MAX_MODEL_LEN,
    Answer,
    VllmServer,
    at_once,
    both_at_once,
    both_params,
    free_port,
    leave,
    p_first,
    pdctl,
    prompt,
    tiny_model,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

#: Short, so that waiting in vain ends soon; D's answer must come within LOAD_S of being asked.
LOAD_S = 20.0
SETTINGS: dict[str, Any] = {
    "deadlines": {
        "park_s": 6, "hold_s": 5, "hold_max_s": 8, "queue_s": 10, "load_s": LOAD_S, "progress_s": 8,
    }
}  # fmt: skip
OUT = 8
LENGTHS = [1, 2, 31, 32, 33, 34, 64, 65, 300, 513, MAX_MODEL_LEN - OUT]
SLEEPING = ["--scheduler-cls", "pd_control.vllm.sleeping.make_scheduler"]


class Farm:
    """The servers; P listens on the same control port in every life."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_model(folder / "tiny")
        self.ports = {"p": free_port(), "d": free_port()}
        self.servers: list[VllmServer] = []
        self.inspect = InspectClient()
        self._lives = 0
        self._known: dict[tuple[int, ...], list[list[int]]] = {}
        whole = ["--scheduler-cls", "tests.vllm.whole_scheduler.make_scheduler"]
        whole += ["--no-enable-prefix-caching"]
        try:
            self.whole = self._start("whole", args=whole)
            self.p = self.start_p()
            self.d = self.start_d()
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.inspect.close()

    def _start(self, kind: str, **more: Any) -> VllmServer:
        self._lives += 1
        log = self.folder / f"{self._lives}-{kind}.log"
        server = VllmServer(self.model, log, **more)
        self.servers.append(server)
        return server

    def start_p(self) -> VllmServer:
        """P sleeps while it holds; its budget is small, so that long prompts come in chunks."""
        args = [*SLEEPING, "--max-num-batched-tokens", "256"]
        port = self.ports["p"]
        return self._start("p", role="kv_producer", name="p0", control_port=port,
                           settings=SETTINGS, args=args)  # fmt: skip

    def start_d(self, **more: Any) -> VllmServer:
        return self._start("d", role="kv_consumer", name="d0", control_port=self.ports["d"],
                           settings=SETTINGS, **more)  # fmt: skip

    def expected(self, tokens: list[int]) -> list[list[int]]:
        """What the undivided engine says; it computes one request at a time."""
        key = tuple(tokens)
        if key not in self._known:
            answer = self.whole.ask(tokens, OUT)
            assert answer.status == 200, answer.body
            self._known[key] = answer.tokens
        return self._known[key]

    def check(self, answer: Answer, tokens: list[int]) -> None:
        assert answer.status == 200, answer.body
        assert answer.tokens == self.expected(tokens), f"prompt of {len(tokens)} tokens"

    def pinned(self, server: VllmServer) -> int:
        """Blocks that the control plane of this server pins."""
        sides = self.inspect.ask(server.control, "process")["sides"]
        return sum(sum(side["leased_blocks"].values()) for side in sides.values())

    def waiting(self) -> int:
        """Requests that wait for KV on D."""
        return len(self.inspect.requests(self.d.control, "decode"))

    def check_clean(self) -> None:
        """No block stays pinned on either side."""
        for server in (self.p, self.d):
            self.poke(server)
            until(lambda: self.pinned(server) == 0, f"{server.log} lets go")  # noqa: B023

    @staticmethod
    def poke(server: VllmServer) -> None:
        """A core that sleeps in vLLM's own loop gives back what it holds when it next runs."""
        assert server.ask([1, 2, 3], 1).status == 200


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    made = Farm(tmp_path_factory.mktemp("vllm"))
    try:
        yield made
    finally:
        made.close()


def test_the_output_depends_on_the_first_block(farm: Farm) -> None:
    """The negative control: KV of another prompt, even of one block, would be noticed."""
    one = prompt(200, 1)
    other = prompt(BLOCK_TOKENS, 2) + one[BLOCK_TOKENS:]
    assert farm.expected(one) != farm.expected(other)


@pytest.mark.parametrize("length", LENGTHS)
def test_p_first(farm: Farm, length: int) -> None:
    tokens = prompt(length, 10)
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_both_at_once(farm: Farm, length: int) -> None:
    tokens = prompt(length, 11)
    farm.check(both_at_once(farm.p, farm.d, tokens, f"both-{length}", OUT), tokens)


def test_shared_prefixes(farm: Farm) -> None:
    base = prompt(130, 20)
    for tail in (0, 1, 31, 40):
        tokens = base + prompt(tail, 21 + tail)
        farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
        farm.check(both_at_once(farm.p, farm.d, tokens, f"again-{tail}", OUT), tokens)


def test_many_at_once(farm: Farm) -> None:
    prompts = [prompt(20 + 37 * i, 30 + i) for i in range(12)]
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


def test_nothing_stays_pinned_after_good_requests(farm: Farm) -> None:
    farm.check_clean()
    for server in (farm.p, farm.d):
        (found,) = pdctl("blocks", "-e", server.control)
        assert not found["error"]
        assert [side["leases"] for side in found["sides"].values()] == [[]]


# -- references that lie -----------------------------------------------------------------------------


def test_a_reference_to_another_prompt_is_refused(farm: Farm) -> None:
    half = farm.p.ask(prompt(150, 60), 1, {"do_remote_decode": True})
    answer = farm.d.ask(prompt(150, 61), OUT, half.params)
    assert answer.status == 500


def test_a_made_up_or_stale_reference_never_gives_tokens(farm: Farm) -> None:
    tokens = prompt(150, 62)
    half = farm.p.ask(tokens, 1, {"do_remote_decode": True})
    assert farm.d.ask(tokens, OUT, half.params).status == 200
    other = prompt(150, 63)
    made_up = {"transfer_id": "never", "remote_request_id": "never"}
    for params in (
        half.params,  # stale: taken, and of another prompt
        half.params | made_up,
        half.params | {"remote_port": free_port()},
        {"do_remote_prefill": True},
    ):
        assert farm.d.ask(other, OUT, params).status == 500


def test_block_ids_of_strangers_are_not_read(farm: Farm) -> None:
    """Vendors' connectors read blocks by number; ours has no such thing."""
    answer = farm.d.ask(prompt(150, 64), OUT, {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4, 5]], "remote_engine_id": "p0",
        "remote_request_id": "x", "remote_host": HOST, "remote_port": farm.p.control_port,
        "tp_size": 1,
    })  # fmt: skip
    assert answer.status == 500


# -- halves that do not come -------------------------------------------------------------------------


def test_d_ends_with_an_error_when_p_never_gets_its_half(farm: Farm) -> None:
    _, for_d = both_params(farm.p, "vain")
    answer = farm.d.ask(prompt(150, 70), OUT, for_d, timeout_s=3 * LOAD_S)
    assert answer.status == 500
    farm.check_clean()


def test_p_lets_go_when_d_never_comes(farm: Farm) -> None:
    assert farm.p.ask(prompt(150, 71), 1, {"do_remote_decode": True}).status == 200
    # P sleeps: nothing but the end of the hold itself may wake it up.
    assert farm.pinned(farm.p) > 0
    until(lambda: farm.pinned(farm.p) == 0, "the hold ends by itself")


def test_a_client_that_leaves_takes_nothing_with_it(farm: Farm) -> None:
    tokens = prompt(160, 72)
    for_p, for_d = both_params(farm.p, "left")
    client = leave(farm.d, tokens, for_d)
    until(lambda: farm.waiting() == 1, "the request waits")
    client.close()
    until(lambda: farm.waiting() == 0, "D notices")
    assert farm.p.ask(tokens, 1, for_p).status == 200
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
    farm.check_clean()


# -- death -------------------------------------------------------------------------------------------


def test_p_dies_while_d_waits(farm: Farm) -> None:
    _, for_d = both_params(farm.p, "dies")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(farm.d.ask, prompt(150, 80), OUT, for_d, timeout_s=3 * LOAD_S)
        until(lambda: farm.waiting() == 1, "the request waits")
        farm.p.kill("VLLM::EngineCore")
        assert waiting.result().status == 500
    farm.p.wait_end()
    tokens = prompt(150, 81)
    farm.check(farm.d.ask(tokens, OUT), tokens)
    assert farm.pinned(farm.d) == 0
    farm.p = farm.start_p()
    farm.p.wait_ready()
    for i, ask in enumerate((p_first, lambda *a: both_at_once(*a[:3], "anew", OUT))):
        tokens = prompt(200, 82 + i)
        farm.check(ask(farm.p, farm.d, tokens, OUT), tokens)


def test_d_dies_while_p_holds(farm: Farm) -> None:
    """Then a new D, which sleeps while it waits and computes for itself what does not come."""
    tokens = prompt(200, 90)
    half = farm.p.ask(tokens, 1, {"do_remote_decode": True})
    _, for_d = both_params(farm.p, "alone")
    client = leave(farm.d, prompt(150, 91), for_d)
    until(lambda: farm.waiting() == 1, "the request waits")
    farm.d.kill("VLLM::Worker")
    farm.d.wait_end()
    client.close()
    policy = {"kv_load_failure_policy": "recompute"}
    farm.d = farm.start_d(args=SLEEPING, transfer=policy)
    farm.d.wait_ready()
    until(lambda: farm.pinned(farm.p) == 0, "P lets go of what no D took")
    farm.check(farm.d.ask(tokens, OUT, half.params), tokens)  # stale: computed here


@pytest.mark.parametrize("length", [1, 33, 300])
def test_a_sleeping_d_is_woken(farm: Farm, length: int) -> None:
    tokens = prompt(length, 92)
    farm.check(p_first(farm.p, farm.d, tokens, OUT), tokens)
    tokens = prompt(length, 93)
    farm.check(both_at_once(farm.p, farm.d, tokens, f"woken-{length}", OUT), tokens)


def test_recompute_gives_right_tokens_when_p_never_gets_its_half(farm: Farm) -> None:
    tokens = prompt(150, 94)
    _, for_d = both_params(farm.p, "vain again")
    farm.check(farm.d.ask(tokens, OUT, for_d, timeout_s=3 * LOAD_S), tokens)
    until(lambda: farm.pinned(farm.d) == 0, "D's blocks come back")
