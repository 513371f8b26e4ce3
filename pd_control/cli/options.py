"""Options that many commands share, and how a command ends.

Exit status: 0 done; 1 the answer is no (a request not found, a check failed, not every process
answered); 2 the command line or configuration is wrong; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pd_control.cli.endpoints import Asker, EndpointError, find_endpoints
from pd_control.config import ConfigError, Network

T = TypeVar("T")

OK, NO, USAGE, INTERRUPTED = 0, 1, 2, 130

#: Without a terminal there is no width to ask for; wide enough that no column is folded.
PLAIN_WIDTH = 160

EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="ADDRESS",
        help="Control address; repeatable. Default: all known.",
    ),
]
StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="Where engines leave their files.")
]
SecretOption = Annotated[
    Path | None, typer.Option("--secret-file", help="File with the shared secret (mode 0600).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


#: Every control character but the line feed.
_UNPRINTABLE = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if c != 10}


class PlainConsole(Console):
    """Names that come from clients and peers are shown as they are: what looks like markup is none, and
    no control character reaches the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else segment.text.translate(_UNPRINTABLE)
            yield segment._replace(text=text)


def console() -> Console:
    if sys.stdout.isatty():
        return PlainConsole()
    return PlainConsole(width=PLAIN_WIDTH)


def fail(message: str, status: int = NO) -> NoReturn:
    """Say it on stderr and end with this status."""
    PlainConsole(stderr=True, soft_wrap=True).print(f"pdctl: {message}", highlight=False)
    raise typer.Exit(status)


def print_json(value: Any) -> None:
    """One JSON document; bytes as hex."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


def make_asker(
    endpoints: list[str] | None, state_dir: Path | None, secret_file: Path | None
) -> Asker:
    """Must be called on the loop that will use it."""
    try:
        secret = Network(secret_file=secret_file).load_secret() if secret_file else _env_secret()
        return Asker(find_endpoints(endpoints or [], state_dir), secret=secret)
    except (EndpointError, ConfigError, ValueError, OSError) as error:
        fail(str(error), USAGE)


def find_given(endpoints: list[str] | None) -> list[str]:
    """The addresses that were given, checked; none if none were."""
    try:
        return find_endpoints(endpoints) if endpoints else []
    except EndpointError as error:
        fail(str(error), USAGE)


def _env_secret() -> Any:
    from pd_control.config import load

    return load(instance="pdctl").network.load_secret()


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a command's coroutine; Ctrl-C ends it cleanly with status 130."""
    try:
        return asyncio.run(make())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
