"""HELLO, proof, DATA, GO and then native code at both ends: over a real server and client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvt_bindings import (
    CompletionQueue,
    DataClient,
    DataConnection,
    DataPeer,
    PairPlanner,
    Receiver,
)
from kvt_bindings.data import DATA, DataServer, Dialer
from simple_rpc import Client, Code, Deadline, Identity, RpcError, Secret, Server
from tests.kvt_kit import D_SCHEDULER, P_SCHEDULER, Shape, key_of, make_cache, raw

SHAPE = Shape()
SECRET = Secret(b"correct horse battery staple 12345")


class Node:
    def __init__(self) -> None:
        self.source = make_cache(SHAPE, seed=1)
        self.target = make_cache(SHAPE, seed=2)
        self.queue = CompletionQueue()
        self.receiver = Receiver(self.target.native, self.queue)
        self.d = Identity("worker", "d0", os.urandom(16), {})
        self.p = Identity("worker", "p0", os.urandom(16), {})
        self.server = Server(self.d, secret=SECRET)
        DataServer(self.server, self.receiver, rank=0)
        self.client = Client(self.p, secret=SECRET)
        self.data_client = DataClient(self.source.native, connect_timeout_ms=5000)
        self.address = ""

    def peer(self, *, rank: int = 0, address: str | None = None) -> DataPeer:
        return DataPeer(
            instance="d0",
            scheduler_incarnation=D_SCHEDULER,
            worker_incarnation=self.d.incarnation,
            rank=rank,
            address=address or self.address,
        )

    async def result(self, connection: DataConnection, transfer: int) -> tuple[int, int, str]:
        found = await asyncio.to_thread(connection.wait_result, transfer, 20.0)
        assert found is not None
        return found

    def grant(self, key: int, blocks: list[int], end: int) -> None:
        self.receiver.open_grant(
            key_of(key),
            scheduler_incarnation=D_SCHEDULER,
            sender_instance="p0",
            sender_incarnation=P_SCHEDULER,
            block_ids=[blocks],
            first_token=0,
            end_token=end,
            source_ranks=[0],
        )

    def send(self, connection: DataConnection, key: int, blocks: list[int], end: int) -> int:
        transfer = connection.open(
            key_of(key), sender_incarnation=P_SCHEDULER, first_token=0, end_token=end
        )
        plan = PairPlanner(self.source.layout, self.target.layout).plan(
            0, 0, [blocks], [blocks], 0, end, True
        )
        for part in plan:
            connection.send_runs(
                transfer, part.layers, first_token=0, end_token=end, runs=part.runs_bytes()
            )
        connection.end(transfer)
        return transfer


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    n = Node()
    n.address = str(await n.server.listen("tcp://127.0.0.1:0"))
    dialer = Dialer(n.data_client, n.client, rank=0)
    yield n
    dialer.close()
    await asyncio.to_thread(n.data_client.close)
    await n.client.close()
    await n.server.close()
    await asyncio.to_thread(n.receiver.close)
    n.queue.drain()
    assert n.queue.stats()["reserved"] == 0


async def ready(connection: DataConnection) -> bool:
    return bool(await asyncio.to_thread(connection.wait_ready, 20.0))


async def test_a_transfer_over_an_authenticated_connection(node: Node) -> None:
    connection = DataConnection(node.data_client, node.peer())
    assert await ready(connection)
    node.grant(1, [3, 1], 32)
    assert await node.result(connection, node.send(connection, 1, [3, 1], 32)) == (0, 32, "")
    for mine, theirs in zip(node.target.tensors, node.source.tensors, strict=True):
        assert np.array_equal(raw(mine)[:, [3, 1]], raw(theirs)[:, [3, 1]])
    (seen,) = node.receiver.snapshot()["connections"]
    assert (seen["instance"], seen["worker_incarnation"]) == ("p0", node.p.incarnation)
    assert seen["transport"] == "cma"  # one host, one user


async def test_bytes_flow_while_python_is_busy(node: Node) -> None:
    """The loop that served the handshake is blocked for the whole transfer."""
    connection = DataConnection(node.data_client, node.peer())
    assert await ready(connection)
    node.grant(1, [3, 1], 32)
    transfer = node.send(connection, 1, [3, 1], 32)
    assert connection.wait_result(transfer, 20.0) == (0, 32, "")  # blocks this loop's thread
    assert node.queue.drain()[0][5] == 0


async def test_another_incarnation_is_not_spoken_to(node: Node) -> None:
    peer = DataPeer(
        instance="d0",
        scheduler_incarnation=D_SCHEDULER,
        worker_incarnation=bytes(16),
        rank=0,
        address=node.address,
    )
    connection = DataConnection(node.data_client, peer)
    lost = await asyncio.to_thread(connection.wait_lost, 20.0)
    assert lost is not None
    assert lost[0] == Code.PEER_LOST
    assert node.receiver.snapshot()["num_connections_total"] == 0


async def test_a_wrong_rank_is_refused(node: Node) -> None:
    connection = DataConnection(node.data_client, node.peer(rank=3))
    lost = await asyncio.to_thread(connection.wait_lost, 20.0)
    assert lost is not None
    assert lost[0] == Code.BAD_REQUEST
    assert "target_rank" in lost[1]


async def test_nobody_listens(node: Node) -> None:
    await node.server.close()
    connection = DataConnection(node.data_client, node.peer())
    lost = await asyncio.to_thread(connection.wait_lost, 20.0)
    assert lost is not None
    assert lost[0] == Code.UNREACHABLE
    assert node.address in lost[1]


async def test_a_closed_receiver_refuses(node: Node) -> None:
    await asyncio.to_thread(node.receiver.close)
    connection = DataConnection(node.data_client, node.peer())
    lost = await asyncio.to_thread(connection.wait_lost, 20.0)
    assert lost is not None
    assert lost[0] in (Code.PEER_LOST, Code.ABORTED, Code.UNREACHABLE)


async def test_without_the_secret_there_is_no_data(node: Node) -> None:
    stranger = Client(node.p, secret=Secret(b"wrong secret, wrong secret, wrong"))
    try:
        with pytest.raises(RpcError):
            await stranger.call(node.address, DATA, _request(), deadline=Deadline.after(5.0))
    finally:
        await stranger.close()
    assert node.receiver.snapshot()["num_connections_total"] == 0


def _request() -> object:
    from kvt_bindings.data import DataRequest

    return DataRequest(0, 0)


def test_threads_and_descriptors_end_with_their_owners() -> None:
    cache = make_cache(SHAPE)
    before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    receiver = Receiver(cache.native, CompletionQueue())
    client = DataClient(cache.native)
    connection = DataConnection(client, nobody())
    assert len(os.listdir("/proc/self/task")) > before[0]
    client.close()
    receiver.close()
    del connection, client, receiver
    assert (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == before


def nobody() -> DataPeer:
    return DataPeer(
        instance="d0",
        scheduler_incarnation=D_SCHEDULER,
        worker_incarnation=bytes(16),
        rank=0,
        address="tcp://127.0.0.1:1",
    )
