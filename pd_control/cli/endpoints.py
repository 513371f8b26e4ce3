"""Which processes a command talks to, and one question to each of them.

Endpoints come from ``--endpoint`` (repeatable), else from ``PD_CONTROL_ENDPOINTS`` (comma separated),
else from the state directory, where each engine keeps a file about itself: so on one machine no
argument is needed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_control.discovery import PeerRecord
from pd_control.discovery.files import SUFFIX, read_record
from pd_control.runtime.inspect import ABORT_REQUEST, INSPECT, AbortCommand, InspectRequest
from simple_rpc import Address, Client, Deadline, Identity, RpcError, Secret, new_incarnation

ENDPOINTS_ENV = "PD_CONTROL_ENDPOINTS"
STATE_DIR_ENV = "PD_CONTROL_STATE_DIR"
#: An operator waits this long for one process before it is reported as not answering.
ASK_TIMEOUT_S = 3.0
#: Pages fetched at most of one list; a table of more than half a million rows is a broken cursor.
MAX_PAGES = 1024


class EndpointError(Exception):
    """No endpoint to talk to; the message says where was looked and what to do."""


def default_state_dir() -> Path:
    """Where engines of this user and machine leave their files."""
    told = os.environ.get(STATE_DIR_ENV)
    if told:
        return Path(told)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "pd-control"
    return Path(f"/tmp/pd-control-{os.getuid()}")


def find_endpoints(given: Sequence[str], state_dir: Path | None = None) -> list[str]:
    """Control addresses, in a stable order.

    Raises:
        EndpointError: none anywhere, or one that is no address.
    """
    texts = list(given)
    if not texts:
        texts = [t for t in os.environ.get(ENDPOINTS_ENV, "").split(",") if t.strip()]
    if not texts:
        folder = state_dir or default_state_dir()
        records = _read_records(folder)
        if not records:
            raise EndpointError(
                f"no engine is known: none has a file in {folder}. Start one (pdctl serve), or give "
                f"--endpoint tcp://HOST:PORT, {ENDPOINTS_ENV} or {STATE_DIR_ENV}"
            )
        texts = [r.address for r in records]
    found = []
    for text in texts:
        text = text.strip()
        try:
            Address.parse(text if "://" in text else f"tcp://{text}")
        except ValueError as error:
            raise EndpointError(f"{text!r} is no address: {error}") from error
        found.append(text if "://" in text else f"tcp://{text}")
    return list(dict.fromkeys(found))


def _read_records(folder: Path) -> list[PeerRecord]:
    records = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            records.append(read_record(path))
        except (OSError, ValueError):
            continue  # half written, or somebody else's; `doctor` names it
    return records


@dataclass
class Answer:
    """What one process said to one question, or why it said nothing."""

    endpoint: str
    body: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    code: str = ""
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error


class Asker:
    """Asks many processes at once. An async context manager; one loop.

    A process that does not answer costs ``timeout_s`` and nobody else's answer.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        secret: Secret | None = None,
        ssl_context: Any = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> None:
        self.endpoints = list(endpoints)
        self._timeout_s = timeout_s
        identity = Identity("tool", f"pdctl-{os.getpid()}", new_incarnation())
        self._client = Client(identity, secret=secret, ssl_context=ssl_context)

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def ask(self, endpoint: str, what: str, **fields: Any) -> Answer:
        """One question to one process; never raises for what it does."""
        began = time.monotonic()
        try:
            answer = await self._client.call(
                endpoint,
                INSPECT,
                InspectRequest(what, **fields),
                deadline=Deadline.after(self._timeout_s),
            )
        except RpcError as error:
            return Answer(endpoint, {}, str(error), error.code.name, time.monotonic() - began)
        return Answer(endpoint, answer.body, took_s=time.monotonic() - began)

    async def ask_all(self, what: str, **fields: Any) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(e, what, **fields) for e in self.endpoints)))

    async def pages(
        self, endpoint: str, what: str, key: str, next_of: Any, *, after: str = "", **fields: Any
    ) -> tuple[list[Any], str]:
        """Every row of a paged list, and the error that ended it early, if one did.

        ``after`` is the first page's cursor; ``next_of(body)`` gives the next one's, "" at the end.
        """
        rows: list[Any] = []
        for _ in range(MAX_PAGES):
            answer = await self.ask(endpoint, what, after=after, **fields)
            if not answer.ok:
                return rows, "" if answer.code == "NOT_FOUND" else answer.error
            rows += answer.body[key]
            following = next_of(answer.body)
            if not following:
                break
            after = following
        return rows, ""

    async def requests(self, endpoint: str, side: str) -> tuple[list[dict[str, Any]], str]:
        """All live requests of one side of one process; empty if it does not have that side."""

        def next_of(body: Mapping[str, Any]) -> str:
            page = body["requests"]
            return str(page[-1]["request_id"]) if page else ""

        return await self.pages(endpoint, "requests", "requests", next_of, side=side)

    async def leases(self, endpoint: str, side: str) -> tuple[list[dict[str, Any]], str]:
        return await self.pages(
            endpoint, "leases", "leases", lambda body: str(body["after"]), side=side
        )

    async def events(self, endpoint: str) -> tuple[list[Any], str]:
        """All stage events that a process still holds, as they came over the wire."""
        return await self.pages(
            endpoint, "events", "events", lambda body: str(body["after"]), after="0", limit=500
        )

    async def abort(self, endpoint: str, request_id: str) -> tuple[bool, str]:
        """Abort on one process: (was it there, error)."""
        try:
            answer = await self._client.call(
                endpoint,
                ABORT_REQUEST,
                AbortCommand(request_id),
                deadline=Deadline.after(self._timeout_s),
            )
        except RpcError as error:
            return False, str(error)
        return answer.found, ""
