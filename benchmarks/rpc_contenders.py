"""The contenders of benchmarks.rpc: each a server (own process) and a client that makes one call.

All of them do the same work for a call: the client packs a request of 64 block ids with msgpack, the
server unpacks it, packs a short answer, and the client unpacks that. The *floor* does it over bare
asyncio streams: no deadline, no identity, no limits, no errors, no checks of what was unpacked.
``floor_bytes`` does not even pack: both messages are the same bytes every time. All run on uvloop.

The messages of simple_rpc are dataclasses that are not frozen (a frozen one costs about 0.1 us per field
whenever one is made). It serves with a plain function, as the embedding guide recommends for a handler
that decides at once; ``rpc_tcp_coroutine`` has the same handler as a coroutine function, which costs a
task per call.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from simple_rpc import Address, Client, Deadline, Identity, Method, Server

NUM_BLOCKS = 64
REQUEST_ID = "req-0123456789abcdef"
BLOCK_IDS = list(range(7000, 7000 + NUM_BLOCKS))
FIELDS = [REQUEST_ID, BLOCK_IDS, NUM_BLOCKS * 16, 0]
ANSWER = [1, ""]
PREFIX = struct.Struct("<4sI")


@dataclass(slots=True)
class PrefillRequest:
    request_id: str
    block_ids: list[int]
    max_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Accepted:
    code: int
    detail: str = ""


PREFILL = Method("PREF", PrefillRequest, Accepted, idempotent=True)


class Caller(Protocol):
    """One client. ``call`` may be running up to 64 times at once."""

    async def call(self) -> None: ...

    async def close(self) -> None: ...


# simple_rpc


async def serve_rpc(address: str) -> str:
    def prefill(request: PrefillRequest, context: Any) -> Accepted:
        return Accepted(1)

    return await _serve_rpc(address, prefill)


async def serve_rpc_coroutine(address: str) -> str:
    async def prefill(request: PrefillRequest, context: Any) -> Accepted:
        return Accepted(1)

    return await _serve_rpc(address, prefill)


async def _serve_rpc(address: str, handler: Any) -> str:
    server = Server(Identity("scheduler", "bench-server"))
    server.register(PREFILL, handler)
    _KEPT.append(server)
    return str(await server.listen(address))


class RpcCaller:
    def __init__(self, address: str) -> None:
        self.client = Client(Identity("scheduler", "bench-client"))
        self.address = Address.parse(address)

    async def call(self) -> None:
        request = PrefillRequest(REQUEST_ID, BLOCK_IDS, NUM_BLOCKS * 16)
        answer = await self.client.call(
            self.address, PREFILL, request, deadline=Deadline.after(10.0)
        )
        assert answer.code == 1

    async def close(self) -> None:
        await self.client.close()


# The floor: bare streams, one connection per call in flight


async def serve_floor(address: str) -> str:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pack = msgpack.Packer().pack
        while True:
            try:
                _, length = PREFIX.unpack(await reader.readexactly(8))
            except asyncio.IncompleteReadError:
                return
            values = msgpack.unpackb(await reader.readexactly(length))
            assert len(values[1][1]) == NUM_BLOCKS
            body = pack(ANSWER)
            writer.write(PREFIX.pack(b"OKAY", len(body)) + body)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    _KEPT.append(server)
    return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class FloorCaller:
    def __init__(self, address: str) -> None:
        self.address = Address.parse(address)
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.pack = msgpack.Packer().pack

    async def call(self) -> None:
        streams = await self._streams()
        reader, writer = streams
        body = self.pack([10_000, FIELDS])
        writer.write(PREFIX.pack(b"PREF", len(body)) + body)
        _, length = PREFIX.unpack(await reader.readexactly(8))
        answer = msgpack.unpackb(await reader.readexactly(length))
        assert answer[0] == 1
        self.idle.append(streams)

    async def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.idle:
            return self.idle.pop()
        return await asyncio.open_connection(self.address.host, self.address.port)

    async def close(self) -> None:
        for _, writer in self.idle:
            writer.close()


REQUEST_BYTES = msgpack.packb([10_000, FIELDS])
REQUEST_FRAME = PREFIX.pack(b"PREF", len(REQUEST_BYTES)) + REQUEST_BYTES
ANSWER_BYTES = msgpack.packb(ANSWER)
ANSWER_FRAME = PREFIX.pack(b"OKAY", len(ANSWER_BYTES)) + ANSWER_BYTES


async def serve_floor_bytes(address: str) -> str:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                _, length = PREFIX.unpack(await reader.readexactly(8))
                await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                return
            writer.write(ANSWER_FRAME)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    _KEPT.append(server)
    return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class FloorBytesCaller(FloorCaller):
    async def call(self) -> None:
        streams = await self._streams()
        reader, writer = streams
        writer.write(REQUEST_FRAME)
        _, length = PREFIX.unpack(await reader.readexactly(8))
        await reader.readexactly(length)
        self.idle.append(streams)


# zmq.asyncio, DEALER to ROUTER, one socket pair, answers matched by number


async def serve_zmq(address: str) -> str:
    import zmq
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        pack = msgpack.Packer().pack
        while True:
            peer, number, body = await socket.recv_multipart()
            values = msgpack.unpackb(body)
            assert len(values[1][1]) == NUM_BLOCKS
            await socket.send_multipart([peer, number, pack(ANSWER)])

    _KEPT.append(asyncio.ensure_future(serve()))
    return f"tcp://127.0.0.1:{port}"


class ZmqCaller:
    def __init__(self, address: str) -> None:
        import zmq
        import zmq.asyncio

        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.pack = msgpack.Packer().pack
        self.number = 0
        self.waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            number, body = await self.socket.recv_multipart()
            self.waiting.pop(number).set_result(body)

    async def call(self) -> None:
        self.number += 1
        number = self.number.to_bytes(8, "little")
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_multipart([number, self.pack([10_000, FIELDS])])
        assert msgpack.unpackb(await future)[0] == 1

    async def close(self) -> None:
        self.reader.cancel()
        self.socket.close()


# grpc.aio, generic handlers with msgpack as the serializer


async def serve_grpc(address: str) -> str:
    import grpc

    pack = msgpack.Packer().pack

    async def prefill(values: Any, context: Any) -> list[Any]:
        assert len(values[1][1]) == NUM_BLOCKS
        return ANSWER

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        prefill, request_deserializer=msgpack.unpackb, response_serializer=pack
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("pd.Bench", {"Prefill": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _KEPT.append(server)
    return f"tcp://127.0.0.1:{port}"


class GrpcCaller:
    def __init__(self, address: str) -> None:
        import grpc

        self.channel = grpc.aio.insecure_channel(address.removeprefix("tcp://"))
        self.method = self.channel.unary_unary(
            "/pd.Bench/Prefill",
            request_serializer=msgpack.Packer().pack,
            response_deserializer=msgpack.unpackb,
        )

    async def call(self) -> None:
        answer = await self.method([10_000, FIELDS], timeout=10.0)
        assert answer[0] == 1

    async def close(self) -> None:
        await self.channel.close()


_KEPT: list[Any] = []  # servers of this process live as long as it does

CONTENDERS: dict[str, tuple[Any, Any]] = {
    "floor_bytes": (serve_floor_bytes, FloorBytesCaller),
    "floor_tcp": (serve_floor, FloorCaller),
    "rpc_tcp": (serve_rpc, RpcCaller),
    "rpc_uds": (serve_rpc, RpcCaller),
    "rpc_tcp_coroutine": (serve_rpc_coroutine, RpcCaller),
    "zmq": (serve_zmq, ZmqCaller),
    "grpc": (serve_grpc, GrpcCaller),
}
