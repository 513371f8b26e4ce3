"""Samples of `benchmarks.vllm_handoff` as figures, and the figures against its goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks._vllm_rows import KV_BYTES_PER_TOKEN, PARK_S, difference, spread

OURS = "pd-control"


def rows(found: dict[str, Any], undivided: dict[str, list[float]]) -> dict[str, Any]:
    """Samples as the figures that are reported."""
    out: dict[str, Any] = {}
    for cell, conventions in found.items():
        whole = spread(undivided[cell])
        for name, s in conventions.items():
            first, after, floor = spread(s.first_token), spread(s.after), spread(s.floor)
            out.setdefault(cell, {"undivided": whole})[name] = {
                "over_undivided": difference(first, whole),
                "excess": difference(after, floor),
                "first_token": first,
                "after_p": after,
                "floor": floor,
                "requests": len(s.after),
                "different_tokens": s.different,
            }
    return out


def _best(cells: dict[str, Any], cell: str) -> dict[str, float] | None:
    """The convention with the lower median excess."""
    found = [r["excess"] for n, r in cells.get(cell, {}).items() if n != "undivided"]
    return min(found, key=lambda e: e["p50"]) if found else None


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Goals per setting; one that has nothing to be compared with is null."""
    verdicts: dict[str, Any] = {}
    for setting, result in results.items():
        every = {n: r for n, r in result["connectors"].items() if "failed" not in r}
        ours = every.pop(OURS, None)
        every = {n: r for n, r in every.items() if not n.startswith(OURS)}
        if ours is None:
            if OURS in result["connectors"]:
                verdicts[setting] = {"excess": {}, "vain_wait": {"end": "failed", "met": False}}
            continue
        v: dict[str, Any] = {"excess": {}}
        for cell in ours["handoff_ms"]:
            mine = _best(ours["handoff_ms"], cell)
            assert mine is not None
            peers = {n: b["p50"] for n, r in every.items() if (b := _best(r["handoff_ms"], cell))}
            best = min(peers, key=lambda n: peers[n]) if peers else None
            v["excess"][cell] = {
                "ours_p50": mine["p50"],
                "best_peer": best,
                "best_peer_p50": peers[best] if best else None,
                "met": mine["p50"] <= peers[best] * (0.5 if peers[best] > 0 else 1)
                if best
                else None,
            }
        v["layer_by_layer"] = _layer_by_layer(ours["handoff_ms"])
        if ours["waiting"]:
            used = ours["waiting"]["cpu_s_total"]
            theirs = [
                w["cpu_s_total"]
                for r in every.values()
                if (w := r["waiting"]) and w["cpu_s_total"] is not None
            ]
            v["waiting_cpu"] = {
                "ours_s": used,
                "best_peer_s": min(theirs, default=None),
                "met": used <= 0.1 * min(theirs) if theirs and used is not None else None,
            }
            ended = ours["waiting"]["ended_after_s"]
            v["vain_wait"] = {
                "end": ours["waiting"]["end"],
                "ended_after_s": ended,
                "deadline_s": PARK_S,
                "met": ours["waiting"]["end"] == "HTTP 500" and ended <= PARK_S + 1,
            }
        verdicts[setting] = v
    return verdicts


def _layer_by_layer(cells: dict[str, Any]) -> dict[str, Any]:
    """Sending while P computes: the excess of one request, both asked at once, does not grow with its bytes.

    Met if at the longest prompt it is above that of the shortest by less than half of what copying the
    additional bytes takes at 4.7 GB/s (loopback, one thread). An excess below zero counts as zero: D had its
    token before P's answer was out, and how long before depends on what P was busy with.
    """
    lengths = sorted(int(c.partition("x")[0]) for c in cells if c.endswith("x1"))
    if len(lengths) < 2:
        return {"met": None}
    low, high = (cells[f"{n}x1"]["both"]["excess"]["p50"] for n in (lengths[0], lengths[-1]))
    copying_ms = (lengths[-1] - lengths[0]) * KV_BYTES_PER_TOKEN / 4.7e9 * 1e3
    return {
        "excess_p50": {lengths[0]: low, lengths[-1]: high},
        "copying_would_take_ms": round(copying_ms, 2),
        "met": max(high, 0.0) - max(low, 0.0) < copying_ms / 2,
    }


def all_met(verdicts: dict[str, Any]) -> bool:
    def walk(v: Any) -> Iterator[Any]:
        if isinstance(v, dict):
            for k, inner in v.items():
                if k == "met":
                    yield inner
                else:
                    yield from walk(inner)

    return False not in list(walk(verdicts))


def print_table(report: dict[str, Any]) -> None:
    for setting, result in report["settings"].items():
        print(f"{setting}: {result['what']}")
        for name, r in result["connectors"].items():
            if "failed" in r:
                print(f"  {name:18} failed: {r['failed'][-1].splitlines()[0]}")
                continue
            for cell, conventions in r["handoff_ms"].items():
                for convention, row in conventions.items():
                    if convention == "undivided":
                        continue
                    e, o, f = row["excess"], row["over_undivided"], row["floor"]
                    print(
                        f"  {name:18} {convention:8} {cell:>8}  excess {e['p50']:8.2f} /{e['p99']:8.2f}"
                        f"  over undivided {o['p50']:8.2f} /{o['p99']:8.2f}  floor {f['p50']:7.2f}"
                    )
            if r["waiting"]:
                w = r["waiting"]
                print(
                    f"  {name:18} waiting  {w['cpu_s_total']} CPU s of {w['waited_s']:g} s; {w['end']}"
                )
    for setting, goals in report["goals"].items():
        for cell, v in goals["excess"].items():
            print(
                f"{setting}: {cell}: excess {v['ours_p50']} ms, best peer {v['best_peer_p50']} "
                f"({v['best_peer']}): {_word(v['met'])}"
            )
        for name in ("layer_by_layer", "waiting_cpu", "vain_wait"):
            if v := goals.get(name):
                rest = ", ".join(f"{k} {x}" for k, x in v.items() if k != "met")
                print(f"{setting}: {name}: {rest}: {_word(v['met'])}")


def _word(met: bool | None) -> str:
    return {True: "met", False: "MISSED", None: "cannot be judged"}[met]
