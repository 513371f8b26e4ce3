"""Engines and a proxy as child processes of this one, for the demo, replays and tests.

Each child is ``pdctl serve`` or ``pdctl proxy``: nothing here that a user could not type. A child is
known to be up by its ready line. :meth:`Cluster.close` ends all of them, also after a failure or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A child that was asked to stop gets this long to end its own workers.
STOP_GRACE_S = 10.0
#: Loading a real model three times over on two busy cores.
READY_TIMEOUT_S = 240.0
_PR_SET_PDEATHSIG = 1


class ClusterError(RuntimeError):
    """A child did not come up, or died; the message ends with what it said last."""


def threads_to_use() -> int:
    """Compute threads a worker, when one worker computes at a time: two where two cores are idle, else one.

    Threads of one worker wait for each other several hundred times a token. If another process takes one
    of them off its core, each of these waits takes milliseconds, and one thread alone is many times faster.
    """
    cores = len(os.sched_getaffinity(0))
    return 2 if cores - os.getloadavg()[0] > 1.5 or cores >= 8 else 1


def _die_with_parent() -> None:
    """In the child, before exec: no engine outlives a demo that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Child:
    """One process and what its ready line said."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.info["url"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self, lines: int = 15) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


class Cluster:
    """Children of this process. One asyncio loop; not reusable after :meth:`close`."""

    def __init__(
        self,
        *,
        model: str = "tiny",
        p_tp: int = 1,
        d_tp: int = 1,
        num_prefill: int = 1,
        num_decode: int = 1,
        engine_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        mode: str = "dual",
        env: dict[str, str] | None = None,
        on_start: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.model, self.p_tp, self.d_tp, self.mode = model, p_tp, d_tp, mode
        self.num_prefill, self.num_decode = num_prefill, num_decode
        self._engine_args = list(engine_args)
        self._prefill_args, self._decode_args = list(prefill_args), list(decode_args)
        self._env = env or {}
        self._on_start = on_start
        self.folder = Path(tempfile.mkdtemp(prefix="pd-control-"))
        self.state_dir = self.folder / "state"
        self.children: dict[str, Child] = {}

    @property
    def proxy_url(self) -> str:
        return self.children["proxy"].url

    @property
    def undivided_url(self) -> str:
        return self.children["undivided"].url

    @property
    def endpoints(self) -> list[str]:
        """Control addresses of the engines that have one."""
        return [str(c.info["control"]) for c in self.children.values() if c.info.get("control")]

    async def start_split(self, mode: str | None = None) -> None:
        """P and D engines, at once, then the proxy before them.

        Raises:
            ClusterError: one did not come up; the others are still running until :meth:`close`.
        """
        p = ["--tp", str(self.p_tp), *self._prefill_args]
        d = ["--tp", str(self.d_tp), *self._decode_args]
        await asyncio.gather(
            *(self.start_engine(self._name("p", i), "prefill", p) for i in range(self.num_prefill)),
            *(self.start_engine(self._name("d", i), "decode", d) for i in range(self.num_decode)),
        )
        await self.start_proxy("proxy", mode or self.mode)

    @staticmethod
    def _name(letter: str, index: int) -> str:
        return letter if index == 0 else f"{letter}{index}"

    async def start_undivided(self) -> None:
        """One engine that does both halves itself, cut as D cuts its prompts."""
        args = ["--split-last-token", "--tp", "1"]
        await self.start_engine("undivided", "undivided", args)

    async def start_engine(self, name: str, role: str, args: Sequence[str] = ()) -> Child:
        """One ``pdctl serve``; its instance is called ``name``."""
        return await self._start(
            name,
            [
                "serve", "--role", role, "--instance", name, "--model", self.model,
                "--state-dir", str(self.state_dir), *self._engine_args, *args,
            ],
        )  # fmt: skip

    async def start_proxy(self, name: str, mode: str) -> Child:
        """A ``pdctl proxy`` before the engines that run now."""
        args = ["proxy", "--mode", mode]
        for child in self.children.values():
            if child.info.get("role") == "prefill" and mode != "single":
                args += ["--prefill", child.url]
            elif child.info.get("role") == "decode":
                args += ["--decode", child.url]
        return await self._start(name, args)

    async def _start(self, name: str, args: list[str]) -> Child:
        self._on_start(name)
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_control.cli",
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env={**os.environ, **self._env},
                preexec_fn=_die_with_parent,
                start_new_session=True,  # a Ctrl-C at the terminal is ours to act on
            )
        child = Child(name, process, log)
        self.children[name] = child
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ClusterError(f"{name} is not up after {READY_TIMEOUT_S:g} s") from None
        if not line:
            status = await process.wait()
            raise ClusterError(f"{name} ended with status {status}:\n{child.last_words()}")
        child.info = json.loads(line)
        return child

    def check(self) -> None:
        """Raises ClusterError with a child's last words if one has ended by itself."""
        for child in self.children.values():
            status = child.process.returncode
            if status is not None:
                raise ClusterError(
                    f"{child.name} ended with status {status}:\n{child.last_words()}"
                )

    async def kill(self, name: str) -> None:
        """kill -9 of one child, and wait for its end; its workers end with it."""
        child = self.children.pop(name)
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()

    async def stop(self, name: str) -> None:
        """Ask one child to end, and see to it."""
        child = self.children.pop(name, None)
        if child is not None:
            await _end(child)

    async def close(self) -> None:
        """End every child and remove the folder. Idempotent."""
        children, self.children = list(self.children.values()), {}
        await asyncio.gather(*(_end(child) for child in children))
        shutil.rmtree(self.folder, ignore_errors=True)


async def _end(child: Child) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()
        try:
            await asyncio.wait_for(child.process.wait(), STOP_GRACE_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
