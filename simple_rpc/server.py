"""The server: who may connect, what they may call, and what it may cost. (Skeleton: signatures first.)"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from ._connection import Connection
from ._deadline import Clock, Deadline
from ._limits import Limits
from .identity import Address, Identity
from .metrics import Metrics

RawCallback = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ChannelAcceptor = Callable[[Identity, Any], None]


class Server:
    def __init__(
        self,
        identity: Identity,
        *,
        secret: Any = None,
        limits: Limits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        insecure: bool = False,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
    ) -> None: ...

    def register_method(self, head: str, callback: RawCallback) -> None: ...

    def register(self, method: Any, handler: Callable[..., Any]) -> None: ...

    def on_channel(self, kind: str, acceptor: ChannelAcceptor) -> None:
        """Accept channels of ``kind``: on a LINK call of that kind the server calls, synchronously on the
        loop thread,

            simple_rpc.channel.accept_channel(
                connection: Connection,      # held (no frame is delivered), authenticated
                own: Identity, peer: Identity,
                fields: list[Any],           # the LINK request's positional fields, unchecked but [0] == kind
                acceptor, *, clock: Clock, metrics: Metrics)

        which either raises ``RpcError`` (answered FAIL; the connection goes on) or takes over:
        ``connection.take_over(owner, heads)``, ``connection.write_frame(OKAY, ...)``, acceptor(...),
        ``connection.release()``. From then on the server only counts the connection and, at shutdown, calls
        ``owner.on_shutdown(error)``. No idle limit applies.
        """

    async def listen(self, address: Address | str) -> Address: ...

    async def drain(self, deadline: Deadline) -> None: ...

    async def close(self) -> None: ...
