"""Who is responsible for a connection: the interface between a transport and what is said over it."""

from __future__ import annotations

from typing import Protocol

from ._errors import PeerProtocolError, RpcError


class Owner(Protocol):
    """Who is responsible for a connection now. Called on the loop thread; must not raise or block."""

    def on_frame(self, head: int, body: bytes | None) -> None:
        """A frame. ``body`` is None for a raw head (see ``FrameDecoder.heads``)."""
        ...

    def on_violation(self, error: PeerProtocolError) -> None:
        """The peer broke the protocol or a limit (``details["reason"]`` is a short label). The owner may
        tell it so and ``close(error)``; if it does nothing the connection is aborted."""
        ...

    def on_lost(self, error: RpcError) -> None:
        """The connection is unusable from now on. Called exactly once over all owners; ``error`` says
        why: what was passed to ``close``/``abort``, what the peer violated, or how the socket ended."""
        ...

    def on_wait_over(self) -> None:
        """``wait_due_s`` has passed (it is ``inf`` again)."""
        ...

    def on_shutdown(self, error: RpcError) -> None:
        """This process is shutting down in order: say goodbye if there is a way, then ``close(error)``."""
        ...


class _Nobody:
    """The owner of a connection that is gone."""

    def on_frame(self, head: int, body: bytes | None) -> None: ...
    def on_violation(self, error: PeerProtocolError) -> None: ...
    def on_lost(self, error: RpcError) -> None: ...
    def on_wait_over(self) -> None: ...
    def on_shutdown(self, error: RpcError) -> None: ...


NOBODY = _Nobody()
