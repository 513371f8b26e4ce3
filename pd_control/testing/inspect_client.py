"""A blocking client of INSPECT, for tests, examples and scripts."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pd_control.runtime.inspect import (
    ABORT_REQUEST,
    INSPECT,
    AbortCommand,
    InspectAnswer,
    InspectRequest,
)
from simple_rpc import Client, Deadline, Identity
from simple_rpc.auth import Secret
from simple_rpc.loop_thread import LoopThread

CALL_S = 5.0


class InspectClient:
    """One loop thread and one client for any number of processes. Any thread but the loop's."""

    def __init__(self, *, secret: Secret | None = None) -> None:
        self._thread = LoopThread("inspect").start()
        self._secret = secret
        self._client: Client = self._thread.submit(self._make).result(CALL_S)

    async def _make(self) -> Client:
        return Client(Identity("pdctl", "pdctl"), secret=self._secret)

    def ask(self, address: str, what: str, **fields: Any) -> dict[str, Any]:
        """One question (`pd_control.runtime.inspect`). Raises RpcError."""
        request = InspectRequest(what, **fields)

        async def call() -> InspectAnswer:
            answer: InspectAnswer = await self._client.call(
                address, INSPECT, request, deadline=Deadline.after(CALL_S)
            )
            return answer

        return self._thread.submit(call).result(2 * CALL_S).body

    def requests(self, address: str, side: str) -> list[dict[str, Any]]:
        """All live requests of one side, page by page."""
        rows: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self.ask(address, "requests", side=side, after=after)
            if not page["requests"]:
                return rows
            rows += page["requests"]
            after = page["requests"][-1]["request_id"]

    def abort(self, address: str, request_id: str) -> bool:
        async def call() -> bool:
            answer = await self._client.call(
                address, ABORT_REQUEST, AbortCommand(request_id), deadline=Deadline.after(CALL_S)
            )
            return bool(answer.found)

        return self._thread.submit(call).result(2 * CALL_S)

    def close(self) -> None:
        self._thread.submit(self._client.close).result(CALL_S)
        self._thread.close()

    def __enter__(self) -> InspectClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
