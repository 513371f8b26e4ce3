"""Commands that take something out or end something: ``trace``, ``abort``, ``doctor``, ``config``,
``version``."""

from __future__ import annotations

import asyncio
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from pd_control.cli.endpoints import Answer, Asker, default_state_dir
from pd_control.cli.look import (
    collect_request,
    collect_requests,
    deadline_of,
    make_table,
    seconds,
)
from pd_control.cli.options import (
    NO,
    USAGE,
    EndpointOption,
    JsonOption,
    SecretOption,
    StateDirOption,
    console,
    fail,
    make_asker,
    print_json,
    run,
)
from pd_control.cli.picture import PictureError, timeline_svg
from pd_control.cli.stages import SideEvents, collect_events, make_sides, perfetto

#: Processes on one machine share a clock; more than this between two says that they do not.
MAX_CLOCK_OFFSET_S = 0.05
#: A request older than this that has made no step is worth a look.
STUCK_AFTER_S = 30.0


# -- trace ---------------------------------------------------------------------------------------------


async def request_events(asker: Asker, request_id: str) -> list[SideEvents]:
    """The stage events of one request, process by process."""
    found = await collect_request(asker, request_id)
    return make_sides([a for a, _ in found], [b["events"] for _, b in found])


def trace(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request id; or --all.")] = "",
    every: Annotated[bool, typer.Option("--all", help="All requests still in the rings.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "pd-trace.json"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the request's timeline (.svg).")
    ] = None,
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
) -> None:
    """Write a Chrome/Perfetto trace, P and D on one clock. Open it in ui.perfetto.dev."""
    if bool(request) == every:
        fail("give a request id, or --all", USAGE)
    if picture is not None and every:
        fail("--picture shows one request: give its id", USAGE)

    async def main() -> list[SideEvents]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            return await (collect_events(asker) if every else request_events(asker, request))

    sides = run(main)
    count = sum(len(side.events) for side in sides)
    if not count:
        fail("no stage event is left of " + (repr(request) if request else "any request"))
    import json

    try:
        output.write_text(json.dumps(perfetto(sides)))
        if picture is not None:
            picture.write_text(timeline_svg(sides, request))
    except (OSError, PictureError) as error:
        fail(str(error))
    console().print(f"{count} stage events of {len(sides)} processes in {output}", highlight=False)
    if picture is not None:
        console().print(f"timeline in {picture}", highlight=False)


# -- abort ---------------------------------------------------------------------------------------------


def abort(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="D's request id.")],
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a request on D, and P's half with it. Returns at once; its blocks follow."""

    async def main() -> list[tuple[Answer, bool, str]]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            targets = [
                p for p in await asker.ask_all("process") if p.ok and "decode" in p.body["sides"]
            ]
            done = await asyncio.gather(*(asker.abort(p.endpoint, request) for p in targets))
            return [(p, found, error) for p, (found, error) in zip(targets, done, strict=True)]

    results = run(main)
    found = [p.body["instance"] for p, there, _ in results if there]
    if as_json:
        print_json({"request_id": request, "aborted_on": found})
    elif found:
        console().print(f"{request}: aborted on {', '.join(found)}", highlight=False)
    if not found:
        fail(f"no D has a live request {request!r}")


# -- doctor --------------------------------------------------------------------------------------------


def likely_cause(row: dict[str, Any]) -> str:
    """Why a request may be where it is, in words an operator can act on."""
    due = deadline_of(row)
    name = due[0] if due else ""
    causes = {
        "park": "P has not seen this request: did the router send it to another P, or not at all?",
        "hold": "P has the KV and no D has asked for it: is D alive, and did the router tell it?",
        "blocks": "D has no free KV blocks: it is full; more D, or shorter prompts",
        "queue": "P has accepted and not started: P's steps are long or it is full",
        "load": "KV is on its way: is P's worker alive, is the network slow?",
        "connect": "P does not answer at its address",
        "grant": "a worker of D does not acknowledge: it is stuck or dead",
        "close": "a worker of D does not acknowledge a close: it is stuck or dead",
    }
    for key, cause in causes.items():
        if key in name:
            return cause
    return str(row.get("waits_for") or row.get("why_held") or "")


async def examine(asker: Asker) -> list[tuple[str, bool, str]]:
    """The checks of ``doctor``: (what, good, finding)."""
    checks: list[tuple[str, bool, str]] = []
    began = time.time()
    processes = await asker.ask_all("process")
    half_way = (began + time.time()) / 2
    workers = {a.endpoint: a.body.get("workers", []) for a in await asker.ask_all("workers")}
    for p in processes:
        if p.ok:
            text = f"answers in {seconds(p.took_s)}"
        elif p.code == "UNAUTHORIZED":
            text = f"{p.error}; give --secret-file or PD_CONTROL__NETWORK__SECRET_FILE"
        elif p.code == "UNREACHABLE":
            text = f"{p.error}; is the process running, and the address right?"
        else:
            text = p.error
        checks.append((f"reach {p.body.get('instance') or p.endpoint}", p.ok, text))
    alive = [p for p in processes if p.ok]
    for p in alive:
        name, b = p.body["instance"], p.body
        checks.append((f"health of {name}", not b["fatal"], b["fatal"] or "no fatal error"))
        missing = b["ranks_missing"]
        down = [w["rank"] for w in workers.get(p.endpoint, ()) if not w["is_connected"]]
        good = not missing and not down
        text = (
            "all registered and connected" if good else f"missing {missing}, not connected {down}"
        )
        checks.append((f"workers of {name}", good, text))
        offset_s = (b["monotonic_ns"] + b["clock_offset_ns"]) / 1e9 - half_way
        uncertain = p.took_s
        checks.append(
            (
                f"clock of {name}",
                abs(offset_s) <= MAX_CLOCK_OFFSET_S + uncertain,
                f"{offset_s * 1e3:+.1f} ms from here, ±{uncertain * 1e3:.1f} ms",
            )
        )
    models = {p.body["model"] for p in alive}
    if len(alive) > 1:
        checks.append(
            ("one model everywhere", len(models) == 1, ", ".join(sorted(map(str, models))))
        )
    sources = [p for p in alive if "prefill" in p.body["sides"]]
    sinks = [p for p in alive if "decode" in p.body["sides"]]
    for d in sinks:
        if sources and any(s is not d for s in sources):
            links = d.body["links"]["decode"]
            checks.append(
                (
                    f"links of {d.body['instance']} to P",
                    True,
                    f"{links} open; made when first needed",
                )
            )
    rows, problems = await collect_requests(asker)
    stuck = [r for r in rows if float(r.get("age_s") or 0) > STUCK_AFTER_S]
    checks.append(("no request is stuck", not stuck, f"{len(rows)} live, {len(stuck)} old"))
    for row in stuck[:20]:
        checks.append((f"  {row['request_id']} ({row['state']})", False, likely_cause(row)))
    checks += [("list of requests", False, problem) for problem in problems]
    return checks


def doctor(
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check reachability, secret, workers, models, clocks and stuck requests, with likely causes."""

    async def main() -> list[tuple[str, bool, str]]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            return await examine(asker)

    checks = run(main)
    if as_json:
        print_json([{"check": w, "ok": good, "finding": text} for w, good, text in checks])
    else:
        table = make_table("", "", "CHECK", "FINDING")
        table.columns[-1].no_wrap = False  # what to do comes last in it
        for what, good, text in checks:
            mark = Text("ok", style="green") if good else Text("NO", style="bold red")
            table.add_row(mark, what, Text(text))
        console().print(table)
    if not all(good for _, good, _ in checks):
        raise typer.Exit(NO)


# -- config and version --------------------------------------------------------------------------------


def config(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file; default: a live process's.")
    ] = None,
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration in force: of live processes, or of a file with the environment over it."""
    if file is not None:
        from pd_control.config import ConfigError, load

        try:
            trees = {str(file): load(file, instance="unnamed").to_mapping()}
        except ConfigError as error:
            fail(str(error), USAGE)
    else:

        async def main() -> dict[str, Any]:
            async with make_asker(endpoint, state_dir, secret_file) as asker:
                answers = await asker.ask_all("config")
                return {
                    a.endpoint: a.body["config"] if a.ok else {"error": a.error} for a in answers
                }

        trees = run(main)
    if as_json:
        print_json(trees)
        return
    for name, tree in trees.items():
        typer.echo(f"# {name}")
        for key, value in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
            if isinstance(value, dict):
                typer.echo(f"\n[{key}]")
                for k, v in value.items():
                    typer.echo(f"{k} = {_toml(v)}" if v is not None else f"# {k} is not set")
            else:
                typer.echo(f"{key} = {_toml(value)}")
        typer.echo("")


def _toml(value: Any) -> str:
    import json

    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items())
        return "{" + inner + "}"
    return json.dumps(value)


def version_info() -> dict[str, str]:
    """Of this package and of what its behaviour depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("pd-control", "uvloop", "msgpack", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["state_dir"] = str(default_state_dir())
    return found


def show_version(as_json: JsonOption = False) -> None:
    """Versions of this installation, and where it looks for engines."""
    found = version_info()
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        typer.echo(f"{name:12} {value}")
