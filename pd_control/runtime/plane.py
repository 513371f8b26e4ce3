"""What the runtime asks of a data plane in a worker process, and what it offers to it.

`kvt_plane` implements it with the native data plane; `pd_control.testing.loopback_plane` copies
between caches of one process under the same rules. The words of the two ends (grants, sends,
completions) are those of `pd_control.messages`; a plane speaks them with its scheduler over the
channel of kind "worker" that it opens in `attach`, itself, so that neither grants nor completions
need Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pd_control.messages import Send
from simple_rpc import Client, Identity
from simple_rpc.handoff import DetachedSocket


class WorkerHost(Protocol):
    """What a plane may use of its worker's runtime. Loop thread, except `lost`."""

    rank: int
    scheduler_address: str
    identity: Identity  # the worker's own: its engine's instance, its incarnation

    @property
    def scheduler_client(self) -> Client:
        """For the scheduler's Unix socket."""
        ...

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Any thread: run `function` on the loop thread, soon; dropped after the worker's close."""
        ...

    @property
    def client(self) -> Client:
        """For the servers of other workers."""
        ...

    def lost(self, reason: str) -> None:
        """Any thread. The channel to the scheduler is gone: this worker can no longer promise
        anything to anybody. Once."""
        ...


class DataPlane(Protocol):
    """One rank's data plane."""

    @property
    def fingerprint(self) -> str:
        """Of this rank's layout, for people and for the check at registration."""
        ...

    # -- step thread: none of these waits --------------------------------------------------------

    def start_step(self, step: int, sends: Sequence[Send]) -> None:
        """Before the forward of `step`, with the sends that ride it."""
        ...

    def record_event(self, step: int, layer: int, stream: int) -> None: ...

    def freeze_step(self, step: int) -> int:
        """The highest contiguous substep taken."""
        ...

    # -- loop thread -------------------------------------------------------------------------------

    async def attach(self, host: WorkerHost) -> None:
        """The worker has registered: open the channel to the scheduler and serve it from now on.
        Raises RpcError if that fails."""
        ...

    def data_accepted(self, sock: DetachedSocket) -> None:
        """A P worker has connected (authenticated, silent until it reads GO, which the plane is to
        send). Owns the socket. Raises RpcError to refuse."""
        ...

    def close(self) -> None:
        """No byte is read or written for anybody after this returns. Idempotent. Any thread."""
        ...
