"""Engines of every shape in processes of their own, and requests through any pair of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pd_control.cli.endpoints import Asker
from pd_control.cli.load import Job, Result, complete
from pd_control.reference.cluster import Child, Cluster

GUARD_S = 120.0  # against a hang; nothing is measured with it
_names = itertools.count()


def tokens(seed: int, count: int, vocab: int = 500) -> list[int]:
    """A prompt that no other seed shares a block with."""
    return [(seed * 7919 + i * i * 31 + i * 17) % vocab for i in range(count)]


def descendants(pid: int) -> set[int]:
    """Every process below ``pid`` that is no zombie."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


@dataclass
class Farm:
    """A cluster whose engines are addressed one by one."""

    cluster: Cluster
    http: aiohttp.ClientSession
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    _started: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    async def start(self, name: str, role: str, *args: str) -> None:
        self._started[name] = (role, args)
        child = await self.cluster.start_engine(name, role, args)
        if role != "undivided":
            async with self.http.get(child.url + "/pd") as answer:
                self.info[name] = await answer.json()

    async def restart(self, name: str) -> None:
        """The same engine again, as a supervisor would: same name, new incarnation and ports."""
        role, args = self._started[name]
        await self.cluster.stop(name)
        await self.start(name, role, *args)

    def child(self, name: str) -> Child:
        return self.cluster.children[name]

    async def whole(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Result:
        """The undivided engine's answer."""
        job = Job("whole", 0.0, list(prompt), max_tokens)
        return await complete(self.http, self.child("undivided").url, job, **fields)

    def remote(self, p: str, transfer_id: str, **more: Any) -> dict[str, Any]:
        """What D must be told of P's half."""
        info = self.info[p]
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": info["engine_id"],
            "remote_host": info["control_host"],
            "remote_port": info["control_port"],
        } | more

    async def prefill_half(
        self, p: str, transfer_id: str, prompt: Sequence[int], **more: Any
    ) -> Any:
        """P's half of a dual request; returns (status, body)."""
        body = {
            "prompt": list(prompt),
            "max_tokens": 1,
            "request_id": transfer_id,
            "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id} | more,
        }
        async with self.http.post(self.child(p).url + "/v1/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def split(
        self,
        p: str,
        d: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        mode: str = "dual",
        p_delay_s: float = 0.0,
        d_delay_s: float = 0.0,
        **fields: Any,
    ) -> Result:
        """One request through P and D, both halves at once unless delayed."""
        name = f"r{next(_names)}"
        job = Job(name, 0.0, list(prompt), max_tokens)
        if mode == "single":
            params = {"do_remote_prefill": True, "mode": "single"}
            params["remote_engine_id"] = self.info[p]["engine_id"]
            result = complete(
                self.http,
                self.child(d).url,
                job,
                kv_transfer_params=params,
                request_id=name,
                **fields,
            )
            return await asyncio.wait_for(result, GUARD_S)

        async def left() -> None:
            await asyncio.sleep(p_delay_s)
            status, body = await self.prefill_half(p, name, prompt)
            assert status == 200, body

        async def right() -> Result:
            await asyncio.sleep(d_delay_s)
            return await complete(
                self.http,
                self.child(d).url,
                job,
                kv_transfer_params=self.remote(p, name),
                request_id=f"{name}-d",
                **fields,
            )

        _, result = await asyncio.wait_for(asyncio.gather(left(), right()), GUARD_S)
        return result

    async def processes(self, *names: str) -> list[dict[str, Any]]:
        endpoints = [str(self.child(n).info["control"]) for n in names or self.info]
        async with Asker(endpoints) as asker:
            answers = await asker.ask_all("process")
        assert all(a.ok for a in answers), [a.error for a in answers]
        return [a.body for a in answers]

    async def wait_unpinned(self, *names: str) -> None:
        """Until no block is leased: at once in a good case, at the end of a hold in a bad one."""

        async def turn() -> None:
            while any(  # noqa: ASYNC110 - the state of other processes can only be asked for
                count
                for body in await self.processes(*names)
                for side in body["sides"].values()
                for count in side["leased_blocks"].values()
            ):
                await asyncio.sleep(0.05)

        await asyncio.wait_for(turn(), GUARD_S)


@contextlib.asynccontextmanager
async def open_farm(cluster: Cluster) -> AsyncIterator[Farm]:
    """`cluster` with nothing started yet; at the end nothing of it is left."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            yield Farm(cluster, http)
        finally:
            await cluster.close()
