"""Several nodes of one process over a loopback plane, and the count of what they leave behind."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from pd_control.config import Config
from pd_control.testing.fake_engine import EngineSpec
from pd_control.testing.fake_model import Geometry
from pd_control.testing.loopback_plane import Hub
from pd_control.testing.node import Node, PlaneKind

SMALL = Geometry(num_layers=3, num_heads=4, head_dim=4, block_size_tokens=8)
ROLES = {"p": "prefill", "d": "decode", "b": "both"}


class Cluster:
    """Starts nodes by name (the first letter is the role), ends them all, and tells their leaks.

    As a context manager it raises AssertionError at its end if a node that still runs holds a
    lease, a block reference or an entry of a core's table.
    """

    def __init__(self, plane: PlaneKind = "loopback", geometry: Geometry = SMALL) -> None:
        self.hub = Hub()
        self.nodes: list[Node] = []
        self.geometry = geometry
        self._plane: PlaneKind = plane
        self._stack = contextlib.ExitStack()

    def node(self, name: str, *, spec: dict[str, Any] | None = None, **config: Any) -> Node:
        """A running node; `spec` and `config` override the defaults of `EngineSpec` and `Config`."""
        values: dict[str, Any] = {
            "geometry": self.geometry,
            "max_step_tokens": 24,
            **(spec or {}),
        }
        node = Node(
            Config(instance=name, role=ROLES[name[0]], **config),  # type: ignore[arg-type]
            EngineSpec(**values),
            plane=self._plane,
            hub=self.hub,
        )
        node.start()
        self._stack.callback(node.stop)
        self.nodes.append(node)
        return node

    def stop(self, node: Node) -> None:
        """End one node before the others; its leaks no longer count."""
        self.nodes.remove(node)
        node.stop()

    def leaks(self, timeout_s: float = 30.0) -> dict[str, list[str]]:
        found = {n.config.instance: n.wait_clean(timeout_s) for n in self.nodes}
        return {name: leaks for name, leaks in found.items() if leaks}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.hub.gate.set()
        try:
            leaks = {} if kind is not None else self.leaks()
        finally:
            self._stack.close()
        assert leaks == {}, leaks
