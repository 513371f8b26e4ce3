"""What a source of peers tells, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

INCARNATION_BYTES = 16
MAX_INSTANCE_CHARS = 64
ROLES = ("prefill", "decode", "both")


class DiscoveryError(ValueError):
    """A peer record that cannot be used; the text says expected, got and where."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One instance as a source knows it.

    `incarnation` is None where the source cannot know it (a static list); the handshake tells then.
    """

    instance: str
    address: str
    role: str = "both"
    incarnation: bytes | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.instance) <= MAX_INSTANCE_CHARS:
            raise DiscoveryError(
                f"instance: expected 1 to {MAX_INSTANCE_CHARS} characters, got {self.instance!r}"
            )
        if not self.address.startswith(("tcp://", "unix://")):
            raise DiscoveryError(
                f"address of {self.instance}: expected tcp://HOST:PORT or unix:///PATH, "
                f"got {self.address!r}"
            )
        if self.role not in ROLES:
            raise DiscoveryError(
                f"role of {self.instance}: expected one of {', '.join(ROLES)}, got {self.role!r}"
            )
        if self.incarnation is not None and len(self.incarnation) != INCARNATION_BYTES:
            raise DiscoveryError(
                f"incarnation of {self.instance}: expected {INCARNATION_BYTES} bytes, "
                f"got {len(self.incarnation)}"
            )


class Listener(Protocol):
    """Called on the loop thread, in the order in which things were seen."""

    def peer_appeared(self, peer: PeerRecord) -> None: ...

    def peer_restarted(self, old: PeerRecord, new: PeerRecord) -> None:
        """Same instance, another incarnation: everything of the old one is void."""
        ...

    def peer_vanished(self, peer: PeerRecord) -> None:
        """The source no longer vouches for it. A link that still beats outweighs this."""
        ...


class PeerSource(Protocol):
    """A source of peers. All calls on the loop thread."""

    def start(self, listener: Listener) -> None:
        """Report every peer known now, then every change until `close`."""
        ...

    def current(self) -> Sequence[PeerRecord]: ...

    def close(self) -> None:
        """No listener call follows. Idempotent."""
        ...
