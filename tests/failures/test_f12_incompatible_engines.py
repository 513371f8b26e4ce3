"""F12, on whole engines: P and D whose caches do not fit are told so by name, with both values, within
one handshake, and the request ends by its policy. What fits although it differs (TP size, block
size) just works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_control.config import Config
from pd_control.engine import OnFailure
from pd_control.testing.cluster import SMALL, Cluster
from pd_control.testing.fake_engine import EngineError, EngineSpec
from pd_control.testing.fake_model import oracle
from pd_control.testing.node import Node

WAIT_S = 60.0
PROMPT = [(i * 31) % 997 for i in range(60)]


def test_another_head_size_is_refused_with_both_values() -> None:
    with Cluster("kvt") as cluster:
        p = cluster.node("p0")
        wide = cluster.node("d0", spec={"geometry": replace(SMALL, head_dim=8)})
        with pytest.raises(EngineError, match=r"INCOMPATIBLE") as refused:
            wide.decode("r", PROMPT, 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        assert "4" in str(refused.value)
        assert "8" in str(refused.value)
        # It is not the end of either engine.
        got = wide.decode("s", PROMPT, 2, peer=p, on_failure=OnFailure.RECOMPUTE).result(WAIT_S)
        assert got == oracle(PROMPT, 2, replace(SMALL, head_dim=8))


def test_another_model_is_refused_with_both_names() -> None:
    with Cluster() as cluster:
        p = cluster.node("p0")
        other = Node(
            Config(instance="d9", role="decode"),
            EngineSpec(geometry=SMALL),
            hub=cluster.hub,
            model="another-model",
        )
        with other, pytest.raises(EngineError, match="INCOMPATIBLE") as refused:
            other.decode("r", PROMPT, 1, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        assert "another-model" in str(refused.value)
        assert SMALL.name in str(refused.value)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (4, 2)])
@pytest.mark.parametrize("d_block", [8, 4, 16])
def test_other_tp_and_block_sizes_fit(p_tp: int, d_tp: int, d_block: int) -> None:
    with Cluster("kvt") as cluster:
        p = cluster.node("p0", spec={"tp_size": p_tp})
        geometry = replace(SMALL, block_size_tokens=d_block)
        d = cluster.node("d0", spec={"tp_size": d_tp, "geometry": geometry})
        got = d.decode("r", PROMPT, 3, peer=p, on_failure=OnFailure.FAIL).result(WAIT_S)
        assert got == oracle(PROMPT, 3, geometry)
