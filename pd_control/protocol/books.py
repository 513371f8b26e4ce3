"""The books of P's sends: what must add up, whatever happened.

Counters are per process and never reset. `p_transfer.*` and `ways.*` count transfers; `substeps.*` and
`repairs.*` count pairs of a transfer and one of our ranks, since ranks answer one by one.

| counter | counts |
|---|---|
| `p_transfer.opened`, `.ok`, `.failed.CODE` | transfers accepted, and their outcomes |
| `ways.step`, `.substep`, `.frozen`, `.nothing` | transfers that ended well, by the send that closed them |
| `sends.step`, `.substep`, `.frozen` | sends planned: by the core thread; by the loop, running or complete |
| `substeps.pushed` | a rank was sent a substep with the transfer |
| `substeps.missed` | a rank had reported the step's end already, so it was not asked |
| `substeps.taken`, `.refused`, `.unknown` | what it said at freeze; unknown: its report is lost |
| `substeps.withdrawn` | it answered a cancel, or died, before it said |
| `sends.repaired`, `repairs.dropped` | it was sent the KV frozen instead; the transfer ended first |
"""

from __future__ import annotations

from collections.abc import Mapping

#: Left and right side of each equation. A name that ends in a dot stands for all that begin so; the last
#: term of the right side is what is still under way.
EQUATIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("p_transfer.opened",), ("p_transfer.ok", "p_transfer.failed.", "transfers open")),
    (("p_transfer.ok",), ("ways.step", "ways.substep", "ways.frozen", "ways.nothing")),
    (
        ("substeps.pushed",),
        (
            "substeps.taken",
            "substeps.refused",
            "substeps.unknown",
            "substeps.withdrawn",
            "substeps tentative",
        ),
    ),
    (
        ("substeps.refused", "substeps.missed"),
        ("sends.repaired", "repairs.dropped", "repairs owed"),
    ),
)


def imbalances(
    counters: Mapping[str, int], transfers_open: int = 0, tentative: int = 0, owed: int = 0
) -> list[str]:
    """Which equations do not hold, in words; empty: all do.

    The last three are what is under way: live transfers, substeps that a rank has not answered yet, and
    repairs that wait for their step; all 0 when P is idle.
    """
    under_way = {
        "transfers open": transfers_open,
        "substeps tentative": tentative,
        "repairs owed": owed,
    }

    def value(name: str) -> int:
        if name in under_way:
            return under_way[name]
        if name.endswith("."):
            return sum(n for key, n in counters.items() if key.startswith(name))
        return counters.get(name, 0)

    problems = []
    for left, right in EQUATIONS:
        if sum(map(value, left)) != sum(map(value, right)):
            sides = (
                " + ".join(f"{name.rstrip('.')} {value(name)}" for name in side)
                for side in (left, right)
            )
            problems.append(" != ".join(sides))
    return problems
