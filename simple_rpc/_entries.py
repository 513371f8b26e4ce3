"""What a server serves under a head, and what a handler knows about its call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._deadline import Deadline
from .handoff import DetachedSocket
from .identity import Identity
from .methods import Method

if TYPE_CHECKING:
    from ._session import Session


@dataclass(frozen=True)
class RawEntry:
    """A head whose callback reads the stream itself."""

    name: str
    callback: Callable[..., Any]


@dataclass(frozen=True)
class TypedEntry:
    """A head with a request and a response type."""

    name: str
    method: Method[Any, Any]
    handler: Callable[..., Any]
    is_coroutine: bool


Entry = RawEntry | TypedEntry


class CallContext:
    """What a handler knows about its call besides the request. Valid until the handler returns."""

    __slots__ = ("_deadline_at_s", "_session", "peer")

    def __init__(self, session: Session, peer: Identity, deadline_at_s: float) -> None:
        self._session = session
        self._deadline_at_s = deadline_at_s
        self.peer = peer

    @property
    def deadline(self) -> Deadline:
        """When the caller stops waiting; a coroutine handler is cancelled then."""
        return Deadline(self._deadline_at_s)

    @property
    def peer_name(self) -> str:
        """The peer's network address, for logs."""
        return self._session.connection.peer_name

    def detach(self) -> DetachedSocket:
        """Take the socket of this call away, to be given to native code, which sends the answer.

        The caller owns what is returned. Whatever the handler returns or raises afterwards, nothing more
        is sent. Raises ``ValueError``, with the call unharmed, if bytes are buffered in either direction (a
        correct opener sends nothing before the answer) or the connection uses TLS.
        """
        return self._session.detach()
