"""A child that ends by itself is told apart from one that runs."""

from __future__ import annotations

import pytest

from pd_control.reference.cluster import Cluster, ClusterError


async def test_a_child_that_ended_is_named_with_its_status() -> None:
    cluster = Cluster()
    try:
        child = await cluster._start("front", ["proxy", "--mode", "single", "-d", "localhost:1"])
        cluster.check()
        child.process.kill()
        await child.process.wait()
        with pytest.raises(ClusterError, match="front ended with status -9"):
            cluster.check()
    finally:
        await cluster.close()
