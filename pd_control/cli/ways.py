"""Which way the KV of P's transfers went, for people: main step, substep, frozen; refused and repaired."""

from __future__ import annotations

from typing import Any

from pd_control.cli.endpoints import Answer

#: Column → the counter of P's side that it shows (`pd_control.protocol.books`).
WAY_COLUMNS = {
    "STEP": "ways.step",
    "SUBSTEP": "ways.substep",
    "FROZEN": "ways.frozen",
    "NOTHING": "ways.nothing",
    "TAKEN": "substeps.taken",
    "REFUSED": "substeps.refused",
    "MISSED": "substeps.missed",
    "UNKNOWN": "substeps.unknown",
    "REPAIRED": "sends.repaired",
}


def way_rows(answers: list[Answer]) -> list[list[str]]:
    """One row for each P: its instance, the columns above, transfers that failed."""
    rows = []
    for a in answers:
        side = a.body.get("sides", {}).get("prefill")
        if side is None:
            continue
        counters = side["core"]["counters"]
        failed = sum(n for k, n in counters.items() if k.startswith("p_transfer.failed."))
        counts = [counters.get(name, 0) for name in WAY_COLUMNS.values()]
        rows.append([a.body["instance"], *map(str, [*counts, failed])])
    return rows


def way_lines(transfer: dict[str, Any]) -> list[tuple[str, str]]:
    """Which way a transfer's KV went (of P's view, or of one that is over), what was refused and repaired."""
    ways = [w for w in transfer["ways"] if not w.startswith("repair")]
    repairs = [w.removeprefix("repair of ") for w in transfer["ways"] if w.startswith("repair")]
    refused = list(transfer["refusals"])
    owed = transfer.get("refused", ())
    lines = [("went by", ", ".join(ways))] if ways else []
    if refused:
        lines.append(("refused", ", ".join(refused)))
    if repairs:
        lines.append(("repaired", "sent frozen to " + ", ".join(repairs)))
    if owed:
        ranks = ", ".join(map(str, owed))
        lines.append(("to repair", f"rank {ranks}, as soon as its steps have ended"))
    return lines
