"""What `pdctl` sees of D (R10): plain values with documented, stable keys.

A request: `request_id`, `side` "D", `mode`, `state`, `remote_request_id` (P's), `outcome` (once
decided), `code`, `message`, `age_s`, `attempt`, `transfer` (its id), `key`, `peer`, `tokens`
[cached, wanted end), `num_blocks`, `block_ids` (inspect only), `lease`, `why_held` (a sentence),
`grants` (ranks that may be written to), `grants_unacked`, `complete` and `missing` (pairs of own
rank and source rank; "FINAL" for P's word), `duplicates`, `deadline` {name, in_s} or None.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_control.ids import prefill_request_id
from pd_control.protocol.completion import FINAL_MEMBER, Member
from pd_control.protocol.d_request import DRequestState

if TYPE_CHECKING:
    from pd_control.protocol.decode_state import DecodeState, DRequest


def _members(found: Iterable[Member]) -> list[list[int] | str]:
    return ["FINAL" if member == FINAL_MEMBER else list(member) for member in sorted(found)]


def request_view(core: DecodeState, request: DRequest, now_s: float) -> dict[str, Any]:
    """One request, without its block ids."""
    at = core._timers.get(request.request_id)
    transfer_id = core._transfer_id(request, request.attempt)
    missing = request.completion.missing()
    peer = request.peer_id or (request.peer.instance if request.peer else None)
    return {
        "request_id": request.request_id,
        "side": "D",
        "mode": request.mode.name,
        "remote_request_id": request.request.remote_request_id
        or prefill_request_id(request.request_id, transfer_id.key()),
        "state": request.state.name,
        "outcome": None if request.outcome is None else request.outcome.name,
        "code": request.code.name,
        "message": request.message,
        "age_s": round(now_s - request.added_s, 3),
        "attempt": request.attempt,
        "transfer": str(transfer_id),
        "key": request.key.hex(),
        "peer": None if peer is None else str(peer),
        "tokens": [request.cached_tokens, request.wanted_end],
        "num_blocks": sum(map(len, request.block_ids)),
        "lease": request.lease_id or None,
        "why_held": _why_held(request),
        "grants": sorted(request.grants),
        "grants_unacked": sorted(request.unacked),
        "complete": _members(request.completion.expected.difference(missing)),
        "missing": _members(missing),
        "duplicates": request.completion.duplicates,
        "deadline": None
        if at is None
        else {"name": request.deadline_name, "in_s": round(at - now_s, 3)},
    }


def _why_held(request: DRequest) -> str:
    if not request.lease_id:
        return "no blocks yet"
    if request.stuck:
        return f"ranks {sorted(request.grants)} are lost and may still write"
    if request.state is DRequestState.CLOSING:
        return f"ranks {sorted(request.grants)} have not closed their grants"
    return "destination of a transfer"


def inspect_request(core: DecodeState, request_id: str, now_s: float) -> dict[str, Any] | None:
    """One live request with its block ids, or None."""
    request = core._requests.get(request_id)
    if request is None:
        return None
    view = request_view(core, request, now_s)
    view["block_ids"] = [list(group) for group in request.block_ids]
    return view


def snapshot(core: DecodeState, now_s: float, after: str, limit: int) -> dict[str, Any]:
    """The process: `instance`, `incarnation`, `tables` (sizes), `counters`, `peers`, `workers`, and
    `requests`, a page of at most `limit` with ids greater than `after`."""
    page = heapq.nsmallest(limit, (r for r in core._requests if r > after))
    return {
        "side": "D",
        "instance": core.me.instance,
        "incarnation": core.me.incarnation.hex(),
        "tables": {
            "requests": len(core._requests),
            "tries": len(core._by_key),
            "calls": len(core._calls),
            "peers": len(core._peers),
            "marks": len(core._early_aborts),
            "timers": len(core._timers),
        },
        "counters": dict(sorted(core.counters.items())),
        "peers": [
            {
                "instance": peer.instance,
                "address": peer.address,
                "peer": None if peer.peer_id is None else str(peer.peer_id),
                "link": peer.link.name,
                "discovered": peer.discovered,
                "healthy": peer.healthy_from_s <= now_s,
                "waiting": len(peer.waiting),
                "in_flight": len(peer.users),
                "renewing": len(peer.held),
                "queue_depth": peer.queue_depth,
            }
            for peer in core._peers
        ],
        "workers": {
            str(rank): info.incarnation.hex() for rank, info in sorted(core._workers.items())
        },
        "requests": [request_view(core, core._requests[r], now_s) for r in page],
    }
