"""The native data plane of one worker: kvt's sender, receiver and news channel, put together.

Python only assembles: it opens and authenticates sockets and gives their descriptors away. Grants, sends,
completions and bytes are the business of native threads, which never need Python's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from kvt_bindings import DataClient, KvCache, NewsChannel, Receiver, Sender
from kvt_bindings import Send as NativeSend
from kvt_bindings.data import Dialer, adopt
from pd_control.config import Config
from pd_control.messages import Send
from pd_control.runtime import wire
from pd_control.runtime.plane import WorkerHost
from simple_rpc import Deadline
from simple_rpc.handoff import DetachedSocket

ATTACH_S = 10.0  # our own scheduler is on this host and has just answered a call


def to_native(send: Send) -> NativeSend:
    """The same send as native code takes it."""
    return NativeSend(
        key=send.key,
        target_instance=send.target_instance,
        target_incarnation=send.target_incarnation,
        targets=[(t.rank, t.incarnation, t.data_address) for t in send.targets],
        src_blocks=send.src_block_ids,
        dst_blocks=send.dst_block_ids,
        first_token=send.first_token,
        end_token=send.end_token,
        last=send.last,
    )


class KvtPlane:
    """A `DataPlane`. The cache's memory stays where it is until `close` has returned."""

    def __init__(self, config: Config, cache: KvCache) -> None:
        """Raises KvtError if the cache is on a device whose driver cannot be had."""
        self._cache = cache
        deadlines, transfer = config.deadlines, config.transfer
        transports = list(transfer.transports)
        self._channel = NewsChannel(
            kind=wire.KIND_WORKER,
            rank=cache.rank,
            heartbeat_ms=int(deadlines.worker_heartbeat_s * 1000),
        )
        self._receiver = Receiver(cache.native, self._channel, transports=transports)
        self._connections = DataClient(
            cache.native,
            transports=transports,
            connect_timeout_ms=int(deadlines.connect_s * 1000),
            progress_timeout_ms=int(deadlines.send_progress_s * 1000),
        )
        self._sender = Sender(
            cache.native,
            self._channel,
            self._connections,
            crc=transfer.checksum,
            whole_s=deadlines.send_s,
            early_s=deadlines.substep_s,
        )
        self._scheduler = b""
        self._host: WorkerHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dialer: Dialer | None = None
        self._is_closed = False

    @property
    def fingerprint(self) -> str:
        return f"{self._cache.layout.fingerprint:016x}"

    # -- step thread -------------------------------------------------------------------------------

    def start_step(self, step: int, sends: Sequence[Send]) -> None:
        for send in sends:
            self._sender.submit_send(step, to_native(send))
        self._sender.start_step(step)

    def record_event(self, step: int, layer: int, stream: int) -> None:
        self._sender.record_event(step, layer, stream)

    def freeze_step(self, step: int) -> int:
        taken = self._sender.freeze_step(step)
        self._sender.flush_step(step)
        return taken

    # -- loop thread -------------------------------------------------------------------------------

    async def attach(self, host: WorkerHost) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        connection = await host.scheduler_client.connect(
            host.scheduler_address, Deadline.after(ATTACH_S)
        )
        self._scheduler = connection.peer.incarnation
        sock = connection.detach()
        self._sender.begin_scheduler(self._scheduler)
        self._receiver.serve(self._channel, self._cache.rank)
        self._sender.serve(self._channel)
        self._dialer = Dialer(self._connections, host.client, rank=self._cache.rank)
        self._loop.add_reader(self._channel.event_fd, self._on_channel_events)
        self._channel.start()
        self._channel.attach(sock.detach(), self._scheduler)

    def _on_channel_events(self) -> None:
        for kind, _, _, _, code, detail in self._channel.take_events():
            if kind == "detached" and not self._is_closed and self._host is not None:
                self._host.lost(f"the channel to the scheduler ended: {detail} (code {code})")

    def data_accepted(self, sock: DetachedSocket) -> None:
        adopt(self._receiver, sock)

    def close(self) -> None:
        """The native parts first: after that no byte moves. Then what Python still watches."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sender.close()
        self._receiver.close()
        self._connections.close()
        self._channel.stop()
        if self._host is not None:
            self._host.call(self._forget)

    def _forget(self) -> None:
        if self._dialer is not None:
            self._dialer.close()
        if self._loop is not None:
            with contextlib.suppress(OSError, ValueError):
                self._loop.remove_reader(self._channel.event_fd)
