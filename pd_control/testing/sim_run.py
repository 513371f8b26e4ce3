"""Run seeds, one or many; make a failing one small; print what happened.

``run_seed`` is the whole interface for tests; the command line in ``tests/simulate`` adds processes and
totals.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from pd_control.testing.sim_scenario import Scenario, draw_scenario
from pd_control.testing.sim_trace import Violation
from pd_control.testing.sim_world import World

#: Lines of trace printed for a failing seed unless all are asked for.
MAX_TRACE_LINES = 150


@dataclass(slots=True)
class SeedResult:
    """What one seed did. ``failure`` is empty when every invariant held."""

    seed: int
    num_requests: int
    num_events: int
    virtual_s: float
    digest: int
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    rule: str = ""
    subjects: tuple[str, ...] = ()
    trace: list[str] = field(default_factory=list)


def run_scenario(scenario: Scenario, trace: bool = False, whole_trace: bool = False) -> SeedResult:
    """Play one scenario. Never raises for what the code under test does wrong."""
    world = World(scenario, trace)
    failure, rule, subjects = "", "", ()  # type: str, str, tuple[str, ...]
    try:
        world.run()
    except Violation as e:
        failure, rule, subjects = str(e), e.rule, e.subjects
    except Exception as e:
        # A core must not raise at all; where it did is the finding.
        where = traceback.extract_tb(e.__traceback__)[-1]
        failure = f"{type(e).__name__}: {e} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        rule = "exception"
    result = SeedResult(
        seed=scenario.seed,
        num_requests=sum(max(1, len(r.takers)) for r in scenario.requests),
        num_events=world.queue.num_run,
        virtual_s=world.queue.now_s,
        digest=world.queue.digest & 0xFFFFFFFFFFFFFFFF,
        counts=world.trace.counts,
        failure=failure,
        rule=rule,
        subjects=subjects,
    )
    if trace:
        wanted = None if whole_trace or not any(subjects) else [s for s in subjects if s]
        result.trace = world.trace.lines(wanted)
    return result


def run_seed(seed: int, trace: bool = False, whole_trace: bool = False) -> SeedResult:
    """Draw the scenario of a seed and play it."""
    return run_scenario(draw_scenario(seed), trace, whole_trace)


def shrink(scenario: Scenario, rule: str, max_events: int = 2_000_000) -> Scenario:
    """Leave out requests and faults while the same rule still breaks (delta debugging).

    Random draws move when something is left out, so the smaller run is another run that fails in the same
    way, not a part of the first. ``max_events`` bounds the work (about half a minute by default).
    """
    events = 0

    def still_fails(candidate: Scenario) -> bool:
        nonlocal events
        result = run_scenario(candidate)
        events += result.num_events
        return result.rule == rule

    best = scenario
    chunk = max(1, len(best.requests) // 2)
    while events < max_events:
        progress = False
        for start in range(0, len(best.requests), chunk):
            drop = {r.index for r in best.requests[start : start + chunk]}
            if len(drop) == len(best.requests):
                continue
            candidate = best.without(drop, set())
            if still_fails(candidate):
                best, progress = candidate, True
                break
            if events >= max_events:
                break
        if not progress:
            if chunk == 1:
                break
            chunk = max(1, chunk // 2)
    for position in reversed(range(len(best.faults))):
        candidate = best.without(set(), {position})
        if events < max_events and still_fails(candidate):
            best = candidate
    return best
