"""Calls over real sockets, on both event loops: answers, errors, deadlines, cancellation, the end."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from simple_rpc import (
    BusyError,
    Client,
    ClosedError,
    Code,
    ConnectionLostError,
    Deadline,
    DeadlineError,
    Identity,
    InvalidMessageError,
    Limits,
    Method,
    PeerProtocolError,
    Phase,
    RemoteError,
    RpcError,
    UnreachableError,
)
from simple_rpc._session import Session
from simple_rpc.testing import ManualClock, ScriptedPeer
from tests.rpc_kit import ECHO, LOOPS, WAIT, Text, pool_of, rig, soon, until


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


@pytest.fixture(params=["tcp", "unix"])
def listen(request, tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/s.sock"


async def test_an_answer(listen):
    async with rig(listen=listen) as r:
        assert (await r.call("hello")).text == "hello"
        assert r.address.port or r.address.path


async def test_many_calls_reuse_one_connection(listen):
    async with rig(listen=listen) as r:
        for number in range(50):
            assert (await r.call(str(number))).text == str(number)
        assert r.server.stats().num_accepted == 1
        assert pool_of(r.client, r.address)["idle"] == 1


async def test_answers_of_every_size_go_to_their_own_callers():
    sizes = [0, 1, 1000, 65_535, 65_536, 200_000, 1_000_000, 4_000_000]
    async with rig() as r:

        async def one(size: int) -> None:
            data = bytes([size % 251]) * size
            answer = await r.client.call(
                r.address, ECHO, Text(str(size), size, data), deadline=soon()
            )
            assert answer == Text(str(size), size, data)

        await asyncio.gather(*[one(size) for size in sizes * 3])


async def test_more_callers_than_connections_queue_and_all_are_served():
    async with rig(client={"limits": Limits(max_connections_per_peer=3)}) as r:
        answers = await asyncio.gather(*[r.call(str(number)) for number in range(100)])
        assert [answer.text for answer in answers] == [str(number) for number in range(100)]
        assert r.server.stats().num_accepted == 3


# Errors


async def test_a_refusal_arrives_with_code_message_and_details():
    gone: Method[Text, Text] = Method("GONE", Text, Text)

    def refuse(request, context):
        raise RpcError(Code.GONE, "it was here", {"attempt": 3})

    async with rig(setup=lambda r: r.server.register(gone, refuse)) as r:
        with pytest.raises(RemoteError, match=r"GONE \[handler\]: it was here") as failure:
            await r.call("x", gone)
        assert failure.value.code is Code.GONE
        assert failure.value.details == {"attempt": 3}
        assert failure.value.phase is Phase.HANDLER
        assert (await r.call()).text == "x"
        assert r.server.stats().num_accepted == 1  # the connection was fine


@pytest.mark.parametrize("is_coroutine", [True, False])
async def test_an_exception_in_a_handler_is_internal_and_keeps_its_secrets(is_coroutine, caplog):
    boom: Method[Text, Text] = Method("BOOM", Text, Text)

    async def explode(request, context):
        raise KeyError("password=hunter2")

    def explode_at_once(request, context):
        raise KeyError("password=hunter2")

    handler = explode if is_coroutine else explode_at_once
    async with rig(setup=lambda r: r.server.register(boom, handler)) as r:
        with caplog.at_level(logging.ERROR), pytest.raises(RemoteError) as failure:
            await r.call("x", boom)
        assert failure.value.code is Code.INTERNAL
        assert "KeyError" in failure.value.message
        assert "hunter2" not in str(failure.value)
        assert "hunter2" in caplog.text  # but the log has it
        assert (await r.call()).text == "x"


async def test_a_handler_that_is_cancelled_from_within_answers_aborted():
    stop: Method[Text, Text] = Method("STOP", Text, Text)

    async def cancel(request, context):
        raise asyncio.CancelledError

    async with rig(setup=lambda r: r.server.register(stop, cancel)) as r:
        with pytest.raises(RemoteError) as failure:
            await r.call("x", stop)
        assert failure.value.code is Code.ABORTED
        assert (await r.call()).text == "x"


async def test_a_call_that_is_cancelled_before_its_handler_has_begun_is_answered(monkeypatch):
    """A task cancelled before its first step runs no line at all, not even a ``finally``."""
    original = Session._call_typed

    def call_and_cancel(session, entry, body):
        original(session, entry, body)
        session._cancel(RpcError(Code.ABORTED, "too early"))

    async with rig() as r:
        with monkeypatch.context() as patched:
            patched.setattr(Session, "_call_typed", call_and_cancel)
            with pytest.raises(RemoteError, match="too early"):
                await r.call("x", WAIT)
        assert r.requests == []
        assert r.server.stats().num_calls == 0
        assert (await r.call()).text == "x"


@pytest.mark.parametrize("value", [None, 5, Text(data="not bytes"), Text(object())], ids=repr)  # type: ignore[arg-type]
async def test_a_handler_that_returns_nonsense_is_internal(value):
    odd: Method[Text, Text] = Method("ODDX", Text, Text)
    async with rig(setup=lambda r: r.server.register(odd, lambda request, context: value)) as r:
        with pytest.raises((RemoteError, PeerProtocolError)) as failure:
            await r.call("x", odd)
        assert failure.value.code in (Code.INTERNAL, Code.CORRUPT)
        assert (await r.call()).text == "x"


async def test_a_response_that_is_too_large_is_an_error_not_a_broken_connection():
    big: Method[Text, Text] = Method("BIGX", Text, Text)
    limits = Limits(max_body_bytes=10_000)
    async with rig(
        server={"limits": limits},
        setup=lambda r: r.server.register(big, lambda request, context: Text(data=bytes(20_000))),
    ) as r:
        with pytest.raises(RemoteError, match="too large") as failure:
            await r.call("x", big)
        assert failure.value.code is Code.INTERNAL
        assert (await r.call()).text == "x"


async def test_a_request_that_is_wrong_or_too_large_never_leaves():
    async with rig(client={"limits": Limits(max_body_bytes=1000)}) as r:
        for wrong in (Text(object()), 5, Text(data=bytes(2000))):  # type: ignore[arg-type]
            with pytest.raises(InvalidMessageError):
                await r.client.call(r.address, ECHO, wrong, deadline=soon())  # type: ignore[arg-type]
        assert r.requests == []
        assert (await r.call()).text == "x"
        assert r.server.stats().num_accepted == 1


async def test_a_request_of_other_types_is_a_bad_request_with_its_path():
    strange: Method[int, Text] = Method.__new__(Method)
    typed = Method("ECHO", Text, Text)
    for name in Method.__slots__:
        setattr(strange, name, getattr(typed, name))
    strange._encode_request = lambda request: (5, "x")
    async with rig() as r:
        with pytest.raises(RemoteError, match=r"Text.text: expected str, got int 5") as failure:
            await r.client.call(r.address, strange, 0, deadline=soon())
        assert failure.value.code is Code.BAD_REQUEST
        assert r.requests == []


async def test_an_unknown_head_ends_that_connection_with_a_reason_and_is_counted(caplog):
    nope: Method[Text, Text] = Method("NOPE", Text, Text)
    async with rig() as r:
        await r.call()
        with pytest.raises(RemoteError, match="NOPE is not known here") as failure:
            await r.call("x", nope)
        assert failure.value.code is Code.CORRUPT
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().closed == {"unknown_head": 1}
        assert "unknown_head" in caplog.text
        assert (await r.call()).text == "x"


def test_registering_a_head_twice_or_a_reserved_one_is_an_error():
    from simple_rpc import Server

    server = Server(Identity("scheduler", "p0"))

    async def raw(reader, writer):
        pass

    server.register(ECHO, lambda request, context: request)
    with pytest.raises(ValueError, match="ECHO is already registered"):
        server.register(ECHO, lambda request, context: request)
    with pytest.raises(ValueError, match="ECHO is already registered"):
        server.register_method("ECHO", raw)
    for head in ("HELO", "OKAY", "LINK"):
        with pytest.raises(ValueError, match="belongs to the protocol"):
            server.register_method(head, raw)
    with pytest.raises(ValueError, match="four ASCII letters"):
        server.register_method("toolong", raw)
    server.on_channel("worker", lambda peer, channel: None)
    with pytest.raises(ValueError, match="already accepted"):
        server.on_channel("worker", lambda peer, channel: None)


# Deadlines and phases


async def test_a_deadline_that_has_passed_sends_nothing():
    async with rig() as r:
        with pytest.raises(DeadlineError) as failure:
            await r.call(deadline=Deadline.after(0))
        assert failure.value.phase is Phase.POOL
        assert r.server.stats().num_accepted == 0


async def test_no_answer_by_the_deadline():
    async with rig() as r:
        with pytest.raises(DeadlineError) as failure:
            await r.call("slow", WAIT, deadline=Deadline.after(0.05))
        # Both ends keep the deadline, and either may be first to say so.
        assert failure.value.phase in (Phase.ANSWER, Phase.HANDLER)
        assert failure.value.code is Code.TIMEOUT
        await until(lambda: r.cancelled == ["slow"])  # the server gave up at the same time
        assert (await r.call()).text == "x"


async def test_the_remaining_time_crosses_the_wire():
    left: Method[Text, Text] = Method("LEFT", Text, Text)
    clock = ManualClock(500.0)

    def remaining(request, context):
        return Text(number=round(context.deadline.remaining_s(clock) * 1000))

    async with rig(
        server={"clock": clock},
        client={"clock": clock},
        setup=lambda r: r.server.register(left, remaining),
    ) as r:
        deadline = Deadline.after(7.25, clock)
        assert (await r.call("x", left, deadline=deadline)).number == 7250
        clock.advance(2.0)
        assert (await r.call("x", left, deadline=deadline)).number == 5250
        assert (await r.call("x", left, deadline=Deadline(float("inf")))).number == 600_000


async def test_a_handler_that_ignores_its_deadline_is_answered_for_by_the_client():
    stubborn: Method[Text, Text] = Method("STUB", Text, Text)
    gate = asyncio.Event()

    async def ignore(request, context):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await gate.wait()
        return request

    async with rig(setup=lambda r: r.server.register(stubborn, ignore)) as r:
        with pytest.raises(DeadlineError):
            await r.call("x", stubborn, deadline=Deadline.after(0.05))
        assert (await r.call()).text == "x"
        gate.set()


async def test_waiting_for_a_pooled_connection_is_its_own_phase():
    async with rig(client={"limits": Limits(max_connections_per_peer=1)}) as r:
        task = asyncio.ensure_future(r.call("first", WAIT))
        await r.started.get()
        with pytest.raises(DeadlineError, match="all 1 connections are busy") as failure:
            await r.call(deadline=Deadline.after(0.05))
        assert failure.value.phase is Phase.POOL
        r.gate.set()
        assert (await task).text == "first"
        assert (await r.call()).text == "x"


async def test_a_request_that_does_not_leave_is_the_send_phase():
    async def deaf(peer):
        await peer.expect("HELO")
        peer.send("OKAY", [1, "r", "i", bytes(16), bytes(32), False, b"", {}])
        peer.writer.transport.pause_reading()
        await asyncio.sleep(3600)

    async with ScriptedPeer(deaf) as peer:
        client = Client(Identity("scheduler", "d0"), limits=Limits(max_body_bytes=64_000_000))
        with pytest.raises(DeadlineError, match="bytes unsent") as failure:
            await client.call(
                peer.address, ECHO, Text(data=bytes(32_000_000)), deadline=Deadline.after(0.3)
            )
        assert failure.value.phase is Phase.SEND
        await client.close()


async def test_nobody_listens():
    async with rig() as r:
        await r.server.close()
        with pytest.raises(UnreachableError) as failure:
            await r.call()
        assert failure.value.phase is Phase.CONNECT
        assert failure.value.code is Code.UNREACHABLE
        assert str(r.address) in str(failure.value)


async def test_a_name_that_does_not_resolve():
    client = Client(Identity("scheduler", "d0"))
    with pytest.raises(UnreachableError):
        await client.call("tcp://no-such-host.invalid:1", ECHO, Text(), deadline=soon())
    await client.close()


@pytest.mark.parametrize("step", ["connect", "hello"])
async def test_a_peer_that_never_answers_the_handshake(step):
    async def silent(peer):
        if step == "hello":
            await peer.expect("HELO")
        await asyncio.sleep(3600)

    async with ScriptedPeer(silent) as peer:
        client = Client(Identity("scheduler", "d0"), limits=Limits(connect_s=0.1))
        with pytest.raises(UnreachableError, match=r"\[hello\]: no connection within 0.1 s"):
            await client.call(peer.address, ECHO, Text(), deadline=soon())
        with pytest.raises(DeadlineError, match=r"TIMEOUT \[hello\]"):
            await client.call(peer.address, ECHO, Text(), deadline=Deadline.after(0.05))
        await client.close()


# Cancellation


async def test_a_cancelled_call_leaves_a_healthy_pool():
    async with rig(client={"limits": Limits(max_connections_per_peer=2)}) as r:
        for number in range(10):
            task = asyncio.ensure_future(r.call(str(number), WAIT))
            await r.started.get()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await r.call("after")).text == "after"  # never the answer of another
        assert pool_of(r.client, r.address) == {
            "idle": 1,
            "busy": 0,
            "opening": 0,
            "waiting": 0,
        }
        r.gate.set()


async def test_cancelling_waiters_and_openers_leaves_a_healthy_pool():
    async with rig(client={"limits": Limits(max_connections_per_peer=2)}) as r:
        for turns in range(12):
            tasks = [asyncio.ensure_future(r.call(str(number))) for number in range(8)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(results):
                if isinstance(result, Text):
                    assert result.text == str(number)
                else:
                    assert isinstance(result, asyncio.CancelledError)
                    assert number % 2 == 0
            snapshot = pool_of(r.client, r.address)
            assert (snapshot["busy"], snapshot["opening"], snapshot["waiting"]) == (0, 0, 0)
            await r.client._pools.find(r.address).idle[0].exchange(ECHO.head, b"\x92\x01\x90", 1e18)  # type: ignore[union-attr]


# Ends


async def test_drain_finishes_calls_in_progress_and_refuses_new_ones():
    async with rig() as r:
        call = asyncio.ensure_future(r.call("last", WAIT))
        await r.started.get()
        drain = asyncio.ensure_future(r.server.drain(Deadline.never()))
        await asyncio.sleep(0)
        with pytest.raises((UnreachableError, ConnectionLostError)):
            await r.call("too late")
        assert not drain.done()
        r.gate.set()
        assert (await call).text == "last"
        await drain
        assert r.cancelled == []


async def test_drain_ends_at_its_deadline():
    async with rig() as r:
        call = asyncio.ensure_future(r.call("stuck", WAIT))
        await r.started.get()
        await r.server.drain(Deadline.after(0.05))
        with pytest.raises(RemoteError, match="the server is closed") as failure:
            await call
        assert failure.value.code is Code.ABORTED
        assert r.cancelled == ["stuck"]


async def test_a_closed_server_refuses_to_listen_and_may_be_closed_again():
    async with rig() as r:
        await r.server.close()
        await r.server.close()
        with pytest.raises(ClosedError):
            await r.server.listen("tcp://127.0.0.1:0")


async def test_a_closed_client_ends_its_calls_and_refuses_new_ones():
    async with rig(client={"limits": Limits(max_connections_per_peer=1)}) as r:
        calls = [asyncio.ensure_future(r.call(str(number), WAIT)) for number in range(3)]
        await r.started.get()
        await r.client.close()
        for call in calls:
            with pytest.raises(ClosedError):
                await call
        with pytest.raises(ClosedError):
            await r.call()
        with pytest.raises(ClosedError):
            await r.client.connect(r.address, soon())
        r.gate.set()


async def test_a_handler_outlives_its_connection_is_held_and_ends_with_the_server():
    """Its effects are not cut in half because of a network; but it is nobody's orphan (F15)."""
    async with rig() as r:
        for text in ("one", "two"):
            call = asyncio.ensure_future(r.call(text, WAIT))
            await r.started.get()
            call.cancel()
            await until(lambda: r.server.stats().num_connections == 0)
        gc.collect()
        assert r.server.stats().num_calls == 2
        assert r.cancelled == []
        await r.server.close()
        assert sorted(r.cancelled) == ["one", "two"]
        assert r.server.stats().num_calls == 0


async def test_a_drained_client_lets_its_calls_finish():
    async with rig() as r:
        call = asyncio.ensure_future(r.call("last", WAIT))
        await r.started.get()
        drain = asyncio.ensure_future(r.client.drain(Deadline.never()))
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await r.call()
        r.gate.set()
        await drain
        assert (await call).text == "last"


async def test_peers_are_bounded_and_the_least_recently_used_goes():
    async with rig() as one, rig() as two, rig() as three:
        client = Client(Identity("scheduler", "d0"), limits=Limits(max_peers=2))
        for r in (one, two, one, three):
            await client.call(r.address, ECHO, Text(), deadline=soon())
        assert set(client.snapshot()) == {str(one.address), str(three.address)}
        await until(lambda: two.server.stats().num_connections == 0)
        calls = [
            asyncio.ensure_future(client.call(r.address, WAIT, Text(), deadline=soon()))
            for r in (one, three)
        ]
        await one.started.get()
        await three.started.get()
        with pytest.raises(BusyError, match="2 peers have calls"):
            await client.call(two.address, ECHO, Text(), deadline=soon())
        one.gate.set()
        three.gate.set()
        await asyncio.gather(*calls)
        await client.close()


async def test_statistics_and_metrics_tell_what_happened():
    async with rig() as r:
        await r.call()
        (line,) = r.server.sessions()
        assert "scheduler d0@" in line
        with pytest.raises(DeadlineError):
            await r.call("slow", WAIT, deadline=Deadline.after(0.05))
        await until(lambda: not r.server.stats().num_calls)
        server, client = r.server.metrics.snapshot().calls, r.client.metrics.snapshot().calls  # type: ignore[attr-defined]
        assert server["server", "ECHO"].codes == {0: 1}
        assert client["client", "ECHO"].codes == {0: 1}
        assert client["client", "WAIT"].codes == {int(Code.TIMEOUT): 1}
        assert server["server", "WAIT"].codes == {int(Code.TIMEOUT): 1}
