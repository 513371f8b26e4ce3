"""Caches, receivers and senders of the byte path for tests: real processes, real sockets, kill -9.

A sender or a receiver of another process is forked from a clean server process, so that starting
one costs milliseconds. Memory is filled from a seed, so the test knows what a process holds without
asking it.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvt_bindings import CompletionQueue, KvCache, KvtError, LayoutBuilder, PairPlanner
from kvt_bindings._kvt import DataClient, DataConnection, DataPeer, Receiver
from tests.kvt_wire import GO, RawPeer

GUARD_S = 30.0  # against a hang; nothing is measured with it
TRANSPORTS = ("tcp", "cma")

D_SCHEDULER = b"D" * 16
P_SCHEDULER = b"P" * 16
P_WORKER = b"p" * 16
D_WORKER = b"d" * 16


@dataclass(frozen=True)
class Shape:
    """Flash NHD caches, float16."""

    layers: int = 4
    blocks: int = 32
    block_tokens: int = 16
    heads: int = 4
    dim: int = 32
    tp: int = 1
    model: str = "kit"

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * (self.heads // self.tp) * self.dim * 2


BIG = Shape(layers=4, blocks=1024, heads=8, dim=64)  # 64 MiB, 16 MiB a layer


def make_cache(shape: Shape, rank: int = 0, seed: int = 0) -> KvCache:
    builder = LayoutBuilder(model=shape.model, tp_size=shape.tp, tp_rank=rank)
    group = builder.add_group(shape.block_tokens)
    for layer, tensor in enumerate(memory_of(shape, seed, rank)):
        builder.add_layer(layer, group, "nhd", [tensor], heads_total=shape.heads)
    return builder.build()


def memory_of(shape: Shape, seed: int, rank: int = 0) -> list[Any]:
    """What a cache with this seed holds, by layer."""
    size = (2, shape.blocks, shape.block_tokens, shape.heads // shape.tp, shape.dim)
    rng = np.random.default_rng((seed, rank))
    return [
        np.frombuffer(bytearray(rng.bytes(int(np.prod(size)) * 2)), dtype=np.uint16)
        .view(np.float16)
        .reshape(size)
        for _ in range(shape.layers)
    ]


def raw(tensor: Any) -> Any:
    """The bytes of a cache tensor, as they are (NaN equals itself)."""
    return tensor.view(np.uint16)


def key_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


class Target:
    """A receiver in this process, with a listening socket that adopts whoever connects."""

    def __init__(self, shape: Shape, *, rank: int = 0, seed: int = 1000, **options: Any) -> None:
        self.shape = shape
        self.cache = make_cache(shape, rank, seed)
        self.queue = CompletionQueue()
        self.receiver = Receiver(self.cache.native, self.queue, **options)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._completions: list[tuple[str, bytes, int, int, int, int, str]] = []
        self.instance = "p0"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with suppress(KvtError):
                self.receiver.adopt(
                    sock.detach(), instance=self.instance, worker_incarnation=P_WORKER
                )

    def grant(
        self,
        key: int,
        blocks: list[int],
        first: int,
        end: int,
        *,
        sources: tuple[int, ...] = (0,),
        progress_ms: int = 10_000,
        scheduler: bytes = D_SCHEDULER,
    ) -> None:
        self.receiver.open_grant(
            key_of(key),
            scheduler_incarnation=scheduler,
            sender_instance="p0",
            sender_incarnation=P_SCHEDULER,
            block_ids=[blocks],
            first_token=first,
            end_token=end,
            source_ranks=list(sources),
            progress_timeout_ms=progress_ms,
        )

    def completion(self, n: int) -> tuple[int, int, int, int, str]:
        """The n-th completion from the start (1, 2, …): (key, source rank, tokens, code, detail)."""
        end = time.monotonic() + GUARD_S
        while len(self._completions) < n:
            left = end - time.monotonic()
            assert left > 0, f"completion {n} does not come: {self.receiver.snapshot()}"
            select.select([self.queue.wake_fd], [], [], left)
            self._completions += self.queue.drain()
        kind, key, _, source, tokens, code, detail = self._completions[n - 1]
        assert kind == "load"
        return int.from_bytes(key, "big"), source, tokens, code, detail

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits for a state of the receiver that is not announced: polling is for tests only."""
        end = time.monotonic() + GUARD_S
        while not condition(snapshot := self.receiver.snapshot()):
            assert time.monotonic() < end, snapshot
            time.sleep(0.0005)
        return snapshot

    def bytes(self) -> list[Any]:
        return [raw(t).copy() for t in self.cache.tensors]

    def raw_peer(self) -> RawPeer:
        peer = RawPeer(socket.create_connection(("127.0.0.1", self.port)))
        peer.read_go()
        return peer

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.receiver.close()
        stats = self.queue.stats()
        self._completions += self.queue.drain(1 << 20)
        assert self.queue.stats()["reserved"] == 0, "a completion is owed"
        assert stats["pushed_unreserved"] == 0, "a completion came twice"

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def equal_after(
    target: Target,
    before: list[Any],
    source: list[Any],
    source_blocks: list[int],
    target_blocks: list[int],
    first: int,
    end: int,
) -> bool:
    """Whether the target holds `before` with the source's tokens [first, end) in its blocks, and
    not one byte more. Equal shapes, by named index: it knows nothing of plans."""
    size = target.shape.block_tokens
    for mine, theirs, was in zip(target.cache.tensors, source, before, strict=True):
        want = was.copy()
        for token in range(first, end):
            src, dst = source_blocks[token // size], target_blocks[token // size]
            want[:, dst, token % size] = raw(theirs)[:, src, token % size]
        if not np.array_equal(raw(mine), want):
            return False
    return True


# -- sender processes ----------------------------------------------------------------------------


@dataclass
class _Sender:
    """Runs in the child."""

    shape: Shape
    rank: int
    seed: int
    cache: KvCache = field(init=False)
    client: DataClient | None = None
    connection: DataConnection | None = None

    def __post_init__(self) -> None:
        self.cache = make_cache(self.shape, self.rank, self.seed)

    def connect(self, port: int, transports: list[str], target_rank: int = 0) -> str:
        self.client = DataClient(self.cache.native, transports=transports)
        peer = DataPeer(
            instance="d0",
            scheduler_incarnation=D_SCHEDULER,
            worker_incarnation=D_WORKER,
            rank=target_rank,
            address=f"tcp://127.0.0.1:{port}",
        )
        self.connection = DataConnection(self.client, peer)
        ((dial_id, *_),) = self.client.take_dials()
        sock = socket.create_connection(("127.0.0.1", port))
        assert sock.recv(len(GO), socket.MSG_WAITALL) == GO
        self.client.adopt(dial_id, sock.detach())
        assert self.connection.wait_ready(GUARD_S)
        return self.connection.transport

    def open(self, key: int, first: int = 0, end: int = 0, crc: bool = False) -> int:
        assert self.connection is not None
        return self.connection.open(
            key_of(key), sender_incarnation=P_SCHEDULER, first_token=first, end_token=end, crc=crc
        )

    def send(
        self,
        transfer: int,
        source_blocks: list[int],
        target_blocks: list[int],
        first: int,
        end: int,
        last: bool = True,
        layers: list[int] | None = None,
        target_shape: Shape | None = None,
        target_rank: int = 0,
    ) -> None:
        assert self.connection is not None
        target = self.cache.layout
        if target_shape is not None:
            target = make_cache(target_shape, target_rank).layout
        plan = PairPlanner(self.cache.layout, target).plan(
            self.rank, target_rank, [source_blocks], [target_blocks], first, end, last
        )
        for part in plan:
            wanted = [n for n in part.layers if layers is None or n in layers]
            self.connection.send_runs(
                transfer, wanted, first_token=first, end_token=end, runs=part.runs_bytes()
            )

    def send_runs(
        self, transfer: int, layer: int, first: int, end: int, runs: list[tuple[int, int, int]]
    ) -> None:
        assert self.connection is not None
        packed = np.array(runs, dtype=np.uint64).tobytes()
        self.connection.send_runs(transfer, [layer], first_token=first, end_token=end, runs=packed)

    def end(self, transfer: int) -> None:
        assert self.connection is not None
        self.connection.end(transfer)

    def cancel(self, transfer: int, code: int, detail: str) -> None:
        assert self.connection is not None
        self.connection.cancel(transfer, code, detail)

    def result(self, transfer: int) -> tuple[int, int, str] | None:
        assert self.connection is not None
        return self.connection.wait_result(transfer, GUARD_S)

    def is_released(self, transfer: int) -> bool:
        assert self.connection is not None
        return self.connection.is_released(transfer)

    def lost(self) -> tuple[int, str] | None:
        assert self.connection is not None
        return self.connection.wait_lost(GUARD_S)

    def open_and_send(
        self, key: int, source_blocks: list[int], target_blocks: list[int], end: int
    ) -> int:
        """A whole transfer of tokens [0, end), in two chunks a layer."""
        transfer = self.open(key, 0, end)
        half = end // 2
        self.send(transfer, source_blocks, target_blocks, 0, half, False)
        self.send(transfer, source_blocks, target_blocks, half, end, True)
        self.end(transfer)
        return transfer

    def disconnect(self) -> None:
        assert self.client is not None
        self.client.close()
        self.client = self.connection = None

    def keep(self) -> None:
        """Lay this connection aside; `swap` brings it back."""
        self._kept = (self.client, self.connection)

    def swap(self) -> None:
        kept, self._kept = self._kept, (self.client, self.connection)
        self.client, self.connection = kept

    def scribble(self, seed: int) -> None:
        """New KV in the old blocks."""
        for tensor, new in zip(
            self.cache.tensors, memory_of(self.shape, seed, self.rank), strict=True
        ):
            tensor[...] = new


def _serve(make: Callable[[], Any], pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served = make()
    pipe.send(("ready", None))
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            return
        if name == "exit":
            return
        try:
            answer = ("ok", getattr(served, name)(*args, **kwargs))
        except KvtError as error:
            answer = ("kvt", (error.code, str(error)))
        except BaseException as error:
            answer = ("error", repr(error))
        pipe.send(answer)


def _sender_main(pipe: Any, shape: Shape, rank: int, seed: int) -> None:
    _serve(lambda: _Sender(shape, rank, seed), pipe)


@dataclass
class _ReceiverHost:
    """Runs in the child: a Target driven from outside."""

    target: Target

    def port(self) -> int:
        return self.target.port

    def grant(self, *args: Any, **kwargs: Any) -> None:
        self.target.grant(*args, **kwargs)

    def completion(self, n: int) -> tuple[int, int, int, int, str]:
        return self.target.completion(n)


def _receiver_main(pipe: Any, shape: Shape, rank: int, seed: int) -> None:
    _serve(lambda: _ReceiverHost(Target(shape, rank=rank, seed=seed)), pipe)


_context: Any = None


def _forkserver() -> Any:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.kvt_kit"])
    return _context


class RemoteError(Exception):
    """A KvtError in the other process; `code` as there."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Process:
    """Another process and its commands. Killed, if need be, at the end of the test."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        context = _forkserver()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        assert self._answer() is None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def _answer(self) -> Any:
        assert self._pipe.poll(GUARD_S), "the other process does not answer"
        kind, value = self._pipe.recv()
        if kind == "kvt":
            raise RemoteError(*value)
        assert kind in ("ok", "ready"), value
        return value

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((name, args, kwargs))
        return self._answer()

    def post(self, name: str, *args: Any, **kwargs: Any) -> None:
        """A call whose answer nobody waits for."""
        self._pipe.send((name, args, kwargs))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and reaped."""
        self.signal(signal.SIGKILL)
        self._process.join(GUARD_S)

    def close(self) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self.kill()
        self._pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sender_process(shape: Shape, *, rank: int = 0, seed: int = 0) -> Process:
    return Process(_sender_main, shape, rank, seed)


def receiver_process(shape: Shape, *, rank: int = 0, seed: int = 1000) -> Process:
    return Process(_receiver_main, shape, rank, seed)
