"""The driver of one scheduler process: everything on the loop thread, put together.

    runtime = SchedulerRuntime(config, engine, topology=…, block_size_tokens=…, model=…)
    runtime.start()                    # listens; workers can register at runtime.worker_address
    runtime.wait_ready(deadline_s)     # until every rank has
    …                                  # the engine calls runtime.prefill and runtime.decode
    runtime.close()

`start`, `wait_ready` and `close` may be called on any thread but the loop's. Between `start` and
`close` the engine must call `drain` when woken, or nothing that waits for it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pd_control import messages as m
from pd_control.config import Config
from pd_control.discovery import FileDiscovery, PeerRecord, PeerSource, StaticDiscovery
from pd_control.engine import Engine
from pd_control.ids import PeerId
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.decode import DecodeCore
from pd_control.protocol.prefill import PrefillCore
from pd_control.runtime import wire
from pd_control.runtime.inspect import Inspector
from pd_control.runtime.peers import PeersOfDecode, PeersOfPrefill
from pd_control.runtime.runner import CoreRunner
from pd_control.runtime.sides import DecodeSide, PrefillSide
from pd_control.runtime.tls import client_context, server_context
from pd_control.runtime.workers import Workers
from pd_control.trace import Stage, Trace
from simple_rpc import Address, Client, Deadline, Identity, Limits, Server, new_incarnation
from simple_rpc.loop_thread import Fatal, LoopThread
from simple_rpc.mailbox import Mailbox
from simple_rpc.metrics import Counters

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # to bind two addresses; covers a machine that swaps
DRAIN_S = 1.0  # at close: calls in progress get this long


class SchedulerRuntime:
    """See the module. `prefill` and `decode` are the drivers for the engine (None: not this role)."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        *,
        topology: m.Topology,
        block_size_tokens: int | Sequence[int],
        model: str = "",
    ) -> None:
        self.config = config
        self.topology = topology
        self.model = model
        self.me = PeerId(config.instance, new_incarnation())
        self.trace = Trace(config.inspect.trace_events)
        self.metrics = Counters()
        self.started_s = time.time()
        self.address: Address | None = None
        self.worker_address: Address | None = None
        self._engine = engine
        self._ready = threading.Event()
        self._is_closed = False
        self._thread = LoopThread(
            f"pd-control {config.instance}", on_fatal=self._on_fatal, metrics=self.metrics
        )
        settings = config.core_settings()
        has_decode = config.role in ("decode", "both")
        has_prefill = config.role in ("prefill", "both")
        self.decode: DecodeSide | None = None
        self.prefill: PrefillSide | None = None
        self.decode_runner: CoreRunner | None = None
        self.prefill_runner: CoreRunner | None = None
        if has_decode:
            self.decode = DecodeSide(engine, self._poster("decode_runner"), self._fail, self.trace)
            self.decode_core = DecodeCore(self.me, topology, settings, model=model)
        if has_prefill:
            self.prefill = PrefillSide(
                engine, block_size_tokens, self._poster("prefill_runner"), self._fail, self.trace
            )
            self.prefill_core = PrefillCore(self.me, topology, settings, model=model)
        self.num_events_dropped = 0
        self._folder: Path | None = None
        self._sources: list[PeerSource] = []
        # Made on the loop thread by _start.
        self.workers: Workers
        self.decode_peers: PeersOfDecode | None = None
        self.prefill_peers: PeersOfPrefill | None = None
        self._server: Server
        self._worker_server: Server
        self._client: Client

    def _poster(self, runner: str) -> Callable[[Any], None]:
        """Core thread → loop thread, for the events of one side."""

        def on_loop(event: Any) -> None:
            target: CoreRunner | None = getattr(self, runner)
            if target is not None:
                target.post(event)

        def post(event: Any) -> None:
            try:
                self._thread.call(on_loop, event)
            except Exception:  # closed, or not started yet: the engine need not care
                self.num_events_dropped += 1

        return post

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the loop thread and listens. Raises what binding raises; nothing is left then."""
        self._thread.start()
        try:
            self._thread.submit(self._start).result(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def wait_ready(self, timeout_s: float) -> bool:
        """Until every rank has registered; False if that takes longer."""
        return self._ready.wait(timeout_s)

    @property
    def fatal(self) -> str:
        """Why this runtime can no longer keep its promises; empty while it can."""
        return "" if self._thread.fatal is None else self._thread.fatal.reason

    def close(self) -> None:
        """Ends links, servers and the loop thread. Idempotent. Requests in flight get no outcome."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_running:
            with contextlib.suppress(Exception):
                self._thread.submit(self._stop).result(START_TIMEOUT_S)
        self._thread.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def call_on_loop(self, function: Callable[[], object]) -> None:
        """Any thread: run `function` on the loop thread, soon. Raises LoopClosedError after close."""
        self._thread.call(function)

    # -- inside: loop thread -------------------------------------------------------------------------

    async def _start(self) -> None:
        net, discovery = self.config.network, self.config.discovery
        if discovery.directory is not None:  # before workers are started, not when they are there
            FileDiscovery(discovery.directory, refresh_s=discovery.refresh_s).check(
                self.me.instance
            )
        secret = net.load_secret()
        limits = Limits(max_body_bytes=net.max_body_bytes, max_connections=net.max_connections)
        identity = Identity(wire.ROLE_SCHEDULER, self.me.instance, self.me.incarnation)
        self._server = Server(
            identity,
            secret=secret,
            limits=limits,
            ssl_context=server_context(net),
            insecure=net.insecure,
            metrics=self.metrics,
        )
        self._worker_server = Server(identity, metrics=self.metrics)
        self._client = Client(
            identity,
            secret=secret,
            limits=limits,
            ssl_context=client_context(net),
            metrics=self.metrics,
        )
        if self.decode is not None:
            self._make_decode(self.decode)
        if self.prefill is not None:
            self._make_prefill(self.prefill)
        self.workers = Workers(
            self.topology,
            self.me.instance,
            post_decode=self.decode_runner.post if self.decode_runner else None,
            post_prefill=self.prefill_runner.post if self.prefill_runner else None,
            fail=self._fail_loop,
            grace_s=self.config.deadlines.grant_s,
            progress_s=self.config.deadlines.progress_s,
            trace=self.trace,
            changed=self._rank_came,
        )
        self._worker_server.register(
            wire.REGISTER_WORKER, lambda info, ctx: self.workers.register(ctx.peer, info)
        )
        self._worker_server.on_channel(
            wire.KIND_WORKER, lambda peer, channel: self.workers.accept(peer, channel)
        )
        Inspector(self).serve(self._server)
        self.worker_address = await self._worker_server.listen(Address.unix(self._socket_path()))
        self.address = await self._server.listen(net.listen)

    def _socket_path(self) -> str:
        folder = self.config.network.worker_socket_dir
        if folder is None:
            self._folder = folder = Path(tempfile.mkdtemp(prefix="pd-control-"))  # mode 0700
        else:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(folder / f"{os.getpid()}-{self.me.incarnation.hex()[:8]}.sock")

    def _make_decode(self, side: DecodeSide) -> None:
        runner: CoreRunner
        peers = PeersOfDecode(
            lambda event: runner.post(event),
            self._client,
            self._thread,
            self._about,
            self.config.deadlines.heartbeat_s,
            self.trace,
            self.config.network.may_dial,
        )
        put = side.mailbox.put
        runner = CoreRunner(
            "decode",
            self.decode_core,
            {
                fx.OpenLink: peers.open,
                fx.CloseLink: peers.close,
                fx.LinkNews: peers.send,
                fx.Call: peers.call,
                fx.WorkerNews: lambda effect: self.workers.send(effect),
                fx.ReleaseLease: put,
                fx.RequestLoaded: lambda effect: self._loaded(effect, side.mailbox),
                fx.RequestFailed: put,
                fx.RecomputeRequest: put,
                fx.VoidRankKv: put,
                fx.Fatal: self._worker_fatal,
            },
            self._fail_loop,
        )
        self.decode_runner, self.decode_peers = runner, peers

    def _loaded(self, effect: fx.RequestLoaded, mailbox: Mailbox[fx.CoreCommand]) -> None:
        self.trace.record(Stage.ALL_RANKS, effect.request_id, value=effect.num_tokens)
        mailbox.put(effect)
        self.trace.record(Stage.ANSWERED, effect.request_id)

    def _make_prefill(self, side: PrefillSide) -> None:
        runner: CoreRunner
        peers = PeersOfPrefill(lambda event: runner.post(event), self._about, self.trace)
        put = side.mailbox.put
        runner = CoreRunner(
            "prefill",
            self.prefill_core,
            {
                fx.CloseLink: peers.close,
                fx.LinkNews: peers.send,
                fx.Answer: peers.answer,
                fx.WorkerNews: lambda effect: self.workers.send(effect),
                fx.OfferTransfer: put,
                fx.WithdrawTransfer: put,
                fx.ReleaseLease: put,
                fx.ForgetRequest: put,
                fx.AdmitRequest: put,
                fx.AbortRequest: put,
                fx.VoidRankKv: put,
                fx.Fatal: self._worker_fatal,
            },
            self._fail_loop,
        )
        self._server.on_channel(wire.KIND_LINK, peers.accept)
        self._server.register(
            wire.PREFILL, lambda message, ctx: peers.on_prefill(ctx.peer, message)
        )
        self._server.register(
            wire.TRANSFER_KV, lambda message, ctx: peers.on_transfer_kv(ctx.peer, message)
        )
        self.prefill_runner, self.prefill_peers = runner, peers

    def _about(self) -> m.HeloAttributes:
        return m.HeloAttributes(self.topology, self.workers.rank_infos(), self.model)

    # -- inside: peers and workers -------------------------------------------------------------------

    def _rank_came(self) -> None:
        if self.workers.is_complete and not self._ready.is_set():
            self._find_peers()
            self._ready.set()

    def _find_peers(self) -> None:
        """Only now: a peer that finds us can use us at once."""
        discovery = self.config.discovery
        if discovery.peers:
            self._sources.append(StaticDiscovery(discovery.peers))
        if discovery.directory is not None:
            files = FileDiscovery(discovery.directory, refresh_s=discovery.refresh_s)
            files.publish(
                PeerRecord(
                    self.me.instance,
                    self.advertised_address(),
                    self.config.role,
                    self.me.incarnation,
                )
            )
            self._sources.append(files)
        for source in self._sources:
            source.start(self)

    def advertised_address(self) -> str:
        """What peers are told to connect to."""
        assert self.address is not None
        host = self.config.network.advertise_host
        if host is None or self.address.is_unix:
            return str(self.address)
        return str(Address(host=host, port=self.address.port))

    def peer_appeared(self, peer: PeerRecord) -> None:
        if self.decode_runner is not None and peer.role != "decode":
            self.decode_runner.post(ev.PeerFound(peer.instance, peer.address))

    def peer_restarted(self, old: PeerRecord, new: PeerRecord) -> None:
        """The links of the old one will break by themselves; what matters is where the new one is."""
        self.peer_appeared(new)

    def peer_vanished(self, peer: PeerRecord) -> None:
        if self.decode_runner is not None and peer.role != "decode":
            self.decode_runner.post(ev.PeerGone(peer.instance))

    # -- inside: failures ----------------------------------------------------------------------------

    def _worker_fatal(self, effect: fx.Fatal) -> None:
        self._fail_loop(f"rank {effect.rank}: {effect.reason}", None)

    def _fail_loop(self, reason: str, error: BaseException | None) -> None:
        """Loop thread."""
        self._thread.fail(reason, error)

    def _fail(self, reason: str, error: BaseException) -> None:
        """Core thread."""
        with contextlib.suppress(Exception):
            self._thread.call(self._thread.fail, reason, error)

    def _on_fatal(self, fatal: Fatal) -> None:
        self._engine.on_fatal(fatal.reason)

    async def _stop(self) -> None:
        for source in self._sources:
            source.close()
        for runner in (self.decode_runner, self.prefill_runner):
            if runner is not None:
                runner.close()
        for peers in (self.decode_peers, self.prefill_peers):
            if peers is not None:
                peers.close_all(f"{self.me.instance} is shutting down")
        if hasattr(self, "workers"):
            self.workers.close()
        await self._server.drain(Deadline.after(DRAIN_S))
        await self._worker_server.close()
        await self._client.close()
