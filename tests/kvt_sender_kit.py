"""A P worker in another process: the sender engine, run step by step from the test.

Its cache starts as noise that no test may find anywhere else; `compute` is the only thing that
writes KV, and what it writes follows from (salt, layer), so the test knows the bytes without asking.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from kvt_bindings import (
    CompletionQueue,
    DataClient,
    HostStream,
    KvtError,
    Send,
    Sender,
)
from tests.kvt_kit import (
    D_SCHEDULER,
    D_WORKER,
    GUARD_S,
    P_SCHEDULER,
    Process,
    Shape,
    _serve,
    key_of,
    make_cache,
    memory_of,
)
from tests.kvt_wire import GO

NOISE_SEED = 666
Completion = tuple[int, int, int, int, str]  # key, target rank, tokens, code, detail


def computed(shape: Shape, salt: int, layer: int, rank: int = 0) -> Any:
    """What one layer's cache holds after `compute(layer, salt)`."""
    return memory_of(shape, 10_000 + salt, rank)[layer]


def worker_of(rank: int) -> bytes:
    return D_WORKER[:15] + bytes([rank])


class StepWorker:
    """Runs in the child."""

    def __init__(self, shape: Shape, rank: int, **options: Any) -> None:
        self.shape = shape
        self.rank = rank
        self.cache = make_cache(shape, rank, NOISE_SEED)
        self.queue = CompletionQueue()
        self.client = DataClient(self.cache.native, transports=options.pop("transports", ["tcp"]))
        self.sender = Sender(self.cache.native, self.queue, self.client, **options)
        self.sender.begin_scheduler(P_SCHEDULER)
        self.stream = HostStream()
        self._work: dict[tuple[int, int], int] = {}
        self._completions: list[Completion] = []
        threading.Thread(target=self._dial, daemon=True).start()

    def _dial(self) -> None:
        """What `kvt_bindings.data.Dialer` does on a loop, without the handshake."""
        while True:
            select.select([self.client.dial_fd], [], [])
            for dial_id, _, _, _, _, address in self.client.take_dials():
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                try:
                    sock = socket.create_connection((host, int(port)))
                    assert sock.recv(len(GO), socket.MSG_WAITALL) == GO
                except OSError as error:
                    self.client.dial_failed(dial_id, 8, str(error))
                    continue
                with suppress(KvtError):
                    self.client.adopt(dial_id, sock.detach())

    # -- sends ---------------------------------------------------------------------------------

    def _send(
        self,
        key: int,
        ports: list[int],
        src: list[int],
        dst: list[int],
        first: int,
        end: int,
        last: bool = True,
    ) -> Send:
        return Send(
            key=key_of(key),
            target_instance="d0",
            target_incarnation=D_SCHEDULER,
            targets=[(r, worker_of(r), f"tcp://127.0.0.1:{p}") for r, p in enumerate(ports)],
            src_blocks=[src],
            dst_blocks=[dst],
            first_token=first,
            end_token=end,
            last=last,
        )

    def submit(self, step: int, *send: Any) -> None:
        self.sender.submit_send(step, self._send(*send))

    def delta(self, step: int, key: int, src: list[int], first: int, end: int, last: bool) -> None:
        self.sender.submit_delta(
            step,
            key_of(key),
            src_blocks=[src],
            dst_blocks=[[]],
            first_token=first,
            end_token=end,
            last=last,
        )

    def substep(self, step: int, substep: int, *send: Any) -> str:
        return self.sender.start_substep(step, substep, [self._send(*send)])

    def frozen(self, *send: Any) -> None:
        self.sender.send_frozen([self._send(*send)])

    def cancel(self, key: int, code: int, detail: str) -> None:
        self.sender.cancel(key_of(key), code, detail)

    def elsewhere(self, name: str, *args: Any) -> Any:
        """The same, called from a thread that has called nothing before."""
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(getattr(self, name)(*args)))
        thread.start()
        thread.join()
        return answers[0]

    # -- the engine's side -----------------------------------------------------------------------

    def start(self, step: int, records_per_layer: int = 1) -> None:
        self.sender.start_step(step, 1, records_per_layer=records_per_layer)

    def compute(self, layer: int, salt: int) -> None:
        self.cache.tensors[layer][...] = computed(self.shape, salt, layer, self.rank)

    def launch(self, step: int, layer: int) -> None:
        """The layer's kernel is on the stream and has not run: the event is recorded behind it."""
        self._work[step, layer] = self.stream.submit()
        self.sender.record_event(step, layer, self.stream.handle)

    def run_kernel(self, step: int, layer: int, salt: int) -> None:
        self.compute(layer, salt)
        self.stream.complete(self._work.pop((step, layer)))

    def record(self, step: int, layer: int) -> None:
        """The layer was computed by this thread."""
        self.sender.record_event(step, layer)

    def finish(self, step: int) -> int:
        highest = self.sender.freeze_step(step)
        self.sender.flush_step(step)
        return highest

    def whole_step(self, step: int, salt: int) -> int:
        self.start(step)
        for layer in range(self.shape.layers):
            self.compute(layer, salt)
            self.record(step, layer)
        return self.finish(step)

    # -- what became of it -------------------------------------------------------------------------

    def completion(self, n: int) -> Completion:
        """The n-th from the start (1, 2, …)."""
        end = time.monotonic() + GUARD_S
        while len(self._completions) < n:
            left = end - time.monotonic()
            assert left > 0, f"completion {n} does not come: {self.sender.snapshot()}"
            select.select([self.queue.wake_fd], [], [], left)
            for kind, key, rank, target, tokens, code, detail in self.queue.drain():
                assert (kind, rank) == ("send", self.rank)
                self._completions.append((int.from_bytes(key, "big"), target, tokens, code, detail))
        return self._completions[n - 1]

    def until_sent(self, num_layers: int) -> None:
        """Until each target of the only transfer has been given so many layers."""
        end = time.monotonic() + GUARD_S
        while True:
            (transfer,) = self.sender.snapshot()["transfers"]
            if all(t["num_layers_sent"] >= num_layers for t in transfer["targets"]):
                return
            assert time.monotonic() < end, transfer
            time.sleep(0.0005)

    def snapshot(self) -> dict[str, Any]:
        return self.sender.snapshot()

    def transport(self) -> list[str]:
        return [c["transport"] for c in self.client.snapshot()]

    def close(self) -> tuple[int, int]:
        """Completions after everything has ended, and slots still promised."""
        self.sender.close()
        self._completions += [
            (int.from_bytes(c[1], "big"), *c[3:]) for c in self.queue.drain(1 << 20)
        ]
        return len(self._completions), self.queue.stats()["reserved"]


def _main(pipe: Any, shape: Shape, rank: int, options: dict[str, Any]) -> None:
    _serve(lambda: StepWorker(shape, rank, **options), pipe)


def step_process(shape: Shape, *, rank: int = 0, **options: Any) -> Process:
    return Process(_main, shape, rank, options)


def expected_after(
    shape: Shape,
    before: list[Any],
    pieces: list[tuple[int, list[int], list[int], int, int]],
) -> list[Any]:
    """`before` with, for each (salt, source blocks, target blocks, first, end), what that salt's
    step computed of these tokens. By named index, equal shapes: knows nothing of plans."""
    size = shape.block_tokens
    out = [b.copy() for b in before]
    for salt, src, dst, first, end in pieces:
        for layer in range(shape.layers):
            theirs = computed(shape, salt, layer).view(np.uint16)
            for token in range(first, end):
                out[layer][:, dst[token // size], token % size] = theirs[
                    :, src[token // size], token % size
                ]
    return out
