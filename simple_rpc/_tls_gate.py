"""Accepting over TLS, with a bound on how many strangers may be in its handshake.

Given an SSL context, asyncio's own servers tell nobody of a connection before TLS is through, and take
any number of them: each costs a descriptor and some hundred kilobytes. So a TLS listener accepts for
itself, counts, and only then starts TLS.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_S = 1.0
"""How long nobody is accepted when the process has no descriptor left: as long as asyncio's servers wait.
Connections queue in the kernel meanwhile."""


class TlsGate:
    """Accepts on ``sock`` (listening, non-blocking; owned from now on) until ``close``.

    A connection gets ``handshake_s`` for TLS; then a protocol of ``factory`` has it. With
    ``max_handshaking`` in the handshake already, a new one is closed at once. ``note(reason, message)`` is
    called for those, and for each whose handshake fails.
    """

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        handshake_s: float,
        max_handshaking: int,
        note: Callable[[str, str], None],
    ) -> None:
        self._sock = sock
        self._factory = factory
        self._context = context
        self._handshake_s = handshake_s
        self._max_handshaking = max_handshaking
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept(), name="accept TLS connections")
        self._accepting.add_done_callback(self._stopped)

    @property
    def num_handshaking(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        """Accepts no more and ends the handshakes in progress; connections that passed are not touched."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._note("no_descriptors", str(error))
                    await asyncio.sleep(RETRY_S)
                elif error.errno != errno.ECONNABORTED:
                    raise
                continue
            if len(self._handshakes) >= self._max_handshaking:
                connection.close()
                self._note(
                    "too_many_handshakes",
                    f"at most {self._max_handshaking} connections in the TLS handshake",
                )
                continue
            task = self._loop.create_task(self._shake(connection), name="TLS handshake")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """By ``close``; or by surprise, and then somebody must hear of it."""
        self._sock.close()
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "a TLS listener has stopped accepting", "exception": task.exception()}
            )

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
            )
        except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is an OSError
            connection.close()
            self._note("tls_handshake", f"TLS: {error or type(error).__name__}")
        except BaseException:
            connection.close()
            raise
