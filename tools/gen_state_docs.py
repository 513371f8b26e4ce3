"""Print the state machines of the protocol from their tables: docs/state-machines.md.

python tools/gen_state_docs.py           write the page
python tools/gen_state_docs.py --check   exit 1 if the page is not what the code says
"""

from __future__ import annotations

import enum
import sys
from collections import defaultdict
from dataclasses import fields
from inspect import getdoc, getsource
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "state-machines.md"
sys.path.insert(0, str(ROOT))

from pd_control.protocol import d_request, p_request, p_transfer  # noqa: E402
from pd_control.protocol.machine import Table  # noqa: E402
from pd_control.protocol.settings import Deadlines  # noqa: E402

HEAD = """# State machines

This page is generated from the code by `tools/gen_state_docs.py`; a test fails if it is out of date.

Three tables decide what may happen to a request. **The one rule for illegal input**: a pair of state
and input that a table does not list changes nothing, and is counted under
`ignored.<machine>.<STATE>.<INPUT>` in the process's counters. How the machines work together is told
in [The protocol](protocol.md).
"""

SECTIONS = [
    ("P request", p_request, p_request.P_REQUEST),
    ("P transfer", p_transfer, p_transfer.P_TRANSFER),
    ("D request", d_request, d_request.D_REQUEST),
]


def comments_of(cls: type) -> dict[str, str]:
    """The trailing comments of a class's members, by name."""
    found = {}
    for line in getsource(cls).splitlines():
        code, _, comment = line.partition("#")
        name = code.split("=")[0].split(":")[0].strip()
        if comment and name.isidentifier():
            found[name] = comment.strip()
    return found


def diagram(table: Table[Any, Any]) -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state.name}" for state in table.initial]
    arrows: dict[tuple[enum.Enum, enum.Enum], list[str]] = defaultdict(list)
    for row in table.rows:
        for state in row.states:
            arrows[state, row.to].append(row.input.name)
    for (state, to), inputs in arrows.items():
        lines.append(f"    {state.name} --> {to.name}: {', '.join(inputs)}")
    lines += [f"    {state.name} --> [*]" for state in table.final]
    return [*lines, "```"]


def listing(cls: type[enum.Enum]) -> list[str]:
    notes = comments_of(cls)
    return [
        f"- `{member.name}`: {notes[member.name]}" if member.name in notes else f"- `{member.name}`"
        for member in cls
    ]


def section(title: str, module: Any, table: Table[Any, Any]) -> list[str]:
    rules = (getdoc(module) or "").splitlines()
    lines = [f"## {title}", "", rules[0], ""]
    lines += [line for line in rules[1:] if line not in ("Rules", "-----")]
    lines += ["", *diagram(table), "", "**States**", "", *listing(table.states)]
    lines += ["", "**Inputs**", "", *listing(table.inputs), "", "**Transitions**", ""]
    lines += ["| state | input | next | what goes with it |", "|---|---|---|---|"]
    for row in table.rows:
        states = ", ".join(state.name for state in row.states)
        lines.append(f"| {states} | {row.input.name} | {row.to.name} | {row.why} |")
    return [*lines, ""]


def deadlines() -> list[str]:
    notes = comments_of(Deadlines)
    lines = [
        "## Deadlines",
        "",
        "In seconds; all can be set, and `pdctl show` names the one that runs.",
        "",
    ]
    lines += ["| name | default | who waits for what; what follows |", "|---|---|---|"]
    for one in fields(Deadlines):
        lines.append(f"| `{one.name}` | {one.default:g} | {notes[one.name]} |")
    return [*lines, ""]


def page() -> str:
    lines = [*HEAD.splitlines(), ""]
    for title, module, table in SECTIONS:
        lines += section(title, module, table)
    lines += deadlines()
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == page():
            return 0
        print(f"{PAGE} is out of date: run python tools/gen_state_docs.py", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
