"""Data connections over `simple_rpc`: who may open one, and how its socket reaches native code.

A sender rank dials the receiver rank's server, shakes hands, calls ``DATA``, reads GO and gives its
end to the `DataClient`; the receiver's server checks the call and gives its end to the `Receiver`,
which sends GO itself. From then on neither socket is seen by Python again. docs/kvt/protocol.md says
what travels then.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvt_bindings._kvt import DataClient, KvtError, Receiver
from simple_rpc import CallContext, Client, Code, Deadline, Method, RpcError, Server
from simple_rpc.handoff import DetachedSocket

log = logging.getLogger(__name__)

CONNECT_S = 3.0  # to dial, authenticate and read GO


@dataclass(frozen=True, slots=True)
class DataRequest:
    """DATA: which rank is calling, and which it means."""

    source_rank: int
    target_rank: int


DATA: Method[DataRequest, None] = Method("DATA", DataRequest, None)
"""Its OKAY is GO: written by native code, never by the server."""


class DataServer:
    """Answers DATA on a server for one receiver. The server's loop thread only.

    A caller must have shaken hands as the worker of some instance; what it may write is decided by
    the grants of the receiver alone.
    """

    def __init__(self, server: Server, receiver: Receiver, *, rank: int) -> None:
        self._receiver = receiver
        self._rank = rank
        server.register(DATA, self._on_data)

    def _on_data(self, request: DataRequest, context: CallContext) -> None:
        if request.target_rank != self._rank:
            raise RpcError(
                Code.BAD_REQUEST, f"target_rank: expected {self._rank}, got {request.target_rank}"
            )
        adopt(self._receiver, context.detach())


def adopt(receiver: Receiver, sock: DetachedSocket) -> None:
    """Give an accepted, silent socket to the receiver, which sends GO. Raises KvtError (BUSY,
    ABORTED); the socket is closed then."""
    peer = sock.peer
    receiver.adopt(
        sock.take_fd(),
        instance=peer.instance,
        worker_incarnation=peer.incarnation,
        address=str(peer),
    )


async def dial(
    client: Client,
    address: str,
    *,
    source_rank: int,
    target_rank: int,
    worker_incarnation: bytes | None,
    timeout_s: float = CONNECT_S,
) -> DetachedSocket:
    """A data connection up to and with GO. Raises RpcError; nothing is left open then."""
    deadline = Deadline.after(timeout_s)
    connection = await client.connect(address, deadline, expect_incarnation=worker_incarnation)
    try:
        # GO is the last thing that Python reads here.
        await connection.request(
            DATA.head, [source_rank, target_rank], deadline=deadline, hold=True
        )
        return DetachedSocket(connection.detach(), connection.peer)
    except BaseException:
        connection.close()
        raise


class Dialer:
    """Serves a `DataClient`'s dial requests from a running loop. That loop's thread only.

    Each dial is a task of its own: a peer that does not answer costs its own connection and no
    other. After `close` requests are no longer served; the client's connect deadline ends them.
    """

    def __init__(self, data_client: DataClient, client: Client, *, rank: int) -> None:
        self._data_client = data_client
        self._client = client
        self._rank = rank
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop.add_reader(data_client.dial_fd, self._take)

    def close(self) -> None:
        self._loop.remove_reader(self._data_client.dial_fd)
        for task in self._tasks:
            task.cancel()

    def _take(self) -> None:
        for dial_id, _, _, incarnation, rank, address in self._data_client.take_dials():
            task = self._loop.create_task(self._dial(dial_id, incarnation, rank, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _dial(self, dial_id: int, incarnation: bytes, rank: int, address: str) -> None:
        try:
            sock = await dial(
                self._client,
                address,
                source_rank=self._rank,
                target_rank=rank,
                worker_incarnation=incarnation,
            )
        except RpcError as error:
            self._data_client.dial_failed(dial_id, int(error.code), f"{address}: {error}")
            return
        try:
            self._data_client.adopt(dial_id, sock.take_fd())
        except KvtError as error:
            log.info("data connection to %s came too late: %s", address, error)


__all__ = ["DATA", "DataRequest", "DataServer", "Dialer", "adopt", "dial"]
