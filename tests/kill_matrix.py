"""kill -9 of each kind of process at each stage, on real processes over loopback.

    python -m tests.kill_matrix [--short] [--only VICTIM] [--json]

P and D are scheduler processes of their own, each with worker processes of its own; bytes move
through kvt. A cell of the matrix: bring one request to a stage, kill the victim, and see that

  outcome   the request ends exactly once, in time, as the policy says (recompute: right tokens; an
            error names the cause), unless the process that had its client died
  clean     the surviving engine holds nothing any more: no lease, no reference, no table entry
  orphans   nothing of the victim's engine is left running
  next      with the victim replaced, the next request works and its tokens are right
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from pd_control.config import Config, Deadlines
from pd_control.testing.fake_engine import EngineSpec
from pd_control.testing.fake_model import Geometry, oracle
from pd_control.testing.inspect_client import InspectClient
from pd_control.testing.node_process import NodeError, NodeProcess, NodeSpec

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=8, block_size_tokens=8)
PROMPT_TOKENS = 120
NEW_TOKENS = 6
GUARD_S = 30.0  # against a hang
STAGES = ("idle", "parked", "prefilling", "held", "loading", "decoding")
VICTIMS = ("P scheduler", "P worker", "D scheduler", "D worker", "router")

# Short, so that what only a deadline ends ends soon; the order of their sizes is that of the defaults.
DEADLINES = Deadlines(
    connect_s=2, grant_s=3, park_s=2, queue_s=8, progress_s=3, load_s=15, hold_s=2, hold_max_s=6,
    send_progress_s=4, send_s=15, substep_s=2, heartbeat_s=0.3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """What happened."""

    victim: str
    stage: str
    outcome: str
    outcome_s: float
    clean: str
    clean_s: float
    orphans: str
    next: str

    @property
    def ok(self) -> bool:
        return self.clean == self.orphans == self.next == "ok" and not self.outcome.startswith("!")


def prompt(seed: int, n: int = PROMPT_TOKENS) -> list[int]:
    return [(i * 31 + seed * 17 + 1) % 997 for i in range(n)]


def until(condition: Callable[[], bool], what: str) -> None:
    """Looks again and again, as an operator would; a guard against a hang, not a measurement."""
    end_s = time.monotonic() + GUARD_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not reached: {what}")
        time.sleep(0.002)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Rig:
    """One P and one D, and questions to them."""

    def __init__(self, inspect: InspectClient) -> None:
        self._inspect = inspect
        self._count = 0
        self.p = self.start("p0")
        self.d = self.start("d0")
        self.p.wait_ready()
        self.d.wait_ready()

    @staticmethod
    def start(name: str) -> NodeProcess:
        spec = EngineSpec(
            geometry=GEOMETRY,
            num_blocks=128,
            max_step_tokens=16,
            workers="process",
            restart_lost_workers=True,
            layer_delay_s=0.004,
        )
        role = "prefill" if name[0] == "p" else "decode"
        config = Config(instance=name, role=role, deadlines=DEADLINES)
        return NodeProcess(NodeSpec(config, spec), quiet="KILL_MATRIX_LOUD" not in os.environ)

    def stop(self) -> None:
        self.p.stop()
        self.d.stop()

    def name(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def decode(self, request_id: str, seed: int, mode: str, on_failure: str) -> Future[Any]:
        return self.d.submit(
            "decode",
            request_id=request_id,
            prompt=prompt(seed),
            num_new_tokens=NEW_TOKENS,
            mode=mode,
            peer=self.p.name,
            address=self.p.address,
            on_failure=on_failure,
        )

    def states(self, node: NodeProcess, side: str) -> list[str]:
        rows = self._inspect.requests(node.address, side)
        return [row["state"] for row in rows] + [
            f"transfer {t['state']}" for row in rows for t in row.get("transfers", ())
        ]

    def tables(self, node: NodeProcess, side: str) -> dict[str, int]:
        body = self._inspect.ask(node.address, "process")
        tables: dict[str, int] = body["sides"][side]["core"]["tables"]
        return tables

    def bring(self, stage: str, seed: int) -> Future[Any] | None:
        """One request to the stage; its future on D (None: D does not have it)."""
        name = self.name()
        if stage == "idle":
            self.d.ask("decode", request_id=name, prompt=prompt(seed), num_new_tokens=1,
                       mode="SINGLE", peer=self.p.name, address=self.p.address)  # fmt: skip
            return None
        if stage == "parked":  # D has asked for what P does not know yet
            future = self.decode(name, seed, "DUAL", "RECOMPUTE")
            until(lambda: self.tables(self.p, "prefill").get("parked", 0) > 0, stage)
            return future
        if stage == "prefilling":  # P computes; nobody has asked for it yet
            self.p.submit("prefill", request_id=name, prompt=prompt(seed))
            until(lambda: "PREFILLING" in self.states(self.p, "prefill"), stage)
            return None
        if stage == "held":
            self.p.ask("prefill", request_id=name, prompt=prompt(seed))
            until(lambda: "HELD" in self.states(self.p, "prefill"), stage)
            return None
        if stage == "loading":
            future = self.decode(name, seed, "SINGLE", "RECOMPUTE")
            until(lambda: "LOADING" in self.states(self.d, "decode"), stage)
            return future
        future = self.d.submit(
            "decode", request_id=name, prompt=prompt(seed), num_new_tokens=60, mode="SINGLE",
            peer=self.p.name, address=self.p.address,
        )  # fmt: skip
        until(lambda: self.d.ask("counters")["steps"] > 3, stage)
        return future

    def is_complete(self, dead: list[int]) -> bool:
        """Every rank is there, and none of them is a process that was killed."""
        for node in (self.p, self.d):
            pids = [w["pid"] for w in self._inspect.ask(node.address, "workers")["workers"]]
            if not pids or set(pids) & set(dead):
                return False
        return True

    def leaks(self, node: NodeProcess) -> list[str]:
        found: list[str] = node.ask("leaks")
        return found


def run_cell(rig: Rig, victim: str, stage: str, seed: int) -> Cell:
    future = rig.bring(stage, seed)
    node = rig.p if victim.startswith("P") else rig.d
    others = [rig.d if node is rig.p else rig.p]
    workers = [node.worker_pid()]
    start_s = time.monotonic()
    if victim == "router":
        others = [rig.p, rig.d]  # it says no more: its other half never comes
    elif victim.endswith("scheduler"):
        node.kill(node.pid)
    else:
        node.kill(workers[0])
        others = [rig.p, rig.d]
    outcome = _outcome(future, victim, seed, stage)
    outcome_s = time.monotonic() - start_s
    clean = "ok"
    for other in others:
        try:
            until(lambda other=other: not rig.leaks(other), "clean")  # type: ignore[misc]
        except TimeoutError:
            clean = f"! {other.name}: {rig.leaks(other)[:3]}"
    clean_s = time.monotonic() - start_s
    orphans = "ok"
    if victim.endswith("scheduler"):
        try:
            until(lambda: all(is_gone(pid) for pid in workers), "orphans")
        except TimeoutError:
            orphans = f"! {workers}"
        node.stop()
        fresh = rig.start(node.name).wait_ready()
        if node is rig.p:
            rig.p = fresh
        else:
            rig.d = fresh
    after = _next(rig, seed + 1000, [] if victim == "router" else workers)
    return Cell(victim, stage, outcome, outcome_s, clean, clean_s, orphans, after)


def _outcome(future: Future[Any] | None, victim: str, seed: int, stage: str) -> str:
    if future is None:
        return "-"
    count = 60 if stage == "decoding" else NEW_TOKENS
    try:
        tokens = future.result(GUARD_S)
    except NodeError as error:
        if victim == "D scheduler":
            return "gone with its engine"
        return f"! {error}"
    except Exception as error:
        return f"! {type(error).__name__}"
    if tokens != oracle(prompt(seed), count, GEOMETRY):
        return "! wrong tokens"
    return "right tokens"


def _next(rig: Rig, seed: int, dead: list[int]) -> str:
    try:
        until(lambda: rig.is_complete(dead), "every rank is back")
        tokens = rig.decode(rig.name(), seed, "SINGLE", "FAIL").result(GUARD_S)
    except Exception as error:
        return f"! {type(error).__name__}: {error}"
    if tokens != oracle(prompt(seed), NEW_TOKENS, GEOMETRY):
        return "! wrong tokens"
    return "ok"


def cells(short: bool, only: str = "") -> list[tuple[str, str]]:
    """All pairs that make sense: a router that is gone matters only before its halves are joined."""
    pairs = [
        (victim, stage)
        for victim in VICTIMS
        for stage in STAGES
        if victim != "router" or stage in ("parked", "prefilling", "held")
    ]
    if short:
        keep = {
            ("P scheduler", "loading"), ("P worker", "loading"), ("D worker", "loading"),
            ("D scheduler", "held"), ("D scheduler", "loading"), ("router", "parked"),
            ("P worker", "held"),
        }  # fmt: skip
        pairs = [p for p in pairs if p in keep]
    return [p for p in pairs if only in p[0]]


def run(short: bool = False, only: str = "") -> Iterator[Cell]:
    """The cells, one after the other, on one pair of engines that is mended as it goes."""
    with InspectClient() as inspect, contextlib.closing(_Closing(Rig(inspect))) as closing:
        for i, (victim, stage) in enumerate(cells(short, only)):
            yield run_cell(closing.rig, victim, stage, i)


class _Closing:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def close(self) -> None:
        self.rig.stop()


def show(cell: Cell) -> str:
    return (
        f"{cell.victim:12} {cell.stage:11} {cell.outcome:21} {cell.outcome_s:6.2f} s  "
        f"{cell.clean:6} {cell.clean_s:6.2f} s  {cell.orphans:8} {cell.next}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of each kind of process at each stage")
    parser.add_argument("--short", action="store_true", help="the cells that CI runs")
    parser.add_argument("--only", default="", help="victims whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    if not args.json:
        print(f"{'victim':12} {'at stage':11} {'outcome':21} {'after':>8}  {'survivors clean':16} "
              f"{'orphans':8} next request")  # fmt: skip
    done: list[Cell] = []
    for cell in run(args.short, args.only):
        done.append(cell)
        if not args.json:
            print(show(cell), flush=True)
    bad = [cell for cell in done if not cell.ok]
    if args.json:
        print(json.dumps({"cells": [asdict(c) for c in done], "failed": len(bad)}, indent=1))
    else:
        print(f"{len(done)} cells, {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
