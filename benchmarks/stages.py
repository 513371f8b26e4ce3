"""Stage events of live engines as durations, for benchmarks that look at requests one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_control.cli.endpoints import Asker
from pd_control.cli.look import stage_events
from pd_control.trace import Stage


async def stages_of(endpoints: Sequence[str], request_id: str) -> dict[Stage, list[float]]:
    """When each stage of one request happened, on all ranks: seconds on one clock, ascending.

    ``request_id`` is D's; P's events are joined by the transfer key.
    """
    points: dict[Stage, list[float]] = {stage: [] for stage in Stage}
    async with Asker(endpoints) as asker:
        answers = [a for a in await asker.ask_all("events", limit=1000) if a.ok]
    every = [
        (e, e.at_ns + a.body["clock_offset_ns"]) for a in answers for e in stage_events(a.body)
    ]
    keys = {e.key for e, _ in every if e.request_id == request_id and e.key}
    for event, at_ns in every:
        if event.request_id == request_id or event.key in keys:
            points[event.stage].append(at_ns / 1e9)
    return {stage: sorted(times) for stage, times in points.items()}


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
