"""The testing kit is a product too."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_rpc.testing import (
    Cut,
    Delayed,
    FaultFilter,
    FaultProxy,
    Faults,
    ManualClock,
    ScriptedPeer,
    memory_pair,
    memory_streams,
)
from simple_rpc.testing.clock import settle

GUARD_S = 30.0


# -- clock -------------------------------------------------------------------------------------------


def test_timers_run_in_order_each_at_its_own_time():
    clock = ManualClock(100.0)
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now()))

    clock.call_later(2.0, note, "b")
    clock.call_later(1.0, note, "a")
    clock.call_later(2.0, note, "c")
    clock.call_later(3.0, note, "later")
    clock.call_later(1.5, note, "cancelled").cancel()
    assert clock.next_due_s == 101.0
    assert clock.advance(2.0) == 3
    assert seen == [("a", 101.0), ("b", 102.0), ("c", 102.0)]
    assert clock.now() == 102.0
    assert clock.advance(0.999) == 0
    assert clock.advance(0.001) == 1
    assert clock.next_due_s is None


def test_a_timer_set_by_a_timer_runs_within_the_same_advance_if_it_is_due():
    clock = ManualClock(0.0)
    beats: list[float] = []

    def beat() -> None:
        beats.append(clock.now())
        clock.call_later(1.0, beat)

    clock.call_later(1.0, beat)
    clock.advance(3.5)
    assert beats == [1.0, 2.0, 3.0]


def test_a_jump_runs_what_is_overdue_late():
    clock = ManualClock(0.0)
    seen: list[float] = []
    clock.call_later(1.0, lambda: seen.append(clock.now()))
    clock.jump(10.0)
    assert seen == [10.0]


def test_time_does_not_go_back():
    with pytest.raises(ValueError, match="forward"):
        ManualClock().advance(-1.0)


# -- faults ------------------------------------------------------------------------------------------


def joined(actions: list[Delayed | Cut]) -> bytes:
    return b"".join(action.data for action in actions if isinstance(action, Delayed))


def test_no_faults_change_nothing():
    assert FaultFilter(Faults()).feed(b"hello") == [Delayed(0.0, b"hello")]
    assert FaultFilter(Faults(cut_at=9)).feed(b"") == []


def test_split_and_delay():
    assert FaultFilter(Faults(split=2, delay_s=0.5)).feed(b"hello") == [
        Delayed(0.5, b"he"),
        Delayed(0.5, b"ll"),
        Delayed(0.5, b"o"),
    ]


def test_offsets_count_over_all_writes():
    fault_filter = FaultFilter(Faults(corrupt={1: 0xFF, 5: 0x01}))
    assert joined(fault_filter.feed(b"\x00\x00\x00")) == b"\x00\xff\x00"
    assert joined(fault_filter.feed(b"\x00\x00\x00")) == b"\x00\x00\x01"


@pytest.mark.parametrize("cut_at", range(6))
def test_cut_before_byte_n(cut_at):
    actions = FaultFilter(Faults(cut_at=cut_at, delay_s=1.0)).feed(b"hello!")
    assert joined(actions) == b"hello!"[:cut_at]
    assert actions[-1] == Cut(1.0)


def test_a_cut_at_the_end_waits_for_the_next_byte():
    fault_filter = FaultFilter(Faults(cut_at=5))
    assert fault_filter.feed(b"hello") == [Delayed(0.0, b"hello")]
    assert fault_filter.feed(b"!") == [Cut(0.0)]
    assert fault_filter.feed(b"more") == []


def test_a_black_hole_swallows_for_ever_and_a_range_only_itself():
    assert joined(FaultFilter(Faults(drop=[(2, None)])).feed(b"hello")) == b"he"
    assert joined(FaultFilter(Faults(drop=[(1, 3)])).feed(b"hello")) == b"hlo"


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="negative"):
        Faults(delay_s=-1)


@given(
    st.lists(st.binary(max_size=20)), st.integers(0, 9), st.none() | st.integers(0, 60), st.data()
)
def test_chunking_does_not_matter(chunks, split, cut_at, data):
    """What arrives depends on offsets only, not on how it was written."""
    drop = data.draw(st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 60))))
    corrupt = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 255)))
    faults = Faults(split=split, cut_at=cut_at, drop=drop, corrupt=corrupt)
    in_pieces = FaultFilter(faults)
    pieces = b"".join(joined(in_pieces.feed(chunk)) for chunk in chunks)
    at_once = FaultFilter(faults)
    assert joined(at_once.feed(b"".join(chunks))) == pieces
    assert at_once.is_cut == in_pieces.is_cut


# -- memory pair -------------------------------------------------------------------------------------


class Recorder(asyncio.Protocol):
    def __init__(self, closes_on_eof: bool = True) -> None:
        self.events: list[object] = []
        self.data = b""
        self._keep = not closes_on_eof

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.events.append(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self._keep

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(("lost", type(exc).__name__ if exc else None))

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


async def test_bytes_arrive_in_order_and_never_within_the_write():
    a, b = Recorder(), Recorder()
    end_a, _ = memory_pair(a, b)
    end_a.write(b"one")
    end_a.write(b"two")
    assert b.data == b""
    await settle()
    assert b.events == [b"one", b"two"]


async def test_closing_delivers_what_was_written_then_the_end():
    a, b = Recorder(), Recorder()
    end_a, _ = memory_pair(a, b)
    end_a.write(b"bye")
    end_a.close()
    end_a.write(b"too late")
    await settle()
    assert b.events == [b"bye", "eof", ("lost", None)]
    assert a.events == [("lost", None)]


async def test_a_cut_loses_what_was_on_the_way_and_both_ends_see_it():
    a, b = Recorder(), Recorder()
    end_a, end_b = memory_pair(a, b)
    end_a.write(b"lost")
    end_b.cut()
    await settle()
    assert a.events == b.events == [("lost", "ConnectionResetError")]


async def test_a_fault_cuts_after_n_bytes():
    a, b = Recorder(), Recorder()
    end_a, _ = memory_pair(a, b, a_to_b=Faults(cut_at=3, split=1))
    end_a.write(b"hello")
    await settle()
    assert b.data == b"hel"
    assert b.events[-1] == ("lost", "ConnectionResetError")
    assert a.events == [("lost", "ConnectionResetError")]


async def test_delays_follow_the_clock():
    clock = ManualClock()
    a, b = Recorder(), Recorder()
    end_a, _ = memory_pair(a, b, a_to_b=Faults(delay_s=1.0), clock=clock)
    end_a.write(b"slow")
    end_a.close()
    await settle()
    assert b.events == []
    clock.advance(1.0)
    await settle()
    assert b.events == [b"slow", "eof", ("lost", None)]


async def test_a_reader_that_pauses_pushes_back():
    a, b = Recorder(), Recorder()
    end_a, end_b = memory_pair(a, b)
    end_b.pause_reading()
    end_a.write(b"x" * 100_000)
    await settle()
    assert b.data == b""
    assert a.events == ["pause"]
    assert end_a.get_write_buffer_size() == 100_000
    end_b.resume_reading()
    await settle()
    assert len(b.data) == 100_000
    assert a.events == ["pause", "resume"]


async def test_streams():
    (reader_a, writer_a), (reader_b, writer_b) = memory_streams()
    writer_a.write(b"question")
    assert await asyncio.wait_for(reader_b.readexactly(8), GUARD_S) == b"question"
    writer_b.write(b"answer")
    writer_b.close()
    assert await asyncio.wait_for(reader_a.read(), GUARD_S) == b"answer"
    writer_a.close()
    await settle()


# -- real sockets ------------------------------------------------------------------------------------


async def echo(peer) -> None:
    while True:
        head, body = await peer.read_frame()
        peer.send(head, body)


async def connect(address):
    return await asyncio.open_connection(address.host, address.port)


async def test_a_scripted_peer_says_what_its_script_says():
    async with ScriptedPeer(echo) as peer:
        reader, writer = await connect(peer.address)
        writer.write(b"PING\x02\x00\x00\x00\x91\x07")
        assert await reader.readexactly(10) == b"PING\x02\x00\x00\x00\x91\x07"
        writer.close()
    assert peer.num_connections == 1


async def test_what_goes_wrong_in_a_script_is_raised_at_the_end():
    async def wants_helo(peer) -> None:
        await peer.expect("HELO")

    async def play() -> None:
        async with ScriptedPeer(wants_helo) as peer:
            reader, writer = await connect(peer.address)
            writer.write(b"PING\x01\x00\x00\x00\x90")
            assert await reader.read() == b""
            writer.close()

    with pytest.raises(AssertionError, match="expected a HELO frame, got PING"):
        await play()


async def test_a_script_that_resets():
    async def rude(peer) -> None:
        await peer.read_exactly(1)
        peer.reset()

    async with ScriptedPeer(rude) as peer:
        reader, writer = await connect(peer.address)
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def test_a_scripted_peer_on_a_unix_path(tmp_path):
    async with ScriptedPeer(echo, path=f"{tmp_path}/s") as peer:
        reader, writer = await asyncio.open_unix_connection(peer.address.path)
        writer.write(b"PING\x01\x00\x00\x00\x90")
        assert await reader.readexactly(9)
        writer.close()


async def test_a_proxy_passes_corrupts_and_counts():
    faults = [(Faults(), Faults()), (Faults(corrupt={8: 0x01}), Faults(split=1))]
    async with (
        ScriptedPeer(echo) as peer,
        FaultProxy(peer.address, lambda n: faults[n]) as proxy,
    ):
        for expected in (b"PING\x01\x00\x00\x00\x90", b"PING\x01\x00\x00\x00\x91"[:8] + b"\x90"):
            reader, writer = await connect(proxy.address)
            writer.write(
                b"PING\x01\x00\x00\x00" + (b"\x90" if proxy.num_connections < 2 else b"\x91")
            )
            assert await asyncio.wait_for(reader.readexactly(9), GUARD_S) == expected
            writer.close()
        assert proxy.num_connections == 2


async def test_a_hanging_proxy_passes_nothing_and_closes_nothing():
    async with ScriptedPeer(echo) as peer, FaultProxy(peer.address) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(b"PING\x01\x00\x00\x00\x90")
        await reader.readexactly(9)
        proxy.hang()
        writer.write(b"PING\x01\x00\x00\x00\x90")
        read = asyncio.ensure_future(reader.readexactly(1))
        await settle(200)
        assert not read.done()
        proxy.cut_all()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(read, GUARD_S)
        writer.close()


async def test_a_proxy_closes_one_side_when_the_other_does():
    async def hangs_up(peer) -> None:
        await peer.read_exactly(1)

    async with ScriptedPeer(hangs_up) as peer, FaultProxy(peer.address) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(), GUARD_S) == b""
        writer.close()
        assert not proxy.connections
