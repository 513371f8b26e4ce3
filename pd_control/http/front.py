"""From an asyncio handler to the engine's core thread and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from pd_control.reference.engine import Output, Request

if TYPE_CHECKING:
    from pd_control.http.metrics import Meter


class EngineLike(Protocol):
    """The two calls a front needs; both may come from any thread and never block."""

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...


#: How a completion can end: by its engine's word, by its client's leaving, or before it began.
OUTCOMES = ("stop", "length", "abort", "error", "refused")


def outcome_of(output: Output) -> str:
    """Of a last output."""
    return "refused" if output.is_refusal else str(output.finish_reason)


class DuplicateRequestError(ValueError):
    """A request id that is already running."""


class Front:
    """Outputs of one engine, handed to the coroutine that waits for them.

    Create it on the loop that serves; give :meth:`on_output` to the engine (it calls it on its core
    thread), then :meth:`attach` the engine.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        self._engine: EngineLike | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, engine: EngineLike) -> None:
        self._engine = engine

    @property
    def num_open(self) -> int:
        return len(self._queues)

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    def on_output(self, output: Output) -> None:
        """Any thread. After the loop is closed outputs are dropped: nobody is left to read them."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, output)
        except RuntimeError:
            return

    def _deliver(self, output: Output) -> None:
        queue = self._queues.get(output.request_id)
        if queue is not None:
            queue.put_nowait(output)

    async def generate(
        self, request: Request, on_taken: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Output]:
        """Submit and yield outputs until the one with a ``finish_reason``.

        Leaving the iterator early, by cancellation or otherwise, aborts the request.

        Raises:
            DuplicateRequestError: the id is in use.
        """
        if self._engine is None:
            raise RuntimeError("no engine is attached")
        if request.request_id in self._queues:
            raise DuplicateRequestError(f"request {request.request_id!r} is already running")
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._idle.clear()
        measured = self._meter.begin(len(request.token_ids)) if self._meter else None
        ended = False
        try:
            self._engine.submit(request)
            on_taken()
            while not ended:
                output = await queue.get()
                ended = output.finish_reason is not None
                if measured is not None:
                    measured.tokens(len(output.tokens))
                    if ended:
                        measured.end(outcome_of(output), output.num_cached)
                yield output
        finally:
            if measured is not None:
                measured.end("abort")  # nothing if it has ended
            del self._queues[request.request_id]
            if not self._queues:
                self._idle.set()
            if not ended:
                self._engine.abort(request.request_id)
