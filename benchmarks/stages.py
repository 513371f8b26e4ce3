"""Stage events of live engines as durations, for benchmarks that look at requests one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_control.cli.endpoints import Asker
from pd_control.cli.stages import collect_events, stage_times
from pd_control.trace import Stage


async def stages_of(endpoints: Sequence[str], request_id: str) -> dict[Stage, list[float]]:
    """When each stage of one request happened, on all ranks: seconds on one clock, ascending.

    ``request_id`` is D's; P's events are joined by the transfer key.
    """
    async with Asker(endpoints) as asker:
        return stage_times(await collect_events(asker))[request_id]


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import os
    import platform

    import torch

    model = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
