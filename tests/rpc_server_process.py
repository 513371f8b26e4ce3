"""A served ECHO and WAIT in a process of its own, to be killed: ``python -m tests.rpc_server_process
ADDRESS``. Prints its address and its incarnation; WAIT never answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from simple_rpc import Address, Identity, Server
from tests.rpc_kit import ECHO, ONCE, WAIT, WAIT_IDEMPOTENT, Text


async def main(address: str) -> None:
    identity = Identity("scheduler", "p0")
    server = Server(identity)

    async def wait(request: Text, context: object) -> Text:
        await asyncio.Event().wait()
        return request

    server.register(ECHO, lambda request, context: request)
    server.register(ONCE, lambda request, context: request)
    server.register(WAIT, wait)
    server.register(WAIT_IDEMPOTENT, wait)
    print(await server.listen(address), identity.incarnation.hex(), flush=True)
    await asyncio.Event().wait()


class ServerProcess:
    """One such process."""

    process: asyncio.subprocess.Process
    address: Address
    incarnation: bytes

    async def start(self, address: str = "tcp://127.0.0.1:0") -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.rpc_server_process",
            address,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        where, incarnation = (await self.process.stdout.readline()).decode().split()
        self.address, self.incarnation = Address.parse(where), bytes.fromhex(incarnation)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def restart(self) -> None:
        """Another incarnation at the same address."""
        await self.kill()
        await self.start(str(self.address))


@asynccontextmanager
async def server_process() -> AsyncIterator[ServerProcess]:
    process = ServerProcess()
    await process.start()
    try:
        yield process
    finally:
        await process.kill()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
