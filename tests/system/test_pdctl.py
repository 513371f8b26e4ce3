"""``pdctl`` on live engines: the seven questions, asked while requests are frozen in each state.

1 who holds it now; 2 which blocks on each side and why; 3 which step and substep; 4 for each P rank,
which D rank it feeds; 5 which completions came and which are missing; 6 what an abort would clean up;
7 the latest time by which it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from pd_control.cli.app import app
from pd_control.cli.load import Job, Result, complete
from pd_control.reference.cluster import Cluster
from tests.system.split_kit import GUARD_S, Farm, open_farm, tokens

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = Cluster(model="tiny:4", engine_args=["--blocks", "24", "--step-tokens", "64"])
    async with open_farm(cluster) as farm:
        await farm.start("p", "prefill", "--tp", "2")
        await farm.start("d", "decode")
        yield farm


async def pdctl(farm: Farm, *args: str, status: int | None = 0) -> Any:
    """Run a command against the farm's state directory; parses --json output."""
    command = [*args, "--state-dir", str(farm.cluster.state_dir)]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    if status is not None:
        assert result.exit_code == status, (result.output, result.stderr)
    return json.loads(result.stdout) if "--json" in args else result.output


async def row_of(farm: Farm, request_id: str, state: str) -> dict[str, Any]:
    """The row of ``ps`` once the request is in that state."""

    async def turn() -> dict[str, Any]:
        while True:
            rows = (await pdctl(farm, "ps", "--json"))["requests"]
            for row in rows:
                if row["request_id"] == request_id and row["state"] == state:
                    return dict(row)
            await asyncio.sleep(0.02)

    return await asyncio.wait_for(turn(), GUARD_S)


def decode_half(farm: Farm, name: str, prompt: list[int]) -> asyncio.Task[Result]:
    job = Job(name, 0.0, prompt, 4)
    params = farm.remote("p", name)
    return asyncio.ensure_future(
        complete(
            farm.http, farm.child("d").url, job, kv_transfer_params=params, request_id=f"{name}-d"
        )
    )


async def leave(task: asyncio.Task[Result]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def ends_by(row: dict[str, Any]) -> tuple[str, float]:
    """Question 7, of any row."""
    from pd_control.cli.look import deadline_of

    due = deadline_of(row)
    assert due is not None, f"nothing ends {row['request_id']} in {row['state']}"
    return due


async def test_parked_at_p_and_queued_at_d(farm: Farm) -> None:
    """D has asked for a request that P has not seen."""
    task = decode_half(farm, "parked", tokens(1, 40))
    row = await row_of(farm, "parked-d", "QUEUED")
    assert row["instance"] == "d"  # 1
    assert row["num_blocks"] == 3  # 2
    assert row["why_held"] == "destination of a transfer"
    assert row["missing"] == [[0, 0], [0, 1]]  # 4, 5: D's rank 0 is fed by P's ranks 0 and 1
    assert 0 < ends_by(row)[1] <= 60  # 7
    shown = await pdctl(farm, "show", "parked-d", "--json")
    by_instance = {p["instance"]: p for p in shown["processes"]}
    lease = by_instance["d"]["decode_leases"][0]  # 2, 6: what an abort gives back
    assert (lease["kind"], lease["num_blocks"]) == ("load", 3)
    parked = by_instance["p"]["prefill"]["transfers"][0]
    assert parked["state"] == "PARKED"
    assert parked["deadline"]["name"] == "park"
    assert "all ranks" in shown["stages_missing"]
    assert "a taker" not in await pdctl(farm, "ps")
    aborted = await pdctl(farm, "abort", "parked-d", "--json")
    assert aborted["aborted_on"] == ["d"]
    assert "ABORTED" in (await asyncio.wait_for(task, GUARD_S)).error
    await farm.wait_unpinned()


async def test_held_at_p(farm: Farm) -> None:
    """P has prefilled and nobody asks."""
    status, _ = await farm.prefill_half("p", "held", tokens(2, 40))
    assert status == 200
    row = await row_of(farm, "held", "HELD")
    assert (row["instance"], row["num_blocks"], row["takers"]) == ("p", 3, [0, 1])
    assert row["why_held"] == "1 taker(s) to come"
    name, left_s = ends_by(row)
    assert "hold" in name
    assert 0 < left_s <= 30
    shown = await pdctl(farm, "show", "held", "--json")
    assert shown["processes"][0]["prefill_leases"][0]["kind"] == "hold"
    blocks = await pdctl(farm, "blocks", "--json")
    p = next(b for b in blocks if b["instance"] == "p")
    assert p["sides"]["prefill"]["pinned_blocks"]["hold"] == 3
    text = await pdctl(farm, "blocks")
    assert "held" in text
    taken = await asyncio.wait_for(decode_half(farm, "held", tokens(2, 40)), GUARD_S)
    assert taken.error == ""
    await farm.wait_unpinned()
    assert "nothing is pinned" in await pdctl(farm, "blocks")


async def test_prefilling_with_a_stopped_worker(farm: Farm) -> None:
    """P's rank 1 does not come back from its step."""
    stopped = farm.child("p").info["workers"][1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        left = asyncio.ensure_future(farm.prefill_half("p", "slow", tokens(3, 100)))
        task = decode_half(farm, "slow", tokens(3, 100))
        row = await row_of(farm, "slow", "PREFILLING")
        assert row["waits_for_steps"], "3: the step that must end"
        shown = await pdctl(farm, "show", "slow", "--json")
        p = next(b for b in shown["processes"] if b["instance"] == "p")
        step = row["waits_for_steps"][0]
        process = (await farm.processes("p"))[0]["sides"]["prefill"]["core"]
        record = next(s for s in process["steps"] if s["step"] == step)
        assert 1 in record["ranks_left"], "5: which rank has not reported"
        assert p["prefill_leases"], "2: leased before its first step"
        d_row = await row_of(farm, "slow-d", "LOADING" if _is_loading(shown) else "QUEUED")
        assert ends_by(d_row)[1] > 0
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert (await asyncio.wait_for(task, GUARD_S)).error == ""
    await left
    await farm.wait_unpinned()


def _is_loading(shown: dict[str, Any]) -> bool:
    return any((p.get("decode") or {}).get("state") == "LOADING" for p in shown["processes"])


async def test_which_way_it_went_while_it_goes_and_afterwards(farm: Farm) -> None:
    """TRANSFER_KV arrives in the middle of a step, which a stopped worker holds open."""
    prompt = tokens(8, 40)
    stopped = farm.child("p").info["workers"][1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        left = asyncio.ensure_future(farm.prefill_half("p", "way", prompt))
        row = await row_of(farm, "way", "PREFILLING")
        step = row["waits_for_steps"][0]
        task = decode_half(farm, "way", prompt)
        await row_of(farm, "way-d", "LOADING")
        shown = await pdctl(farm, "show", "way-d", "--json")
        p = next(b for b in shown["processes"] if b["instance"] == "p")
        (transfer,) = p["prefill"]["transfers"]
        assert transfer["ways"] == [f"substep {step}.1"]
        assert transfer["tentative"] == [0, 1], "no rank has ended the step"
        text = await pdctl(farm, "show", "way-d")
        assert f"substep {step}.1" in text
    finally:
        os.kill(stopped, signal.SIGCONT)
    done = await asyncio.wait_for(task, GUARD_S)
    assert done.error == ""
    await left
    await farm.wait_unpinned()
    for name in ("way", "way-d"):  # over: what P remembers is found from either side
        shown = await pdctl(farm, "show", name, "--json")
        (ended,) = [e for b in shown["processes"] for e in b.get("prefill_ended", ())]
        assert (ended["code"], ended["ways"][0]) == ("OK", f"substep {step}.1")
        # A rank that froze before it looked at its channel refused, and was repaired.
        refused = [f"substep {step}.1 by rank {r}" for r in (0, 1)]
        assert set(ended["refusals"]) <= set(refused)
        assert len(ended["ways"]) == (2 if ended["refusals"] else 1)
        text = await pdctl(farm, "show", name)
        assert "is over" in text
        assert "went by" in text
    peers = await pdctl(farm, "peers")
    assert "WAYS" in peers
    (row,) = [line.split() for line in peers.partition("WAYS")[2].splitlines()[2:3]]
    assert row[0] == "p"
    assert int(row[2]) >= 1, "the column SUBSTEP"
    async with farm.http.get(farm.child("p").url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counted = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name = 'pd_control_events_total{event="ways.substep",side="prefill"}'
    assert float(counted[name]) == int(row[2])


async def test_waiting_for_blocks_at_d(farm: Farm) -> None:
    """D's 24 blocks are taken; the next request says so."""
    first = decode_half(farm, "first", tokens(4, 300))
    await row_of(farm, "first-d", "QUEUED")
    second = decode_half(farm, "second", tokens(5, 200))
    row = await row_of(farm, "second-d", "WAITING_BLOCKS")
    assert row["num_blocks"] == 0
    assert "blocks" in ends_by(row)[0]
    assert "free KV blocks here" in await pdctl(farm, "ps")
    await leave(first)
    await row_of(farm, "second-d", "QUEUED")
    await leave(second)
    await farm.wait_unpinned()


async def test_closing_while_a_worker_is_silent(farm: Farm) -> None:
    """D's worker is stopped; an abort waits for its word before the blocks come back."""
    task = decode_half(farm, "closing", tokens(6, 40))
    await row_of(farm, "closing-d", "QUEUED")
    worker = farm.child("d").info["workers"][0]
    os.kill(worker, signal.SIGSTOP)
    try:
        await leave(task)  # the client is gone; D aborts at once
        row = await row_of(farm, "closing-d", "CLOSING")
        assert row["grants"] == [0], "6: what is being cleaned up"
        assert "have not closed" in row["why_held"]
        assert 0 < ends_by(row)[1] <= 5
    finally:
        os.kill(worker, signal.SIGCONT)
    await farm.wait_unpinned()


async def test_the_commands_that_look_at_everything(farm: Farm, tmp_path: Any) -> None:
    prompt = tokens(7, 50)
    done = await farm.split("p", "d", prompt, 4)
    assert done.error == ""
    peers = await pdctl(farm, "peers", "--json")
    assert {(p["instance"], p["role"], len(p["workers"])) for p in peers} == {
        ("p", "prefill", 2), ("d", "decode", 1),
    }  # fmt: skip
    assert "prefill" in await pdctl(farm, "peers")
    checks = await pdctl(farm, "doctor", "--json")
    assert all(c["ok"] for c in checks), checks
    out = tmp_path / "t.json"
    await pdctl(farm, "trace", "--all", "-o", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    assert {"admitted", "send done"} <= {e["name"] for e in events}
    assert any(e["ph"] == "X" for e in events)
    configs = await pdctl(farm, "config", "--json")
    assert {c["role"] for c in configs.values()} == {"prefill", "decode"}
    assert "TIMELINE" in await pdctl(farm, "show", done.request_id)
    await pdctl(farm, "watch", "--count", "1")
    assert "no process knows" in await pdctl(farm, "show", "nobody", status=1)
    await pdctl(farm, "abort", "nobody", status=1)


async def test_a_process_that_does_not_answer_is_reported_and_the_rest_shown(farm: Farm) -> None:
    endpoints = [str(farm.child(n).info["control"]) for n in ("p", "d")]
    args = [a for e in [*endpoints, "tcp://127.0.0.1:1"] for a in ("-e", e)]
    result = await asyncio.to_thread(CliRunner().invoke, app, ["peers", "--json", *args])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [bool(p["error"]) for p in found] == [False, False, True]
    result = await asyncio.to_thread(CliRunner().invoke, app, ["ps", "-e", "nonsense://x"])
    assert result.exit_code == 2
