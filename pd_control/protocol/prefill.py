"""P's side of every request of one scheduler process."""

from __future__ import annotations

from typing import Any

from pd_control.ids import PeerId
from pd_control.messages import Topology
from pd_control.protocol.effects import Effect
from pd_control.protocol.events import PrefillEvent
from pd_control.protocol.settings import Settings


class PrefillCore:
    """All P requests and P transfers of one scheduler process. Loop thread only."""

    def __init__(
        self, me: PeerId, topology: Topology, settings: Settings | None = None
    ) -> None: ...

    def handle(self, event: PrefillEvent, now_s: float) -> list[Effect]:
        """Take one event; returns what is to be done, in order."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None: nothing waits."""
        raise NotImplementedError

    def inspect(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """Everything about one live request (R10), or None."""
        raise NotImplementedError

    def snapshot(self, now_s: float, after: str = "", limit: int = 500) -> dict[str, Any]:
        """Counters, tables' sizes, and a page of live requests in order of their ids."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Nothing is remembered but tombstones and marks: every table is empty."""
        raise NotImplementedError
