"""What pdctl prints of names that it did not make."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.text import Text

from pd_control.cli.look import requests_table
from pd_control.cli.options import PlainConsole


def row(request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id, "side": "P", "instance": "P", "state": "HELD", "takers": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["[/x]", "[red]request", "[link=http://x]y[/link]", ":smile:"])
def test_names_are_no_markup(name: str) -> None:
    out = PlainConsole(file=io.StringIO(), width=160)
    out.print(requests_table([row(name)]))
    assert name in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [str, Text])
def test_no_control_character_reaches_the_terminal(make: Any) -> None:
    out = PlainConsole(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    out.print(make("a\x1b[2Jb\x1b]0;title\x07c\x9bd"))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.strip() == "a\ufffd[2Jb\ufffd]0;titlec\ufffdd"
    assert not [c for c in text if ord(c) < 32 and c != "\n"]
