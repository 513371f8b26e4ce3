"""Peers through a folder: appearance, restart, staleness, torn and hostile files."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pd_control.discovery import DiscoveryError, FileDiscovery, PeerRecord, StaticDiscovery

A, B = b"a" * 16, b"b" * 16


class Seen:
    """A listener that writes down what it is told and can be waited on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.changed = asyncio.Event()

    def _add(self, text: str) -> None:
        self.log.append(text)
        self.changed.set()

    def peer_appeared(self, peer: PeerRecord) -> None:
        self._add(f"+{peer.instance}")

    def peer_restarted(self, old: PeerRecord, new: PeerRecord) -> None:
        assert old.incarnation != new.incarnation
        self._add(f"~{new.instance}")

    def peer_vanished(self, peer: PeerRecord) -> None:
        self._add(f"-{peer.instance}")

    async def until(self, text: str) -> None:
        async def wait() -> None:
            while text not in self.log:
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), 30)


def record(instance: str, incarnation: bytes = A, port: int = 1) -> PeerRecord:
    return PeerRecord(instance, f"tcp://127.0.0.1:{port}", "prefill", incarnation)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "peers"


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_changes_are_pushed_without_waiting_for_a_rescan(folder: Path) -> None:
    seen = Seen()
    watcher = FileDiscovery(folder, refresh_s=3600)
    watcher.start(seen)
    assert watcher.pushed
    other = FileDiscovery(folder, refresh_s=3600)
    other.publish(record("p0"))
    await seen.until("+p0")
    assert watcher.current()[0] == record("p0")
    FileDiscovery(folder).publish(record("p0", B))
    await seen.until("~p0")
    other.close()  # an older incarnation leaves the newer one's file alone
    newer = FileDiscovery(folder)
    newer.publish(record("p0", B))
    newer.close()
    await seen.until("-p0")
    assert seen.log == ["+p0", "~p0", "-p0"]
    watcher.close()


def test_a_name_belongs_to_one_live_process_of_a_host(folder: Path) -> None:
    """Two engines of one name would take turns in one file, and peers would see one restart after another."""
    publish = (
        "import sys; from pathlib import Path; from pd_control.discovery import *;"
        "FileDiscovery(Path(sys.argv[1])).publish("
        "PeerRecord('p0', 'tcp://127.0.0.1:1', 'prefill', b'a' * 16));"
        "print(flush=True); sys.stdin.read()"
    )
    mine = FileDiscovery(folder)
    with subprocess.Popen(
        [sys.executable, "-c", publish, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        mine.check("p1")
        with pytest.raises(
            DiscoveryError, match=f"'p0' is running already, as process {other.pid}"
        ):
            mine.check("p0")
        # One that does not touch its file any more has lost it, as for everybody else.
        FileDiscovery(folder, wall_s=lambda: time.time() + 7).check("p0")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        mine.check("p0")  # nobody has collected it yet
    mine.check("p0")
    (path,) = files(folder)
    mine.publish(record("p0"))
    mine.check("p0")  # this process's own
    path.write_text("{not json")
    mine.check("p0")
    mine.close()


async def test_own_file_is_not_a_peer_and_comes_back_if_removed(folder: Path) -> None:
    seen = Seen()
    own = FileDiscovery(folder, refresh_s=3600)
    own.publish(record("me"))
    own.start(seen)
    own.scan()
    assert seen.log == []
    for path in files(folder):
        path.unlink()
    own._tick()
    assert len(files(folder)) == 1
    own.close()
    assert files(folder) == []


async def test_a_file_that_is_not_touched_goes_stale(folder: Path) -> None:
    now = [0.0]
    seen = Seen()
    FileDiscovery(folder).publish(record("p0"))
    (path,) = files(folder)
    os.utime(path, (100, 100))
    watcher = FileDiscovery(folder, refresh_s=2.0, wall_s=lambda: now[0])
    now[0] = 106.0
    watcher.start(seen)
    assert seen.log == ["+p0"]
    now[0] = 106.1
    watcher.scan()
    assert seen.log == ["+p0", "-p0"]
    os.utime(path, (107, 107))
    watcher.scan()
    assert seen.log[-1] == "+p0"
    watcher.close()


async def test_a_move_without_restart_is_seen_anew(folder: Path) -> None:
    seen = Seen()
    writer, watcher = FileDiscovery(folder), FileDiscovery(folder, refresh_s=3600)
    writer.publish(record("p0", port=1))
    watcher.start(seen)
    writer.publish(record("p0", port=2))
    watcher.scan()
    assert seen.log == ["+p0", "-p0", "+p0"]
    assert watcher.current()[0].address.endswith(":2")
    watcher.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1, "instance": 3, "address": "tcp://a:1", "role": "both", "incarnation": ""}',
        b'{"format": 1, "instance": "x", "address": "a:1", "role": "both", "incarnation": "00"}',
        b'{"format": 1, "instance": "x", "address": "tcp://a:1", "role": "both",'
        b' "incarnation": "zz"}',
        b'{"format": 1, "instance": "x", "address": "tcp://a:1", "role": "router",'
        b' "incarnation": "' + b"00" * 16 + b'"}',
        b"[" * 50_000,
        b"\xff\xfe",
    ],
)
async def test_bad_files_are_counted_and_hide_nobody(folder: Path, content: bytes) -> None:
    seen = Seen()
    FileDiscovery(folder).publish(record("good"))
    (folder / "bad.peer.json").write_bytes(content)
    watcher = FileDiscovery(folder, refresh_s=3600)
    watcher.start(seen)
    assert seen.log == ["+good"]
    assert watcher.bad_files == 1
    assert "bad.peer.json" in watcher.last_error or "of x" in watcher.last_error
    watcher.close()


async def test_instance_names_cannot_leave_the_folder(folder: Path) -> None:
    d = FileDiscovery(folder)
    d.publish(record("../../etc/x"))
    (path,) = files(folder)
    assert path.parent == folder
    d.close()
    with pytest.raises(DiscoveryError, match="incarnation"):
        d.publish(PeerRecord("x", "tcp://a:1"))


def test_static_peers() -> None:
    seen: list[PeerRecord] = []

    class Listener:
        def peer_appeared(self, peer: PeerRecord) -> None:
            seen.append(peer)

        def peer_restarted(self, old: PeerRecord, new: PeerRecord) -> None:
            raise AssertionError

        def peer_vanished(self, peer: PeerRecord) -> None:
            raise AssertionError

    source = StaticDiscovery({"p0": "tcp://127.0.0.1:1"}, "prefill")
    source.start(Listener())
    assert seen == [PeerRecord("p0", "tcp://127.0.0.1:1", "prefill")]
    source.close()
    with pytest.raises(DiscoveryError, match="p0"):
        StaticDiscovery({"p0": "127.0.0.1:1"})
