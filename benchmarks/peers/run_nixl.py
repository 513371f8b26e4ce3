"""NIXL WRITE over UCX between two processes; which UCX transports, UCX_TLS says.

Counted: making the transfer out of prepared descriptors (as vLLM does for each request), posting it and
waiting for it on the initiator's side. Not counted: registration and descriptors. The latency is from
there to the target's process seeing the notification.

``--progress thread`` is the agent as it comes (and as vLLM makes it): a thread in each process spins to make
progress, and the initiator looks every 20 us. ``--progress polled`` turns these threads off and lets both
processes poll without pause, which suits NIXL better on a machine of two cores; no engine could spend its
main thread like that.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from multiprocessing.connection import Connection

import common
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

LOOK_EVERY_S = 20e-6


def new_agent(name: str, progress: str) -> nixl_agent:
    config = nixl_agent_config(enable_prog_thread=progress == "thread", backends=["UCX"])
    return nixl_agent(name, config)


def pieces_of(base: int, piece: int, at: np.ndarray) -> list[tuple[int, int, int]]:
    return [(base + int(i) * piece, piece, 0) for i in at]


def target(pipe: Connection, total: int, progress: str) -> None:
    memory = np.zeros(total, np.uint8)
    agent = new_agent("target", progress)
    agent.register_memory([(memory.ctypes.data, total, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    seen: list[float] = []
    while True:
        for messages in agent.get_new_notifs().values():  # this is what makes progress, too
            seen += [time.perf_counter()] * len(messages)
        if not pipe.poll(0 if progress == "polled" else LOOK_EVERY_S):
            continue
        job = pipe.recv()
        if job is None:
            return
        if job[0] == "check":
            pipe.send(common.is_right(memory, job[1], job[2]))
            memory[: job[1] * job[2]] = 0
        else:  # when each notification was seen
            pipe.send(seen)


def main() -> None:
    progress = sys.argv.pop(sys.argv.index("--progress") + 1)
    sys.argv.remove("--progress")
    options = common.arguments()
    total = max(p * n for p, n in [*options.pieces, common.LATENCY_PIECES])
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(
        target=target, args=(there, total, progress), daemon=True
    )
    process.start()
    memory = common.source_memory(total)
    agent = new_agent("initiator", progress)
    agent.register_memory([(memory.ctypes.data, total, 0, "")], "DRAM")
    metadata, remote_base = here.recv()
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer

    def prepare(piece: int, num: int, notify: bytes = b""):
        local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", pieces_of(memory.ctypes.data, piece, common.order(num, 1)), "DRAM"
        )
        remote = agent.prep_xfer_dlist(
            peer, pieces_of(remote_base, piece, common.order(num, 2)), "DRAM"
        )
        indices = np.arange(num, dtype=np.int32)

        def once() -> None:
            transfer = agent.make_prepped_xfer("WRITE", local, indices, remote, indices, notify)
            state = agent.transfer(transfer)
            while state == "PROC":
                if progress == "thread":
                    time.sleep(LOOK_EVERY_S)
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"transfer ended as {state}")
            agent.release_xfer_handle(transfer)

        return once

    for piece, num in options.pieces:
        try:
            seconds = common.repeat(prepare(piece, num), options.min_s)
        except Exception as error:
            common.report_failure(piece, num, f"{type(error).__name__}: {error}")
            continue
        here.send(("check", piece, num))
        common.report(piece, num, seconds, here.recv())
    if options.latency:
        once = prepare(*common.LATENCY_PIECES, b"done")
        begun = []
        for _ in range(options.latency + 2):
            begun.append(time.perf_counter())
            once()
            time.sleep(0.002)
        here.send(("seen",))
        seen = here.recv()
        common.report_latency(
            [b - a for a, b in zip(begun, seen, strict=True)][2:],
            "WRITE posted to notification seen by the target's polling process",
        )
    here.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
