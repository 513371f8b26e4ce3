"""Kill and abort drills on live engines: every client gets an end, every block comes back, the next
request works.

kill -9 of P, of P's worker, of D, of D's worker and of the proxy, while the request is held on P, in the
middle of its prefill, and while D generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from pd_control.cli.load import Job, Result, complete
from pd_control.reference.cluster import Cluster
from tests.system.split_kit import GUARD_S, Farm, open_farm, tokens

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

OUT = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = Cluster(model="tiny:9", engine_args=["--blocks", "256", "--step-tokens", "256"])
    async with open_farm(cluster) as farm:
        await farm.start("undivided", "undivided", "--split-last-token")
        await farm.start("p", "prefill")
        await farm.start("d", "decode")
        yield farm


def kill(farm: Farm, victim: str) -> None:
    name, _, part = victim.partition(" ")
    child = farm.child(name)
    pid = child.info["workers"][0] if part == "worker" else child.pid
    os.kill(pid, signal.SIGKILL)


async def ended(task: asyncio.Task[Result]) -> Result:
    """Every request ends in bounded time, with an answer or with an error."""
    return await asyncio.wait_for(task, GUARD_S)


async def mend(farm: Farm, victim: str) -> None:
    """Restart what is dead, as a supervisor would, and see that all is well again."""
    name = victim.partition(" ")[0]
    await asyncio.wait_for(
        farm.child(name).process.wait(), GUARD_S
    )  # an engine ends with its worker
    await farm.restart(name)
    prompt = tokens(random.randrange(1 << 20), 70)
    after = await farm.split("p", "d", prompt, OUT)
    assert (after.error, after.tokens) == ("", (await farm.whole(prompt, OUT)).tokens)
    await farm.wait_unpinned()


VICTIMS = ["p", "p worker", "d", "d worker"]


@pytest.mark.parametrize("victim", VICTIMS)
async def test_killed_while_p_holds(farm: Farm, victim: str) -> None:
    """P has the KV, D has not asked yet; then D asks the dead, or a new life, or was the one to die."""
    name = f"held-{victim.replace(' ', '-')}"
    prompt = tokens(hash(name) % 10_000, 60)
    status, _ = await farm.prefill_half("p", name, prompt)
    assert status == 200
    remote = farm.remote("p", name)
    kill(farm, victim)
    if victim.startswith("p"):
        job = Job(name, 0.0, prompt, OUT)
        result = await asyncio.wait_for(
            complete(farm.http, farm.child("d").url, job, kv_transfer_params=remote), GUARD_S
        )
        # The policy of these engines is to recompute: the client gets the right answer all the same.
        assert (result.error, result.tokens) == ("", (await farm.whole(prompt, OUT)).tokens)
    await mend(farm, victim)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_killed_in_the_middle_of_a_prefill(farm: Farm, victim: str) -> None:
    prompt = tokens(VICTIMS.index(victim) + 20_000, 1500)
    first_step = asyncio.Event()

    async def run() -> Result:
        name = f"mid-{victim.replace(' ', '-')}"
        left = asyncio.ensure_future(farm.prefill_half("p", name, prompt))
        first_step.set()
        job = Job(name, 0.0, prompt, OUT)
        result = await complete(
            farm.http, farm.child("d").url, job, kv_transfer_params=farm.remote("p", name)
        )
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, AssertionError):
            await left
        return result

    task = asyncio.ensure_future(run())
    await first_step.wait()
    await asyncio.sleep(0.05)  # somewhere in its six steps; every point is legal
    kill(farm, victim)
    result = await ended(task)
    if victim.startswith("p"):
        assert (result.error, result.tokens) == ("", (await farm.whole(prompt, OUT)).tokens)
    else:
        assert result.error, "its own engine is dead: the client is told"
    await mend(farm, victim)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_killed_while_d_generates(farm: Farm, victim: str) -> None:
    prompt = tokens(VICTIMS.index(victim) + 30_000, 80)
    started = asyncio.Event()
    job = Job("gen", 0.0, prompt, 200)
    name = f"gen-{victim.replace(' ', '-')}"
    left = asyncio.ensure_future(farm.prefill_half("p", name, prompt))
    task = asyncio.ensure_future(
        complete(
            farm.http,
            farm.child("d").url,
            job,
            lambda text: started.set(),
            kv_transfer_params=farm.remote("p", name),
        )
    )
    await asyncio.wait_for(started.wait(), GUARD_S)
    await left
    kill(farm, victim)
    result = await ended(task)
    if victim.startswith("p"):
        assert result.error == "", "P has done its part"
        assert result.tokens == (await farm.whole(prompt, 200)).tokens
    else:
        assert result.error
    await mend(farm, victim)


async def test_the_proxy_dies_and_both_halves_are_aborted(farm: Farm) -> None:
    await farm.cluster.start_proxy("proxy", "dual")
    job = Job("x", 0.0, tokens(40_000, 100), 400)
    started = asyncio.Event()
    task = asyncio.ensure_future(
        complete(farm.http, farm.cluster.proxy_url, job, lambda text: started.set())
    )
    await asyncio.wait_for(started.wait(), GUARD_S)
    await farm.cluster.kill("proxy")
    assert (await ended(task)).error
    await farm.wait_unpinned()
    for name in ("p", "d"):
        async with farm.http.get(farm.child(name).url + "/health") as answer:
            assert (await answer.json())["status"] == "ok"


async def test_a_client_that_leaves_frees_everything_at_once(farm: Farm) -> None:
    await farm.cluster.start_proxy("proxy", "dual")
    for i in range(8):
        job = Job("x", 0.0, tokens(41_000 + i, 900), 50)
        task = asyncio.ensure_future(complete(farm.http, farm.cluster.proxy_url, job))
        await asyncio.sleep(0.01 * i)  # at a different moment each time
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await farm.wait_unpinned()
    await farm.cluster.stop("proxy")


async def test_five_hundred_requests_with_random_aborts_leak_nothing(farm: Farm) -> None:
    rng = random.Random(7)
    wrong: list[str] = []
    gate = asyncio.Semaphore(12)
    counts = {"whole": 0, "aborted": 0}
    shared = tokens(42_000, 48)
    expected = {n: (await farm.whole(shared + tokens(43_000, n), 4)).tokens for n in (5, 30, 90)}
    await farm.cluster.start_proxy("proxy", "dual")

    async def one(i: int) -> None:
        n = rng.choice([5, 30, 90])
        leave_after_s = rng.uniform(0.0, 0.25) if rng.random() < 0.4 else None
        async with gate:
            job = Job(f"a{i}", 0.0, shared + tokens(43_000, n), 4)
            task = asyncio.ensure_future(complete(farm.http, farm.cluster.proxy_url, job))
            if leave_after_s is not None:
                await asyncio.wait({task}, timeout=leave_after_s)
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                    counts["aborted"] += 1
                    return
            result = await ended(task)
            counts["whole"] += 1
            if result.error or result.tokens != expected[n]:
                wrong.append(f"{i}: {result.error or result.tokens}")

    await asyncio.gather(*(one(i) for i in range(500)))
    assert wrong == []
    assert counts["aborted"] > 20, counts
    assert counts["whole"] > 200, counts
    await farm.wait_unpinned()
    for body in await farm.processes():
        for side in body["sides"].values():
            taken, back = side["leases_acquired"], side["leases_released"]
            assert taken == back, body["instance"]
            assert side["core"]["tables"]["requests"] == 0
    await farm.cluster.stop("proxy")
