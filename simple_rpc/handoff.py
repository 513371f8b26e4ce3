"""Handing an authenticated socket to native code, with not one byte lost on the way.

The order that makes it safe (R7, and "GO" in docs/wire.md):

1. the opener connects, shakes hands and sends one request; then it sends nothing more;
2. the acceptor's handler checks the request and calls ``context.detach()``: nothing can be buffered,
   because the opener is silent. It gives the descriptor to native code;
3. the native code sends the OKAY answer, called GO, as the first thing it does;
4. the opener reads exactly that frame (``request(..., hold=True)``) and detaches its own end. Data that
   the acceptor sends right behind GO would be lost here, so the acceptor is silent after GO until the
   opener speaks.

The descriptor is a duplicate; the original is closed with the asyncio transport, so the event loop
never touches the socket again. It is non-blocking; the receiver of it owns and closes it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ._frames import OKAY, encode_frame
from .identity import Identity

GO_EMPTY = encode_frame(OKAY, b"\x90")
"""The answer without fields, ready to be written by whoever answers in place of this package."""


@dataclass
class DetachedSocket:
    """A socket that left the event loop, and who is at its other end (as proven by the handshake).

    Closed when it is dropped without ``take_fd``. Not thread-safe; hand it over once.
    """

    sock: socket.socket
    peer: Identity

    def fileno(self) -> int:
        """The descriptor, still owned by this object."""
        return self.sock.fileno()

    def take_fd(self) -> int:
        """The descriptor, owned by the caller from now on."""
        return self.sock.detach()

    def close(self) -> None:
        self.sock.close()
