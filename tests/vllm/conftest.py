"""These tests need a venv with vLLM (tools/vllm_venv.sh); the stage ``vllm`` of .ci/run runs them there.

Starting a vLLM server costs more than most tests, so the servers of `farm` live as long as the session.
Modules run in the order below: what needs the servers as they were started first, then what kills them.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.vllm.farm import Farm

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

ORDER = (
    "layouts",
    "sleeping",
    "stats",
    "equality",
    "refusals",
    "drills",
    "storm",
    "model",
    "ranks",
)


def pytest_configure(config: pytest.Config) -> None:
    """Being asked to end, as by a stage that is out of time, ends the servers too."""
    if not collect_ignore_glob and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("asked to end", 143))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if "tests/vllm/" in item.path.as_posix()]
    mine.sort(key=lambda item: ORDER.index(item.path.stem.removeprefix("test_vllm_")))
    others = [item for item in items if item not in mine]
    items[:] = others + mine


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    from tests.vllm.farm import Farm

    made = Farm(tmp_path_factory.mktemp("vllm"))
    try:
        yield made
    finally:
        made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """The end of every live server's log, beside the failure it may explain."""
    from pd_control.testing.vllm_kit import VllmServer

    report = yield
    if report.failed:
        for server in VllmServer.running:
            report.sections.append((f"end of {server.log}", server.tail(25)))
    return report
