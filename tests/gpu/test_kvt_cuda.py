"""kvt with caches on a CUDA device: the same tests on the stand-in driver, everywhere, and on a real
GPU where there is one (`pytest -m gpu`; elsewhere each says that it was not run)."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvt_bindings import CompletionQueue, DataClient, KvtError, RankCache, Receiver, Send, Sender
from tests.cuda_kit import REAL, Driver, build_standin, find_gpu
from tests.kvt_kit import D_SCHEDULER, GUARD_S, P_SCHEDULER, Shape, key_of, make_cache
from tests.kvt_wire import GO

SHAPE = Shape(layers=4, blocks=32)
HALF = SHAPE.blocks * SHAPE.block_bytes  # K, then V
NOTHING = 0xEE
WORKER = b"w" * 16


@pytest.fixture(params=["standin", pytest.param("gpu", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "gpu" and (why := find_gpu()):
        pytest.skip(f"no GPU here ({why}): not run on a real driver")
    it = Driver(REAL if request.param == "gpu" else build_standin())
    yield it
    it.close()


class Cache:
    """One rank's cache on the device or, without a driver, in host memory."""

    def __init__(self, driver: Driver | None, value: int) -> None:
        host = make_cache(SHAPE)
        self._driver = driver
        self._keep = host.tensors
        if driver is None:
            for tensor in host.tensors:
                tensor.view("uint8")[...] = value
            self.native = host.native
            return
        self.address = [driver.alloc(2 * HALF) for _ in range(SHAPE.layers)]
        for address in self.address:
            driver.upload(address, bytes([value]) * 2 * HALF)
        memory = [(n, [(a, 2 * HALF)]) for n, a in enumerate(self.address)]
        self.native = RankCache(host.layout, 0, memory, 0)

    def compute(self, layer: int, block: int, value: int, stream: int) -> None:
        """K and V of one block, by kernels that run later."""
        assert self._driver is not None
        for kv in range(2):
            at = self.address[layer] + kv * HALF + block * SHAPE.block_bytes
            self._driver.fill(at, value, SHAPE.block_bytes, stream)

    def contents(self, layer: int) -> bytes:
        if self._driver is None:
            return bytes(self._keep[layer].tobytes())
        return self._driver.download(self.address[layer], 2 * HALF)


def expected(values: dict[int, int], rest: int) -> bytes:
    """A layer whose blocks hold these values, and `rest` everywhere else."""
    half = b"".join(
        bytes([values.get(block, rest)]) * SHAPE.block_bytes for block in range(SHAPE.blocks)
    )
    return half + half


class Line:
    """A sender and a receiver in this process, over loopback."""

    def __init__(self, library: str, source: Cache, target: Cache, **options: Any) -> None:
        self.sent, self.loaded = CompletionQueue(), CompletionQueue()
        self.receiver = Receiver(target.native, self.loaded, cuda_library=library)
        self.client = DataClient(source.native, cuda_library=library)
        self.sender = Sender(
            source.native, self.sent, self.client, cuda_library=library, crc=True, **options
        )
        self.sender.begin_scheduler(P_SCHEDULER)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with suppress(KvtError):
                self.receiver.adopt(sock.detach(), instance="p0", worker_incarnation=WORKER)

    def send(self, key: int, blocks: list[int]) -> Send:
        end = len(blocks) * SHAPE.block_tokens
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
        return Send(
            key=key_of(key),
            target_instance="d0",
            target_incarnation=D_SCHEDULER,
            targets=[(0, b"d" * 16, "loopback")],
            src_blocks=[blocks],
            dst_blocks=[blocks],
            first_token=0,
            end_token=end,
        )

    def dial(self) -> None:
        """The connection that the first send has asked for."""
        assert select.select([self.client.dial_fd], [], [], GUARD_S)[0]
        ((dial_id, *_),) = self.client.take_dials()
        sock = socket.create_connection(self._listener.getsockname())
        assert sock.recv(len(GO), socket.MSG_WAITALL) == GO
        self.client.adopt(dial_id, sock.detach())

    def results(self, n: int) -> tuple[list[int], list[int]]:
        """Codes of n completions at each end."""

        def take(queue: CompletionQueue) -> list[int]:
            got: list[int] = []
            while len(got) < n:
                assert select.select([queue.wake_fd], [], [], GUARD_S)[0], self.sender.snapshot()
                got += [c[5] for c in queue.drain()]
            return got

        return take(self.loaded), take(self.sent)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.sender.close()
        self.receiver.close()


@pytest.mark.parametrize("wait", ["block", "query"])
def test_a_step_on_the_callers_stream(driver: Driver, wait: str) -> None:
    """Every layer is launched and recorded before the first one is done."""
    source, target = Cache(driver, NOTHING), Cache(driver, 0)
    line = Line(driver.library, source, target, event_wait=wait)
    stream = driver.stream()
    blocks = [3, 4, 9]
    line.sender.submit_send(1, line.send(1, blocks))
    line.sender.start_step(1, 48)
    line.dial()
    for layer in range(SHAPE.layers):
        for block in blocks:
            source.compute(layer, block, 10 * layer + block, stream)
        line.sender.record_event(1, layer, stream)
    line.sender.freeze_step(1)
    line.sender.flush_step(1)
    assert line.results(1) == ([0], [0])
    for layer in range(SHAPE.layers):
        want = expected({block: 10 * layer + block for block in blocks}, 0)
        assert target.contents(layer) == want
    line.close()


def test_the_last_record_of_a_layer_counts(driver: Driver) -> None:
    source, target = Cache(driver, NOTHING), Cache(driver, 0)
    line = Line(driver.library, source, target)
    stream = driver.stream()
    line.sender.submit_send(1, line.send(1, [5]))
    line.sender.start_step(1, 16, records_per_layer=2)
    line.dial()
    for microbatch in (1, 2):
        for layer in range(SHAPE.layers):
            source.compute(layer, 5, 100 * microbatch + layer, stream)
            line.sender.record_event(1, layer, stream)
    line.sender.flush_step(1)
    assert line.results(1) == ([0], [0])
    for layer in range(SHAPE.layers):
        assert target.contents(layer) == expected({5: 200 + layer}, 0)
    line.close()


def test_steps_in_flight_on_two_streams(driver: Driver) -> None:
    source, target = Cache(driver, NOTHING), Cache(driver, 0)
    line = Line(driver.library, source, target)
    streams = [driver.stream(), driver.stream()]
    for step in range(1, 17):
        line.sender.submit_send(step, line.send(step, [step]))
        line.sender.start_step(step, 16)
        if step == 1:
            line.dial()
        for layer in range(SHAPE.layers):
            source.compute(layer, step, 8 * step + layer, streams[step % 2])
            line.sender.record_event(step, layer, streams[step % 2])
        line.sender.freeze_step(step)
        line.sender.flush_step(step)
    assert line.results(16) == ([0] * 16, [0] * 16)
    for layer in range(SHAPE.layers):
        want = expected({step: 8 * step + layer for step in range(1, 17)}, 0)
        assert target.contents(layer) == want
    line.close()


@pytest.mark.parametrize("on_device", ["source", "target", "both"])
def test_frozen_sends_between_device_and_host(driver: Driver, on_device: str) -> None:
    source = Cache(driver if on_device != "target" else None, 7)
    target = Cache(driver if on_device != "source" else None, 0)
    line = Line(driver.library, source, target)
    blocks = list(range(0, 32, 3))
    line.sender.send_frozen([line.send(1, blocks)])
    line.dial()
    assert line.results(1) == ([0], [0])
    for layer in range(SHAPE.layers):
        assert target.contents(layer) == expected(dict.fromkeys(blocks, 7), 0)
    line.close()


def test_an_unusable_driver_is_refused_by_name() -> None:
    cache = make_cache(SHAPE)
    memory = [(n, [(4096, 2 * HALF)]) for n in range(SHAPE.layers)]
    on_device = RankCache(cache.layout, 0, memory, 0)
    with pytest.raises(KvtError, match=r"libm\.so\.6 lacks cuInit"):
        DataClient(on_device, cuda_library="libm.so.6")
    client = DataClient(cache.native)
    with pytest.raises(KvtError, match=r"libno-such\.so cannot be opened"):
        Sender(on_device, CompletionQueue(), client, cuda_library="libno-such.so")
