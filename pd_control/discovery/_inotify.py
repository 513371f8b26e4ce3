"""Directory change notices from the Linux kernel, through libc; None elsewhere."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE = 0x8, 0x40, 0x80, 0x200
# Not IN_ATTRIB: it would wake every instance on every touch of every other one.
MASK = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE
READ_BYTES = 64 << 10


class Watch:
    """One watched directory. `close` is idempotent; no callback follows it."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]):
        self._fd = fd
        self._loop = loop
        self._changed = changed
        loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        try:
            os.read(self._fd, READ_BYTES)  # which file it was does not matter: the folder is read
        except BlockingIOError:
            return
        self._changed()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def watch(directory: Path, changed: Callable[[], None]) -> Watch | None:
    """Calls `changed` on the running loop after each change in `directory`; None if impossible."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        init, add = libc.inotify_init1, libc.inotify_add_watch
    except (OSError, AttributeError):
        return None
    fd = init(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return None
    if add(fd, os.fsencode(directory), MASK) < 0:
        os.close(fd)
        return None
    return Watch(fd, asyncio.get_running_loop(), changed)
