"""docs/engine-interface.md: its program is executed, against a real P."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from pd_control.codes import Code
from pd_control.config import Config
from pd_control.engine import Refusal
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_model import cells, chain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine-interface.md"


def programs() -> dict[str, Any]:
    """The names that the page's Python defines."""
    names: dict[str, Any] = {"threading": threading}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(code, names)
    return names


def test_the_embedding_of_the_page_loads_real_kv() -> None:
    names = programs()
    prompt = [(i * 31) % 997 for i in range(20)]
    tensors = [np.zeros((2, 8, 8, 4, 4), dtype=np.uint32) for _ in range(SMALL.num_layers)]
    with Cluster("kvt") as cluster:
        p = cluster.node("p0")
        config = Config(instance="d0", role="decode")
        scheduler = names["Scheduler"](config)
        scheduler.runtime.start()
        side = None
        try:
            address = str(scheduler.runtime.worker_address)
            side = names["open_worker"](config, 0, address, tensors)
            assert scheduler.runtime.wait_ready(30)
            said = names["ask"](scheduler, "p0", p.address, prompt)
            assert said == "19 tokens are in my blocks"
            blocks = [3, 4, 5]
            for layer, tensor in enumerate(tensors):
                wanted = cells(chain(prompt), layer, range(4), SMALL)
                for token in range(19):
                    got = tensor[:, blocks[token // 8], token % 8]
                    assert np.array_equal(got, wanted[token]), (layer, token)
            while any(scheduler.references.values()):  # the lease comes back by its own proof
                assert scheduler.woken.wait(30)
                scheduler.woken.clear()
                scheduler.runtime.decode.drain()
            # Three calls a step, on any worker (this one has no step to send anything in).
            assert names["step"](side, 1, b"", lambda: range(SMALL.num_layers)) == 0
        finally:
            if side is not None:
                side.close()
            scheduler.runtime.close()


def test_what_the_page_says_of_the_interface_is_there() -> None:
    from pd_control import engine

    text = PAGE.read_text()
    for name in ("hold_blocks", "release_blocks", "request_loaded", "request_failed"):
        assert hasattr(engine.Engine, name)
        assert name in text
    for cls in (engine.DecodeDriver, engine.PrefillDriver, engine.WorkerDriver):
        for name in (n for n in vars(cls) if not n.startswith("_")):
            assert f"{name}(" in text or name == "first_token", f"{cls.__name__}.{name}"
    assert Refusal(Code.BUSY, "x").code is Code.BUSY
