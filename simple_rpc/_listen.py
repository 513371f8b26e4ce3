"""Listening sockets: TCP and Unix, the exposure rule, and socket files that are nobody else's."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._limits import Limits
from ._tls_gate import TlsGate
from .identity import Address

UNIX_SOCKET_MODE = (
    0o600  # only our own user connects; a deployment that wants more changes the file's mode
)
PROBE_S = 1.0  # a Unix connect that blocks this long has found a live server with a full backlog


def check_exposure(address: Address) -> None:
    """Raises ``ValueError`` if processes of other machines could connect to ``address``."""
    if not address.is_loopback:
        raise ValueError(
            f"{address} is reachable from other machines: give the server a secret or an ssl_context, or "
            "say insecure=True if everybody who can connect may call everything"
        )


@dataclass
class Listener:
    """One listening socket and, for a Unix one, its file. ``close`` may be called twice."""

    address: Address
    _server: asyncio.AbstractServer | TlsGate
    _file_id: tuple[int, int] | None

    def close(self) -> None:
        """Stop accepting; remove the socket file if it is still ours."""
        self._server.close()
        if self._file_id is not None:
            _unlink_if(self.address.path, self._file_id)
            self._file_id = None


async def open_listener(
    address: Address,
    factory: Callable[[], asyncio.BaseProtocol],
    ssl_context: ssl.SSLContext | None,
    limits: Limits,
    *,
    must_be_loopback: bool,
    note: Callable[[str, str], None],
) -> Listener:
    """Raises ``OSError``, with nothing left behind. ``note(reason, message)`` is called for each stranger
    that is refused before it could become a connection of ``factory``."""
    loop = asyncio.get_running_loop()
    file_id: tuple[int, int] | None = None
    if address.is_unix:
        # Takes a file lock and probes another server: not on the loop's thread.
        sock, file_id = await loop.run_in_executor(
            None, _bind_unix, address.path, limits.listen_backlog
        )
    else:
        infos = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = _bind_tcp(infos[0][0], infos[0][4], limits.listen_backlog)
    try:
        if not address.is_unix:
            host, port = sock.getsockname()[:2]
            if must_be_loopback and not ipaddress.ip_address(host).is_loopback:
                raise ValueError(f"{address} resolved to {host}, which is not loopback")
            address = Address(host=address.host, port=port)
        server: asyncio.AbstractServer | TlsGate
        if ssl_context is not None:
            sock.setblocking(False)
            server = TlsGate(
                sock,
                factory,
                ssl_context,
                handshake_s=limits.handshake_s,
                max_handshaking=limits.max_handshaking,
                note=note,
            )
        elif address.is_unix:
            server = await loop.create_unix_server(
                factory, sock=sock, backlog=limits.listen_backlog
            )
        else:
            server = await loop.create_server(factory, sock=sock, backlog=limits.listen_backlog)
    except BaseException:
        sock.close()
        if file_id is not None:
            _unlink_if(address.path, file_id)
        raise
    return Listener(address, server, file_id)


def _bind_tcp(family: int, where: Any, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(backlog)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and error.strerror:
            at = f"{where[0]}:{where[1]}"
            raise OSError(error.errno, f"cannot listen on tcp://{at}: {error.strerror}") from error
        raise
    return sock


def _bind_unix(path: str, backlog: int) -> tuple[socket.socket, tuple[int, int]]:
    """Bind and listen at ``path``, in place of a dead server's file but never of anything else.

    The directory is locked meanwhile (``flock``: released by the kernel if we die), so that of two servers
    that find the same dead file one binds and the other sees it alive.
    """
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        _remove_if_dead(path)
        sock.bind(path)
        status = os.lstat(path)
        file_id = (status.st_dev, status.st_ino)
        try:
            os.chmod(path, UNIX_SOCKET_MODE)  # nobody can connect before listen
            sock.setblocking(False)
            sock.listen(backlog)
        except BaseException:
            _unlink_if(path, file_id)
            raise
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(directory)
    return sock, file_id


def _remove_if_dead(path: str) -> None:
    """Raises ``OSError(EADDRINUSE)`` if something that is not a dead socket is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EADDRINUSE, f"{path} exists and is not a socket")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(PROBE_S)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)  # bound once, and nobody listens: its server is dead
        return
    except FileNotFoundError:
        return  # its server has just cleaned up
    except (TimeoutError, BlockingIOError):
        pass  # a full backlog: alive, and busy
    finally:
        probe.close()
    raise OSError(errno.EADDRINUSE, f"{path} is served by a live process")


def _unlink_if(path: str, file_id: tuple[int, int]) -> None:
    """Remove the file if it is the one that we made."""
    try:
        status = os.lstat(path)
        if (status.st_dev, status.st_ino) == file_id:
            os.unlink(path)
    except OSError:
        pass
