"""INSPECT: what a live process tells about itself (R10). Answering changes nothing.

One call asks for one thing (`what`); lists come in pages of bounded size, so that no answer holds
the loop thread for more than a few milliseconds. The fields are documented in docs/runtime.md and
stable: new ones are added, none is renamed or removed within a version of the format.

  process     who this is, its clocks, roles, counters, health, and how much of everything there is
  requests    a page of live requests of one side, in order of their ids
  request     everything about one request, of both sides, with its stage events
  leases      a page of leases: who holds which blocks and why
  workers     the ranks
  events      stage events of all requests: the latest, or page by page all that are still held
  config      the configuration, secrets masked
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_control.codes import Code
from pd_control.protocol import events as ev
from pd_control.protocol.leases import Lease, LeaseTable
from pd_control.trace import TraceEvent, in_order
from simple_rpc import Method, RpcError, Server

if TYPE_CHECKING:
    from pd_control.runtime.runner import CoreRunner
    from pd_control.runtime.scheduler import SchedulerRuntime

FORMAT_VERSION = 1
MAX_PAGE = 500  # leases or events: a millisecond of the loop thread
MAX_REQUESTS_PAGE = 250  # some 12 µs each: well below 5 ms of the loop thread
SIDES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """`after` is the last id of the page before, "" for the first. `limit` 0: the configured page.
    `key` (request only): a transfer's key, by which the other side knows the request."""

    what: str
    side: str = ""
    request_id: str = ""
    after: str = ""
    limit: int = 0
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class InspectAnswer:
    """`body` by `what`; see docs/runtime.md."""

    version: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """An operator's abort of one request on D."""

    request_id: str
    reason: str = "aborted by an operator"


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    """Whether the request was there."""

    found: bool


INSPECT: Method[InspectRequest, InspectAnswer] = Method(
    "INSP", InspectRequest, InspectAnswer, idempotent=True
)
ABORT_REQUEST: Method[AbortCommand, AbortAnswer] = Method(
    "ABRQ", AbortCommand, AbortAnswer, idempotent=True
)


def event_fields(event: TraceEvent) -> list[Any]:
    """A stage event on the wire: [at_ns, stage, request_id, key, rank, value]."""
    return [event.at_ns, int(event.stage), event.request_id, event.key, event.rank, event.value]


def lease_fields(lease: Lease, *, with_blocks: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "lease_id": lease.lease_id,
        "kind": lease.kind.value,
        "request_id": lease.request_id,
        "num_blocks": lease.num_blocks,
    }
    if with_blocks:
        out["block_ids"] = [list(group) for group in lease.block_ids]
    return out


class Inspector:
    """Answers INSPECT for one `SchedulerRuntime`. Loop thread."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime

    def serve(self, server: Server) -> None:
        async def handle(request: InspectRequest, _: object) -> InspectAnswer:
            return await self.answer(request)

        server.register(INSPECT, handle)
        server.register(ABORT_REQUEST, lambda command, _: self.abort(command))

    async def answer(self, request: InspectRequest) -> InspectAnswer:
        """Raises RpcError(BAD_REQUEST) for what it does not know, NOT_FOUND for a request that
        neither lives nor left a trace."""
        handler = getattr(self, f"_{request.what}", None)
        if request.what not in _WHATS or handler is None:
            raise RpcError(
                Code.BAD_REQUEST, f"what: expected one of {', '.join(_WHATS)}, got {request.what!r}"
            )
        if request.limit < 0:
            raise RpcError(Code.BAD_REQUEST, f"limit: expected 0 or more, got {request.limit}")
        found = handler(request)
        body: dict[str, Any] = await found if inspect.isawaitable(found) else found
        return InspectAnswer(FORMAT_VERSION, body)

    def abort(self, command: AbortCommand) -> AbortAnswer:
        runner = self._runtime.decode_runner
        if runner is None:
            raise RpcError(Code.BAD_REQUEST, "this process has no decode side")
        found = runner.core.inspect(command.request_id, time.monotonic()) is not None
        if found:
            runner.post(ev.AbortRequested(command.request_id, command.reason))
        return AbortAnswer(found)

    # -- what --------------------------------------------------------------------------------------

    def _limit(self, request: InspectRequest) -> int:
        return min(request.limit or self._runtime.config.inspect.page_requests, MAX_PAGE)

    def _runner(self, side: str) -> CoreRunner:
        if side not in SIDES:
            raise RpcError(Code.BAD_REQUEST, f"side: expected decode or prefill, got {side!r}")
        runner = self._runtime.decode_runner if side == "decode" else self._runtime.prefill_runner
        if runner is None:
            raise RpcError(Code.NOT_FOUND, f"this process has no {side} side")
        return runner

    def _leases_of(self, side: str) -> LeaseTable | None:
        driver = self._runtime.decode if side == "decode" else self._runtime.prefill
        return None if driver is None else driver.leases

    def _process(self, _: InspectRequest) -> dict[str, Any]:
        return self.process()

    def process(self) -> dict[str, Any]:
        """What INSPECT `process` answers."""
        runtime = self._runtime
        now_s = time.monotonic()
        sides: dict[str, Any] = {}
        for name in SIDES:
            leases = self._leases_of(name)
            if leases is None:
                continue
            runner = self._runner(name)
            sides[name] = {
                "core": runner.core.snapshot(now_s, "", 0),
                "num_events": runner.num_events,
                "num_leases": len(leases),
                "leased_blocks": {kind.value: n for kind, n in leases.blocks.items()},
                "leases_acquired": {kind.value: n for kind, n in leases.acquired.items()},
                "leases_released": {kind.value: n for kind, n in leases.released.items()},
            }
        return {
            "instance": runtime.me.instance,
            "incarnation": runtime.me.incarnation,
            "role": runtime.config.role,
            "model": runtime.model,
            "pid": os.getpid(),
            "address": runtime.advertised_address(),
            "started_s": runtime.started_s,
            "monotonic_ns": time.monotonic_ns(),
            "clock_offset_ns": runtime.trace.clock_offset_ns,
            "fatal": runtime.fatal,
            "topology": {
                "tp_size": runtime.topology.tp_size,
                "pp_size": runtime.topology.pp_size,
                "num_kv_heads": runtime.topology.num_kv_heads,
            },
            "ranks_missing": runtime.workers.missing(),
            "links": {
                "decode": 0 if runtime.decode_peers is None else len(runtime.decode_peers),
                "prefill": 0 if runtime.prefill_peers is None else len(runtime.prefill_peers),
            },
            "trace": {
                "recorded": runtime.trace.recorded,
                "overwritten": runtime.trace.overwritten,
            },
            "counters": dict(runtime.metrics.snapshot().counters),
            "sides": sides,
        }

    def _requests(self, request: InspectRequest) -> dict[str, Any]:
        runner = self._runner(request.side)
        limit = min(self._limit(request), MAX_REQUESTS_PAGE)
        return runner.core.snapshot(time.monotonic(), request.after, limit)

    async def _request(self, request: InspectRequest) -> dict[str, Any]:
        keys = (request.key,) if request.key else ()
        parts = []
        for part in self._runtime.trace.search(request.request_id, keys):
            parts.append(part)
            await asyncio.sleep(0)
        events = in_order(event for part in parts for event in part)
        # From here on in one piece: what the two sides and their leases say belongs together.
        now_s = time.monotonic()
        body: dict[str, Any] = {}
        for side in SIDES:
            leases = self._leases_of(side)
            if leases is None:
                continue
            found = self._runner(side).core.inspect(request.request_id, now_s)
            body[side] = found
            body[f"{side}_leases"] = [
                lease_fields(lease, with_blocks=True)
                for lease in list(leases)
                if lease.request_id == request.request_id
            ]
        if not events and not any(body.get(side) for side in SIDES):
            raise RpcError(Code.NOT_FOUND, f"no request {request.request_id!r} here")
        if self._runtime.prefill is not None:
            core = self._runtime.prefill_core
            over = (core.ended(key, now_s) for key in {e.key: None for e in events if e.key})
            body["prefill_ended"] = [transfer for transfer in over if transfer is not None]
        body["events"] = [event_fields(e) for e in events]
        body["clock_offset_ns"] = self._runtime.trace.clock_offset_ns
        return body

    def _leases(self, request: InspectRequest) -> dict[str, Any]:
        if request.side not in SIDES:
            raise RpcError(
                Code.BAD_REQUEST, f"side: expected decode or prefill, got {request.side!r}"
            )
        table = self._leases_of(request.side)
        if table is None:
            raise RpcError(Code.NOT_FOUND, f"this process has no {request.side} side")
        after = int(request.after) if request.after.isdecimal() else 0
        # Ids ascend with age and the table keeps their order; the copy is one step under the GIL.
        page = [lease for lease in list(table) if lease.lease_id > after][: self._limit(request)]
        return {
            "leases": [lease_fields(lease, with_blocks=False) for lease in page],
            "after": str(page[-1].lease_id) if len(page) == self._limit(request) else "",
            "num_leases": len(table),
        }

    def _workers(self, _: InspectRequest) -> dict[str, Any]:
        return {"workers": self._runtime.workers.snapshot()}

    def _events(self, request: InspectRequest) -> dict[str, Any]:
        trace, limit = self._runtime.trace, self._limit(request)
        start = int(request.after) if request.after.isdecimal() else trace.recorded - limit
        events, stop = trace.page(max(0, start), limit)
        return {
            "events": [event_fields(e) for e in events],
            "clock_offset_ns": trace.clock_offset_ns,
            "after": str(stop) if stop < trace.recorded else "",
        }

    def _config(self, _: InspectRequest) -> dict[str, Any]:
        return {"config": self._runtime.config.to_mapping()}


_WHATS = ("process", "requests", "request", "leases", "workers", "events", "config")
