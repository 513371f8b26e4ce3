"""The driver of one worker process: its loop thread, its registration, its data connections.

    side = WorkerSide(config, rank, scheduler_address, plane)
    side.start()             # registered with the scheduler, data plane at work
    side.start_step(…)       # step thread; see pd_control.engine.WorkerDriver
    side.close()

The order at start matters: the data address is bound first, then the worker registers with it,
then the plane opens its channel to the scheduler; only then may a grant arrive.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.config import Config
from pd_control.runtime import wire
from pd_control.runtime.plane import DataPlane
from simple_rpc import (
    Address,
    Client,
    Deadline,
    Identity,
    InvalidMessageError,
    RpcError,
    Server,
    new_incarnation,
)
from simple_rpc._entries import CallContext
from simple_rpc.loop_thread import Fatal, LoopThread

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # to reach our own scheduler on this host
REGISTER_S = 10.0


class WorkerSide:
    """See the module. `start`, `close`: any thread but the loop's. Driver calls: step thread."""

    def __init__(
        self,
        config: Config,
        rank: int,
        scheduler_address: str,
        plane: DataPlane,
        *,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """`on_lost(reason)` is called once, on the loop thread, when the scheduler cannot be
        reached any more: the worker should end. The plane is closed by then."""
        self.rank = rank
        self.scheduler_address = scheduler_address
        self.incarnation = new_incarnation()
        self.plane = plane
        self.lost_reason = ""
        self._config = config
        self._on_lost = on_lost
        self._is_closed = False
        self._thread = LoopThread(f"pd-worker {rank}", on_fatal=self._fatal)
        self.identity: Identity
        self.client: Client
        self.data_address: Address
        self._server: Server

    # -- WorkerDriver: step thread -----------------------------------------------------------------

    def start_step(self, step: int, plan: bytes) -> None:
        self.plane.start_step(step, wire.unpack_plan(plan))

    def record_event(self, step: int, layer: int, stream: int = 0) -> None:
        self.plane.record_event(step, layer, stream)

    def freeze_step(self, step: int) -> int:
        return self.plane.freeze_step(step)

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Registers. Raises RpcError (INCOMPATIBLE, UNREACHABLE, …); nothing is left running then."""
        self._thread.start()
        try:
            self._thread.submit(self._start).result(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """No byte is read or written after this. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.plane.close()
        if self._thread.is_running:
            with contextlib.suppress(Exception):
                self._thread.submit(self._stop).result(START_TIMEOUT_S)
        self._thread.close()

    async def _start(self) -> None:
        network = self._config.network
        secret = network.load_secret()
        attributes = {"pid": os.getpid(), "rank": self.rank}
        self.identity = Identity(
            wire.worker_role(self.rank), self._config.instance, self.incarnation, attributes
        )
        self.client = Client(self.identity, secret=secret)
        self._server = Server(self.identity, secret=secret, insecure=network.data_off_loopback)
        self._server.register(wire.DATA, self._on_data)
        self.data_address = await self._server.listen(network.data_listen)
        # Our own scheduler, over a Unix socket in a private folder: no secret is needed there.
        own = Client(self.identity)
        self._own_client = own
        info = m.RegisterWorker(
            self.rank, self.incarnation, self._advertised(), self.plane.fingerprint
        )
        await own.call(
            self.scheduler_address, wire.REGISTER_WORKER, info, deadline=Deadline.after(REGISTER_S)
        )
        await self.plane.attach(self)

    def _advertised(self) -> str:
        host = self._config.network.advertise_host
        if host is None or self.data_address.is_unix:
            return str(self.data_address)
        return str(Address(host=host, port=self.data_address.port))

    async def _stop(self) -> None:
        if hasattr(self, "_server"):
            await self._server.close()
            await self.client.close()
        if hasattr(self, "_own_client"):
            await self._own_client.close()

    # -- WorkerHost --------------------------------------------------------------------------------

    @property
    def scheduler_client(self) -> Client:
        """For the scheduler's socket."""
        return self._own_client

    def lost(self, reason: str) -> None:
        """Any thread."""
        with contextlib.suppress(Exception):
            self._thread.call(self._lost, reason)

    def _lost(self, reason: str) -> None:
        if self.lost_reason or self._is_closed:
            return
        self.lost_reason = reason
        log.error("worker %d has lost its scheduler: %s", self.rank, reason)
        self.plane.close()
        if self._on_lost is not None:
            self._on_lost(reason)

    def _fatal(self, fatal: Fatal) -> None:
        self._lost(fatal.reason)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Any thread: run `function` on the loop thread; dropped after close."""
        with contextlib.suppress(Exception):
            self._thread.call(function, *args)

    # -- data connections --------------------------------------------------------------------------

    def _on_data(self, request: wire.DataRequest, context: CallContext) -> None:
        """A P worker connects. The answer (GO) is native code's, as the first thing that it sends."""
        if not wire.is_worker(context.peer.role):
            raise RpcError(Code.BAD_REQUEST, f"data is for workers, not for {context.peer}")
        if request.target_rank != self.rank:
            raise InvalidMessageError(
                message=f"target_rank: expected {self.rank}, got {request.target_rank}"
            )
        self.plane.data_accepted(context.detach())
