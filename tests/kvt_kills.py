"""Kills kvt workers, thousands if asked, and counts what is left behind.

    python -m tests.kvt_kills --kills 1000 [--seed 1]

Each round is a fresh worker process with several transfers under way, killed with SIGKILL at a
random moment: P's worker while this process receives, or D's worker while this process sends. Every
transfer must end with exactly one completion, and nothing may stay: no grant, no owed completion,
no connection, no descriptor, no thread.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from kvt_bindings import KvtError
from tests.kvt_kit import (
    GUARD_S,
    TRANSPORTS,
    Shape,
    Target,
    key_of,
    receiver_process,
    sender_process,
)
from tests.kvt_kit import _Sender as InProcessSender

SHAPE = Shape(layers=6, blocks=128, block_tokens=16, heads=8, dim=64)  # 4 MiB a layer
NUM_TRANSFERS = 4
TOKENS = 256
NAMES = {0: "OK", 5: "ABORTED", 9: "PEER_LOST", 10: "TIMEOUT"}


@dataclass
class Tally:
    kills: int = 0
    transfers: int = 0
    leaked: int = 0
    ends: Counter[str] = field(default_factory=Counter)


def _blocks(i: int) -> list[int]:
    size = TOKENS // SHAPE.block_tokens
    return list(range(i * size, (i + 1) * size))


def kill_sender(target: Target, rng: random.Random, base: int, seen: int, tally: Tally) -> int:
    """One P worker dies; returns the number of completions so far."""
    with sender_process(SHAPE, seed=base) as sender:
        sender.call("connect", target.port, [rng.choice(TRANSPORTS)])
        for i in range(NUM_TRANSFERS):
            target.grant(base + i, _blocks(i), 0, TOKENS, progress_ms=400)
        for i in range(NUM_TRANSFERS):
            sender.post("open_and_send", base + i, _blocks(i), _blocks(i), TOKENS)
        time.sleep(rng.random() * 0.02)  # the moment of death is the point
        sender.kill()
    for i in range(NUM_TRANSFERS):
        # What it never opened is ended by the progress clock that STARTED sets going.
        with suppress(KvtError):  # NOT_FOUND: it is over already
            target.receiver.start_progress(key_of(base + i))
    for i in range(NUM_TRANSFERS):
        tally.ends[NAMES[target.completion(seen + i + 1)[3]]] += 1
    target.until(lambda s: s["grants"] == [] and s["connections"] == [])
    tally.kills += 1
    tally.transfers += NUM_TRANSFERS
    return seen + NUM_TRANSFERS


def kill_receiver(sender: InProcessSender, rng: random.Random, base: int, tally: Tally) -> None:
    """One D worker dies while this process sends to it."""
    with receiver_process(SHAPE) as receiver:
        sender.connect(receiver.call("port"), [rng.choice(TRANSPORTS)])
        for i in range(NUM_TRANSFERS):
            receiver.call("grant", base + i, _blocks(i), 0, TOKENS)
        handles = [
            sender.open_and_send(base + i, _blocks(i), _blocks(i), TOKENS)
            for i in range(NUM_TRANSFERS)
        ]
        time.sleep(rng.random() * 0.01)
        receiver.kill()
    for handle in handles:
        result = sender.result(handle)
        assert result is not None, "a transfer without an end"
        tally.ends[NAMES[result[0]]] += 1
        assert sender.connection is not None
        assert sender.connection.is_released(handle)
    assert sender.lost() is not None
    sender.disconnect()
    tally.kills += 1
    tally.transfers += NUM_TRANSFERS


def _left() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def run(kills: int, seed: int) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    sender = InProcessSender(SHAPE, 0, 0)
    with Target(SHAPE) as target:
        # Warm: the fork server and its pipes stay.
        seen = kill_sender(target, rng, 1, 0, Tally())
        kill_receiver(sender, rng, 1, Tally())
        before = _left()
        for n in range(kills):
            base = 100 + n * NUM_TRANSFERS
            if n % 2 == 0:
                seen = kill_sender(target, rng, base, seen, tally)
            else:
                kill_receiver(sender, rng, base, tally)
        tally.leaked += target.queue.stats()["reserved"] + len(target.receiver.snapshot()["grants"])
        end = time.monotonic() + GUARD_S
        while _left() != before and time.monotonic() < end:
            time.sleep(0.01)  # the last threads are being joined
        after = _left()
        tally.leaked += max(0, after[0] - before[0]) + max(0, after[1] - before[1])
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.monotonic()
    tally = run(arguments.kills, arguments.seed)
    ends = ", ".join(f"{n} {name}" for name, n in sorted(tally.ends.items()))
    print(
        f"{tally.kills} workers killed, {tally.transfers} transfers ended ({ends}), "
        f"{tally.leaked} leaked, {time.monotonic() - start:.1f} s on {socket.gethostname()}"
    )
    raise SystemExit(tally.leaked != 0)


if __name__ == "__main__":
    main()
