"""The hex of docs/kvt/protocol.md is what a sender and a receiver send."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import kvt_wire as wire

DOC = Path(__file__).resolve().parents[3] / "docs" / "kvt" / "protocol.md"
KEY, SCHEDULER = bytes(range(16)), b"P" * 16

FRAMES = {
    "KHEL": wire.hello(
        b"\xaa\xbb\xcc",
        source_rank=1,
        target_rank=2,
        transports=wire.TCP | wire.CMA,
        pid=0x1234,
        start_time=0x5678,
        nonce_address=0x7F0000001000,
        nonce=b"N" * 32,
        regions=[(7, 0, 0x10000, 0x7F0000200000)],
    ),
    "KWEL": wire.welcome(b"\xdd\xee", transport=1, note="ok"),
    "OPEN": wire.open_(5, KEY, SCHEDULER, 16, 48, crc=True),
    "DESC": wire.blocks(5, 7, 16, 32, [(0x400, 0x800, 0x200), (0xC00, 0x200, 0x100)]),
    "LAYR": wire.chunk_end(5, 7, 16, 32, 0x04C11DB7),
    "ENDT": wire.end(5),
    "CANC": wire.result(b"CANC", 5, 6, 0, "lease"),
    "ASKH": wire.ask_held(5),
    "HELD": wire.held(5, True),
    "DONE": wire.result(b"DONE", 5, 0, 48, ""),
    "FAIL": wire.result(b"FAIL", 0, 12, 0, "unknown frame"),
}


def documented() -> dict[str, bytes]:
    """Each ```hex NAME block: hex at the start of its lines, two spaces, words."""
    found = {}
    for name, block in re.findall(r"```hex (\w+)\n(.*?)```", DOC.read_text(), re.DOTALL):
        lines = (re.match(r"(?:[0-9a-f]{2}(?: |$))*", line) for line in block.splitlines())
        found[name] = bytes.fromhex("".join(m.group() for m in lines if m))
    return found


def test_every_frame_is_documented() -> None:
    assert documented().keys() == FRAMES.keys()


@pytest.mark.parametrize("name", FRAMES)
def test_hex(name: str) -> None:
    assert documented()[name].hex(" ") == FRAMES[name].hex(" ")
