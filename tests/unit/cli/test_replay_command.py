"""What cannot work is said, with status 2, before any engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_control.cli.app import app

TRACE = Path(__file__).resolve().parents[2] / "data" / "trace_small.jsonl"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--picture", "x.gif"], ".svg, .png, .pdf"),
        (["--picture", "/nowhere/x.svg"], "no folder /nowhere"),
        (["--output", "/nowhere/x.json"], "no folder /nowhere"),
        (["--scale", "0"], "must be positive"),
        (["--endpoint", "127.0.0.1:1"], "only together with --split"),
        (["--split", "http://x", "--endpoint", "ftp://y"], "is no address"),
        (["--model", "/nowhere/model"], "no model at"),
    ],
)
def test_usage(args: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(TRACE), *args])
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    assert says in done.stderr.replace("\n", " ")


def test_a_broken_trace_is_named_by_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    done = CliRunner().invoke(app, ["replay", str(trace)])
    assert done.exit_code == 2
    assert "t.jsonl:1: KeyError: 'input_length'" in done.stderr.replace("\n", "")
