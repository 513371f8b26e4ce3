"""docs/embedding.md is one program: its blocks are run from top to bottom, in a process of their own."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from simple_rpc import _errors

ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / "docs" / "embedding.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_every_block_runs_and_its_assertions_hold(tmp_path):
    program = tmp_path / "embedding.py"
    program.write_text("\n\n".join(blocks()) + '\n\nprint("the end")\n')
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(program)],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert "Traceback" not in done.stderr


def test_the_page_leaves_no_block_out_and_names_every_error():
    text = PAGE.read_text()
    assert text.count("```python") == len(blocks()) >= 12
    assert text.count("asyncio.run(") >= 8  # each of them really runs something
    for name in vars(_errors):
        if name.endswith("Error") and name != "RpcError":
            assert f"`{name}`" in text, name
