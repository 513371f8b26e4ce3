"""What routers of Mooncake's convention ask P before they send requests: ``GET /query``.

They learn P's ``engine_id`` from the answer and give it to D as ``remote_engine_id``, beside a
``remote_bootstrap_addr`` and the ``transfer_id`` that they gave to both. Mooncake's D asks that address
where P's workers are. Ours need not: the id that our P answers with says where P's control plane is, as
``NAME@HOST:PORT`` (:func:`pd_control.vllm.params.parse` reads it).
"""

from __future__ import annotations

from typing import Any

from simple_rpc import Address, LoopThread

START_S = 10.0


class Bootstrap:
    """An HTTP server on a thread of its own. Any thread. Raises OSError, naming the address, if it cannot
    bind.

    Args:
        host, port: where to listen.
        engine_id: P's instance.
        control: (host, port) of its control plane, as D's are to dial it.
        tp_size: routers that count P's ranks find so many.
    """

    def __init__(
        self, host: str, port: int, *, engine_id: str, control: tuple[str, int], tp_size: int
    ) -> None:
        address = str(Address.tcp(*control))
        ranks = {str(rank): {"0": address} for rank in range(tp_size)}
        #: data-parallel rank → who it is
        self._answer = {
            "0": {
                "engine_id": f"{engine_id}@{address.removeprefix('tcp://')}",
                "worker_addr": ranks,
            }
        }
        self._thread = LoopThread(f"pd-control bootstrap {engine_id}")
        self._thread.start()
        try:
            self._runner, self.port = self._thread.submit(self._start, host, port).result(START_S)
        except BaseException as error:
            self._thread.close()
            if isinstance(error, OSError):
                raise OSError(error.errno, f"bootstrap_port: {error.strerror}") from error
            raise

    async def _start(self, host: str, port: int) -> tuple[Any, int]:
        from aiohttp import web

        from pd_control.http.completions import serve_app

        async def query(_: web.Request) -> web.Response:
            return web.json_response(self._answer)

        app = web.Application(client_max_size=1)
        app.add_routes([web.get("/query", query)])
        return await serve_app(app, host, port)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_running:
            self._thread.submit(self._runner.cleanup).result(START_S)
        self._thread.close()
