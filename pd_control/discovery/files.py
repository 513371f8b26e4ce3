"""Peers through a shared folder: each instance keeps one small file about itself there.

A file is written under another name and renamed, so a reader never sees half of one. Its owner
touches it every `refresh_s`; one that was not touched for three of these is stale and its instance
reported as vanished. A changed incarnation in the same instance's file is a restart.

Changes are pushed by inotify where the kernel offers it (the folder is on this host). A rescan
every `refresh_s` finds what inotify cannot tell: files that stopped being touched, and changes made
by another host on a network file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pd_control.discovery import _inotify
from pd_control.discovery._record import DiscoveryError, Listener, PeerRecord

SUFFIX = ".peer.json"
STALE_AFTER_REFRESHES = 3  # as many missed touches as a link may miss heartbeats
MAX_FILE_BYTES = 16 << 10  # a record is some 200 bytes
MAX_FILES = 4096  # far above any cluster that shares one folder
FORMAT = 1


def _file_name(instance: str) -> str:
    # Instance ids may hold any printable character; a file name may not.
    safe = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in instance)
    return safe + SUFFIX


def read_record(path: Path) -> PeerRecord:
    """The record in one file. Raises DiscoveryError saying what is wrong, OSError if unreadable."""
    with path.open("rb") as f:
        raw = f.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise DiscoveryError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
    try:
        data = json.loads(raw)
    except ValueError as e:
        raise DiscoveryError(f"{path}: expected JSON, got {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DiscoveryError(f"{path}: expected a peer record of format {FORMAT}")
    values: dict[str, str] = {}
    for key in ("instance", "address", "role", "incarnation"):
        value = data.get(key)
        if not isinstance(value, str):
            raise DiscoveryError(f"{path}: {key}: expected text, got {type(value).__name__}")
        values[key] = value
    try:
        incarnation = bytes.fromhex(values["incarnation"])
    except ValueError:
        raise DiscoveryError(f"{path}: incarnation: expected hexadecimal digits") from None
    return PeerRecord(values["instance"], values["address"], values["role"], incarnation)


def _live_owner(path: Path, oldest_s: float) -> int | None:
    """The pid of the other process of this host that keeps a file up to date, if there is one."""
    try:
        if path.stat().st_mtime < oldest_s:
            return None
        data = json.loads(path.read_bytes()[:MAX_FILE_BYTES])
        pid = data["pid"]
        if data["host"] != socket.gethostname() or type(pid) is not int or pid == os.getpid():
            return None
        status = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if status.rpartition(")")[2].split()[0] in "ZX" else pid


class FileDiscovery:
    """Watches a folder, and keeps this instance's own file in it while `publish`ed.

    All calls on the loop thread. Files that cannot be read are counted in `bad_files` and named in
    `last_error`; they never stop the others from being seen.
    """

    def __init__(
        self,
        directory: Path,
        *,
        refresh_s: float = 2.0,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._refresh_s = refresh_s
        self._wall_s = wall_s
        self._known: dict[str, PeerRecord] = {}
        self._own: PeerRecord | None = None
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watch: _inotify.Watch | None = None
        self.bad_files = 0
        self.last_error = ""

    def check(self, instance: str) -> None:
        """Whether `instance` could be published, before anything else of it is started.

        Raises:
            OSError: the folder is not there and cannot be made, or takes no files; with what to change.
            DiscoveryError: another live process of this host publishes itself under the same name.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as error:
            raise OSError(
                f"discovery.directory: expected a folder to write to, got {error}; "
                "pdctl serve takes it from --state-dir or PD_CONTROL_STATE_DIR"
            ) from error
        path = self._directory / _file_name(instance)
        # One that is ending takes its file away; one that has died is no process any more.
        pid = _live_owner(path, self._oldest_s())
        if pid is not None:
            raise DiscoveryError(
                f"{path}: an instance of the name {instance!r} is running already, as process {pid}: "
                "end it, or give this one another name (pdctl serve --instance)"
            )

    def publish(self, own: PeerRecord) -> None:
        """Write this instance's file (replacing one of an earlier incarnation)."""
        if own.incarnation is None:
            raise DiscoveryError(f"{own.instance}: a published record needs an incarnation")
        self._directory.mkdir(parents=True, exist_ok=True)
        body = {
            "format": FORMAT,
            "instance": own.instance,
            "address": own.address,
            "role": own.role,
            "incarnation": own.incarnation.hex(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        fd, name = tempfile.mkstemp(dir=self._directory, prefix=".tmp-")
        try:
            with os.fdopen(fd, "w") as f:
                json.dump(body, f)
            os.replace(name, self._directory / _file_name(own.instance))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._own = own

    def start(self, listener: Listener) -> None:
        """Report what is there, then watch. Needs a running loop on this thread."""
        self._listener = listener
        self._directory.mkdir(parents=True, exist_ok=True)
        self._watch = _inotify.watch(self._directory, self.scan)
        self.scan()
        self._arm()

    @property
    def pushed(self) -> bool:
        """Whether the kernel pushes changes (else they are found at the next rescan)."""
        return self._watch is not None

    def current(self) -> Sequence[PeerRecord]:
        return tuple(self._known.values())

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._refresh_s, self._tick)

    def _tick(self) -> None:
        self._touch()
        self.scan()
        self._arm()

    def _touch(self) -> None:
        if self._own is None:
            return
        try:
            os.utime(self._directory / _file_name(self._own.instance))
        except FileNotFoundError:
            self.publish(self._own)  # somebody cleaned the folder; we are still here
        except OSError as e:
            self._note(f"cannot touch own file: {e}")

    def _note(self, error: str) -> None:
        self.bad_files += 1
        self.last_error = error

    def _oldest_s(self) -> float:
        """A file that was last touched before this time is nobody's any more."""
        return self._wall_s() - STALE_AFTER_REFRESHES * self._refresh_s

    def scan(self) -> None:
        """Read the folder once and report the differences."""
        if self._listener is None:
            return
        oldest = self._oldest_s()
        seen: dict[str, PeerRecord] = {}
        try:
            paths = sorted(self._directory.glob("*" + SUFFIX))[:MAX_FILES]
        except OSError as e:
            self._note(str(e))
            return
        for path in paths:
            try:
                if path.stat().st_mtime < oldest:
                    continue
                record = read_record(path)
            except FileNotFoundError:
                continue  # gone between listing and reading
            except (OSError, DiscoveryError) as e:
                self._note(str(e))
                continue
            if self._own is None or record.instance != self._own.instance:
                seen[record.instance] = record
        self._report(seen)

    def _report(self, seen: dict[str, PeerRecord]) -> None:
        listener = self._listener
        assert listener is not None
        before, self._known = self._known, seen
        for instance, record in seen.items():
            old = before.get(instance)
            if old is None:
                listener.peer_appeared(record)
            elif old.incarnation != record.incarnation:
                listener.peer_restarted(old, record)
            elif old != record:  # it moved or changed its role without a restart: seen anew
                listener.peer_vanished(old)
                listener.peer_appeared(record)
        for instance, record in before.items():
            if instance not in seen:
                listener.peer_vanished(record)

    def close(self) -> None:
        """Stop watching and take our own file away, unless a newer incarnation replaced it."""
        self._listener = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._own is not None:
            path = self._directory / _file_name(self._own.instance)
            with contextlib.suppress(OSError, DiscoveryError):
                if read_record(path).incarnation == self._own.incarnation:
                    path.unlink()
            self._own = None
