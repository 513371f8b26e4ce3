"""Checks on a core's own account of itself (its snapshot), shared by the simulation and the pair.

``waits_for_ever`` answers: is there anything in there that would wait for ever if nobody ever said another
word? Things that the process's own engine or core thread owes are not counted: they are not waits on a
peer, and the engine's contract covers them.
"""

from __future__ import annotations

from typing import Any

from pd_control.protocol.books import imbalances

#: Requests looked at in one snapshot; far above what a seed holds.
ALL = 1_000_000

#: P: the engine still computes these, and will say when they end.
_ENGINE_OWNED = ("KNOWN", "PREFILLING")


def waits_for_ever(core: Any, now_s: float) -> str:
    """What waits without a deadline, "" if nothing does."""
    snapshot = core.snapshot(now_s, limit=ALL)
    # A worker that was declared fatal owes its answer until it dies; nothing else ends that, by rule.
    fatal = bool(snapshot["counters"].get("fatal.cancel_not_answered"))
    problems = [_request_problem(view, snapshot["side"], fatal) for view in snapshot["requests"]]
    return "; ".join(p for p in problems if p)


def books_problem(core: Any, now_s: float) -> str:
    """What of P's counters does not add up, "" if all does; for a core that is idle."""
    snapshot = core.snapshot(now_s, limit=ALL)
    transfers = [t for view in snapshot["requests"] for t in view["transfers"]]
    live = [t for t in transfers if t["state"] not in ("DRAINING", "DONE")]
    return "; ".join(
        imbalances(
            snapshot["counters"],
            len(live) + snapshot["tables"]["parked"],
            sum(len(t["tentative"]) for t in transfers),
            sum(len(t["refused"]) for t in transfers),
        )
    )


def _request_problem(view: dict[str, Any], side: str, fatal: bool) -> str:
    if side == "P":
        for transfer in view["transfers"]:
            if transfer["deadline"] is None and transfer["state"] not in ("DRAINING", "DONE"):
                return f"transfer {transfer['transfer']} is {transfer['state']} without a deadline"
            reads = transfer["readers"] or transfer["tentative"]
            if transfer["deadline"] is None and reads and not fatal:
                return f"transfer {transfer['transfer']} drains without a deadline"
        if view["deadline"] is None and view["state"] == "HELD" and not view["transfers"]:
            return f"{view['request_id']} is HELD without a deadline"
        return ""
    if view["deadline"] is None and not view["why_held"].endswith("may still write"):
        # (Those last ones were declared fatal: only the death of the worker gives the blocks back.)
        return f"{view['request_id']} is {view['state']} without a deadline"
    return ""
