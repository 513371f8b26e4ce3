"""A data connection spoken by hand: docs/kvt/protocol.md, written down a second time in Python.

Tests use it to be peers that the product's own code cannot be: hanging, lying, damaged.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

GO = b"OKAY\x01\x00\x00\x00\x90"
TCP, CMA = 1, 2  # bits of the transports


def frame(head: bytes, body: bytes) -> bytes:
    return head + struct.pack("<I", len(body)) + body


def detail(text: str) -> bytes:
    return struct.pack("<H", len(text)) + text.encode()


def hello(
    layout: bytes,
    *,
    source_rank: int = 0,
    target_rank: int = 0,
    transports: int = TCP,
    versions: tuple[int, int] = (1, 1),
    pid: int = 0,
    start_time: int = 0,
    nonce_address: int = 0,
    nonce: bytes = bytes(32),
    regions: Sequence[tuple[int, int, int, int]] = (),
) -> bytes:
    body = struct.pack("<HHiiI", *versions, source_rank, target_rank, transports)
    body += struct.pack("<IQQ", pid, start_time, nonce_address) + nonce
    body += struct.pack("<II", len(layout), len(regions)) + layout
    for layer, offset, extent, address in regions:
        body += struct.pack("<HQQQ", layer, offset, extent, address)
    return frame(b"KHEL", body)


def welcome(
    layout: bytes, *, code: int = 0, transport: int = 0, version: int = 1, note: str = ""
) -> bytes:
    body = struct.pack("<BBHI", code, transport, version, len(layout)) + detail(note) + layout
    return frame(b"KWEL", body)


def open_(
    transfer: int, key: bytes, sender_incarnation: bytes, first: int, end: int, *, crc: bool = False
) -> bytes:
    body = struct.pack("<II", transfer, int(crc)) + key + sender_incarnation
    return frame(b"OPEN", body + struct.pack("<II", first, end))


Run = tuple[int, int, int]  # src offset, dst offset, length


def chunk(transfer: int, layer: int, first: int, end: int) -> bytes:
    return struct.pack("<IHHII", transfer, layer, 0, first, end)


def blocks(transfer: int, layer: int, first: int, end: int, runs: Sequence[Run]) -> bytes:
    body = chunk(transfer, layer, first, end)
    body += struct.pack("<IQ", len(runs), sum(r[2] for r in runs))
    for src, dst, length in runs:
        body += struct.pack("<QQQIH", src, dst, length, transfer, layer)
    return frame(b"DESC", body)


def chunk_end(transfer: int, layer: int, first: int, end: int, crc: int = 0) -> bytes:
    return frame(b"LAYR", chunk(transfer, layer, first, end) + struct.pack("<I", crc))


def end(transfer: int) -> bytes:
    return frame(b"ENDT", struct.pack("<I", transfer))


def result(head: bytes, transfer: int, code: int, tokens: int, text: str) -> bytes:
    return frame(head, struct.pack("<IBI", transfer, code, tokens) + detail(text))


def held(transfer: int, yes: bool) -> bytes:
    return frame(b"HELD", struct.pack("<IB", transfer, int(yes)))


def ask_held(transfer: int) -> bytes:
    return frame(b"ASKH", struct.pack("<I", transfer))


def start_time_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as f:
        return int(f.read().rpartition(")")[2].split()[19])


@dataclass
class RawPeer:
    """One end of a connection, blocking, with a deadline on each read."""

    sock: socket.socket

    def __post_init__(self) -> None:
        self.sock.settimeout(30.0)

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def read(self, size: int) -> bytes:
        out = b""
        while len(out) < size:
            more = self.sock.recv(size - len(out))
            if not more:
                raise EOFError(f"{len(out)} of {size} bytes")
            out += more
        return out

    def read_go(self) -> None:
        assert self.read(len(GO)) == GO

    def read_frame(self) -> tuple[bytes, bytes]:
        head, length = struct.unpack("<4sI", self.read(8))
        return head, self.read(length)

    def read_result(self) -> tuple[bytes, int, int, int, str]:
        """(head, transfer, code, tokens, detail) of a DONE, CANC or FAIL."""
        head, body = self.read_frame()
        assert head in (b"DONE", b"CANC", b"FAIL"), (head, body)
        transfer, code, tokens, size = struct.unpack("<IBIH", body[:11])
        return head, transfer, code, tokens, body[11 : 11 + size].decode()

    def greet(self, hello_frame: bytes) -> bytes:
        """Sends KHEL and returns the body of KWEL."""
        self.send(hello_frame)
        head, body = self.read_frame()
        assert head == b"KWEL", (head, body)
        return body

    def is_over(self) -> bool:
        """Reads to the end of the connection."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        return True


def own_process() -> dict[str, int]:
    return {"pid": os.getpid(), "start_time": start_time_ticks(os.getpid())}
