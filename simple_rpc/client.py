"""The client: calls with absolute deadlines over pooled connections. (Skeleton: signatures first.)"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from ._connection import Connection, Owner
from ._deadline import Clock, Deadline
from ._limits import Limits
from .identity import Address, Identity
from .metrics import Metrics


class AuthenticatedConnection:
    """A dedicated connection after HELLO (and AUTH): not pooled, owned by the caller."""

    peer: Identity
    own: Identity
    address: Address

    async def request(
        self, head: int, fields: Sequence[Any], *, deadline: Deadline, hold: bool = False
    ) -> list[Any]:
        """One call, by head and positional fields; the OKAY body's fields. FAIL raises ``RemoteError``.
        With ``hold``, frames after the answer are kept back until ``take_over`` and ``release``."""
        raise NotImplementedError

    def take_over(self, owner: Owner, heads: Mapping[int, bool]) -> Connection:
        """From now on ``owner`` gets the frames (after ``connection.release()`` if held). Raises the
        ``ConnectionLostError`` if the connection was lost meanwhile. This object is then spent."""
        raise NotImplementedError

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise NotImplementedError

    def detach(self) -> socket.socket:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Client:
    def __init__(
        self,
        identity: Identity,
        *,
        secret: Any = None,
        limits: Limits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
    ) -> None: ...

    async def call(
        self,
        address: Address | str,
        method: Any,
        request: Any,
        *,
        deadline: Deadline,
        expect_incarnation: bytes | None = None,
    ) -> Any: ...

    async def connect(
        self, address: Address | str, deadline: Deadline, *, expect_incarnation: bytes | None = None
    ) -> AuthenticatedConnection:
        raise NotImplementedError

    async def drain(self, deadline: Deadline) -> None: ...

    async def close(self) -> None: ...
