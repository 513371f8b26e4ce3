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
from .channel import Channel, ChannelState
from .channel_table import ChannelTable
from .client import Client
from .dedicated import AuthenticatedConnection
from .identity import Address, Identity, new_incarnation
from .link import ReconnectingChannel, open_channel
from .loop_thread import Fatal, LoopClosedError, LoopThread, Scope
from .mailbox import Mailbox
from .methods import Method
from .metrics import Counters, Metrics
from .news import Slots
from .server import Server, ServerStats

__all__ = [
    "Address",
    "AuthenticatedConnection",
    "AuthenticationError",
    "BusyError",
    "CallContext",
    "Channel",
    "ChannelState",
    "ChannelTable",
    "Client",
    "Clock",
    "ClosedError",
    "Code",
    "ConnectionLostError",
    "Counters",
    "Deadline",
    "DeadlineError",
    "Fatal",
    "Identity",
    "IncarnationError",
    "IncompatibleError",
    "InvalidMessageError",
    "Limits",
    "LoopClosedError",
    "LoopThread",
    "Mailbox",
    "MaxLen",
    "Method",
    "Metrics",
    "PeerProtocolError",
    "Phase",
    "Range",
    "ReconnectingChannel",
    "RemoteError",
    "RpcError",
    "Scope",
    "Secret",
    "Server",
    "ServerStats",
    "Slots",
    "UnreachableError",
    "new_incarnation",
    "open_channel",
]
