"""The engines and requests of `benchmarks.rapid_transfer`: long steps, and TRANSFER_KVs that meet them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from pd_control.cli.endpoints import Asker
from pd_control.cli.load import Job, complete
from pd_control.cli.stages import by_request, collect_events
from pd_control.reference.cluster import Cluster
from pd_control.trace import Stage

T = TypeVar("T")

GENERATIONS = ("step", "bypass", "substep")
UNFINISHED, FINISHED = 2, 3  # requests a round
HELD_TOKENS, PROBE_TOKENS, BLOCKER_TOKENS = 64, 16, 96
NUM_SUBSTEPS = 50  # in a step whose cost is measured


@dataclass
class Sample:
    """One request's moments, seconds on the wall clock, and those of the step that it met."""

    generation: str
    kind: str  # unfinished or finished
    step_began: float
    step_ended: float
    arrived: float
    first_byte: float
    ready: float  # last layer handed over
    placed: float  # last rank's KV is on D
    admitted: float

    @property
    def first_byte_ms(self) -> float:
        return (self.first_byte - self.arrived) * 1e3

    @property
    def residual_ms(self) -> float:
        return (self.step_ended - self.arrived) * 1e3

    def figures(self) -> dict[str, float]:
        out = {
            "first_byte_ms": self.first_byte_ms,
            "residual_step_ms": self.residual_ms,
            "admitted_after_arrival_ms": (self.admitted - self.arrived) * 1e3,
        }
        if self.kind == "unfinished":
            out["admitted_after_step_ms"] = (self.admitted - self.step_ended) * 1e3
        return out


@dataclass
class Asked:
    """A request whose stages are looked up at the end. `d_id` is D's name for it."""

    generation: str
    kind: str
    d_id: str
    probe: str
    step_began: float


@dataclass
class CostStep:
    """One step whose cost is taken. `probe` is D's name of the request that tells its ends."""

    probe: str
    cpu_s: float  # of the forward thread
    substeps: int


@dataclass
class Rig:
    """Three P's, a D, and the requests between them."""

    cluster: Cluster
    http: aiohttp.ClientSession
    vocab: int
    tokens: int  # of the long step, over its unfinished requests
    rng: random.Random
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    _count: int = 0

    async def open(self) -> None:
        args = {g: ["--generation", g] for g in GENERATIONS}
        await asyncio.gather(
            *(self.cluster.start_engine(g, "prefill", args[g]) for g in GENERATIONS),
            self.cluster.start_engine("d", "decode"),
        )
        for g in GENERATIONS:
            async with self.http.get(self.cluster.children[g].url + "/pd") as answer:
                self.info[g] = await answer.json()

    async def close(self) -> None:
        """Also after a failure: nothing of ours is left running, and its errors are the failure's echo."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.cluster.close()

    def begin(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(what)
        self.tasks.add(task)
        return task

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(tokens)]

    def name(self) -> str:
        self._count += 1
        return f"r{self._count}"

    async def prefill(self, p: str, name: str, prompt: list[int]) -> float:
        """P's half; returns when its answer, the end of its step, was seen."""
        body = {
            "prompt": prompt, "max_tokens": 1, "request_id": name,
            "kv_transfer_params": {"do_remote_decode": True, "transfer_id": name},
        }  # fmt: skip
        url = self.cluster.children[p].url + "/v1/completions"
        async with self.http.post(url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            await answer.read()
        return time.time()

    async def decode(self, p: str, name: str, prompt: list[int]) -> None:
        """D's half, one token."""
        params = {
            "do_remote_prefill": True, "transfer_id": name, "on_failure": "fail",
            "remote_engine_id": self.info[p]["engine_id"],
            "remote_host": self.info[p]["control_host"],
            "remote_port": self.info[p]["control_port"],
        }  # fmt: skip
        url = self.cluster.children["d"].url
        job = Job(name, 0.0, prompt, 1)
        found = await complete(
            self.http, url, job, kv_transfer_params=params, request_id=f"{name}-d"
        )
        if found.error:
            raise RuntimeError(found.error)

    async def decode_at(self, at_s: float, p: str, name: str, prompt: list[int]) -> None:
        await asyncio.sleep(max(0.0, at_s - time.time()))
        await self.decode(p, name, prompt)

    async def round(self, p: str, points: list[float]) -> None:
        """One long step of `p`, met at these fractions of it: first the unfinished, then the finished."""
        held = [(self.name(), self.prompt(HELD_TOKENS)) for _ in range(FINISHED)]
        await asyncio.gather(*(self.prefill(p, *h) for h in held))
        share = self.tokens // UNFINISHED
        long = [(self.name(), self.prompt(share)) for _ in range(UNFINISHED)]
        probe = (self.name(), self.prompt(PROBE_TOKENS))
        tasks = [self.begin(self.decode(p, *probe))]
        blocker = self.begin(self.prefill(p, f"{probe[0]}-b", self.prompt(BLOCKER_TOKENS)))
        await asyncio.sleep(0.05)  # it runs: what comes now waits for it and shares one step
        lefts = [self.begin(self.prefill(p, *x)) for x in (*long, probe)]
        began = await blocker
        for point, (name, prompt), kind in zip(
            points,
            [*long, *held],
            ["unfinished"] * len(long) + ["finished"] * len(held),
            strict=True,
        ):
            self.asked.append(Asked(p, kind, f"{name}-d", f"{probe[0]}-d", began))
            at_s = began + point * self.step_s
            tasks.append(self.begin(self.decode_at(at_s, p, name, prompt)))
        ended = max(await asyncio.gather(*lefts))
        await asyncio.gather(*tasks)
        self.step_s = ended - began

    async def samples(self) -> list[Sample]:
        """What the traces say of everything asked."""
        async with Asker(self.cluster.endpoints) as asker:
            events = by_request(await collect_events(asker))

        def times(request_id: str, stage: Stage) -> list[float]:
            return [at for at, event, _ in events[request_id] if event.stage is stage]

        found = []
        for a in self.asked:
            first = [
                at + event.value / 1e6
                for at, event, _ in events[a.d_id]
                if event.stage is Stage.BOUND
            ]
            found.append(
                Sample(
                    a.generation,
                    a.kind,
                    a.step_began,
                    max(times(a.probe, Stage.LAYERS_READY)),
                    min(times(a.d_id, Stage.MESSAGE_RECEIVED)),
                    min(first),
                    max(times(a.d_id, Stage.LAYERS_READY)),
                    max(times(a.d_id, Stage.PLACED)),
                    max(times(a.d_id, Stage.ADMITTED)),
                )
            )
        # A request that missed the step (this program was late) says nothing about one that met it.
        return [s for s in found if s.step_began < s.arrived < s.step_ended]

    def forward_cpu_s(self, p: str) -> float:
        """Processor time of the forward thread: the worker's main thread."""
        (pid,) = self.cluster.children[p].info["workers"]
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    async def counters(self, p: str) -> dict[str, int]:
        async with Asker([str(self.cluster.children[p].info["control"])]) as asker:
            (answer,) = await asker.ask_all("process")
        return dict(answer.body["sides"]["prefill"]["core"]["counters"])

    async def cost_step(self, p: str, asks: bool) -> CostStep:
        """One step of fifty requests and a probe; whether D asks for them in it or afterwards."""
        small = [
            (self.name(), self.prompt(self.tokens // NUM_SUBSTEPS)) for _ in range(NUM_SUBSTEPS)
        ]
        probe = (self.name(), self.prompt(PROBE_TOKENS))
        before = (await self.counters(p)).get("sends.substep", 0)
        rights = [self.begin(self.decode(p, *probe))]
        blocker = self.begin(self.prefill(p, f"{small[0][0]}-b", self.prompt(2 * BLOCKER_TOKENS)))
        await asyncio.sleep(0.05)
        lefts = [self.begin(self.prefill(p, *x)) for x in (*small, probe)]
        began = await blocker
        cpu = self.forward_cpu_s(p)
        for i, x in enumerate(small):
            at_s = began + self.step_s * (0.05 + 0.8 * i / NUM_SUBSTEPS)
            if asks:
                rights.append(self.begin(self.decode_at(at_s, p, *x)))
        ended = max(await asyncio.gather(*lefts))
        used = self.forward_cpu_s(p) - cpu
        await asyncio.gather(*rights)
        if not asks:
            self.step_s = ended - began
            await asyncio.gather(*(self.decode(p, *x) for x in small))
        substeps = (await self.counters(p)).get("sends.substep", 0) - before
        return CostStep(f"{probe[0]}-d", used, substeps)

    async def wall_s(self, steps: list[CostStep]) -> list[float]:
        """How long each step took on P's rank: its probe's send was bound to it just before it began, and
        handed its last layer over when it had ended. Stamped there, by native code."""
        async with Asker(self.cluster.endpoints) as asker:
            events = by_request(await collect_events(asker))

        def at(step: CostStep, stage: Stage) -> float:
            return max(at for at, event, _ in events[step.probe] if event.stage is stage)

        return [at(step, Stage.LAYERS_READY) - at(step, Stage.BOUND) for step in steps]


def pin_forward_threads(rig: Rig) -> bool:
    """Give P's forward threads a core of their own, for the measurement that follows: everything else, D
    and this program included, shares the others. Otherwise what one measures on a machine of two cores
    is where its scheduler puts the client. False: there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return False
    children = rig.cluster.children.items()
    forward = {c.info["workers"][0] for name, c in children if name != "d"}
    pids = [os.getpid(), *(pid for _, c in children for pid in (c.pid, *c.info["workers"]))]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            where = cores[:1] if int(task.name) in forward else cores[1:]
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), where)
    return True
