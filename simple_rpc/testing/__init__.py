"""What tests of this package are made of, for the tests of whoever builds on it.

    ManualClock     time that moves only when told to, for everything that takes a `clock`
    memory_pair     two connected transports without a network
    Faults          what a wire does wrong: delay, drop, split, corrupt, cut at byte n
    FaultProxy      the same faults between two real sockets
    ScriptedPeer    a server that says exactly what a script says, however wrong

None of it sleeps: waits end by an event or when the manual clock is advanced.
"""

from .clock import ManualClock
from .faults import Cut, Delayed, FaultFilter, Faults
from .memory import MemoryTransport, memory_pair, memory_streams
from .proxy import FaultProxy, ProxiedConnection
from .scripted import ScriptedConnection, ScriptedPeer

__all__ = [
    "Cut",
    "Delayed",
    "FaultFilter",
    "FaultProxy",
    "Faults",
    "ManualClock",
    "MemoryTransport",
    "ProxiedConnection",
    "ScriptedConnection",
    "ScriptedPeer",
    "memory_pair",
    "memory_streams",
]
