"""The example runs, is right, says so in its exit code, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "two_engines.py"), "--prompt-tokens", "200"]


def processes_of(marker: str) -> list[str]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environ:
            found.append(pid)
    return found


def test_it_shows_thirteen_stages_of_both_modes() -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["leaks"] == []
    assert [r["request"] for r in report["requests"]] == ["single", "dual"]
    for request in report["requests"]:
        assert request["equal_to_undivided"]
        assert len({stage for _, _, stage, _ in request["timeline"]}) == 13


@pytest.mark.slow
def test_ctrl_c_ends_it_with_everything_it_started() -> None:
    marker = f"PD_CONTROL_EXAMPLE_TEST={os.getpid()}"
    name, _, value = marker.partition("=")
    running = subprocess.Popen(
        [*COMMAND[:-1], "4000"],  # seconds of work: it must not be over when the signal comes
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert "starting" in running.stdout.readline()
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of them
    running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGINT)
    end_s = time.monotonic() + 30
    while processes_of(marker) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert processes_of(marker) == []
