"""A connection that belongs to its caller: for channels, raw methods and hand-overs to native code."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._client_connection import ClientConnection
from ._codec import unpack_body
from ._connection import Connection
from ._deadline import Deadline
from ._errors import InvalidMessageError, PeerProtocolError, Phase, RemoteError
from ._frames import OKAY, head_name
from ._owner import Owner
from ._streams import open_streams
from .identity import Address, Identity
from .methods import unpack_fail


class AuthenticatedConnection:
    """From ``Client.connect``: both ends know each other. Loop thread only.

    Use it for calls (``request``), and then at most once give it away: ``take_over`` to another owner of
    frames, ``streams`` for raw bytes, or ``detach`` for the socket itself.
    """

    __slots__ = ("_dedicated", "_inner", "_pack", "address", "own", "peer", "version")

    def __init__(
        self,
        inner: ClientConnection,
        own: Identity,
        pack: Callable[[Any], bytes],
        dedicated: set[ClientConnection],
    ) -> None:
        self._inner = inner
        self._pack = pack
        self._dedicated = dedicated
        self.own = own
        self.peer = inner.peer
        self.version = inner.version
        self.address: Address = inner.address

    @property
    def is_open(self) -> bool:
        return self._inner.connection.is_open

    @property
    def connection(self) -> Connection:
        """The frames underneath, for a new owner to configure before ``take_over``."""
        return self._inner.connection

    async def request(
        self, head: int, fields: Sequence[Any], *, deadline: Deadline, hold: bool = False
    ) -> list[Any]:
        """One call, by head and positional fields; returns the fields of the OKAY.

        FAIL raises ``RemoteError`` and leaves the connection usable; every other failure closes it. With
        ``hold``, what the peer sends after the answer is kept back until ``take_over`` and ``release``.
        """
        body = self._pack((int(min(deadline.remaining_s(), 86_400.0) * 1000), fields))
        answer, payload = await self._inner.exchange(head, body, deadline.at_s, hold=hold)
        try:
            if answer == OKAY:
                values = unpack_body(payload)
                if type(values) is list:
                    return values
                raise InvalidMessageError(message="expected an array of fields")
            code, message, details = unpack_fail(payload)
        except InvalidMessageError as error:
            broken = PeerProtocolError(
                message=f"answer to {head_name(head)}: {error.message}",
                details={"reason": "bad_answer"},
                peer=str(self.address),
            )
            self._inner.connection.abort(broken)
            raise broken from None
        raise RemoteError(code, message, details, phase=Phase.HANDLER, peer=str(self.address))

    def take_over(self, owner: Owner, heads: Mapping[int, bool]) -> Connection:
        """From now on ``owner`` gets the frames, of ``heads`` only; if ``request`` was told to hold, after
        ``connection.release()``. Raises ``ConnectionLostError`` if it was lost meanwhile: then the owner
        hears nothing. The client still closes the connection when it is closed itself."""
        connection = self._inner.connection
        connection.check_open()
        connection.take_over(owner, heads)
        return connection

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """asyncio streams on this connection, for a raw method: write its four-byte head first. The caller
        closes the writer. Raises ``ConnectionLostError``."""
        self._inner.connection.check_open()
        return open_streams(self._inner.connection)

    def detach(self) -> socket.socket:
        """The socket, taken away from the event loop; see ``Connection.detach``."""
        duplicate = self._inner.connection.detach()
        self._dedicated.discard(self._inner)
        return duplicate

    def close(self) -> None:
        """May be called twice, and after the connection was lost."""
        self._inner.close("closed by its owner")
