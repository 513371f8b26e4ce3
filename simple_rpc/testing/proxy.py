"""Faults between two real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

from .._deadline import Clock, LoopClock
from ..identity import Address
from .faults import Cut, FaultFilter, Faults

FaultsOf = Callable[[int], tuple[Faults, Faults]]


class ProxiedConnection:
    """One client's connection through a `FaultProxy`, and the proxy's own to the target."""

    def __init__(self, proxy: FaultProxy, index: int, client: _End, faults: Faults) -> None:
        self.index = index
        self._proxy = proxy
        self._client = client
        self._target: _End | None = None
        self._up = FaultFilter(faults)
        self._down: FaultFilter | None = None
        self._early: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return self in self._proxy.connections

    def cut(self) -> None:
        """Resets both connections (RST): both peers see ConnectionResetError or an end."""
        self._proxy.connections.discard(self)
        for end in (self._client, self._target):
            if end is not None:
                end.reset()


class _End(asyncio.Protocol):
    """The proxy's protocol on either side."""

    transport: asyncio.Transport

    def __init__(
        self,
        on_data: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_made: Callable[[_End], None] | None = None,
    ) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from it
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def reset(self) -> None:
        if self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Linger of zero seconds: closing sends RST and drops what is buffered.
            linger = struct.pack("ii", 1, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


class FaultProxy:
    """Listens on a loopback port and passes bytes to and from `target`, with faults.

        async with FaultProxy(server_address, lambda n: (Faults(cut_at=100), Faults())) as proxy:
            await client.call(proxy.address, ...)

    `faults_of(n)` gives the faults (towards the target, towards the client) of the n-th connection,
    from 0. `hang` stops passing bytes without closing anything (a half-open peer); `cut_all` resets
    every connection; `refuse` makes new ones end at once.
    """

    def __init__(
        self,
        target: Address | str,
        faults_of: FaultsOf | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.target = Address.parse(target)
        self.connections: set[ProxiedConnection] = set()
        self.num_connections = 0
        self.is_hanging = False
        self.is_refusing = False
        self._faults_of = faults_of or (lambda _: (Faults(), Faults()))
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address:
        """Where clients connect."""
        assert self._server is not None, "not started"
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host=host, port=port)

    async def __aenter__(self) -> FaultProxy:
        loop = asyncio.get_running_loop()
        self._clock = self._clock or LoopClock(loop)
        self._server = await loop.create_server(self._accepted, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut_all()
        for task in self._tasks:
            task.cancel()
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def cut_all(self) -> None:
        for connection in list(self.connections):
            connection.cut()

    def hang(self) -> None:
        """From now on no byte passes, in either direction, on any connection."""
        self.is_hanging = True

    # -- inside ------------------------------------------------------------------------------------

    def _accepted(self) -> asyncio.Protocol:
        up_faults, down_faults = self._faults_of(self.num_connections)
        connection: ProxiedConnection

        def made(end: _End) -> None:
            if self.is_refusing:
                end.reset()
                return
            self.connections.add(connection)
            task = asyncio.get_running_loop().create_task(self._connect(connection, down_faults))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        client = _End(
            lambda data: self._pass(connection, connection._up, data, True),
            lambda: self._ended(connection),
            made,
        )
        connection = ProxiedConnection(self, self.num_connections, client, up_faults)
        self.num_connections += 1
        return client

    async def _connect(self, connection: ProxiedConnection, faults: Faults) -> None:
        loop = asyncio.get_running_loop()
        down = FaultFilter(faults)

        def factory() -> _End:
            return _End(
                lambda data: self._pass(connection, down, data, False),
                lambda: self._ended(connection),
            )

        try:
            if self.target.is_unix:
                _, end = await loop.create_unix_connection(factory, self.target.path)
            else:
                _, end = await loop.create_connection(factory, self.target.host, self.target.port)
        except OSError:
            connection.cut()
            return
        connection._target = end
        if not connection.is_open:
            end.reset()
            return
        early, connection._early = connection._early, []
        for data in early:
            end.transport.write(data)

    def _pass(
        self, connection: ProxiedConnection, fault_filter: FaultFilter, data: bytes, up: bool
    ) -> None:
        if self.is_hanging:
            return
        assert self._clock is not None
        for action in fault_filter.feed(data):
            if action.delay_s:
                self._clock.call_later(action.delay_s, self._arrive, connection, action, up)
            else:
                self._arrive(connection, action, up)

    def _arrive(self, connection: ProxiedConnection, action: object, up: bool) -> None:
        if not connection.is_open or self.is_hanging:
            return
        if isinstance(action, Cut):
            connection.cut()
            return
        data: bytes = action.data  # type: ignore[attr-defined]
        if not up:
            connection._client.transport.write(data)
        elif connection._target is None:
            connection._early.append(data)
        else:
            connection._target.transport.write(data)

    def _ended(self, connection: ProxiedConnection) -> None:
        """One side has closed: so does the other, after what was written to it."""
        if self.is_hanging or not connection.is_open:
            return
        self.connections.discard(connection)
        for end in (connection._client, connection._target):
            if end is not None:
                end.transport.close()
