"""The command line: ``pdctl``."""

from __future__ import annotations

from collections.abc import Callable

import typer

from pd_control.cli import act, look, replay_command, serve

app = typer.Typer(
    name="pdctl",
    help="Look into live prefill and decode engines; serve, proxy and replay. "
    "Exit status: 0 done, 1 the answer is no, 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

commands: tuple[Callable[..., None], ...] = (
    look.ps, look.show, look.watch, look.peers, look.blocks,
    act.trace, act.abort, act.doctor, act.config,
    serve.serve, serve.proxy,
)  # fmt: skip
for command in commands:
    app.command()(command)
app.command("version")(act.show_version)
app.command("replay")(replay_command.replay)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
