"""The client: calls with absolute deadlines over per-peer pools of connections."""

from __future__ import annotations

import asyncio
import ssl
from typing import TypeVar

from ._client_connection import ClientConnection, Dialer, run_until
from ._client_errors import bad_answer, incarnation_error, refusal, too_large
from ._codec import new_pack
from ._connection import Connection
from ._deadline import Clock, Deadline, LoopClock, Watchdog
from ._errors import (
    BusyError,
    ClosedError,
    Code,
    ConnectionLostError,
    DeadlineError,
    InvalidMessageError,
    Phase,
    RpcError,
)
from ._frames import OKAY
from ._limits import Limits
from ._pool import PeerPool, Pools, Todo
from .auth import Secret
from .dedicated import AuthenticatedConnection
from .hello import PROTOCOL_VERSIONS
from .identity import Address, Identity
from .methods import Method
from .metrics import Counters, Metrics

Req = TypeVar("Req")
Resp = TypeVar("Resp")
_Waiter = asyncio.Future["ClientConnection | None"]  # None: there is room, open one yourself
_PeerPool = PeerPool[ClientConnection, _Waiter]

_OK, _ABORTED = (
    int(Code.OK),
    int(Code.ABORTED),
)  # an enum's member is a slow attribute in Python 3.11
MAX_TIMEOUT_S = 86_400.0  # what "never" means on the wire; the server's own bound is far lower
MAX_TIMEOUT_MS = int(MAX_TIMEOUT_S * 1000)


class Client:
    """Calls methods of servers. One event loop, whose thread makes all calls; any number of peers.

    Connections are opened when needed, kept for reuse and bounded per peer and in the number of peers
    (see ``Limits``). Peers are independent: one that does not answer costs only its own callers. A
    client with a secret talks only to servers that prove that they know it.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        secret: Secret | None = None,
        limits: Limits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        self.identity = identity
        self.limits = limits or Limits()
        self.metrics: Metrics = metrics if metrics is not None else Counters()
        self._clock = clock or LoopClock()
        self._watchdog: Watchdog[Connection] = Watchdog(self._clock)
        self._dialer = Dialer(
            identity,
            secret,
            self.limits,
            ssl_context,
            server_hostname,
            self._watchdog,
            self._clock,
            versions,
        )
        self._pools: Pools[Address, ClientConnection, _Waiter] = Pools(
            self.limits.max_peers, self.limits.max_connections_per_peer
        )
        self._dedicated: set[ClientConnection] = set()
        self._pack = new_pack()
        self._now = self._clock.now
        self._pool_idle_s = self.limits.pool_idle_s
        self._max_body_bytes = self.limits.max_body_bytes
        self._is_closed = False
        self._num_calls = 0
        self._all_done: asyncio.Future[None] | None = None

    async def call(
        self,
        address: Address | str,
        method: Method[Req, Resp],
        request: Req,
        *,
        deadline: Deadline,
        expect_incarnation: bytes | None = None,
    ) -> Resp:
        """Call ``method`` at ``address`` and return its response.

        ``deadline`` bounds everything; what remains of it travels to the server. With
        ``expect_incarnation`` nothing is sent to another incarnation (``IncarnationError``).

        A call is repeated, once, only if all of this holds: the method is idempotent, the connection came
        from the pool, it ended before any byte of an answer, and a new connection reaches the same
        incarnation. Anything else could execute a call twice.

        Raises ``RpcError``; its class says whose fault it is and ``phase`` how far the call came. After any
        failure, cancellation included, the pool is healthy: a connection that may still carry an answer has
        been closed. Cancelling does not stop the handler at the server; its deadline does.
        """
        now = self._now
        start_s = end_s = now()
        code = _ABORTED
        self._num_calls += 1
        try:
            if self._is_closed:
                self._check_open()
            if deadline.at_s <= start_s:
                raise DeadlineError(message="deadline passed", phase=Phase.POOL, peer=str(address))
            if isinstance(address, str):
                address = Address.parse(address)
            pool = self._pools.find(address) or self._add_pool(address)
            is_reused = bool(pool.idle)
            connection = (
                pool.idle.pop() if is_reused else await self._obtain(pool, address, deadline)
            )
            if expect_incarnation is not None and connection.peer.incarnation != expect_incarnation:
                connection = await self._expected(
                    pool, connection, deadline, expect_incarnation, is_reused
                )
            while True:
                try:
                    left_s = deadline.at_s - now()
                    if left_s <= 0.0:
                        raise DeadlineError(
                            message="deadline passed", phase=Phase.POOL, peer=str(address)
                        )
                    timeout_ms = int(left_s * 1000.0) if left_s < MAX_TIMEOUT_S else MAX_TIMEOUT_MS
                    packed = method.pack_request(self._pack, timeout_ms, request)
                    if len(packed) > self._max_body_bytes:
                        raise too_large(method, packed, self._max_body_bytes)
                    head, body = await connection.send(method.head, packed, deadline.at_s)
                    break
                except ConnectionLostError:
                    if not (is_reused and method.idempotent and connection.is_unanswered):
                        raise
                except BaseException:
                    connection.abandon()
                    self._release(pool, connection)
                    raise
                is_reused = False
                connection = await self._reopen(pool, connection, deadline)
                self.metrics.count("client.retries")
            end_s = now()
            if pool.waiters or self._is_closed or not connection.is_open:
                self._release(pool, connection)
            else:  # the same in the usual case
                pool.idle.append(connection)
                connection.connection.wait_due_s = idle_until_s = end_s + self._pool_idle_s
                if idle_until_s < self._watchdog.armed_at_s:
                    self._watchdog.expect(idle_until_s)
            if head != OKAY:
                raise refusal(method, body, connection)
            try:
                response = method.unpack_response(body)
            except InvalidMessageError as error:
                raise bad_answer(method, error, connection) from None
            code = _OK
            return response
        except RpcError as error:
            code = error.code
            raise
        finally:
            if code is not _OK:
                end_s = now()
            self.metrics.call("client", method.name, code, end_s - start_s)
            self._num_calls -= 1
            if self._all_done is not None and not self._num_calls and not self._all_done.done():
                self._all_done.set_result(None)

    async def connect(
        self, address: Address | str, deadline: Deadline, *, expect_incarnation: bytes | None = None
    ) -> AuthenticatedConnection:
        """A connection of the caller's own, after HELLO and the proofs: for a channel, a raw method or a
        hand-over. Not pooled and not counted against the peer's pool. ``close`` of the client closes it
        unless it has been detached. Raises as ``call`` does."""
        self._check_open()
        connection = ClientConnection(self._dialer, Address.parse(address))
        await connection.open(deadline.at_s)
        if expect_incarnation not in (None, connection.peer.incarnation):
            connection.close("another incarnation was expected")
            raise incarnation_error(connection, expect_incarnation or b"")
        try:
            self._check_open()
        except ClosedError:
            connection.close("the client is closed")
            raise
        self._dedicated.add(connection)
        connection.on_gone = self._dedicated.discard
        return AuthenticatedConnection(connection, self.identity, self._pack, self._dedicated)

    async def drain(self, deadline: Deadline) -> None:
        """Refuse new calls, wait for those in progress until ``deadline``, then close."""
        self._is_closed = True
        if self._num_calls:
            self._all_done = asyncio.get_running_loop().create_future()
            try:
                await run_until(_wait_for(self._all_done), deadline.at_s, self._clock)
            except TimeoutError:
                self.metrics.count("client.drain_expired")
        await self.close()

    async def close(self) -> None:
        """End everything now: calls in progress fail with ``ClosedError``. May be called twice.

        Returns when the connections are gone, at the latest after twice ``close_s``."""
        self._is_closed = True
        error = ClosedError(message="the client is closed")
        for _, pool in self._pools.items():  # noqa: PERF102 (not a dict)
            while pool.waiters:
                waiter = pool.waiters.popleft()
                if not waiter.done():
                    waiter.set_exception(error)
        for item in self._watchdog.watched():
            item.shut_down(error)
        self._pools.clear()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchdog.when_empty(lambda: None if ended.done() else ended.set_result(None))
        try:
            # What is written is flushed, at most for close_s (the watchdog cuts then).
            await asyncio.wait_for(ended, 2 * self.limits.close_s)
        except asyncio.TimeoutError:
            for item in self._watchdog.watched():
                item.transport.abort()
        self._watchdog.close()

    def snapshot(self) -> dict[str, dict[str, int]]:
        """For each peer with a pool, by address: connections ``idle``, ``busy``, ``opening``, and calls
        ``waiting`` for one."""
        return {
            str(address): {
                "idle": len(pool.idle),
                "busy": pool.num_busy,
                "opening": pool.num_opening,
                "waiting": len(pool.waiters),
            }
            for address, pool in self._pools.items()
        }

    # Inside

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(message="the client is closed")

    def _release(self, pool: _PeerPool, connection: ClientConnection) -> None:
        """A connection is no longer busy, or gone already."""
        if not connection.is_open:
            return
        if self._is_closed:
            connection.close("the client is closed")
            return
        waiter = pool.release(connection)
        while waiter is not None and waiter.done():  # cancelled in this very turn of the loop
            waiter = pool.release(connection)
        if waiter is None:
            connection.connection.wait_until(self._now() + self.limits.pool_idle_s)
        else:
            waiter.set_result(connection)

    def _add_pool(self, address: Address) -> _PeerPool:
        added = self._pools.add(address)
        if added is None:
            raise BusyError(
                message=f"{self.limits.max_peers} peers have calls in progress", phase=Phase.POOL
            )
        pool, evicted = added
        for connection in list(evicted):
            connection.close("its peer was the least recently used")
        return pool

    async def _obtain(
        self, pool: _PeerPool, address: Address, deadline: Deadline
    ) -> ClientConnection:
        """A busy connection, opened or waited for."""
        if pool.without_idle() is Todo.WAIT:
            connection = await self._wait_for_connection(pool, address, deadline)
            if connection is not None:
                return connection
        return await self._open(pool, address, deadline)

    async def _open(
        self, pool: _PeerPool, address: Address, deadline: Deadline
    ) -> ClientConnection:
        """Open a connection that the pool already counts as opening."""
        connection = ClientConnection(self._dialer, address)
        try:
            await connection.open(deadline.at_s)
        except BaseException:
            _wake(pool, pool.open_failed())
            raise
        connection.pool = pool
        connection.on_gone = self._gone
        pool.opened()
        try:
            self._check_open()
        except ClosedError:
            connection.close("the client is closed")
            raise
        return connection

    async def _wait_for_connection(
        self, pool: _PeerPool, address: Address, deadline: Deadline
    ) -> ClientConnection | None:
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        pool.waiters.append(waiter)

        def expire() -> None:
            if not waiter.done():
                busy = f"all {pool.max_connections} connections are busy"
                waiter.set_exception(
                    DeadlineError(
                        message=f"deadline passed: {busy}", phase=Phase.POOL, peer=str(address)
                    )
                )

        timer = self._clock.call_later(max(0.0, deadline.at_s - self._clock.now()), expire)
        try:
            return await waiter
        except BaseException:
            pool.give_up(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # Cancelled in the very moment in which it was served: what it got goes to the next.
                given = waiter.result()
                if given is None:
                    _wake(pool, pool.open_failed())
                else:
                    self._release(pool, given)
            raise
        finally:
            timer.cancel()

    def _gone(self, connection: ClientConnection) -> None:
        _wake(connection.pool, connection.pool.lost(connection))

    async def _expected(
        self,
        pool: _PeerPool,
        connection: ClientConnection,
        deadline: Deadline,
        incarnation: bytes,
        is_reused: bool,
    ) -> ClientConnection:
        """A connection to ``incarnation`` in place of one to another. The pooled one may be of the process
        that lived here before: then everything idle to it goes, and a new connection decides."""
        if is_reused:
            old = connection.peer.incarnation
            connection.close("another incarnation was expected")
            for idle in [idle for idle in pool.idle if idle.peer.incarnation == old]:
                idle.close("another incarnation was expected")
            connection = await self._obtain(pool, connection.address, deadline)
            if connection.peer.incarnation == incarnation:
                return connection
        self._release(pool, connection)
        raise incarnation_error(connection, incarnation)

    async def _reopen(
        self, pool: _PeerPool, stale: ClientConnection, deadline: Deadline
    ) -> ClientConnection:
        """A connection to the same incarnation as the stale one."""
        connection = await self._obtain(pool, stale.address, deadline)
        if connection.peer.incarnation != stale.peer.incarnation:
            self._release(pool, connection)
            raise incarnation_error(connection, stale.peer.incarnation)
        return connection


def _wake(pool: _PeerPool, waiter: _Waiter | None) -> None:
    """There is room for one more connection, already counted as opening for this waiter."""
    while waiter is not None and waiter.done():  # cancelled in this very turn of the loop
        waiter = pool.open_failed()
    if waiter is not None:
        waiter.set_result(None)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future


__all__ = ["AuthenticatedConnection", "Client"]
