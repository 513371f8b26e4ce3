"""A minimal RPC: a four-byte head, then a body whose shape the head decides."""

from ._codec import MaxLen, Range
from ._deadline import Clock, Deadline
from ._entries import CallContext
from ._errors import (
    AuthenticationError,
    BusyError,
    ClosedError,
    Code,
    ConnectionLostError,
    DeadlineError,
    IncarnationError,
    IncompatibleError,
    InvalidMessageError,
    PeerProtocolError,
    Phase,
    RemoteError,
    RpcError,
    UnreachableError,
)
from ._limits import Limits
from .auth import Secret
from .client import Client
from .dedicated import AuthenticatedConnection
from .identity import Address, Identity, new_incarnation
from .methods import Method
from .server import Server, ServerStats

__all__ = [
    "Address",
    "AuthenticatedConnection",
    "AuthenticationError",
    "BusyError",
    "CallContext",
    "Client",
    "Clock",
    "ClosedError",
    "Code",
    "ConnectionLostError",
    "Deadline",
    "DeadlineError",
    "Identity",
    "IncarnationError",
    "IncompatibleError",
    "InvalidMessageError",
    "Limits",
    "MaxLen",
    "Method",
    "PeerProtocolError",
    "Phase",
    "Range",
    "RemoteError",
    "RpcError",
    "Secret",
    "Server",
    "ServerStats",
    "UnreachableError",
    "new_incarnation",
]
