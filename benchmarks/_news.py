"""News: four sender processes to one receiver process, and the way of a lone completion.

`news_per_s(...)` counts at the receiver, which checks that every completion came, once and in order.
`news_latency_us(...)` measures from the sender's `publish` to the receiver's handler, in two processes
of one machine: the monotonic clock is the same in both, and its reading travels in the item.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import uvloop

from simple_rpc import Client, Deadline, Identity, Server
from simple_rpc.channel import Channel
from simple_rpc.link import ReconnectingChannel

NUM_SENDERS = 4
KEY = bytes(range(16))
# Completions that a sender publishes in one go before it lets the loop turn, as a native thread's batch
# would arrive; and the slots it may fill before it waits for room.
BURST_ITEMS = 256
WINDOW_ITEMS = 16_384


@dataclass(frozen=True)
class Throughput:
    """What `news_per_s` found. `num_wrong` counts completions missing, doubled or out of order."""

    num_items: int
    seconds: float
    num_wrong: int
    items_per_frame: float

    @property
    def per_s(self) -> float:
        return self.num_items / self.seconds


# -- the processes -----------------------------------------------------------------------------------


async def _send(address: str, rank: int, num_items: int) -> None:
    """Publishes `num_items` completions as fast as acknowledgements make room."""
    client = Client(Identity("worker", f"bench/{rank}"))
    go = asyncio.Event()
    news = ReconnectingChannel(
        client, address, kind="bench", on_new_peer=lambda *_: None, on_lost=lambda _: None
    )
    news.channel.on("WAKE", lambda _: go.set())
    await news.start(Deadline.after(30.0))
    await go.wait()
    sender = news.channel.sender
    publish = news.channel.publish
    sent = 0
    while sent < num_items:
        if sender.num_unacked > WINDOW_ITEMS:
            room = asyncio.Event()
            news.channel.when_flushed(room.set)
            await room.wait()
        for number in range(sent, min(sent + BURST_ITEMS, num_items)):
            publish("LDON", [rank, KEY, 0, number, 0, ""])
        sent = min(sent + BURST_ITEMS, num_items)
        await asyncio.sleep(0)
    flushed = asyncio.Event()
    news.channel.when_flushed(flushed.set)
    await flushed.wait()
    news.close()
    await client.close()


async def _ping(address: str, num_items: int) -> None:
    """Publishes lone completions: the next one only when the last has been acknowledged."""
    client = Client(Identity("worker", "bench/ping"))
    go = asyncio.Event()
    news = ReconnectingChannel(
        client, address, kind="bench", on_new_peer=lambda *_: None, on_lost=lambda _: None
    )
    news.channel.on("WAKE", lambda _: go.set())
    await news.start(Deadline.after(30.0))
    await go.wait()
    channel = news.channel
    done = asyncio.Event()
    left = num_items

    def one() -> None:
        nonlocal left
        if not left:
            done.set()
            return
        left -= 1
        channel.publish("LDON", [0, KEY, 0, time.monotonic_ns(), 0, ""])
        channel.when_flushed(one)

    one()
    await done.wait()
    news.close()
    await client.close()


def _start(*args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks._news", *map(str, args)]
    return subprocess.Popen(command)


# -- the receiver (this process) ---------------------------------------------------------------------


class _Receiver:
    """Accepts the senders' channels and wakes them together when the last has come."""

    def __init__(self, num_senders: int) -> None:
        self.server = Server(Identity("scheduler", "bench"))
        self.server.on_channel("bench", self._accept, resume_s=10.0)
        self.channels: list[Channel] = []
        self.ready = asyncio.Event()
        self._num_senders = num_senders

    def _accept(self, _: Identity, channel: Channel) -> None:
        channel.on("LDON", self.take)
        self.channels.append(channel)
        if len(self.channels) == self._num_senders:
            self.ready.set()

    def take(self, items: list[list[object]]) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        for channel in self.channels:
            channel.publish("WAKE", 0)


class _Counter(_Receiver):
    def __init__(self, num_senders: int, num_each: int) -> None:
        super().__init__(num_senders)
        self.expected = [0] * num_senders
        self.num_wrong = 0
        self.num_left = num_senders * num_each
        self.num_batches = 0
        self.all_here = asyncio.Event()

    def take(self, items: list[list[object]]) -> None:
        expected = self.expected
        for rank, _, _, number, _, _ in items:
            if expected[rank] != number:
                self.num_wrong += 1
            expected[rank] = number + 1
        self.num_batches += 1
        self.num_left -= len(items)
        if self.num_left <= 0:
            self.all_here.set()


class _Stopwatch(_Receiver):
    def __init__(self) -> None:
        super().__init__(1)
        self.latencies_ns: list[int] = []

    def take(self, items: list[list[object]]) -> None:
        now = time.monotonic_ns()
        self.latencies_ns += [now - sent for _, _, _, sent, _, _ in items]


async def _finish(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        code = await asyncio.to_thread(process.wait, 60)
        if code:
            raise RuntimeError(f"a sender process ended with {code}")


async def measure_throughput(
    address: str = "tcp://127.0.0.1:0", *, num_each: int = 200_000, num_senders: int = NUM_SENDERS
) -> Throughput:
    """`num_senders` processes publish `num_each` completions each to this process."""
    receiver = _Counter(num_senders, num_each)
    listening = await receiver.server.listen(address)
    processes = [_start("send", listening, rank, num_each) for rank in range(num_senders)]
    try:
        await asyncio.wait_for(receiver.ready.wait(), 60)
        start_s = time.perf_counter()
        receiver.wake()
        await asyncio.wait_for(receiver.all_here.wait(), 120)
        seconds = time.perf_counter() - start_s
        await _finish(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await receiver.server.close()
    missing = sum(num_each - expected for expected in receiver.expected)
    num = num_senders * num_each
    return Throughput(num, seconds, receiver.num_wrong + missing, num / receiver.num_batches)


async def measure_latency(address: str = "tcp://127.0.0.1:0", *, num_items: int = 5000) -> float:
    """Median microseconds from `publish` in another process to the handler in this one."""
    receiver = _Stopwatch()
    listening = await receiver.server.listen(address)
    process = _start("ping", listening, num_items)
    try:
        await asyncio.wait_for(receiver.ready.wait(), 60)
        receiver.wake()
        await _finish([process])
    finally:
        process.kill()
        process.wait()
        await receiver.server.close()
    warm = receiver.latencies_ns[num_items // 10 :]
    return statistics.median(warm) / 1000


def news_per_s(address: str = "tcp://127.0.0.1:0", *, num_each: int = 200_000) -> float:
    """Completions a second from four sender processes to this one. RuntimeError if one is not counted
    exactly once. Runs its own uvloop; about 3 s."""
    result = uvloop.run(measure_throughput(address, num_each=num_each))
    if result.num_wrong:
        raise RuntimeError(f"{result.num_wrong} completions missing, doubled or out of order")
    return result.per_s


def news_latency_p50_us(address: str = "tcp://127.0.0.1:0", *, num_items: int = 5000) -> float:
    """Median way of a lone completion, publish to handler, in microseconds. Runs its own uvloop."""
    return uvloop.run(measure_latency(address, num_items=num_items))


def main() -> None:
    role = sys.argv[1] if len(sys.argv) > 1 else "all"
    if role == "send":
        uvloop.run(_send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    elif role == "ping":
        uvloop.run(_ping(sys.argv[2], int(sys.argv[3])))
    else:
        result = uvloop.run(measure_throughput())
        print(f"news_per_s           {result.per_s:12,.0f}  ({result.items_per_frame:.0f} a frame)")
        print(f"wrong                {result.num_wrong:12}")
        print(f"news_latency_p50_us  {news_latency_p50_us():12.1f}")


if __name__ == "__main__":
    main()
