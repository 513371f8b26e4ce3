"""P and D engines, runtime and workers over real connections in one process; bytes by loopback.

Every test ends with the same count: no lease, no block reference and no entry of a core is left on
any engine that still lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_control.codes import Code
from pd_control.config import Config, Deadlines, Discovery, Network, Policy
from pd_control.engine import Mode, OnFailure
from pd_control.testing.cluster import Cluster
from pd_control.testing.fake_engine import EngineError, EngineSpec
from pd_control.testing.fake_model import Geometry, oracle
from pd_control.testing.node import Node
from pd_control.trace import Stage

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=4, block_size_tokens=8)
WAIT_S = 60.0


def prompt(n: int, seed: int = 1) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(geometry=GEOMETRY) as cluster:
        yield cluster


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
def test_both_modes_give_the_undivided_tokens(cluster: Cluster, p_tp: int, d_tp: int) -> None:
    p = cluster.node("p0", spec={"tp_size": p_tp})
    d = cluster.node("d0", spec={"tp_size": d_tp})
    for n in (2, 8, 9, 75):
        single = d.decode(f"s{n}", prompt(n), 4, peer=p, on_failure=OnFailure.FAIL)
        assert single.result(WAIT_S) == oracle(prompt(n), 4, GEOMETRY)
        p.prefill(f"x{n}", prompt(n, 5))
        dual = d.decode(f"x{n}", prompt(n, 5), 4, mode=Mode.DUAL, peer=p, on_failure=OnFailure.FAIL)
        assert dual.result(WAIT_S) == oracle(prompt(n, 5), 4, GEOMETRY)


def test_wrong_kv_would_be_seen(cluster: Cluster) -> None:
    """The negative control: what P sends is what decides D's tokens."""
    p, d = cluster.node("p0"), cluster.node("d0")
    shard = p.engine.workers[0].shard  # type: ignore[attr-defined]
    write = shard.write

    def spoiled(layer: int, blocks: list[int], first: int, states: list[int]) -> None:
        write(layer, blocks, first, [s ^ 1 for s in states])

    shard.write = spoiled
    got = d.decode("r", prompt(50), 3, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
    assert got != oracle(prompt(50), 3, GEOMETRY)


def test_a_destination_that_comes_before_during_and_after_the_prefill(cluster: Cluster) -> None:
    p = cluster.node("p0", spec={"layer_delay_s": 0.005})
    d = cluster.node("d0")
    options: dict[str, Any] = {"mode": Mode.DUAL, "peer": p, "on_failure": OnFailure.FAIL}
    before = d.decode("before", prompt(70, 1), 2, **options)
    d.on_core(lambda: None)
    p.prefill("before", prompt(70, 1))
    p.prefill("during", prompt(200, 2))
    while not p.on_core(lambda: p.engine.num_steps > 2):
        pass
    during = d.decode("during", prompt(200, 2), 2, **options)
    p.prefill("after", prompt(70, 3)).result(WAIT_S)
    after = d.decode("after", prompt(70, 3), 2, **options)
    assert before.result(WAIT_S) == oracle(prompt(70, 1), 2, GEOMETRY)
    assert during.result(WAIT_S) == oracle(prompt(200, 2), 2, GEOMETRY)
    assert after.result(WAIT_S) == oracle(prompt(70, 3), 2, GEOMETRY)


def test_prefix_hits_on_both_sides(cluster: Cluster) -> None:
    p, d = cluster.node("p0"), cluster.node("d0")
    shared = prompt(40, 9)
    for i in range(3):
        tokens = shared + prompt(20, i)
        got = d.decode(f"r{i}", tokens, 3, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        assert got == oracle(tokens, 3, GEOMETRY)
    again = d.decode("again", shared + prompt(20, 0), 3, peer=p, on_failure=OnFailure.FAIL)
    assert again.result(WAIT_S) == oracle(shared + prompt(20, 0), 3, GEOMETRY)


def test_ps_first_token_is_used_when_wanted(cluster: Cluster) -> None:
    p, d = cluster.node("p0"), cluster.node("d0")
    got = d.decode(
        "r", prompt(33), 3, peer=p, want_first_token=True, recompute_tail_tokens=0,
        on_failure=OnFailure.FAIL,
    ).result(WAIT_S)  # fmt: skip
    assert got == oracle(prompt(33), 3, GEOMETRY)


def test_several_takers_of_one_held_prompt(cluster: Cluster) -> None:
    p, d = cluster.node("p0"), cluster.node("d0")
    p.prefill("shared", prompt(50), num_takers=3).result(WAIT_S)
    futures = [
        d.decode(
            f"taker{i}", prompt(50), 2, mode=Mode.DUAL, peer=p, remote_request_id="shared",
            on_failure=OnFailure.FAIL,
        )
        for i in range(3)
    ]  # fmt: skip
    assert [f.result(WAIT_S) for f in futures] == [oracle(prompt(50), 2, GEOMETRY)] * 3


def test_many_requests_through_small_pools(cluster: Cluster) -> None:
    """Both pools far too small for all at once: queueing, preemption, pressure on holds."""
    deadlines = Deadlines(pressure_hold_s=0.05)
    spec = {"num_blocks": 40, "max_steps_in_flight": 2}
    p = cluster.node("p0", spec=spec, deadlines=deadlines)
    d = cluster.node("d0", spec={"num_blocks": 40})
    futures = []
    for i in range(60):
        tokens = prompt(20 + (i * 13) % 60, i)
        if i % 2:
            p.prefill(f"r{i}", tokens)
        mode = Mode.DUAL if i % 2 else Mode.SINGLE
        futures.append((tokens, d.decode(f"r{i}", tokens, 3, mode=mode, peer=p)))
    for tokens, future in futures:
        assert future.result(WAIT_S) == oracle(tokens, 3, GEOMETRY)


def test_abort_at_any_moment_leaves_nothing(cluster: Cluster) -> None:
    # What D aborts before it has a link to P is held by P until its hold ends.
    p = cluster.node("p0", spec={"layer_delay_s": 0.001}, deadlines=Deadlines(hold_s=1))
    d = cluster.node("d0")
    for i in range(30):
        name = f"r{i}"
        mode = Mode.DUAL if i % 2 else Mode.SINGLE
        if mode is Mode.DUAL:
            p.prefill(name, prompt(60, i))
        future = d.decode(name, prompt(60, i), 50, mode=mode, peer=p)
        for _ in range(i * 3):
            d.on_core(lambda: None)  # lets a little more happen each time
        d.engine.abort(name)
        with pytest.raises(EngineError, match="ABORTED"):
            future.result(WAIT_S)


def test_an_abort_on_p_ends_ds_request_by_policy(cluster: Cluster) -> None:
    p = cluster.node("p0", spec={"layer_delay_s": 0.01})
    d = cluster.node("d0")
    p.prefill("r", prompt(200))
    future = d.decode("r", prompt(200), 2, mode=Mode.DUAL, peer=p, on_failure=OnFailure.FAIL)
    while not p.has_stage(Stage.MESSAGE_RECEIVED):
        p.on_core(lambda: None)
    p.engine.abort("r")
    with pytest.raises(EngineError, match=r"ABORTED|GONE"):
        future.result(WAIT_S)


def test_a_failed_piece_reaches_d_and_the_policy_recomputes(cluster: Cluster) -> None:
    p, d = cluster.node("p0"), cluster.node("d0")
    cluster.hub.fail_next(Code.CORRUPT)
    got = d.decode("r", prompt(50), 3, peer=p, on_failure=OnFailure.RECOMPUTE).result(WAIT_S)
    assert got == oracle(prompt(50), 3, GEOMETRY)
    cluster.hub.fail_next(Code.CORRUPT)
    with pytest.raises(EngineError, match="CORRUPT"):
        d.decode("s", prompt(50, 2), 3, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)


def test_retry_goes_to_another_p(cluster: Cluster, tmp_path: Path) -> None:
    discovery = Discovery(directory=tmp_path)
    p0 = cluster.node("p0", discovery=discovery)
    p1 = cluster.node("p1", discovery=discovery)
    d = cluster.node("d0", discovery=discovery, policy=Policy(on_load_failure="retry"))
    cluster.hub.fail_next(Code.CORRUPT)
    got = d.decode("r", prompt(50), 3).result(WAIT_S)
    assert got == oracle(prompt(50), 3, GEOMETRY)
    assert p0.engine.num_steps > 0
    assert p1.engine.num_steps > 0


def test_discovery_spreads_and_follows_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    discovery = Discovery(directory=tmp_path, choose="round_robin")
    p0 = cluster.node("p0", discovery=discovery)
    p1 = cluster.node("p1", discovery=discovery)
    d = cluster.node("d0", discovery=discovery)
    for i in range(4):
        d.decode(f"r{i}", prompt(30, i), 1, on_failure=OnFailure.FAIL).result(WAIT_S)
    assert p0.engine.num_steps > 0
    assert p1.engine.num_steps > 0
    cluster.stop(p0)
    cluster.stop(p1)
    again = cluster.node("p1", discovery=discovery)
    future = d.decode("after", prompt(30, 77), 2, on_failure=OnFailure.RECOMPUTE)
    assert future.result(WAIT_S) == oracle(prompt(30, 77), 2, GEOMETRY)
    assert again.runtime.me != p1.runtime.me


def test_no_peer_at_all_is_an_outcome(cluster: Cluster) -> None:
    d = cluster.node("d0", deadlines=Deadlines(connect_s=0.3))
    with pytest.raises(EngineError, match="UNREACHABLE"):
        d.decode("r", prompt(30), 1, on_failure=OnFailure.FAIL).result(WAIT_S)
    got = d.decode("s", prompt(30), 2, on_failure=OnFailure.RECOMPUTE).result(WAIT_S)
    assert got == oracle(prompt(30), 2, GEOMETRY)


def test_one_process_can_be_both(cluster: Cluster) -> None:
    b0, b1 = cluster.node("b0"), cluster.node("b1")
    there = b0.decode("x", prompt(40, 1), 2, peer=b1, on_failure=OnFailure.FAIL)
    back = b1.decode("y", prompt(40, 2), 2, peer=b0, on_failure=OnFailure.FAIL)
    assert there.result(WAIT_S) == oracle(prompt(40, 1), 2, GEOMETRY)
    assert back.result(WAIT_S) == oracle(prompt(40, 2), 2, GEOMETRY)


def test_a_shared_secret_is_needed_once_there_is_one(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    secret = Network(secret="correct horse battery staple")
    p = cluster.node("p0", network=secret)
    good = cluster.node("d0", network=secret)
    bad = cluster.node("d1", network=Network(secret="another horse, another staple"))
    tokens = good.decode("r", prompt(30), 2, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
    assert tokens == oracle(prompt(30), 2, GEOMETRY)
    for name in ("r", "again"):
        with pytest.raises(EngineError, match="UNAUTHORIZED"):
            bad.decode(name, prompt(30), 2, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
    warnings = [r.getMessage() for r in caplog.records if "no link to p0" in r.getMessage()]
    assert len(warnings) == 1, "the same failure is told once"
    assert "secret" in warnings[0]


def test_models_that_differ_are_refused_by_name(cluster: Cluster) -> None:
    p = cluster.node("p0")
    other = Node(
        Config(instance="d9", role="decode"),
        EngineSpec(geometry=GEOMETRY),
        hub=cluster.hub,
        model="another-model",
    )
    with other, pytest.raises(EngineError, match=r"INCOMPATIBLE.*another-model"):
        other.decode("r", prompt(30), 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)


def test_d_connects_only_where_it_may(cluster: Cluster) -> None:
    """Requests name their P; `network.dial` says which ones D believes."""
    p = cluster.node("p0")
    host = p.address.rpartition(":")[0]
    free = cluster.node("d0", network=Network(dial=(f"{host}:*",)))
    bound = cluster.node("d1", network=Network(dial=("tcp://10.0.3.*:5600",)))
    fail, recompute = OnFailure.FAIL, OnFailure.RECOMPUTE
    expected = oracle(prompt(30), 2, GEOMETRY)
    assert free.decode("r", prompt(30), 2, peer=p, on_failure=fail).result(WAIT_S) == expected
    with pytest.raises(EngineError, match=r"UNAUTHORIZED.*is not among network\.dial"):
        bound.decode("r", prompt(30), 2, peer=p, on_failure=fail).result(WAIT_S)
    assert bound.decode("s", prompt(30), 2, peer=p, on_failure=recompute).result(WAIT_S) == expected


def test_a_waiting_engine_sleeps(cluster: Cluster) -> None:
    """No dummy steps, no polling: while D only waits for KV its core thread does not turn."""
    p, d = cluster.node("p0"), cluster.node("d0")
    cluster.hub.gate.clear()
    future = d.decode("r", prompt(50), 1, peer=p, on_failure=OnFailure.FAIL)
    while not p.has_stage(Stage.PLANNED):
        p.on_core(lambda: None)
    d.on_core(lambda: None)
    steps, wakes = d.engine.num_steps, d.engine.num_wakes
    p.on_core(lambda: None)
    d.on_core(lambda: None)
    assert d.engine.num_steps == steps == 0
    assert d.engine.num_wakes <= wakes + 2
    cluster.hub.gate.set()
    assert future.result(WAIT_S) == oracle(prompt(50), 1, GEOMETRY)
