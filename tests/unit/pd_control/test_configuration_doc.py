"""docs/configuration.md is what its generator writes now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "configuration_doc.py"), "--check"]
    done = subprocess.run(command, check=False)
    assert done.returncode == 0, "run: python tools/configuration_doc.py"
