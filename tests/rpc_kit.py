"""What the tests of simple_rpc share: a few methods, a served pair that checks for leaks at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from simple_rpc import Address, CallContext, Client, Deadline, Identity, Method, Server

LOOPS = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}
SOON_S = 20.0  # a bound on waits that end by themselves: a guard against hanging, not a measurement


@dataclass(frozen=True, slots=True)
class Text:
    text: str = ""
    number: int = 0
    data: bytes = b""


ECHO = Method("ECHO", Text, Text, idempotent=True)
ONCE = Method("ONCE", Text, Text)  # the same, but not to be repeated
WAIT = Method("WAIT", Text, Text)
WAIT_IDEMPOTENT = Method("WAII", Text, Text, idempotent=True)


def soon() -> Deadline:
    return Deadline.after(SOON_S)


@dataclass
class Rig:
    """A server with ECHO and WAIT (until ``gate`` is set), and a client."""

    server: Server
    client: Client
    address: Address
    gate: asyncio.Event
    requests: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    started: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def call(
        self, text: str = "x", method: Method[Text, Text] = ECHO, **options: Any
    ) -> Text:
        options.setdefault("deadline", soon())
        return await self.client.call(self.address, method, Text(text), **options)


def register(rig: Rig) -> None:
    def echo(request: Text, context: CallContext) -> Text:
        rig.requests.append(request.text)
        return request

    async def wait(request: Text, context: CallContext) -> Text:
        rig.requests.append(request.text)
        rig.started.put_nowait(request.text)
        try:
            await rig.gate.wait()
        except asyncio.CancelledError:
            rig.cancelled.append(request.text)
            raise
        return request

    rig.server.register(ECHO, echo)
    rig.server.register(ONCE, echo)
    rig.server.register(WAIT, wait)
    rig.server.register(WAIT_IDEMPOTENT, wait)


@asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """At the end as many sockets and tasks as at the beginning, give or take none."""
    tasks, sockets = asyncio.all_tasks(), num_sockets()
    yield
    for _ in range(200):  # transports close in the loop's next turns
        if not asyncio.all_tasks() - tasks and num_sockets() <= sockets:
            break
        await asyncio.sleep(0.005)
    assert asyncio.all_tasks() - tasks == set()
    assert num_sockets() <= sockets


@asynccontextmanager
async def rig(
    *,
    server: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
    listen: str = "tcp://127.0.0.1:0",
    setup: Callable[[Rig], None] | None = None,
) -> AsyncIterator[Rig]:
    """A served pair; closes both and checks that nothing is left."""
    async with no_leaks():
        srv = Server(Identity("scheduler", "p0"), **(server or {}))
        cli = Client(Identity("scheduler", "d0"), **(client or {}))
        made = Rig(srv, cli, Address(), asyncio.Event())
        register(made)
        if setup is not None:
            setup(made)
        made.address = await srv.listen(listen)
        try:
            yield made
        finally:
            await cli.close()
            await srv.close()
        assert srv.stats().num_connections == 0
        assert srv.stats().num_calls == 0
        assert srv.stats().num_handshaking == 0
        assert len(srv.watchdog) == 0
        assert len(cli._watchdog) == 0


def pool_of(client: Client, address: Address) -> dict[str, int]:
    """The state of a client's pool, also of one that is not there yet."""
    none = {"idle": 0, "busy": 0, "opening": 0, "waiting": 0}
    return client.snapshot().get(str(address), none)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something that needs no time has happened."""
    for _ in range(int(SOON_S / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("never happened")


def num_sockets() -> int:
    """Open sockets of this process. (Event loops keep other descriptors of their own.)"""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


def rss_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
