"""A sender in this process and a receiver in another, for the benchmarks of kvt's behaviour."""

from __future__ import annotations

import multiprocessing as mp
import select
import socket
import threading
import time
from typing import Any

import numpy as np

from kvt_bindings import (
    CompletionQueue,
    DataClient,
    KvCache,
    LayoutBuilder,
    Receiver,
    Row,
    Send,
    Sender,
    TensorRow,
)

PIECE_BYTES = 32 * 1024
ROW = Row((TensorRow("BLOCK DIM", name="pool"),))
P_SCHEDULER, D_SCHEDULER, P_WORKER, D_WORKER = (c.encode() * 16 for c in "PDpd")
GO = b"OKAY\x01\x00\x00\x00\x90"


def order(num: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).permutation(num)]


def make_cache(num: int, layers: int = 1) -> KvCache:
    """Pools of `num` blocks of one token of PIECE_BYTES, a layer each."""
    builder = LayoutBuilder(model="bench")
    group = builder.add_group(block_tokens=1)
    for layer in range(layers):
        builder.add_layer(layer, group, ROW, [np.ones((num, PIECE_BYTES), np.uint8)])
    return builder.build()


def _receive(pipe: Any, transport: str, num: int, layers: int) -> None:
    cache = make_cache(num, layers)
    queue = CompletionQueue()
    receiver = Receiver(cache.native, queue, transports=[transport])
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])

    def accept() -> None:
        sock, _ = listener.accept()
        receiver.adopt(sock.detach(), instance="p0", worker_incarnation=P_WORKER)

    threading.Thread(target=accept, daemon=True).start()  # the first send is what dials
    blocks = order(num, 2)
    while (job := pipe.recv()) is not None:
        first, count, end_token = job
        for key in range(first, first + count):
            receiver.open_grant(
                key.to_bytes(16, "big"),
                scheduler_incarnation=D_SCHEDULER,
                sender_instance="p0",
                sender_incarnation=P_SCHEDULER,
                block_ids=[blocks],
                first_token=0,
                end_token=end_token,
                source_ranks=[0],
            )
        pipe.send(True)
        left = count
        while left:
            select.select([queue.wake_fd], [], [])
            for _, _, _, _, _, code, detail in queue.drain():
                if code:
                    raise RuntimeError(f"transfer ended with code {code}: {detail}")
                left -= 1
        pipe.send(time.perf_counter())
    receiver.close()


class Node:
    """`num` pieces a layer; `batch` transfers handed over in one call."""

    def __init__(self, transport: str, *, num: int, layers: int = 1, batch: int = 1) -> None:
        self.num, self.layers, self._batch = num, layers, batch
        self.bytes_per_batch = batch * layers * num * PIECE_BYTES
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_receive, args=(theirs, transport, num, layers), daemon=True
        )
        self._process.start()
        self._port = self._pipe.recv()
        self.cache = make_cache(num, layers)
        self.queue = CompletionQueue()
        self._client = DataClient(self.cache.native, transports=[transport])
        self._thread = threading.Thread(target=self._dial, daemon=True)
        self._thread.start()
        self.sender = Sender(self.cache.native, self.queue, self._client)
        self.sender.begin_scheduler(P_SCHEDULER)
        self._next_key = 1
        self._source_blocks = order(num, 1)
        self._target_blocks = order(num, 2)

    @staticmethod
    def make_cache(num: int, layers: int) -> KvCache:
        return make_cache(num, layers)

    def _dial(self) -> None:
        """One connection, once."""
        select.select([self._client.dial_fd], [], [])
        ((dial_id, *_),) = self._client.take_dials()
        sock = socket.create_connection(("127.0.0.1", self._port))
        if sock.recv(len(GO), socket.MSG_WAITALL) != GO:
            raise RuntimeError("no GO")
        self._client.adopt(dial_id, sock.detach())

    def _send(self, key: int, end_token: int, address: str) -> Send:
        return Send(
            key=key.to_bytes(16, "big"),
            target_instance="d0",
            target_incarnation=D_SCHEDULER,
            targets=[(0, D_WORKER, address)],
            src_blocks=[self._source_blocks],
            dst_blocks=[self._target_blocks],
            first_token=0,
            end_token=end_token,
        )

    def send_to_nobody(self, key: int, num: int) -> Send:
        """For a sender whose dial requests nobody serves."""
        return Send(
            key=key.to_bytes(16, "big"),
            target_instance="nobody",
            target_incarnation=D_SCHEDULER,
            targets=[(0, D_WORKER, "tcp://127.0.0.1:1")],
            src_blocks=[order(num, 1)],
            dst_blocks=[order(num, 2)],
            first_token=0,
            end_token=num,
        )

    def grant(self, count: int, end_token: int | None = None) -> list[Send]:
        """Grants are open when it returns; the sends to use them."""
        end = self.num if end_token is None else end_token
        first = self._next_key
        self._next_key += count
        self._pipe.send((first, count, end))
        self._pipe.recv()
        address = f"tcp://127.0.0.1:{self._port}"
        return [self._send(key, end, address) for key in range(first, first + count)]

    def landed(self) -> float:
        """When the receiver's process had read the last LOAD_DONE, by time.perf_counter()."""
        at = float(self._pipe.recv())
        self.queue.drain()
        return at

    def batch(self) -> float:
        """Seconds from handing a batch over to its last LOAD_DONE."""
        sends = self.grant(self._batch)
        begun = time.perf_counter()
        self.sender.send_frozen(sends)
        return self.landed() - begun

    def close(self) -> None:
        self._pipe.send(None)
        self.sender.close()
        self._client.close()
        self._process.join(10)
