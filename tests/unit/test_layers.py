"""The layer rules of CONTRIBUTING.md, checked on the sources rather than promised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("simple_rpc", "pd_control", "kvt_bindings")
#: What a pure machine must not even be able to reach (R9): I/O, clocks, chance, threads.
IMPURE = {
    "asyncio", "socket", "select", "selectors", "time", "datetime", "random", "secrets",
    "threading", "multiprocessing", "subprocess", "concurrent", "os", "uvloop", "queue", "logging",
}  # fmt: skip
#: Deserialisers that can run code (R7).
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
#: A longer file wants splitting.
MAX_LINES = 650


def python_files(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import in a file, those inside functions too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def offenders(files: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        if name in forbidden or any(name.startswith(f + ".") for f in forbidden)
    ]


def test_the_walk_sees_something() -> None:
    for package in PACKAGES:
        assert python_files(package), package


def test_simple_rpc_knows_neither_of_the_others() -> None:
    assert offenders(python_files("simple_rpc"), {"pd_control", "kvt_bindings", "torch"}) == []


def test_kvt_bindings_does_not_know_pd_control() -> None:
    assert offenders(python_files("kvt_bindings"), {"pd_control"}) == []


def test_the_protocol_is_pure() -> None:
    assert offenders(python_files("pd_control/protocol"), IMPURE | {"kvt_bindings", "torch"}) == []


def test_no_engine_is_imported_outside_its_own_package() -> None:
    files = [p for p in python_files(*PACKAGES) if ROOT / "pd_control/vllm" not in p.parents]
    assert offenders(files, {"vllm", "pd_control.vllm"}) == []


def test_nothing_can_unpickle() -> None:
    assert offenders(python_files(*PACKAGES), UNSAFE) == []


def test_the_native_core_includes_no_python_torch_or_cuda_header() -> None:
    cpp = ROOT / "kvt_bindings/cpp"
    files = [p for d in ("include", "src") for p in (cpp / d).rglob("*")]
    files = [p for p in files if p.suffix in (".h", ".cpp")]
    assert files
    headers = r"Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/|cuda(_runtime)?(_api)?\.h"
    pattern = re.compile(rf'#\s*include\s*[<"]({headers})')
    found = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in files
        for n, text in enumerate(p.read_text().splitlines(), 1)
        if pattern.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks", "examples"])
def test_files_stay_readable(folder: str) -> None:
    suffixes = (".py", ".cpp", ".h")
    sizes = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines())
        for p in (ROOT / folder).rglob("*")
        if p.suffix in suffixes
    }
    assert {name: n for name, n in sizes.items() if n > MAX_LINES} == {}


def test_the_checker_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk resolves plain, from-, relative and nested imports."""
    import sys

    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "pd_control" / "protocol" / "bad.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ..runtime import clock\ndef f():\n    from asyncio import sleep\n")
    assert offenders([file], {"asyncio"}) == [
        "pd_control/protocol/bad.py:3 imports asyncio",
        "pd_control/protocol/bad.py:3 imports asyncio.sleep",
    ]
    assert offenders([file], {"pd_control.runtime"}) != []
