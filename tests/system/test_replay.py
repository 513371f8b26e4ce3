"""``pdctl replay`` for real: a small trace of our own against P, D and an undivided engine.

``tests/data/trace_small.jsonl`` has the published traces' format: four conversations that grow turn by
turn, two of them from one opening, and single questions between; made up by a seeded script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.split_kit import GUARD_S, descendants

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

TRACE = Path(__file__).resolve().parents[1] / "data" / "trace_small.jsonl"


def command(folder: Path, *args: str) -> list[str]:
    return [
        sys.executable, "-m", "pd_control.cli", "replay", str(TRACE), "--scale", "0.1", "--speed", "8",
        "--max-output-tokens", "16", "-o", str(folder / "figures.json"), *args,
    ]  # fmt: skip


def test_a_trace_is_replayed_and_its_figures_saved(tmp_path: Path) -> None:
    picture = tmp_path / "latency.svg"
    done = subprocess.run(
        command(tmp_path, "--json", "--picture", str(picture)),
        capture_output=True, text=True, timeout=GUARD_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "figures.json").read_text())
    split, whole = report["split"], report["undivided"]
    for side in (split, whole):
        assert (side["requests"], side["failed"], side["errors"]) == (32, 0, [])
        for what in ("first_token_ms", "inter_token_ms"):
            assert 0 < side[what]["p50"] <= side[what]["p90"] <= side[what]["p99"]
        assert side["output_tokens_per_s"] > 0
        assert side["cached_tokens"] > 500, "turns of one conversation share their beginning"
    assert split["prompt_tokens"] == whole["prompt_tokens"] > 5000
    assert split["output_tokens"] == whole["output_tokens"] > 300
    assert report["first_token_excess"]["requests"] == 32
    assert report["first_token_excess"]["different_outputs"] == 0
    hand_off = report["hand_off"]
    assert hand_off["requests"] == 32, "every request came through P"
    assert 0 < hand_off["control_ms"]["p50"] <= hand_off["whole_ms"]["p50"]
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        ("undivided.log", signal.SIGINT, 130),
        ("undivided.log", signal.SIGTERM, 1),
        ("proxy.log", signal.SIGINT, 130),
    ],
)
def test_it_takes_everything_down_when_it_is_stopped(
    tmp_path: Path, moment: str, number: signal.Signals, status: int
) -> None:
    """While the first engine comes up, and once the last child has been started."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        command(tmp_path, "--speed", "0.05"),
        env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + GUARD_S
        below = set[int]()
        while not (below and list(scratch.glob(f"pd-control-*/{moment}"))):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
            below = descendants(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, output
    assert "Traceback" not in output
    assert not {p for p in below if Path(f"/proc/{p}").exists()}, "all that it started has ended"
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "figures.json").exists()


def test_a_full_disk_costs_the_file_and_not_the_figures(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "-n", "2", "--model", "tiny", "--speed", "0", "-o", "/dev/full"),
        capture_output=True, text=True, timeout=GUARD_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "undivided" in done.stdout
    assert "not everything could be saved" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_stopped_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pd_control.cli", "serve", "--role", "both", "--tp", "2",
         "--state-dir", str(tmp_path / "state")],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + GUARD_S
        while len(below := descendants(process.pid)) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (130, "")
    assert not {p for p in below if Path(f"/proc/{p}").exists()}
    assert not list(tmp_path.glob("pd-control-*")), "the ranks' meeting place is gone"
