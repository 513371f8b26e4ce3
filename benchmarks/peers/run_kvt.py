"""kvt between two processes, one transport forced: ``run_kvt.py --transport tcp|cma``.

Counted: from before `Send` is built and submitted in the sender's process to the moment its LOAD_DONE is
read from the completion queue by a Python thread of the receiver's process. That includes planning on
both sides, the opening of the transfer and the coverage check. Not counted: the grant, which a scheduler
opens while the request still waits for its prefill.
"""

from __future__ import annotations

import multiprocessing as mp
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common

from kvt_bindings import (
    CompletionQueue,
    DataClient,
    KvtError,
    LayoutBuilder,
    Receiver,
    Row,
    Send,
    Sender,
    TensorRow,
)

ROW = Row((TensorRow("BLOCK DIM", name="pool"),))
P_SCHEDULER, D_SCHEDULER, P_WORKER, D_WORKER = (c.encode() * 16 for c in "PDpd")
GO = b"OKAY\x01\x00\x00\x00\x90"


def cache_of(memory: np.ndarray, piece: int, num: int):
    """A pool of `num` blocks of one token of `piece` bytes."""
    builder = LayoutBuilder(model="bench")
    group = builder.add_group(block_tokens=1)
    builder.add_layer(0, group, ROW, [memory[: piece * num].reshape(num, piece)])
    return builder.build()


def completion(queue: CompletionQueue) -> None:
    """Waits for one, which must be OK."""
    while not (got := queue.drain()):
        select.select([queue.wake_fd], [], [])
    ((_, _, _, _, _, code, detail),) = got
    if code:
        raise RuntimeError(f"transfer ended with code {code}: {detail}")


class Target:
    def __init__(self, transport: str, total: int) -> None:
        self.transport = transport
        self.memory = np.zeros(total, np.uint8)
        self.receiver: Receiver | None = None
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            try:
                self.receiver.adopt(sock.detach(), instance="p0", worker_incarnation=P_WORKER)
            except KvtError as error:
                print(f"adopt: {error}", file=sys.stderr)

    def layout(self, piece: int, num: int) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.queue = CompletionQueue()
        cache = cache_of(self.memory, piece, num)
        self.receiver = Receiver(cache.native, self.queue, transports=[self.transport])
        self.blocks = [int(i) for i in common.order(num, 2)]

    def serve(self, pipe: Connection) -> None:
        pipe.send(self.listener.getsockname()[1])
        while (job := pipe.recv()) is not None:
            if job[0] == "layout":
                self.layout(*job[1:])
                pipe.send(True)
            elif job[0] == "transfer":
                self.receiver.open_grant(
                    job[1],
                    scheduler_incarnation=D_SCHEDULER,
                    sender_instance="p0",
                    sender_incarnation=P_SCHEDULER,
                    block_ids=[self.blocks],
                    first_token=0,
                    end_token=len(self.blocks),
                    source_ranks=[0],
                )
                pipe.send(True)
                completion(self.queue)
                pipe.send(time.perf_counter())
            else:
                pipe.send(common.is_right(self.memory, *job[1:]))
                self.memory[: job[1] * job[2]] = 0
        if self.receiver is not None:
            self.receiver.close()


def target(pipe: Connection, transport: str, total: int) -> None:
    Target(transport, total).serve(pipe)


def dial(client: DataClient) -> None:
    """What kvt_bindings.data.Dialer does on a loop, without the handshake."""
    while True:
        select.select([client.dial_fd], [], [])
        for dial_id, _, _, _, _, address in client.take_dials():
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            sock = socket.create_connection((host, int(port)))
            if sock.recv(len(GO), socket.MSG_WAITALL) != GO:
                raise RuntimeError("no GO")
            client.adopt(dial_id, sock.detach())


class Source:
    def __init__(self, transport: str, memory: np.ndarray, pipe: Connection) -> None:
        self.transport, self.memory, self.pipe = transport, memory, pipe
        self.port = pipe.recv()
        self.number = 0
        self.seconds: list[float] = []

    def prepare(self, piece: int, num: int) -> Callable[[], None]:
        """A function that makes one transfer and notes how long it took."""
        self.pipe.send(("layout", piece, num))
        self.pipe.recv()
        cache = cache_of(self.memory, piece, num)
        queue = CompletionQueue()
        client = DataClient(cache.native, transports=[self.transport])
        threading.Thread(target=dial, args=(client,), daemon=True).start()
        sender = Sender(cache.native, queue, client)
        sender.begin_scheduler(P_SCHEDULER)
        source_blocks = [int(i) for i in common.order(num, 1)]
        target_blocks = [int(i) for i in common.order(num, 2)]
        targets = [(0, D_WORKER, f"tcp://127.0.0.1:{self.port}")]
        self.seconds = []
        self.close = sender.close

        def once() -> None:
            self.number += 1
            key = self.number.to_bytes(16, "big")
            self.pipe.send(("transfer", key))
            self.pipe.recv()
            begun = time.perf_counter()
            sender.send_frozen(
                [
                    Send(
                        key=key,
                        target_instance="d0",
                        target_incarnation=D_SCHEDULER,
                        targets=targets,
                        src_blocks=[source_blocks],
                        dst_blocks=[target_blocks],
                        first_token=0,
                        end_token=num,
                    )
                ]
            )
            self.seconds.append(self.pipe.recv() - begun)
            completion(queue)

        return once


def main() -> None:
    transport = sys.argv.pop(sys.argv.index("--transport") + 1)
    sys.argv.remove("--transport")
    options = common.arguments()
    total = max(p * n for p, n in [*options.pieces, common.LATENCY_PIECES])
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(
        target=target, args=(there, transport, total), daemon=True
    )
    process.start()
    source = Source(transport, common.source_memory(total), here)
    for piece, num in options.pieces:
        try:
            num_counted = len(common.repeat(source.prepare(piece, num), options.min_s))
            seconds = source.seconds[-num_counted:]
        except Exception as error:
            common.report_failure(piece, num, f"{type(error).__name__}: {error}")
            continue
        finally:
            source.close()
        here.send(("check", piece, num))
        common.report(piece, num, seconds, here.recv())
    if options.latency:
        once = source.prepare(*common.LATENCY_PIECES)
        for _ in range(options.latency + 2):
            once()
            time.sleep(0.002)
        source.close()
        common.report_latency(
            source.seconds[2:], "send submitted to LOAD_DONE read by the receiver's Python thread"
        )
    here.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
