"""What a request in flight costs, in bytes and in calls per event: counted, not timed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

from pd_control.messages import BlockIds
from pd_control.protocol import events as ev
from pd_control.protocol.leases import LeaseKind
from pd_control.protocol.planner import ScheduledRequest
from pd_control.testing.pair import Pair, content

PROMPT = content(64)
MAX_BYTES = 4096  # per request in flight, beyond its block ids


def lease(pair: Pair, request_id: str, blocks: BlockIds) -> None:
    lease_id = pair.leases.acquire(LeaseKind.LOAD, request_id, blocks)
    pair.to_d(ev.BlocksAllocated(request_id, blocks, 0, lease_id))


def load_up(pair: Pair, count: int, blocks: BlockIds) -> None:
    """That many requests are queued on D and parked on P, and as many others are held by P."""
    for n in range(count):
        pair.add_d_request(f"busy-{n}", PROMPT, remote_request_id=f"absent-{n}")
        lease(pair, f"busy-{n}", blocks)
        pair.pump()
        pair.add_p_request(f"held-{n}", PROMPT)
        pair.plan(ScheduledRequest(f"held-{n}", 0, 64, blocks))
        pair.finish_step(pair.step)
        pair.finish_p_request(f"held-{n}")
        pair.pump()
        pair.delivered.clear()
        pair._call_refs.clear()


def one_life(pair: Pair, blocks: BlockIds) -> None:
    pair.add_p_request("p-r", PROMPT)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    lease(pair, "r", blocks)
    pair.pump()
    pair.plan(ScheduledRequest("p-r", 0, 64, blocks))
    pair.finish_step(pair.step)
    pair.finish_p_request("p-r")
    key = pair.key("r")
    pair.landed(key, 63)
    pair.sent(key, 63)
    pair.pump()
    assert pair.outcomes.pop("r")[0].kind == "loaded"


def calls_in(work: Callable[[], None]) -> int:
    """Python calls made by `work`."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_cost_per_event_does_not_depend_on_what_is_in_flight() -> None:
    calls = {}
    for count in (10, 1000):
        pair = Pair()
        blocks = pair.blocks_for(64)
        load_up(pair, count, blocks)
        one_life(pair, blocks)
        calls[count] = calls_in(lambda pair=pair, blocks=blocks: one_life(pair, blocks))  # type: ignore[misc]
    # A stale timer or two may come to the top of the heap; a scan would show as hundreds.
    assert abs(calls[1000] - calls[10]) <= 30, calls


def test_a_request_in_flight_fits_in_four_kilobytes() -> None:
    pair = Pair()
    blocks = pair.blocks_for(64)
    load_up(pair, 10, blocks)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        count = 500
        for n in range(count):
            pair.add_d_request(f"more-{n}", PROMPT, remote_request_id=f"lost-{n}")
            lease(pair, f"more-{n}", blocks)
            pair.pump()
            pair.delivered.clear()
            pair._call_refs.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # D's request, its lease, its transfer parked on P, and two request ids.
    assert (after - before) / count < MAX_BYTES
