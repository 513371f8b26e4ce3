"""A real language model on the servers of `examples.vllm_pair`, text for text against an undivided vLLM.

The example is run as a user would run it; its proxy asks both at once, and a second one here asks P first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_pair import CHAT_TEMPLATE
from pd_control.reference.checkpoint import prepared
from pd_control.testing.http_process import Answer, HttpProcess, HttpServer
from pd_control.testing.vllm_kit import Proxy, VllmServer, at_once, p_first, pdctl, until
from tests.vllm.farm import WHOLE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OUT = 24
FILLER = (
    "The harbour was quiet in the morning. Boats lay at the pier, gulls walked along the wall, and the "
    "keeper of the lighthouse wrote down the wind, the tide and the names of the ships that had passed. "
)
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a little girl who",
    f"{FILLER * 4}In the evening the keeper",
    f"{FILLER * 12}At noon the first ship",
]


def secret(word: str) -> str:
    """A prompt whose continuation hangs on one word at its very beginning."""
    return f'The secret word is "{word}". Remember it. {FILLER * 3}The secret word is "'


class Pair:
    """The example's servers, an undivided one, and a proxy that asks P first."""

    def __init__(self, folder: Path) -> None:
        VllmServer.close_all()  # those of other modules: memory is short
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-control"
        self._model = Path(prepared("smollm2", cache))
        self._folder = folder
        self._log = (folder / "example.log").open("wb")
        self.example = subprocess.Popen(
            [sys.executable, "-m", "examples.vllm_pair", "--keep", "--json"],
            stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        self.closing: list[HttpProcess] = []
        try:
            self.whole = self._keep(VllmServer(
                self._model, folder / "whole.log", max_model_len=2048,
                args=[*WHOLE, "--no-enable-prefix-caching", "--chat-template", CHAT_TEMPLATE],
            ))  # fmt: skip
            assert self.example.stdout is not None
            line = self.example.stdout.readline()
            assert line, (folder / "example.log").read_text()
            self.ready: dict[str, Any] = json.loads(line)
            self.p, self.d = (self._at(self.ready[name]["url"]) for name in ("prefill", "decode"))
            self.controls = [self.ready[name]["control"] for name in ("decode", "prefill")]
            self.dual = self._at(self.ready["proxy"])
            upstream = f"{self.p.url}@{self.ready['prefill']['control']}"
            log = folder / "proxy.log"
            self.sequential = self._keep(
                Proxy([upstream], [self.d.url], "sequential", log, "smollm2")
            )
            self.whole.wait_ready()
            self.sequential.wait_ready()
        except BaseException:
            self.close()
            raise

    def _keep(self, server: Any) -> Any:
        self.closing.append(server)
        return server

    @staticmethod
    def _at(url: str) -> HttpServer:
        return HttpServer(url, "smollm2")

    def close(self) -> None:
        for server in self.closing:
            server.close()
        if self.example.poll() is None:
            self.example.send_signal(signal.SIGINT)
            self.example.wait(60)
        self._log.close()

    def whole_text(self, prompt: str) -> str:
        """The undivided engine computes one request at a time."""
        answer: Answer = self.whole.ask(prompt, OUT)
        assert answer.status == 200, answer.body
        return answer.texts[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("model"))
    try:
        yield made
    finally:
        made.close()


def test_the_example_has_asked_its_question(pair: Pair) -> None:
    assert "Paris" in pair.ready["answer"]


def test_the_text_hangs_on_the_beginning(pair: Pair) -> None:
    """The negative control: KV of another beginning would be read in the answer."""
    assert pair.whole_text(secret("umbrella")).startswith("umbrella")
    assert pair.whole_text(secret("tomato")).startswith("tomato")


@pytest.mark.parametrize("prompt", [*PROMPTS, secret("umbrella"), secret("tomato")])
def test_text(pair: Pair, prompt: str) -> None:
    wanted = pair.whole_text(prompt)
    assert pair.dual.ask(prompt, OUT).texts == [wanted]
    # Again, P first: D has most of it in its prefix cache now, and P all of it.
    assert pair.sequential.ask(prompt, OUT).texts == [wanted]
    assert p_first(pair.p, pair.d, prompt, OUT).texts == [wanted]


def test_all_of_them_at_once(pair: Pair) -> None:
    prompts = [f"Chapter {n}. {FILLER * (n % 4)}In this chapter" for n in range(8)]
    wanted = [pair.whole_text(prompt) for prompt in prompts]
    proxies = [pair.dual, pair.sequential]
    calls = [lambda i=i, p=p: proxies[i % 2].ask(p, OUT) for i, p in enumerate(prompts)]  # type: ignore[misc]
    assert [a.texts[0] for a in at_once(calls)] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_chat(pair: Pair, stream: bool) -> None:
    def chat(server: HttpServer) -> Answer:
        question = f"How is the weather on the coast? Stream: {stream}."
        body = {
            "model": server.model, "temperature": 0, "stream": stream, "min_tokens": 5,
            "max_completion_tokens" if stream else "max_tokens": OUT,
            "messages": [{"role": "user", "content": question}],
        }  # fmt: skip
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return answer

    (wanted,) = chat(pair.whole).texts
    assert len(wanted.split()) > 3
    for server in (pair.dual, pair.sequential):
        answer = chat(server)
        assert answer.texts == [wanted]
        if stream:
            assert answer.body["events"] > OUT // 2, "it came in pieces"


def test_streamed_completion(pair: Pair) -> None:
    prompt = f"{FILLER * 2}After the storm"
    wanted = pair.whole_text(prompt)
    for server in (pair.dual, pair.sequential):
        answer = server.ask(prompt, OUT, stream=True)
        assert answer.texts == [wanted]
        assert answer.body["events"] > OUT // 2


def test_nothing_is_left_and_pdctl_says_so(pair: Pair) -> None:
    at = [part for control in pair.controls for part in ("-e", control)]
    until(
        lambda: not any(
            row for process in pdctl("blocks", *at) for side in process["sides"].values()
            for row in side["leases"]
        ),
        "every block comes back",
    )  # fmt: skip
    assert pdctl("ps", *at)["requests"] == []


def test_ctrl_c_ends_everything_that_the_example_started(pair: Pair) -> None:
    """The last test: nothing of it is left."""
    children = _descendants(pair.example.pid)
    assert len(children) >= 7  # two API servers with a core and a worker each, and the proxy
    pair.example.send_signal(signal.SIGINT)
    pair.example.wait(60)
    # Killed ones may take a moment to vanish, and init its time to collect them.
    until(lambda: not any(map(_runs, children)), "all of them are gone")


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _descendants(root: int) -> list[int]:
    """Pids of all processes under one."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    for pid in sorted(parents):
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            found.append(pid)
    return found
