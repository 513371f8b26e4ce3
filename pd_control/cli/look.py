"""Commands that look: ``ps``, ``show``, ``watch``, ``peers``, ``blocks``. None changes anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pd_control.cli.endpoints import Answer, Asker
from pd_control.cli.options import (
    NO,
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
from pd_control.cli.stages import parse_events
from pd_control.cli.ways import WAY_COLUMNS, way_lines, way_rows
from pd_control.trace import TraceEvent, missing_stages, timeline

SIDES = ("prefill", "decode")


def seconds(value: float | None) -> str:
    """A duration for people: 0.4 ms, 12 ms, 3.2 s, 4 min."""
    if value is None:
        return ""
    if abs(value) < 0.01:
        return f"{value * 1e3:.2f} ms"
    if abs(value) < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if abs(value) < 120 else f"{value / 60:.0f} min"


def make_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def deadline_of(row: dict[str, Any]) -> tuple[str, float] | None:
    """The wait that ends this request if nothing else comes: (name, seconds left); the nearest."""
    found = [row.get("deadline"), *(t.get("deadline") for t in row.get("transfers", ()))]
    due = [(str(d["name"]), float(d["in_s"])) for d in found if d]
    return min(due, key=lambda d: d[1]) if due else None


def waits_for(row: dict[str, Any]) -> str:
    """What must happen next for this request, from its state and what is missing."""
    if row["side"] == "D":
        lost = ", ".join(
            "P's last word" if m == "FINAL" else f"{m[0]}←{m[1]}" for m in row["missing"]
        )
        return {
            "WAITING_BLOCKS": "free KV blocks here",
            "LINKING": f"a link to {row['peer'] or 'a P'}",
            "GRANTING": f"ranks {row['grants_unacked']} to open their grants",
            "REQUESTING": f"{row['peer']} to accept",
            "QUEUED": f"{row['peer']} to start",
            "LOADING": f"KV, rank←P rank: {lost}",
            "CLOSING": f"ranks {row['grants_unacked']} to close their grants",
        }.get(row["state"], "")
    for transfer in row.get("transfers", ()):
        if transfer["state"] in ("SENDING", "DRAINING"):
            pairs = ", ".join(f"{m[0]}→{m[1]}" for m in transfer["missing"])
            return f"SEND_DONE, rank→D rank: {pairs}"
        if transfer["state"] in ("PARKED", "QUEUED"):
            steps = row.get("waits_for_steps")
            return f"steps {steps} to end" if steps else "its prefill here"
    if row["state"] == "HELD":
        done, wanted = row["takers"]
        return f"{wanted - done} taker(s) to ask for it"
    return str(row.get("why_held", ""))


# -- ps ------------------------------------------------------------------------------------------------


async def collect_requests(asker: Asker) -> tuple[list[dict[str, Any]], list[str]]:
    """Live requests of every process, oldest first, and what could not be asked."""
    processes = await asker.ask_all("process")
    problems = [f"{a.endpoint}: {a.error}" for a in processes if not a.ok]
    rows: list[dict[str, Any]] = []

    async def side_of(answer: Answer, side: str) -> None:
        found, error = await asker.requests(answer.endpoint, side)
        if error:
            problems.append(f"{answer.endpoint}: {error}")
        for row in found:
            rows.append(row | {"instance": answer.body["instance"], "endpoint": answer.endpoint})

    await asyncio.gather(
        *(side_of(a, side) for a in processes if a.ok for side in a.body["sides"] if side in SIDES)
    )
    rows.sort(key=lambda r: (-float(r.get("age_s") or 0.0), r["request_id"], r["side"]))
    return rows, problems


def requests_table(rows: list[dict[str, Any]], limit: int = 0) -> Table:
    table = make_table(
        "", "REQUEST", "SIDE", "INSTANCE", "STATE", "AGE", "BLOCKS", "WAITS FOR", "ENDED BY",
        right=("AGE", "BLOCKS"),
    )  # fmt: skip
    for row in rows[: limit or None]:
        due = deadline_of(row)
        table.add_row(
            row["request_id"],
            row["side"],
            row["instance"],
            row["state"],
            seconds(row.get("age_s")),
            str(row.get("num_blocks", "")),
            Text(waits_for(row), overflow="ellipsis"),
            f"{due[0]} in {seconds(due[1])}" if due else "",
        )
    return table


def ps(
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(help="Rows at most; 0 for all.", min=0)] = 0,
) -> None:
    """Live requests, oldest first: state, age, what each waits for and which deadline ends it."""

    async def main() -> tuple[list[dict[str, Any]], list[str]]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            return await collect_requests(asker)

    rows, problems = run(main)
    if as_json:
        print_json({"requests": rows[: limit or None], "problems": problems})
    else:
        out = console()
        if rows:
            out.print(requests_table(rows, limit))
        else:
            out.print("no live requests")
        for problem in problems:
            out.print(Text(problem, style="red"))
    if problems:
        raise typer.Exit(NO)


# -- show ----------------------------------------------------------------------------------------------


def peer_ids(bodies: Iterable[dict[str, Any]]) -> set[str]:
    """Request ids that a request is joined to by its transfers: D's id in each, and P's in D's view."""
    found = set()
    for body in bodies:
        decode = body.get("decode") or {}
        if decode.get("remote_request_id"):
            found.add(str(decode["remote_request_id"]))
        for transfer in (body.get("prefill") or {}).get("transfers", ()):
            # instance/incarnation/request/attempt; only the request part may hold slashes
            parts = str(transfer["transfer"]).split("/", 2)
            if len(parts) == 3:
                found.add(parts[2].rpartition("/")[0])
    return found


async def collect_request(asker: Asker, request_id: str) -> list[tuple[Answer, dict[str, Any]]]:
    """Every process that knows the request, under its own or under its peer's id; of one that has it no
    more, what it remembers of its transfers, which are known by their keys."""
    known: dict[tuple[str, str], tuple[Answer, dict[str, Any]]] = {}
    processes = {a.endpoint: a for a in await asker.ask_all("process") if a.ok}
    wanted, asked = {(request_id, b"")}, set[tuple[str, bytes]]()
    while wanted - asked:
        name, key = sorted(wanted - asked)[0]
        asked.add((name, key))
        for answer in await asker.ask_all("request", request_id=name, key=key):
            if not answer.ok or answer.endpoint not in processes:
                continue
            _, before = known.get((answer.endpoint, name), (None, {"events": ()}))
            if len(answer.body["events"]) >= len(before["events"]):
                known[answer.endpoint, name] = (processes[answer.endpoint], answer.body)
            if name == request_id:
                events = stage_events(answer.body)
                keys = {e.key for e in events if e.key and e.request_id == name}
                wanted |= {(name, key) for key in keys}
        wanted |= {(name, b"") for name in peer_ids(body for _, body in known.values())}
    lives = {endpoint for (endpoint, _), (_, body) in known.items() if is_live(body)}
    return [
        found
        for (endpoint, _), found in known.items()
        if endpoint not in lives or is_live(found[1])
    ]


def is_live(body: dict[str, Any]) -> bool:
    """Whether an answer about a request has it, and not only what is remembered of it."""
    return any(body.get(side) for side in SIDES)


def stage_events(body: dict[str, Any]) -> list[TraceEvent]:
    """The events in the answer to a question about a request, or about events."""
    return parse_events(body.get("events", ()))


#: Fields of a transfer that `show` does not list as they are: they are in its heading or its ways.
TRANSFER_TOLD = ("transfer", "state", "key", "deadline", "ways", "refusals", "refused")


def view_lines(view: dict[str, Any], leases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """One side of a request as (label, text)."""
    due = deadline_of(view)
    lines = [("state", str(view["state"]))]
    waited = waits_for(view)
    if waited:
        lines.append(("waits for", waited))
    lines.append(
        (
            "ended by",
            f"{due[0]} in {seconds(due[1])}" if due else "no wait of its own: the engine's",
        )
    )
    if view.get("why_held"):
        lines.append(("held because", str(view["why_held"])))
    for lease in leases:
        ids = lease.get("block_ids") or []
        shown = "; ".join(_ranges(group) for group in ids)
        lines.append(
            (
                f"lease {lease['lease_id']}",
                f"{lease['kind']}, {lease['num_blocks']} blocks: {shown}",
            )
        )
    told = ("state", "deadline", "why_held", "transfers", "block_ids", "request_id", "side", "key")
    for key, value in view.items():
        if (
            key not in told
            and key not in ("waits_for_steps",)
            and value not in ("", [], None, "OK")
        ):
            lines.append((key.replace("_", " "), _plain(value)))
    if view.get("waits_for_steps"):
        lines.append(("steps to end", str(view["waits_for_steps"])))
    for transfer in view.get("transfers", ()):
        lines.append(("transfer", f"{transfer['transfer']}: {transfer['state']}"))
        lines += [(f"  {label}", text) for label, text in way_lines(transfer)]
        for key, value in transfer.items():
            if key not in TRANSFER_TOLD and value not in ("", [], None):
                lines.append((f"  {key.replace('_', ' ')}", _plain(value)))
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(v, (int, str)) for v in value):
        return ", ".join(map(str, value))
    return str(value)


def _ranges(ids: list[int]) -> str:
    """3-7, 9: block ids in order, runs folded."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def show(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request id, of either side.")],
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Everything about one request, both sides joined: who holds it, why, and what ends it."""

    async def main() -> list[tuple[Answer, dict[str, Any]]]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            return await collect_request(asker, request)

    found = run(main)
    if not found:
        fail(f"no process knows request {request!r}; pdctl ps lists the live ones")
    sides = [
        (f"{a.body['instance']}", a.body["clock_offset_ns"], stage_events(b)) for a, b in found
    ]
    rows = timeline(sides)
    missing = missing_stages([e for _, _, events in sides for e in events])
    if as_json:
        print_json(
            {
                "request_id": request,
                "processes": [
                    {"endpoint": a.endpoint, "instance": a.body["instance"], **b} for a, b in found
                ],
                "timeline": [
                    {
                        "stage": r.stage.label,
                        "instance": r.side,
                        "rank": r.rank,
                        "value": r.value,
                        "since_start_s": r.since_start_s,
                        "since_previous_s": r.since_previous_s,
                    }
                    for r in rows
                ],
                "stages_missing": [s.label for s in missing],
            }
        )
        return
    out = console()
    for answer, body in found:
        for side in SIDES:
            view = body.get(side)
            if not view:
                continue
            out.print(Text(f"\n{view['request_id']} on {answer.body['instance']} ({side})", "bold"))
            table = Table.grid(padding=(0, 2))
            for label, text in view_lines(view, body.get(f"{side}_leases", [])):
                table.add_row(Text(label, style="dim"), Text(text))
            out.print(table)
        for transfer in body.get("prefill_ended", ()):
            out.print(
                Text(
                    f"\ntransfer {transfer['key'][:8]}… on {answer.body['instance']} is over",
                    "bold",
                )
            )
            table = Table.grid(padding=(0, 2))
            outcome = f"{transfer['code']} {transfer['message']}".strip()
            for label, text in [("outcome", outcome), *way_lines(transfer)]:
                table.add_row(Text(label, style="dim"), Text(text))
            out.print(table)
    if rows:
        table = make_table(
            "\nTIMELINE", "SINCE START", "STEP", "STAGE", "WHERE", "RANK", "VALUE",
            right=("SINCE START", "STEP", "RANK", "VALUE"),
        )  # fmt: skip
        for r in rows:
            table.add_row(
                seconds(r.since_start_s),
                f"+{seconds(r.since_previous_s)}",
                r.stage.label,
                r.side,
                "" if r.rank < 0 else str(r.rank),
                str(r.value) if r.value else "",
            )
        out.print(table)
    if missing:
        out.print(Text("not reached: " + ", ".join(s.label for s in missing), style="dim"))


# -- watch ---------------------------------------------------------------------------------------------


def watch(
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds.", min=0.1)] = 1.0,
    count: Annotated[int, typer.Option(help="Stop after so many views; 0: until Ctrl-C.")] = 0,
) -> None:
    """A live view of processes and requests. Ctrl-C ends it."""

    async def main() -> None:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            out = console()
            with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
                done = 0
                while True:
                    rows, problems = await collect_requests(asker)
                    processes = await asker.ask_all("process")
                    room = max(5, (out.height if out.is_terminal else 40) - len(processes) - 8)
                    live.update(
                        Group(
                            Text(time.strftime("%H:%M:%S"), style="dim"),
                            peers_table(processes),
                            requests_table(rows, room),
                            Text("\n".join(problems), style="red"),
                        ),
                        refresh=True,
                    )
                    done += 1
                    if done == count:
                        return
                    await asyncio.sleep(interval_s)

    run(main)


# -- peers ---------------------------------------------------------------------------------------------


def peers_table(answers: list[Answer]) -> Table:
    table = make_table(
        "", "INSTANCE", "ROLE", "ADDRESS", "INCARNATION", "TP", "LINKS", "REQUESTS", "LEASED",
        "ANSWER", "HEALTH", right=("TP", "LINKS", "REQUESTS", "LEASED", "ANSWER"),
    )  # fmt: skip
    for a in answers:
        if not a.ok:
            table.add_row("?", "", a.endpoint, "", "", "", "", "", "", Text(a.error, style="red"))
            continue
        b = a.body
        sides = b["sides"].values()
        requests = sum(s["core"]["tables"]["requests"] for s in sides)
        leased = sum(sum(s["leased_blocks"].values()) for s in sides)
        health = "ok"
        if b["fatal"]:
            health = f"fatal: {b['fatal']}"
        elif b["ranks_missing"]:
            health = f"ranks missing: {b['ranks_missing']}"
        table.add_row(
            b["instance"],
            b["role"],
            b["address"],
            bytes(b["incarnation"]).hex()[:8],
            str(b["topology"]["tp_size"]),
            str(sum(b["links"].values())),
            str(requests),
            str(leased),
            seconds(a.took_s),
            Text(health, style="green" if health == "ok" else "red"),
        )
    return table


def peers(
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Processes and their workers: health, incarnation, connections, in flight, errors."""

    async def main() -> tuple[list[Answer], list[Answer]]:
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            return await asker.ask_all("process"), await asker.ask_all("workers")

    processes, workers = run(main)
    if as_json:
        print_json(
            [
                {"endpoint": p.endpoint, "error": p.error, "workers": w.body.get("workers", [])}
                | p.body
                for p, w in zip(processes, workers, strict=True)
            ]
        )
    else:
        out = console()
        out.print(peers_table(processes))
        ways = make_table(
            "\nWAYS", "INSTANCE", *WAY_COLUMNS, "FAILED", right=(*WAY_COLUMNS, "FAILED")
        )
        for cells in way_rows(processes):
            ways.add_row(*cells)
        if ways.row_count:
            out.print(ways)
        table = make_table(
            "\nWORKERS", "INSTANCE", "RANK", "PID", "INCARNATION", "DATA ADDRESS", "CONNECTED",
            "UNACKED NEWS", right=("RANK", "PID", "UNACKED NEWS"),
        )  # fmt: skip
        for p, w in zip(processes, workers, strict=True):
            for row in w.body.get("workers", ()):
                table.add_row(
                    p.body.get("instance", p.endpoint),
                    str(row["rank"]),
                    str(row["pid"]),
                    row["incarnation"][:8],
                    row["data_address"],
                    "yes" if row["is_connected"] else Text("no", style="red"),
                    str(row["unacked_news"]),
                )
        if table.row_count:
            out.print(table)
        errors = make_table("\nCOUNTED", "INSTANCE", "WHAT", "TIMES", right=("TIMES",))
        for p in processes:
            for side in p.body.get("sides", {}).values():
                for name, value in side["core"]["counters"].items():
                    if value and name.startswith(("ignored.", "error.", "failed.")):
                        errors.add_row(p.body["instance"], name, str(value))
        if errors.row_count:
            out.print(errors)
    if any(not a.ok for a in processes):
        raise typer.Exit(NO)


# -- blocks --------------------------------------------------------------------------------------------


def blocks(
    endpoint: EndpointOption = None,
    state_dir: StateDirOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """KV blocks that the control plane pins, by kind and by request. Nothing pinned is status 0 too."""

    async def main() -> list[dict[str, Any]]:
        rows = []
        async with make_asker(endpoint, state_dir, secret_file) as asker:
            for process in await asker.ask_all("process"):
                row: dict[str, Any] = {"endpoint": process.endpoint, "error": process.error}
                if process.ok:
                    row["instance"] = process.body["instance"]
                    row["sides"] = {
                        side: {
                            "pinned_blocks": found["leased_blocks"],
                            "acquired": found["leases_acquired"],
                            "released": found["leases_released"],
                            "leases": (await asker.leases(process.endpoint, side))[0],
                        }
                        for side, found in process.body["sides"].items()
                    }
                rows.append(row)
        return rows

    rows = run(main)
    if as_json:
        print_json(rows)
    else:
        out = console()
        table = make_table(
            "", "INSTANCE", "SIDE", "KIND", "PINNED", "LEASES TAKEN", "GIVEN BACK",
            right=("PINNED", "LEASES TAKEN", "GIVEN BACK"),
        )  # fmt: skip
        pins = make_table(
            "\nPINNED BY",
            "INSTANCE",
            "REQUEST",
            "KIND",
            "BLOCKS",
            "LEASE",
            right=("BLOCKS", "LEASE"),
        )
        for row in rows:
            if row["error"]:
                table.add_row(row["endpoint"], Text(row["error"], style="red"))
            for side, found in row.get("sides", {}).items():
                for kind, pinned in found["pinned_blocks"].items():
                    if found["acquired"][kind] or pinned:
                        table.add_row(
                            row["instance"], side, kind, str(pinned),
                            str(found["acquired"][kind]), str(found["released"][kind]),
                        )  # fmt: skip
                for lease in found["leases"]:
                    pins.add_row(
                        row["instance"], lease["request_id"], lease["kind"],
                        str(lease["num_blocks"]), str(lease["lease_id"]),
                    )  # fmt: skip
        out.print(table if table.row_count else "no lease was ever taken")
        out.print(pins if pins.row_count else "nothing is pinned")
    if any(row["error"] for row in rows):
        raise typer.Exit(NO)
