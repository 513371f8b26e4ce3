"""F17: 5,000 requests at once over 2 P × 2 D, every engine and every worker a process of its own.
None is lost, no handshake or call times out; the queues that form are there to be seen, and what
does not fit waits instead of failing."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pd_control.config import Config, Deadlines, Discovery
from pd_control.testing.fake_engine import EngineSpec
from pd_control.testing.fake_model import Geometry, oracle
from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.node_process import NodeProcess, NodeSpec

TINY = Geometry(num_layers=1, num_heads=1, head_dim=2, block_size_tokens=8)
NUM_REQUESTS = 5_000
WAIT_S = 300.0
# Queueing is what this is about; the waits for handshakes, calls and progress keep their defaults.
DEADLINES = Deadlines(blocks_s=600, queue_s=600)


def prompt(seed: int) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(9 + seed % 12)]


def start(name: str, role: Any, folder: Path) -> NodeProcess:
    config = Config(
        instance=name, role=role, discovery=Discovery(directory=folder), deadlines=DEADLINES
    )
    engine = EngineSpec(
        geometry=TINY,
        num_blocks=2048,
        max_step_tokens=512,
        max_steps_in_flight=2,
        workers="process",
    )
    return NodeProcess(NodeSpec(config, engine))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_none_of_five_thousand_is_lost(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        prefills = [start(f"p{i}", "prefill", tmp_path) for i in range(2)]
        decodes = [start(f"d{i}", "decode", tmp_path) for i in range(2)]
        for node in [*prefills, *decodes]:
            stack.callback(node.stop)
        for node in [*prefills, *decodes]:
            node.wait_ready()
        inspect = stack.enter_context(InspectClient())
        futures: list[Future[Any]] = [
            decodes[i % 2].submit(
                "decode",
                request_id=f"r{i}",
                prompt=prompt(i),
                num_new_tokens=1,
                mode="SINGLE",
                on_failure="FAIL",
            )
            for i in range(NUM_REQUESTS)
        ]

        def tables(node: NodeProcess, side: str) -> dict[str, int]:
            found: dict[str, int] = inspect.ask(node.address, "process")["sides"][side]["core"][
                "tables"
            ]
            return found

        deepest = {"P transfers": 0, "D requests": 0}
        while not all(f.done() for f in futures):
            for node in prefills:
                seen = tables(node, "prefill")["transfers"]
                deepest["P transfers"] = max(deepest["P transfers"], seen)
            for node in decodes:
                seen = tables(node, "decode")["requests"]
                deepest["D requests"] = max(deepest["D requests"], seen)
            time.sleep(0.1)  # an operator's look now and then
        wrong = [i for i, f in enumerate(futures) if f.result(WAIT_S) != oracle(prompt(i), 1, TINY)]
        assert wrong == []
        # The queues were there to be seen, longer than what the engines could take at once.
        assert deepest["D requests"] > 500, deepest
        assert deepest["P transfers"] > 50, deepest
        assert min(p.ask("counters")["steps"] for p in prefills) > 0, "both Ps took part"
        for side, nodes in (("prefill", prefills), ("decode", decodes)):
            for node in nodes:
                end_s = time.monotonic() + 60
                while (leaks := node.ask("leaks")) and time.monotonic() < end_s:
                    time.sleep(0.05)
                assert leaks == []
                body = inspect.ask(node.address, "process")
                counters = {**body["sides"][side]["core"]["counters"], **body["counters"]}
                assert not [n for n in counters if "TIMEOUT" in n or "fatal" in n], counters
