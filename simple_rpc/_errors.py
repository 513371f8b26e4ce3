"""What can go wrong, and whose fault it is.

Every failure of a call is an :class:`RpcError`. Its *code* is what travels on the wire and what a
policy decides by; its *class* says who is at fault and who can act:

==========================  ============  ===========================================================
class                       code          meaning
==========================  ============  ===========================================================
``RemoteError``             as answered   the peer received the call and answered FAIL
``InvalidMessageError``     BAD_REQUEST   a value does not fit its declared type (path, expected, got)
``DeadlineError``           TIMEOUT       the caller's deadline passed; ``phase`` says doing what
``UnreachableError``        UNREACHABLE   no connection was made; nothing was sent
``ConnectionLostError``     PEER_LOST     the connection ended under a call; it may have been executed
``IncarnationError``        PEER_LOST     somebody else lives at that address now; nothing was sent
``AuthenticationError``     UNAUTHORIZED  one side could not prove that it knows the secret
``IncompatibleError``       INCOMPATIBLE  no common protocol version
``PeerProtocolError``       CORRUPT       the peer sent bytes that the protocol does not allow
``BusyError``               BUSY          a bound of this process is reached (connections, peers, slots)
``ClosedError``             ABORTED       this client, server or channel has been closed
==========================  ============  ===========================================================

``RpcError`` itself is what a handler raises to refuse a call: ``raise RpcError(Code.GONE, "...")``.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping
from typing import Any

_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 6
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value: object, max_chars: int = 60) -> str:
    """A value from a socket, for an error message: never long, never deep, and cheap to make.

    (``repr`` of a body's worth of nested arrays takes a second, or more stack than there is.)
    """
    return _repr.repr(value)[:max_chars]


class Code(enum.IntEnum):
    """Outcome of a call, a transfer or a stream. The numbers are wire format and never change."""

    OK = 0
    ACCEPTED = 1
    NOT_FOUND = 2
    GONE = 3
    BUSY = 4
    ABORTED = 5
    EXPIRED = 6
    INCOMPATIBLE = 7
    UNREACHABLE = 8
    PEER_LOST = 9
    TIMEOUT = 10
    CORRUPT = 11
    BAD_REQUEST = 12
    UNAUTHORIZED = 13
    INTERNAL = 14

    @classmethod
    def from_wire(cls, value: object) -> Code:
        """The code for a number from a socket; an unknown one is INTERNAL, never an exception."""
        try:
            return cls(value)  # type: ignore[arg-type]
        except ValueError:
            return cls.INTERNAL


class Phase(str, enum.Enum):
    """What a call was doing when it failed. A call passes through these in order."""

    POOL = "pool"  # waiting for one of the peer's pooled connections
    CONNECT = "connect"  # name resolution, connect, TLS
    HELLO = "hello"  # version, identity and proof of the secret
    SEND = "send"  # some of the request is still in our own buffer
    ANSWER = "answer"  # the request has left; no complete answer yet
    HANDLER = "handler"  # the peer's handler decided

    def __str__(self) -> str:
        return self.value


class RpcError(Exception):
    """Base of all failures here, and the refusal that a handler raises.

    ``details`` holds msgpack scalars and travels with the code. ``phase`` and ``peer`` (an address
    or identity, as text) are filled in where they are known and never travel.
    """

    default_code = Code.INTERNAL

    def __init__(
        self,
        code: Code | None = None,
        message: str = "",
        details: Mapping[str, Any] | None = None,
        *,
        phase: Phase | None = None,
        peer: str = "",
    ) -> None:
        self.code = self.default_code if code is None else code
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.phase = phase
        self.peer = peer
        super().__init__(message)

    def __str__(self) -> str:
        where = f" [{self.phase}]" if self.phase else ""
        who = f" (peer {self.peer})" if self.peer else ""
        return f"{self.code.name}{where}: {self.message}{who}"


class RemoteError(RpcError):
    """The peer answered FAIL: the connection is fine, the call is not."""


class InvalidMessageError(RpcError):
    """A value does not fit its declared type; the message says path, expected and got."""

    default_code = Code.BAD_REQUEST


class DeadlineError(RpcError):
    """The deadline passed in ``phase``. From SEND on, the peer may have executed the call."""

    default_code = Code.TIMEOUT


class UnreachableError(RpcError):
    """No connection was made in time or at all; the peer has seen nothing of the call."""

    default_code = Code.UNREACHABLE


class ConnectionLostError(RpcError):
    """The connection ended with a call or a channel on it; the call may have been executed."""

    default_code = Code.PEER_LOST


class IncarnationError(RpcError):
    """The peer at this address is not the incarnation that the caller means; nothing was sent."""

    default_code = Code.PEER_LOST


class AuthenticationError(RpcError):
    """A proof of the secret is missing or wrong, or one side has a secret and the other has not."""

    default_code = Code.UNAUTHORIZED


class IncompatibleError(RpcError):
    """The version ranges have no version in common."""

    default_code = Code.INCOMPATIBLE


class PeerProtocolError(RpcError):
    """The peer sent what the protocol does not allow. The connection it came on is closed."""

    default_code = Code.CORRUPT


class BusyError(RpcError):
    """A bound of this process is reached; the same call may succeed later."""

    default_code = Code.BUSY


class ClosedError(RpcError):
    """Used after ``close()`` or ``drain()``."""

    default_code = Code.ABORTED
