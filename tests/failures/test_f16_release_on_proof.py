"""F16: successful sends are reported, and the last rank's report releases the source blocks, at once:
no lease is left for its deadline to end. Counted, not timed: the hold deadlines here are an hour."""

from __future__ import annotations

import pytest

from pd_control.config import Deadlines
from pd_control.engine import Mode, OnFailure
from pd_control.protocol.leases import LeaseKind
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import PlaneKind

WAIT_S = 60.0
LONG = Deadlines(hold_s=3600, hold_max_s=3600, send_s=3600, load_s=3600)


def prompt(seed: int, n: int = 40) -> list[int]:
    return [(i * 31 + seed * 17) % 997 for i in range(n)]


@pytest.mark.parametrize("plane", ["loopback", "kvt"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (4, 2)])
def test_every_lease_taken_is_released_by_its_senders(
    plane: PlaneKind, p_tp: int, d_tp: int
) -> None:
    with Cluster(plane) as cluster:
        p = cluster.node("p0", spec={"tp_size": p_tp}, deadlines=LONG)
        d = cluster.node("d0", spec={"tp_size": d_tp}, deadlines=LONG)
        futures = []
        for i in range(20):
            mode = Mode.DUAL if i % 2 else Mode.SINGLE
            if mode is Mode.DUAL:
                p.prefill(f"r{i}", prompt(i))
            futures.append(
                d.decode(f"r{i}", prompt(i), 2, mode=mode, peer=p, on_failure=OnFailure.FAIL)
            )
        for i, future in enumerate(futures):
            assert future.result(WAIT_S) == oracle(prompt(i), 2, SMALL)
        assert p.wait_clean() == []
        assert d.wait_clean() == []
        assert p.runtime.prefill is not None
        assert d.runtime.decode is not None
        leases = p.runtime.prefill.leases
        assert leases.acquired[LeaseKind.HOLD] == leases.released[LeaseKind.HOLD] == 20
        assert leases.blocks[LeaseKind.HOLD] == 0
        leases = d.runtime.decode.leases
        assert leases.acquired[LeaseKind.LOAD] == leases.released[LeaseKind.LOAD] == 20
        counters = p.on_loop(lambda: p.runtime.prefill_core.snapshot(0.0, "", 0)["counters"])
        assert not [name for name in counters if "expired" in name], counters
        assert counters["p_transfer.ok"] == 20
