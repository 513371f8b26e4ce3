"""A fixed list of peers, as configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pd_control.discovery._record import Listener, PeerRecord


class StaticDiscovery:
    """Reports each configured peer once, at `start`. Restarts are told by the handshake alone."""

    def __init__(self, peers: Mapping[str, str], role: str = "both") -> None:
        """`peers`: instance id → control address. Raises DiscoveryError for one that is no use."""
        self._peers = tuple(
            PeerRecord(instance, address, role) for instance, address in peers.items()
        )

    def start(self, listener: Listener) -> None:
        for peer in self._peers:
            listener.peer_appeared(peer)

    def current(self) -> Sequence[PeerRecord]:
        return self._peers

    def close(self) -> None:
        """Nothing is held."""
