"""Stage events of live engines: all of them, put on one clock, joined by request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pd_control.cli.endpoints import Answer, Asker
from pd_control.trace import Stage, TraceEvent, chrome_events

#: Two processes of one host whose wall clocks seem further apart than this are not of one host.
MAX_ADJUSTMENT_NS = 1_000_000_000


class SideEvents(NamedTuple):
    """The events of one process. Its clock plus ``clock_offset_ns`` is the wall clock."""

    instance: str
    pid: int
    clock_offset_ns: int
    events: list[TraceEvent]


#: Seconds on the wall clock, ascending, by stage; all ranks and attempts of one request.
StageTimes = dict[Stage, list[float]]


def parse_events(rows: Sequence[Sequence[Any]]) -> list[TraceEvent]:
    """Events as INSPECT sends them."""
    return [TraceEvent(e[0], Stage(e[1]), e[2], e[3], e[4], e[5]) for e in rows]


def make_sides(processes: Sequence[Answer], rows: Sequence[Sequence[Any]]) -> list[SideEvents]:
    """Sides from the answers to ``process`` and each one's events as INSPECT sends them.

    Processes of one host share its monotonic clock, while its wall clock may have been adjusted between
    their starts: there the first one's offset serves for all. (Hosts are told apart by address; behind
    one forwarding address they differ in more than an adjustment.)
    """
    shared: dict[str, int] = {}
    sides = []
    for process, own in zip(processes, rows, strict=True):
        body = process.body
        offset_ns = body["clock_offset_ns"]
        first_ns = shared.setdefault(process.endpoint.rpartition(":")[0], offset_ns)
        if abs(first_ns - offset_ns) < MAX_ADJUSTMENT_NS:
            offset_ns = first_ns
        sides.append(SideEvents(body["instance"], body["pid"], offset_ns, parse_events(own)))
    return sides


async def collect_events(asker: Asker) -> list[SideEvents]:
    """Every stage event that the processes still have; those that do not answer are left out."""
    processes = [p for p in await asker.ask_all("process") if p.ok]
    found = await asyncio.gather(*(asker.events(p.endpoint) for p in processes))
    return make_sides(processes, [rows for rows, _ in found])


def by_request(sides: Sequence[SideEvents]) -> dict[str, list[tuple[float, TraceEvent, str]]]:
    """Each request's (seconds, event, instance) in time order, under each id that it has on some side.

    A request's own id names some of its events; a transfer's key joins those of the other side and of
    the workers, which know nothing else.
    """
    named: dict[str, list[tuple[float, TraceEvent, str]]] = defaultdict(list)
    keyed: dict[bytes, list[tuple[float, TraceEvent, str]]] = defaultdict(list)
    keys: dict[str, set[bytes]] = defaultdict(set)
    for side in sides:
        for event in side.events:
            point = ((event.at_ns + side.clock_offset_ns) / 1e9, event, side.instance)
            if event.request_id:
                named[event.request_id].append(point)
                if event.key:
                    keys[event.request_id].add(event.key)
            if event.key:
                keyed[event.key].append(point)
    joined = {}
    for request_id, own in named.items():
        others = (
            p for key in keys[request_id] for p in keyed[key] if p[1].request_id != request_id
        )
        joined[request_id] = sorted([*own, *others], key=lambda p: (p[0], p[1].stage))
    return joined


def stage_times(sides: Sequence[SideEvents]) -> dict[str, StageTimes]:
    """When each stage of each request happened."""
    found = {}
    for request_id, points in by_request(sides).items():
        times: StageTimes = {stage: [] for stage in Stage}
        for at_s, event, _ in points:
            times[event.stage].append(at_s)
        found[request_id] = times
    return found


def hand_off_s(at: StageTimes) -> tuple[float, float, float] | None:
    """A request's last layer ready on P → (admitted on D, of it bytes under way, of it neither bytes nor
    computing), in seconds; None if it did not come that far in one attempt.

    Bytes may have left long before the last layer was ready; only what is left of them counts.
    """
    if not (at[Stage.LAYERS_READY] and at[Stage.PLACED] and at[Stage.ADMITTED]):
        return None
    ready, placed, admitted = (
        max(at[s]) for s in (Stage.LAYERS_READY, Stage.PLACED, Stage.ADMITTED)
    )
    return admitted - ready, max(0.0, placed - ready), admitted - max(placed, ready)


def perfetto(sides: Sequence[SideEvents]) -> dict[str, Any]:
    """Chrome/Perfetto JSON of several processes on one clock: the stages as instants, and on one
    track a request the time between them as slices."""
    out: list[dict[str, Any]] = []
    names: dict[bytes, str] = {}
    for side in sides:
        out += chrome_events(side.instance, side.pid, side.clock_offset_ns, side.events)
        for e in side.events:
            if e.key and e.request_id:
                names.setdefault(e.key, e.request_id)
    tracks: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for side in sides:
        for e in side.events:
            request = names.get(e.key) or e.request_id
            if request:
                at_us = (e.at_ns + side.clock_offset_ns) / 1000
                tracks[request].append((at_us, e.stage.label, side.instance))
    out.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "requests"}})
    ordered = sorted(tracks.items(), key=lambda item: min(item[1]))
    for track, (request, points) in enumerate(ordered, 1):
        out.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": request}}
        )
        points.sort()
        for (start, before, _), (end, after, where) in pairwise(points):
            out.append(
                {
                    "ph": "X", "pid": 0, "tid": track, "ts": start, "dur": max(end - start, 0.001),
                    "name": f"{before} → {after}", "cat": "stage", "args": {"at": where},
                }
            )  # fmt: skip
    return {"traceEvents": out, "displayTimeUnit": "ms"}
