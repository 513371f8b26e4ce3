"""Simulated processes and network: calls, ordered acknowledged news, data connections.

The rules are those of ``simple_rpc`` and of TCP, not friendlier ones:

* A **call** can fail before it arrived, after it was handled (the answer is lost), or be handled twice
  (the one transparent retry over a stale pooled connection). The caller cannot tell the first two apart.
* **News** on a channel arrives in order, exactly once per incarnation of the receiver. A broken
  connection is reopened and what was not acknowledged is sent again with the same numbers. When one
  side is a new incarnation, or was silent for three heartbeats, the channel is *lost*: both sides that
  still live are told, each at its own time, and what was not acknowledged is dropped.
* A **data connection** keeps order and dies as a whole.

Heartbeats are not events here. Silence is computed: a channel whose path has been down for three
heartbeats is lost, which is what the beats would have found, at a fraction of the cost.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pd_control.testing.sim_clock import EventQueue, Timer
from pd_control.testing.sim_trace import Trace

#: A peer that was silent this long is lost: three missed beats of one second.
HEARTBEAT_LOSS_S = 3.0
CONNECT_TIMEOUT_S = 3.0
#: A repeated call comes at most so long after the first: far below the life of a tombstone.
MAX_LATE_S = 5.0
#: First pause before a broken channel is opened again.
RECONNECT_S = 0.05


class Process:
    """One operating-system process: it can be killed, restarted with a new incarnation, or paused.

    Work is handed to it with :meth:`run`. Work for an earlier incarnation is discarded, work for a
    paused one waits, in order, until it goes on.
    """

    __slots__ = ("alive", "host", "incarnation", "name", "num_starts", "paused_until_s", "queue")

    def __init__(self, queue: EventQueue, name: str, host: str) -> None:
        self.queue = queue
        self.name = name
        self.host = host
        self.alive = False
        self.incarnation = b""
        self.num_starts = 0
        self.paused_until_s = 0.0

    def start(self) -> None:
        """Come up with a fresh incarnation (deterministic: name and number of starts)."""
        self.num_starts += 1
        self.alive = True
        self.paused_until_s = 0.0
        self.incarnation = f"{self.name}#{self.num_starts}".encode().ljust(16, b"\0")[:16]

    def kill(self) -> None:
        self.alive = False
        self.paused_until_s = 0.0

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Timer:
        """Run ``fn(*args)`` in this incarnation after ``delay_s``, later if it is paused then."""
        queue = self.queue
        return queue.push(queue.now_s + delay_s, fn, args, self, self.num_starts)

    def at(self, time_s: float, fn: Callable[..., None], *args: Any) -> Timer:
        """The same at an instant."""
        return self.queue.push(time_s, fn, args, self, self.num_starts)

    def is_(self, start: int) -> bool:
        return self.alive and self.num_starts == start

    def __repr__(self) -> str:
        return f"<Process {self.name}#{self.num_starts} {'up' if self.alive else 'down'}>"


class ChannelOwner(Protocol):
    """What one end of a channel is told. Calls come on the process's loop thread, in order."""

    def on_news(self, channel: Channel, side: int, head: str, items: list[Any]) -> None: ...

    def on_channel_lost(self, channel: Channel, side: int, reason: str) -> None: ...


class _Stream:
    """One direction of a channel."""

    __slots__ = ("busy_until_s", "expected", "first_unacked", "flush_timer", "items", "num_sent")

    def __init__(self) -> None:
        self.items: deque[tuple[str, Any]] = deque()  # not yet acknowledged, oldest first
        self.first_unacked = 1  # number of items[0]
        self.num_sent = 0  # how many of items are in the frame in flight
        self.expected = 1  # the receiver's next number
        self.busy_until_s = 0.0  # the frame in flight is acknowledged at this instant
        self.flush_timer: Timer | None = None


class Channel:
    """Two ordered, acknowledged streams between two live incarnations.

    ``ends`` and ``owners`` are indexed by side; side 0 opened it. ``send`` never fails: on a lost channel
    the item is dropped, as the real stream does after it told its owner.
    """

    __slots__ = (
        "broken_since_s",
        "ends",
        "gen",
        "lost",
        "net",
        "owners",
        "starts",
        "streams",
        "told",
    )

    def __init__(
        self, net: Network, ends: tuple[Process, Process], owners: tuple[ChannelOwner, ChannelOwner]
    ) -> None:
        self.net = net
        self.ends = ends
        self.owners = owners
        self.starts = (ends[0].num_starts, ends[1].num_starts)
        self.streams = (_Stream(), _Stream())  # streams[side] is sent by that side
        self.lost = False
        self.told = [False, False]
        self.broken_since_s: float | None = None
        self.gen = 0  # one per TCP connection; frames of an older one never arrive

    def send(self, side: int, head: str, item: Any) -> None:
        """Publish one item from ``side``. Never blocks."""
        if self.lost:
            return
        stream = self.streams[side]
        self.publish(side, head, item)
        if self.broken_since_s is None and stream.flush_timer is None:
            net = self.net
            if net.queue.now_s >= stream.busy_until_s:
                self.acked(side)
                # The loop thread gathers what is published in one turn.
                stream.flush_timer = net.queue.after(0.0, self._flush, side, self.gen)
            else:
                stream.flush_timer = net.queue.at(stream.busy_until_s, self._flush, side, self.gen)

    def connect(self) -> None:
        """The opener has the acceptor's answer: the streams run."""
        if not self.lost and self.broken_since_s is not None:
            self._resume()

    def _resume(self) -> None:
        self.broken_since_s = None
        for side in (0, 1):
            self.attach(side)
        for side in (0, 1):
            self._flush(side, self.gen)

    def stall(self, side: int, delay_s: float) -> None:
        """Let nothing of this stream leave for a while (a slow reader, a full socket)."""
        if self.lost:
            return
        stream = self.streams[side]
        now_s = self.net.queue.now_s
        if now_s >= stream.busy_until_s:
            self.acked(side)
        stream.busy_until_s = max(now_s, stream.busy_until_s) + delay_s
        if stream.flush_timer is not None:
            stream.flush_timer.cancel()
            stream.flush_timer = self.net.queue.at(stream.busy_until_s, self._flush, side, self.gen)

    # What the streams themselves do; `sim_wire` has the same with the real machines.

    def publish(self, side: int, head: str, item: Any) -> None:
        self.streams[side].items.append((head, item))

    def attach(self, side: int) -> None:
        """A connection stands; this side's stream may send on it."""

    def detach(self, side: int) -> None:
        """The connection broke: what was in flight will be sent again."""
        self.streams[side].num_sent = 0

    def acked(self, side: int) -> None:
        """The frame in flight from this side is acknowledged."""
        stream = self.streams[side]
        for _ in range(stream.num_sent):
            stream.items.popleft()
        stream.first_unacked += stream.num_sent
        stream.num_sent = 0

    def next_frame(self, side: int) -> Any:
        """All that waits, with the number of its first item; None if nothing does."""
        stream = self.streams[side]
        stream.num_sent = len(stream.items)
        return (stream.first_unacked, list(stream.items)) if stream.items else None

    def accept(self, side: int, frame: Any) -> list[tuple[str, list[Any]]]:
        """The groups in a frame from this side that were not delivered before."""
        stream = self.streams[side]
        first, items = frame
        skip = stream.expected - first
        if skip > 0:
            self.net.trace.count("news.duplicate_items", min(skip, len(items)))
            items = items[skip:]
        if items:
            stream.expected = max(stream.expected, first) + len(items)
        groups: list[tuple[str, list[Any]]] = []
        for head, item in items:
            if groups and groups[-1][0] == head:
                groups[-1][1].append(item)
            else:
                groups.append((head, [item]))
        return groups

    def _flush(self, side: int, gen: int) -> None:
        stream = self.streams[side]
        stream.flush_timer = None
        if self.lost or gen != self.gen or self.broken_since_s is not None:
            return
        self.acked(side)
        frame = self.next_frame(side)
        if frame is None:
            return
        net = self.net
        delay_s = net.latency_s(self.ends[side], self.ends[1 - side])
        stream.busy_until_s = (
            net.queue.now_s + delay_s + net.latency_s(self.ends[side], self.ends[1 - side])
        )
        net.queue.after(delay_s, self._arrive, side, gen, frame)
        if net.break_channel_rate and net.rng.random() < net.break_channel_rate:
            net.queue.after(net.rng.random() * 2 * delay_s, self.break_connection, gen)

    def _arrive(self, side: int, gen: int, frame: Any) -> None:
        receiver = self.ends[1 - side]
        if self.lost or gen != self.gen or not receiver.is_(self.starts[1 - side]):
            return
        now_s = self.net.queue.now_s
        if now_s < receiver.paused_until_s:
            # Unread bytes in the socket buffer; the acknowledgement waits as well.
            self.streams[side].busy_until_s += receiver.paused_until_s - now_s
            timer = self.streams[side].flush_timer
            if timer is not None:
                timer.cancel()
                self.streams[side].flush_timer = self.net.queue.at(
                    self.streams[side].busy_until_s, self._flush, side, gen
                )
            self.net.queue.at(receiver.paused_until_s, self._arrive, side, gen, frame)
            return
        owner = self.owners[1 - side]
        for head, items in self.accept(side, frame):
            owner.on_news(self, 1 - side, head, items)

    def break_connection(self, gen: int | None = None) -> None:
        """The TCP connection breaks. What was not acknowledged may or may not have arrived."""
        if self.lost or self.broken_since_s is not None or (gen is not None and gen != self.gen):
            return
        self.net.trace.count("net.channel_breaks")
        self.gen += 1
        now_s = self.net.queue.now_s
        self.broken_since_s = now_s
        for side, stream in enumerate(self.streams):
            if now_s >= stream.busy_until_s:
                self.acked(side)
            self.detach(side)
            stream.busy_until_s = 0.0
            if stream.flush_timer is not None:
                stream.flush_timer.cancel()
                stream.flush_timer = None
        self.net.queue.after(RECONNECT_S * (0.5 + self.net.rng.random()), self._reconnect)

    def _reconnect(self) -> None:
        if self.lost or self.broken_since_s is None:
            return
        net = self.net
        now_s = net.queue.now_s
        for side in (0, 1):
            if not self.ends[side].is_(self.starts[side]):
                self._lose("peer restarted")
                return
        up_s = net.path_up_at_s(self.ends[0], self.ends[1])
        paused_s = max(self.ends[0].paused_until_s, self.ends[1].paused_until_s)
        up_s = max(up_s, paused_s, now_s)
        if up_s - self.broken_since_s > HEARTBEAT_LOSS_S and net.crosses(*self.ends):
            lose_s = self.broken_since_s + HEARTBEAT_LOSS_S
            net.queue.at(lose_s, self._lose, "missed heartbeats")
            return
        if up_s > now_s:
            net.queue.at(up_s + RECONNECT_S * net.rng.random(), self._reconnect)
            return
        net.trace.count("net.channel_resumes")
        self._resume()

    def peer_died(self) -> None:
        """One end's process is gone: the other sees the end of the connection (or silence) and is told."""
        if self.lost:
            return
        net = self.net
        quick = not net.crosses(*self.ends) or net.rng.random() < 0.7
        delay_s = net.rng.random() * 0.01 if quick else HEARTBEAT_LOSS_S
        self.gen += 1
        self.broken_since_s = net.queue.now_s
        net.queue.after(delay_s, self._lose, "peer died")

    def peer_silent(self) -> None:
        """One end has said nothing for three heartbeats, if it is still paused: the channel is lost."""
        now_s = self.net.queue.now_s
        if not self.lost and any(end.paused_until_s > now_s for end in self.ends):
            self.net.trace.count("net.heartbeats_missed")
            self._lose("missed heartbeats")

    def close(self, reason: str) -> None:
        """One side gives the channel up; the other learns it."""
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = True
        self.gen += 1
        net = self.net
        net.trace.count("net.channels_lost")
        net.forget_channel(self)
        for stream in self.streams:
            stream.items.clear()
            if stream.flush_timer is not None:
                stream.flush_timer.cancel()
                stream.flush_timer = None
        for side in (0, 1):
            if self.ends[side].is_(self.starts[side]):
                spread_s = net.rng.random() * (1.0 if net.crosses(*self.ends) else 0.001)
                self.ends[side].after(spread_s, self._tell, side, reason)

    def _tell(self, side: int, reason: str) -> None:
        if not self.told[side]:
            self.told[side] = True
            self.owners[side].on_channel_lost(self, side, reason)


class Network:
    """Latency, loss and partitions between processes. One per world."""

    def __init__(self, queue: EventQueue, rng: random.Random, trace: Trace) -> None:
        self.queue = queue
        self.rng = rng
        self.trace = trace
        self.channel_class: type[Channel] = Channel
        self.base_latency_s = 0.0002
        self.local_latency_s = 0.00005
        self.spike_rate = 0.0
        self.spike_s = 0.0
        self.lose_call_rate = 0.0
        self.duplicate_call_rate = 0.0
        self.break_channel_rate = 0.0
        self.break_data_rate = 0.0
        self._partitions: dict[tuple[str, str], float] = {}  # hosts (sorted) -> end of it
        self._channels: dict[Channel, None] = {}

    def calm(self) -> None:
        """Stop all random loss; partitions end by themselves."""
        self.lose_call_rate = self.duplicate_call_rate = 0.0
        self.break_channel_rate = self.break_data_rate = 0.0
        self.spike_rate = 0.0

    # -- paths ---------------------------------------------------------------------------------

    def crosses(self, a: Process, b: Process) -> bool:
        """Whether the two processes sit on different hosts."""
        return a.host != b.host

    def latency_s(self, a: Process, b: Process) -> float:
        base_s = self.base_latency_s if a.host != b.host else self.local_latency_s
        rnd = self.rng.random
        if self.spike_rate and rnd() < self.spike_rate:
            return base_s + self.spike_s * rnd()
        return base_s * (0.5 + rnd())

    def partition(self, host_a: str, host_b: str, duration_s: float) -> None:
        """Cut the path between two hosts for a while: nothing gets through, connections break."""
        key = (host_a, host_b) if host_a <= host_b else (host_b, host_a)
        until_s = self.queue.now_s + duration_s
        self._partitions[key] = max(until_s, self._partitions.get(key, 0.0))
        for channel in list(self._channels):
            hosts = {channel.ends[0].host, channel.ends[1].host}
            if hosts == {host_a, host_b}:
                channel.break_connection()

    def path_up_at_s(self, a: Process, b: Process) -> float:
        """When the path is (or will be) open; never later than a known partition's end."""
        if not self._partitions:
            return 0.0
        key = (a.host, b.host) if a.host <= b.host else (b.host, a.host)
        return self._partitions.get(key, 0.0)

    def path_is_up(self, a: Process, b: Process) -> bool:
        return self.queue.now_s >= self.path_up_at_s(a, b)

    # -- calls ---------------------------------------------------------------------------------

    def call(
        self,
        caller: Process,
        callee: Process,
        handle: Callable[[Callable[[Any], None]], None],
        answered: Callable[[Any], None],
        failed: Callable[[str], None],
        timeout_s: float,
        expect_incarnation: bytes | None = None,
        once: bool = False,
    ) -> None:
        """One call. ``handle(answer)`` runs at the callee; then exactly one of ``answered(value)`` and
        ``failed(kind)`` runs at the caller, kind being ``UNREACHABLE``, ``PEER_LOST`` or ``TIMEOUT``.
        A caller that died meanwhile gets neither. ``once``: not idempotent, never repeated."""
        queue, rng = self.queue, self.rng
        done = False
        timer: Timer | None = None

        def finish(fn: Callable[[Any], None], value: Any) -> None:
            nonlocal done
            if not done:
                done = True
                if timer is not None:
                    timer.cancel()
                fn(value)

        def fail_after(delay_s: float, kind: str) -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
            timer = caller.after(delay_s, finish, failed, kind)

        if not callee.alive:
            fail_after(self.latency_s(caller, callee), "UNREACHABLE")
            return
        if not self.path_is_up(caller, callee):
            fail_after(min(timeout_s, CONNECT_TIMEOUT_S), "UNREACHABLE")
            return
        timer = caller.after(timeout_s, finish, failed, "TIMEOUT")
        start = callee.num_starts

        def arrive() -> None:
            if expect_incarnation is not None and callee.incarnation != expect_incarnation:
                caller.after(self.latency_s(caller, callee), finish, failed, "PEER_LOST")
                return
            handle(answer)

        def answer(value: Any) -> None:
            if not self.path_is_up(caller, callee) or rng.random() < self.lose_call_rate:
                self.trace.count("net.answers_lost")
                return
            caller.after(self.latency_s(caller, callee), finish, answered, value)

        def deliver() -> None:
            if not callee.is_(start):
                # The connection ends; the caller sees it unless the host itself is cut off.
                fail_after(self.latency_s(caller, callee), "PEER_LOST")
                return
            if not self.path_is_up(caller, callee) or rng.random() < self.lose_call_rate:
                self.trace.count("net.calls_lost")
                return
            callee.after(0.0, arrive)
            if not once and self.duplicate_call_rate and rng.random() < self.duplicate_call_rate:
                self.trace.count("net.calls_duplicated")
                # Soon, or long after the first one was handled and its work is over.
                late_s = self.latency_s(caller, callee) * rng.choice((3, 300, 10_000))
                callee.after(min(late_s, MAX_LATE_S) * rng.random(), arrive)

        queue.after(self.latency_s(caller, callee), deliver)

    # -- channels ------------------------------------------------------------------------------

    def open_channel(
        self,
        opener: Process,
        acceptor: Process,
        owners: tuple[ChannelOwner, ChannelOwner],
        connected: bool = True,
    ) -> Channel:
        """A channel between two live processes (the LINK call is the caller's business). Not
        ``connected``: what is sent waits for :meth:`Channel.connect`, the opener's reading of GO."""
        channel = self.channel_class(self, (opener, acceptor), owners)
        channel.broken_since_s = self.queue.now_s
        self._channels[channel] = None
        if connected:
            channel.connect()
        return channel

    def forget_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def process_died(self, process: Process) -> None:
        """Call after ``process.kill()``: the other ends of its channels notice, sooner or later."""
        for channel in list(self._channels):
            if process in channel.ends:
                channel.peer_died()

    def process_paused(self, process: Process) -> None:
        """Call after ``paused_until_s`` was set: a long silence costs the links to other hosts."""
        for channel in self._channels:
            if process in channel.ends and self.crosses(*channel.ends):
                self.queue.after(HEARTBEAT_LOSS_S, channel.peer_silent)

    def break_some_channel(self) -> None:
        """Break one live channel, chosen at random (fault injection)."""
        if self._channels:
            self.rng.choice(list(self._channels)).break_connection()
