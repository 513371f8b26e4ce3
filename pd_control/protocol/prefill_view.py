"""What `pdctl` sees of P (R10): plain values with documented, stable keys.

A request: `request_id`, `side` "P", `state`, `age_s`, `residence`, `planned_tokens` (computed when the
planned steps end), `complete_tokens` (successful on every rank), `waits_for_steps`, `num_blocks`,
`block_ids` (inspect only), `leases` (ids), `why_held` (a sentence), `takers` [done, wanted],
`deadline` {name, in_s} or None (the engine's, or a transfer's below), `transfers`.

A transfer: `transfer` (its id), `key`, `peer`, `state`, `code`, `message`, `tokens` [first, end),
`sent_tokens`, `ways` (in order), `refusals` (of substeps, by rank), `readers`, `tentative`, `refused` (ranks
that a repair is still owed to), `missing` (pairs of own rank and target rank), `deadline`.

A transfer that is over: `key`, `code`, `message`, `ways`, `refusals`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from pd_control.protocol.p_request import PRequestState
from pd_control.protocol.prefill_state import ADMIT, HOLD

if TYPE_CHECKING:
    from pd_control.protocol.prefill_state import PrefillState, PRequest, PTransfer


def _named(name: str, at_s: float | None, now_s: float) -> dict[str, Any] | None:
    return None if at_s is None else {"name": name, "in_s": round(at_s - now_s, 3)}


def _deadline(core: PrefillState, request: PRequest, now_s: float) -> dict[str, Any] | None:
    for name in (HOLD, ADMIT):
        at_s = core._timers.get((name, request.request_id))
        if at_s is not None:
            return _named(name, at_s, now_s)
    return None


def transfer_view(core: PrefillState, transfer: PTransfer, now_s: float) -> dict[str, Any]:
    """One transfer."""
    key = transfer.key
    return {
        "transfer": str(transfer.transfer_id),
        "key": key.hex(),
        "peer": str(transfer.peer),
        "state": transfer.state.name,
        "code": transfer.code.name,
        "message": transfer.message,
        "tokens": [transfer.first_token, transfer.end_token],
        "sent_tokens": transfer.sent_end,
        "ways": list(transfer.ways),
        "refusals": list(transfer.refusals),
        "readers": sorted(transfer.submitted),
        "tentative": sorted(transfer.tentative),
        "refused": sorted(transfer.repair),
        "missing": [list(member) for member in transfer.completion.missing()],
        "deadline": _named(transfer.deadline_name, core._timers.get(key), now_s),
    }


def request_view(core: PrefillState, request: PRequest, now_s: float) -> dict[str, Any]:
    """One request, without its block ids."""
    complete = min((first for _, first in request.pending), default=request.planned_end)
    leases = [lease for _, lease in request.old_leases]
    if request.lease_id and not request.forgotten:
        leases.append(request.lease_id)
    return {
        "request_id": request.request_id,
        "side": "P",
        "state": request.state.name,
        "age_s": round(now_s - request.added_s, 3),
        "residence": request.residence,
        "planned_tokens": request.planned_end,
        "complete_tokens": complete,
        "waits_for_steps": sorted({step for step, _ in request.pending}),
        "num_blocks": request.num_blocks,
        "leases": [*leases, *request.last_leases],
        "why_held": _why_held(request),
        "takers": [len(request.takers), request.num_takers],
        "deadline": _deadline(core, request, now_s),
        "transfers": [transfer_view(core, t, now_s) for t in request.transfers.values()],
    }


def _why_held(request: PRequest) -> str:
    readers = {rank for t in request.transfers.values() for rank in t.submitted | t.tentative}
    if readers:
        return f"ranks {sorted(readers)} may still read"
    if request.state is PRequestState.RELEASED:
        return f"being returned by the core thread ({request.reason})"
    if request.state is PRequestState.HELD:
        return f"{request.num_takers - len(request.takers)} taker(s) to come"
    return "its prefill is not complete"


def inspect_request(core: PrefillState, request_id: str, now_s: float) -> dict[str, Any] | None:
    """One live request with its block ids; or transfers parked for it; or None."""
    request = core._requests.get(request_id) or core._forgetting.get(request_id)
    if request is not None:
        view = request_view(core, request, now_s)
        view["block_ids"] = [list(group) for group in request.block_ids]
        return view
    parked = core._parked.get(request_id)
    if parked is None:
        return None
    return {
        "request_id": request_id,
        "side": "P",
        "state": "UNKNOWN",
        "transfers": [transfer_view(core, t, now_s) for t in parked.values()],
    }


def ended_transfer(core: PrefillState, key: bytes, now_s: float) -> dict[str, Any] | None:
    """What is remembered of a transfer that is over, or None."""
    ended = core._done.get(key, now_s)
    if ended is None:
        return None
    return {
        "key": key.hex(),
        "code": ended.code.name,
        "message": ended.message,
        "ways": list(ended.ways),
        "refusals": list(ended.refusals),
    }


def snapshot(core: PrefillState, now_s: float, after: str, limit: int) -> dict[str, Any]:
    """The process: `instance`, `incarnation`, `tables` (sizes), `counters`, `links`, `steps` in
    flight, `workers`, and `requests`, a page of at most `limit` with ids greater than `after`."""
    live = {**core._forgetting, **core._requests}
    page = heapq.nsmallest(limit, (r for r in live if r > after))
    return {
        "side": "P",
        "instance": core.me.instance,
        "incarnation": core.me.incarnation.hex(),
        "tables": {
            "requests": len(core._requests),
            "forgetting": len(core._forgetting),
            "fading": len(core._fading),
            "transfers": len(core._transfers),
            "parked": core._num_parked,
            "queued": core._num_queued,
            "held_idle": len(core._idle),
            "tombstones": len(core._done) + len(core._gone),
            "marks": len(core._aborted) + len(core._early_takers),
            "timers": len(core._timers),
        },
        "counters": dict(sorted(core.counters.items())),
        "links": [str(link.peer) for link in core._links.values()],
        "workers": {str(rank): inc.hex() for rank, inc in sorted(core._workers.items())},
        "steps": [
            {
                "step": record.step,
                "ranks_left": sorted(record.ranks_left),
                "substeps": record.num_substeps,
                "acks": {str(rank): ack for rank, ack in sorted(record.finished.items())},
            }
            for record in core._steps.values()
        ],
        "requests": [request_view(core, live[r], now_s) for r in page],
    }
