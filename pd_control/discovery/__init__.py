"""Where peers are found. A source pushes what it sees; it decides nothing about their health."""

from pd_control.discovery._record import (
    DiscoveryError,
    Listener,
    PeerRecord,
    PeerSource,
)
from pd_control.discovery.files import FileDiscovery
from pd_control.discovery.static import StaticDiscovery

__all__ = [
    "DiscoveryError",
    "FileDiscovery",
    "Listener",
    "PeerRecord",
    "PeerSource",
    "StaticDiscovery",
]
