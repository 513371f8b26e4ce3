"""The cells of the kill matrix that CI runs; all of them: `python -m tests.kill_matrix`."""

from __future__ import annotations

import pytest

from tests.kill_matrix import cells, run, show


@pytest.mark.slow
def test_killed_processes_leave_nothing_behind() -> None:
    done = list(run(short=True))
    assert len(done) == len(cells(short=True))
    assert [show(cell) for cell in done if not cell.ok] == []
