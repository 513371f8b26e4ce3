"""What keeps a scheduler's runtime from starting is said at once, before there are workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pd_control.config import load
from pd_control.messages import Topology
from pd_control.runtime.scheduler import SchedulerRuntime


@pytest.mark.parametrize("below", [False, True])
def test_a_discovery_directory_that_takes_no_files(tmp_path: Path, below: bool) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, also for root")
    config = load(
        instance="p", role="prefill", discovery={"directory": str(taken / "x" if below else taken)}
    )
    engine: Any = Mock()  # never asked: it does not come so far
    runtime = SchedulerRuntime(
        config,
        engine,
        topology=Topology(tp_size=1, num_kv_heads=1),
        block_size_tokens=16,
        model="m",
    )
    with pytest.raises(OSError, match=r"discovery\.directory: expected a folder to write to"):
        runtime.start()
    runtime.close()
    assert not engine.on_fatal.called
