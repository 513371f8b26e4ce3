"""The stub in the repository is the one that the built module gives."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).resolve().parents[3] / "kvt_bindings" / "_kvt.pyi"
COMMAND = "python -m nanobind.stubgen -q -m kvt_bindings._kvt -o kvt_bindings/_kvt.pyi"


@pytest.mark.skipif(
    importlib.util.find_spec("nanobind") is None, reason="nanobind (extra: dev) is not installed"
)
def test_the_stub_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "_kvt.pyi"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nanobind.stubgen",
            "-q",
            "-m",
            "kvt_bindings._kvt",
            "-o",
            str(fresh),
        ],
        check=True,
    )
    assert fresh.read_text() == STUB.read_text(), f"regenerate it: {COMMAND}"
