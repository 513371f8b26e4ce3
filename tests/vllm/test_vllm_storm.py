"""200 requests of every kind over a real vLLM pair, with clients that leave at random and engines that are
killed at random: every client gets the right answer or an error in time, and nothing stays behind.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pd_control.testing.vllm_kit import FIRST, Answer, Proxy, at_once, both_params, prompt
from tests.vllm.farm import CORE, GUARD_S, OUT, WORKER, Farm, end_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

AT_ONCE = 8
PER_ROUND = 50
#: One engine dies in each round; the second round's proxy dies with it.
ROUNDS = [("p", CORE), ("d", WORKER), ("p", WORKER), ("d", CORE)]
#: Of the clients, in percent.
LEAVING = 30
#: Prompts that share beginnings, so that either prefix cache has something of most.
BASES = [prompt(400, 700 + i) for i in range(4)]
PROMPTS = [
    BASES[i % 4][: 60 * (i % 7)] + prompt(20 + 31 * (i % 9), 800 + i) for i in range(24)
]  # fmt: skip


class Round:
    """The clients of one round, and the moment of the kill."""

    def __init__(self, farm: Farm, seed: int, proxies: list[Proxy]) -> None:
        self._farm, self._proxies, self._policy = farm, proxies, farm.d_policy
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._started = 0
        self._deadly = self._random.randrange(10, 35)
        self.kill_now = threading.Event()
        #: kind → how often, by status
        self.ended: Counter[tuple[str, int]] = Counter()

    def client(self, number: int) -> None:
        with self._lock:
            draw = random.Random(self._random.random())
            self._started += 1
            if self._started == self._deadly:
                self.kill_now.set()
        tokens = draw.choice(PROMPTS)
        if draw.randrange(100) < LEAVING:
            kind, answer = "left", self._leave(draw, tokens)
        else:
            kind = draw.choice(["first", "both", "dual", "sequential", "stale"])
            if kind == "stale":  # another prompt's reference: D is asked for what P does not hold
                wanted = prompt(90, self._farm.new_seed())
                answer = self._ask_first(tokens, wanted)
                tokens = wanted
            else:
                answer = self._ask(kind, tokens)
        with self._lock:
            self.ended[kind, answer.status] += 1
        if answer.status == 200 and kind != "left":
            # The D that the drills left behind recomputes what it does not get, rightly; others refuse.
            assert kind != "stale" or self._policy == "recompute", "a stale reference had an answer"
            self._farm.check(answer, tokens)

    def _ask(self, kind: str, tokens: list[int]) -> Answer:
        farm = self._farm
        for_p, for_d = both_params(farm.p, farm.new_id())
        if kind == "both":
            _, answer = at_once([
                lambda: end_of(lambda: farm.p.ask(tokens, 1, for_p, timeout_s=GUARD_S)),
                lambda: end_of(lambda: farm.d.ask(tokens, OUT, for_d, timeout_s=GUARD_S)),
            ])  # fmt: skip
            assert isinstance(answer, Answer)
            return answer
        if kind == "first":
            return self._ask_first(tokens, tokens)
        proxy = self._proxies[kind == "sequential"]
        return end_of(lambda: proxy.ask(tokens, OUT, timeout_s=GUARD_S))

    def _ask_first(self, tokens: list[int], wanted: list[int]) -> Answer:
        """P first with `tokens`, then D for `wanted` with P's reference."""
        farm = self._farm
        half = end_of(lambda: farm.p.ask(tokens, 1, FIRST, timeout_s=GUARD_S))
        if half.status != 200:
            return half
        return end_of(lambda: farm.d.ask(wanted, OUT, half.params, timeout_s=GUARD_S))

    def _leave(self, draw: random.Random, tokens: list[int]) -> Answer:
        """At any time: every moment is legal."""
        farm = self._farm
        for_p, for_d = both_params(farm.p, farm.new_id())
        kind = draw.choice(["p", "d", "both", "dual", "sequential"])

        def leave() -> Answer:
            sockets = []
            try:
                if kind in ("p", "both"):
                    sockets.append(farm.p.leave(tokens, 1, for_p))
                if kind in ("d", "both"):
                    sockets.append(farm.d.leave(tokens, OUT, for_d))
                if kind in ("dual", "sequential"):
                    sockets.append(self._proxies[kind == "sequential"].leave(tokens, OUT))
                threading.Event().wait(draw.random() * 0.4)
            finally:
                for sock in sockets:
                    sock.close()
            return Answer(200, {}, 0.0)

        return end_of(leave)


@pytest.mark.parametrize("number", range(len(ROUNDS)))
def test_storm(farm: Farm, number: int) -> None:
    if number == 0:
        farm.mend()
        for tokens in PROMPTS:
            farm.expected(tokens)
    name, part = ROUNDS[number]
    proxies = [farm.start_proxy("dual"), farm.start_proxy("sequential")]
    storm = Round(farm, 40 + number, proxies)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(storm.client, i) for i in range(PER_ROUND)]
        assert storm.kill_now.wait(GUARD_S)
        (farm.p if name == "p" else farm.d).kill(part)
        if number == 1:
            proxies[0].kill()
        for client in clients:
            client.result(2 * GUARD_S)
    good = sum(n for (kind, status), n in storm.ended.items() if status == 200 and kind != "left")
    print(f"round {number}: {dict(storm.ended)}")
    assert good, "nothing was answered before the kill"
    survivor = farm.d if name == "p" else farm.p
    tokens = farm.new_prompt(150)
    farm.check(survivor.ask(tokens, OUT), tokens)
    farm.mend()
    for proxy in proxies:
        proxy.close()
