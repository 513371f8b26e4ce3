"""Mooncake's transfer engine over its tcp protocol between two processes.

Counted: one `batch_transfer_sync_write`, with its argument lists made beforehand. The latency is that of
the call: its tcp protocol tells the target nothing.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from multiprocessing.connection import Connection

import common
import numpy as np
from mooncake.engine import TransferEngine


def new_engine() -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("initialize failed")
    return engine


def target(pipe: Connection, total: int) -> None:
    os.dup2(2, 1)  # its log goes to stdout otherwise
    memory = np.zeros(total, np.uint8)
    engine = new_engine()
    if engine.register_memory(memory.ctypes.data, total):
        raise RuntimeError("register_memory failed")
    pipe.send((engine.get_rpc_port(), memory.ctypes.data))
    while (job := pipe.recv()) is not None:
        pipe.send(common.is_right(memory, *job))
        memory[: job[0] * job[1]] = 0


def main() -> None:
    options = common.arguments()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    total = max(p * n for p, n in [*options.pieces, common.LATENCY_PIECES])
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=target, args=(there, total), daemon=True)
    process.start()
    memory = common.source_memory(total)
    engine = new_engine()
    if engine.register_memory(memory.ctypes.data, total):
        raise RuntimeError("register_memory failed")
    port, remote_base = here.recv()
    peer = f"127.0.0.1:{port}"

    def prepare(piece: int, num: int):
        mine = [memory.ctypes.data + int(i) * piece for i in common.order(num, 1)]
        theirs = [remote_base + int(i) * piece for i in common.order(num, 2)]
        lengths = [piece] * num

        def once() -> None:
            if engine.batch_transfer_sync_write(peer, mine, theirs, lengths):
                raise RuntimeError("batch_transfer_sync_write failed")

        return once

    for piece, num in options.pieces:
        try:
            seconds = common.repeat(prepare(piece, num), options.min_s)
        except Exception as error:
            common.report_failure(piece, num, f"{type(error).__name__}: {error}")
            os._exit(1)  # the engine is of no use any more, and does not end by itself
        here.send((piece, num))
        common.report(piece, num, seconds, here.recv())
    if options.latency:
        once = prepare(*common.LATENCY_PIECES)
        seconds = []
        for _ in range(options.latency + 2):
            t = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - t)
            time.sleep(0.002)
        common.report_latency(seconds[2:], "the write call itself; the target is told nothing")
    here.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
