"""P, D and an undivided engine for the tests: vLLM servers that outlive one test and are mended after it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.vllm_kit import (
    HOST,
    Answer,
    Proxy,
    VllmServer,
    both_at_once,
    free_port,
    p_first,
    prompt,
    tiny_model,
    until,
)
from tests.vllm import gates

#: What is waited for in vain in these tests ends soon; what comes late on a busy machine may.
SETTINGS: dict[str, Any] = {
    "deadlines": {
        "park_s": 4, "hold_s": 6, "hold_max_s": 60, "queue_s": 30, "load_s": 45, "progress_s": 8,
    }
}  # fmt: skip
#: An answer or an error comes within this, whatever dies: the longest deadline and slack.
GUARD_S = 90.0
OUT = 8
#: P's budget per step, so that longer prompts come in chunks.
CHUNK_TOKENS = 128
#: D's are so few that requests queue for them, and that what one gives back the next one gets. P has more:
#: two engines, each full of KV for requests that the other cannot take, are a jam that only deadlines end.
BLOCKS_OF_D, BLOCKS_OF_P = 200, 800
SLEEPING = ["--scheduler-cls", "pd_control.vllm.sleeping.make_scheduler"]
GATED = ["--scheduler-cls", "tests.vllm.gates.make_scheduler"]
WHOLE = ["--scheduler-cls", "tests.vllm.whole_scheduler.make_scheduler"]
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"


def end_of(call: Callable[[], Answer]) -> Answer:
    """Its answer; status 0 if the server broke off or was not there. Raises TimeoutError: every client must
    get an answer or an error in time."""
    try:
        return call()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or isinstance(
            getattr(error, "reason", None), TimeoutError
        ):
            raise
        return Answer(0, {"error": repr(error)}, 0.0)


class Asked:
    """A request under way, in a thread of its own."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._answer: Future[Answer] = Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Answer]) -> None:
        try:
            self._answer.set_result(end_of(call))
        except Exception as error:
            self._answer.set_exception(error)

    def end(self) -> Answer:
        return self._answer.result(GUARD_S)


class Watched:
    """Looks into the control plane of live servers."""

    def __init__(self) -> None:
        self.inspect = InspectClient()

    def pinned(self, server: VllmServer) -> int:
        """Blocks that the control plane of this server pins."""
        sides = self.inspect.ask(server.control, "process")["sides"]
        return sum(sum(side["leased_blocks"].values()) for side in sides.values())

    @staticmethod
    def poke(server: VllmServer) -> None:
        """A core that sleeps in vLLM's own loop gives back what it holds when it next runs."""
        assert server.ask([1, 2, 3], 1).status == 200

    def check_all_let_go(self, *servers: VllmServer) -> None:
        """No block stays pinned on any of them."""
        for server in servers:
            self.poke(server)
            until(lambda: self.pinned(server) == 0, f"{server.log} lets go")  # noqa: B023


class Farm(Watched):
    """The servers. Each of P and D listens on the same control port in every life."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model = tiny_model(folder / "tiny")
        self.ports = {name: free_port() for name in ("p", "d", "bootstrap")}
        self.servers: list[VllmServer] = []
        self.proxies: list[Proxy] = []
        self._lives = 0
        self._names = itertools.count()
        self._one_at_a_time = threading.Lock()
        self._known: dict[tuple[int, ...], list[list[int]]] = {}
        try:
            few = ["--num-gpu-blocks-override", str(BLOCKS_OF_D)]
            self.whole = self._start("whole", args=[*WHOLE, *few, "--no-enable-prefix-caching"])
            self.p = self.start_p()
            self.d = self.start_d()
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for server in (*self.proxies, *self.servers):
            server.close()
        self.inspect.close()

    # -- servers -----------------------------------------------------------------------------------

    def _start(self, kind: str, **more: Any) -> VllmServer:
        self._lives += 1
        log = self.folder / f"{self._lives}-{kind}.log"
        server = VllmServer(self.model, log, **more)
        self.servers.append(server)
        return server

    def start_p(self) -> VllmServer:
        """A new life of P: gated, hence sleeping while it holds; long prompts come in chunks."""
        args = [*GATED, "--max-num-batched-tokens", str(CHUNK_TOKENS)]
        args += ["--num-gpu-blocks-override", str(BLOCKS_OF_P)]
        return self._start("p", role="kv_producer", name="p0", control_port=self.ports["p"],
                           settings=SETTINGS, args=args, env=self._gates("p"),
                           extra={"bootstrap_port": self.ports["bootstrap"]})  # fmt: skip

    def start_d(self, scheduler: list[str] | None = None, **transfer: Any) -> VllmServer:
        """A new life of D; with vLLM's stock scheduler unless told otherwise."""
        self.d_policy = transfer.get("kv_load_failure_policy", "fail")
        args = [*(scheduler or []), "--num-gpu-blocks-override", str(BLOCKS_OF_D)]
        return self._start("d", role="kv_consumer", name="d0", control_port=self.ports["d"],
                           settings=SETTINGS, args=args, env=self._gates("d"),
                           transfer=transfer)  # fmt: skip

    def start_proxy(self, mode: str) -> Proxy:
        self._lives += 1
        log = self.folder / f"{self._lives}-proxy.log"
        proxy = Proxy([self.p.upstream], [self.d.url], mode, log)
        self.proxies.append(proxy)
        proxy.wait_ready()
        return proxy

    def _gates(self, name: str) -> dict[str, str]:
        folder = self.folder / f"gates-{name}"
        folder.mkdir(exist_ok=True)
        return {gates.FOLDER: str(folder)}

    def gate(self, name: str, stage: str) -> gates.Gate:
        """A closed gate for P ("p") or D ("d"); close it as a context."""
        return gates.Gate(self.folder / f"gates-{name}", stage)

    def words_lost(self) -> contextlib.AbstractContextManager[Callable[[], int]]:
        """P's words about transfers never leave it meanwhile; gives how many were lost."""
        return gates.words_lost(self.folder / "gates-p")

    def mend(self, **transfer: Any) -> None:
        """What is dead gets a new life, as from a supervisor; then all is as before: the next request of
        either convention is answered rightly, and nothing is pinned. ``transfer``: of a new D."""
        p_died, d_died = self._bury(self.p), self._bury(self.d)
        if p_died:
            self.p = self.start_p()
        if d_died:
            self.d = self.start_d(GATED, **transfer)
        for server in (self.p, self.d):
            server.wait_ready()
        tokens = self.new_prompt(150)
        self.check(p_first(self.p, self.d, tokens, OUT), tokens)
        tokens = self.new_prompt(350)
        self.check(both_at_once(self.p, self.d, tokens, self.new_id(), OUT), tokens)
        self.check_clean()

    @staticmethod
    def _bury(server: VllmServer) -> bool:
        """Whether a part of it is dead; then all of it is gone, as a supervisor would see to."""

        def parts() -> list[bool]:
            return [bool(server.processes(name)) for name in (CORE, WORKER)]

        if all(parts()):
            return False
        until(lambda: not any(parts()), f"{server.log}: one part ends with the other")
        # The API server ends by itself as well, but only once no client is left that it thinks is there.
        server.close(wait_s=0)
        return True

    @property
    def bootstrap(self) -> str:
        """Where routers of Mooncake's convention ask who P is."""
        return f"http://{HOST}:{self.ports['bootstrap']}"

    # -- what must hold ----------------------------------------------------------------------------

    def new_prompt(self, num_tokens: int) -> list[int]:
        """One that no engine has seen."""
        return prompt(num_tokens, self.new_seed())

    def new_seed(self) -> int:
        return 10_000 + next(self._names)

    def new_id(self) -> str:
        return f"t{next(self._names)}"

    def expected(self, tokens: list[int]) -> list[list[int]]:
        """What the undivided engine says; it computes one request at a time."""
        key = tuple(tokens)
        with self._one_at_a_time:
            if key not in self._known:
                answer = self.whole.ask(tokens, OUT)
                assert answer.status == 200, answer.body
                self._known[key] = answer.tokens
            return self._known[key]

    def check(self, answer: Answer, tokens: list[int]) -> None:
        assert answer.status == 200, answer.body
        assert answer.tokens == self.expected(tokens), f"prompt of {len(tokens)} tokens"

    def counters(self, server: VllmServer, side: str) -> dict[str, int]:
        """What the state machines of one side have counted."""
        found: dict[str, int] = self.inspect.ask(server.control, "process")["sides"][side]["core"][
            "counters"
        ]
        return found

    def waiting(self) -> list[dict[str, Any]]:
        """Requests that wait for KV on D."""
        return self.inspect.requests(self.d.control, "decode")

    def held(self) -> list[dict[str, Any]]:
        """Requests that P knows."""
        return self.inspect.requests(self.p.control, "prefill")

    def ask_d_first(self, tokens: list[int], params: dict[str, Any]) -> Asked:
        """D asks P for what P has not got yet; returns when P knows that."""
        before = self.parked()
        asked = Asked(lambda: self.d.ask(tokens, OUT, params, timeout_s=GUARD_S))
        until(lambda: self.parked() > before, "P knows who waits")
        return asked

    def parked(self) -> int:
        """Transfers that wait for their request to come to P."""
        process = self.inspect.ask(self.p.control, "process")
        return int(process["sides"]["prefill"]["core"]["tables"]["parked"])

    def ask_p(self, tokens: list[int], params: dict[str, Any]) -> Asked:
        return Asked(lambda: self.p.ask(tokens, 1, params, timeout_s=GUARD_S))

    def wait_sent(self) -> None:
        """Until part of a prompt is under way to D."""
        until(
            lambda: any(t["sent_tokens"] for r in self.held() for t in r["transfers"]),
            "a chunk is under way",
        )

    def check_clean(self) -> None:
        """No block stays pinned on either side."""
        self.check_all_let_go(self.p, self.d)

    def loaded_tokens(self) -> int:
        """What D's own metrics say that it has loaded from P's."""
        with urllib.request.urlopen(self.d.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(r"^vllm:pd_control_loaded_tokens_total\{.*\} (\S+)$", text, re.M)
        return int(float(found[1])) if found else 0
