"""Who somebody is, and where."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ._errors import InvalidMessageError, shown

INCARNATION_BYTES = 16
MAX_NAME_CHARS = 64  # of a role or an instance: they appear in logs and metric labels
MAX_ATTRIBUTES = 32
MAX_ATTRIBUTE_BYTES = 512  # of one key or value: fingerprints, addresses, model names
MAX_UNIX_PATH_BYTES = 107  # sun_path on Linux, less the terminating zero

_SCALARS = (str, bytes, int, float, bool, type(None))


def new_incarnation() -> bytes:
    """16 random bytes: one per process start, so that a restart is never taken for the old process."""
    return os.urandom(INCARNATION_BYTES)


@dataclass(frozen=True)
class Identity:
    """What a process says about itself in HELLO.

    ``role`` ("scheduler", "worker", ...) and ``instance`` are 1 to 64 printable characters;
    ``incarnation`` is 16 bytes, new at every process start; ``attributes`` are up to 32 msgpack scalars
    (rank, model identity, layout fingerprint, ...). Raises ``InvalidMessageError`` for anything else,
    whether it comes from our own code or from a socket.
    """

    role: str
    instance: str
    incarnation: bytes = field(default_factory=new_incarnation)
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, text in (("role", self.role), ("instance", self.instance)):
            if not (
                isinstance(text, str) and 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()
            ):
                raise InvalidMessageError(
                    message=f"{name}: expected 1 to {MAX_NAME_CHARS} printable characters, got {shown(text)}"
                )
        if not isinstance(self.incarnation, bytes) or len(self.incarnation) != INCARNATION_BYTES:
            raise InvalidMessageError(
                message=f"incarnation: expected {INCARNATION_BYTES} bytes, got {shown(self.incarnation)}"
            )
        object.__setattr__(self, "attributes", _checked_attributes(self.attributes))

    @property
    def incarnation_hex(self) -> str:
        """The first four bytes, as they appear in logs."""
        return self.incarnation[:4].hex()

    def __str__(self) -> str:
        return f"{self.role} {self.instance}@{self.incarnation_hex}"


def _checked_attributes(attributes: object) -> Mapping[str, Any]:
    if not isinstance(attributes, Mapping):
        raise InvalidMessageError(message=f"attributes: expected a map, got {shown(attributes)}")
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidMessageError(
            message=f"attributes: at most {MAX_ATTRIBUTES} entries, got {len(attributes)}"
        )
    for key, value in attributes.items():
        if not isinstance(key, str) or len(key) > MAX_ATTRIBUTE_BYTES:
            raise InvalidMessageError(
                message=f"attributes: expected short string keys, got {shown(key)}"
            )
        if not isinstance(value, _SCALARS):
            raise InvalidMessageError(
                message=f"attributes[{shown(key)}]: expected a scalar, got {type(value).__name__}"
            )
        if isinstance(value, (str, bytes)) and len(value) > MAX_ATTRIBUTE_BYTES:
            raise InvalidMessageError(
                message=f"attributes[{shown(key)}]: at most {MAX_ATTRIBUTE_BYTES} long, got {len(value)}"
            )
    return MappingProxyType(dict(attributes))


class Address(NamedTuple):
    """Where a server listens: ``tcp://host:port``, ``tcp://[::1]:port`` or ``unix:///absolute/path``.

    Immutable, hashable, ``str()`` gives back what ``parse`` takes. Port 0 asks the kernel for one;
    ``Server.listen`` returns the address with the real port.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str | Address) -> Address:
        """Raises ``ValueError`` that says what is wrong with ``text``."""
        if isinstance(text, Address):
            return text
        parts = urlsplit(text)
        if parts.scheme == "unix":
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError(f"expected unix:///absolute/path, got {text!r}")
            return cls.unix(parts.path)
        if parts.scheme == "tcp":
            if not parts.hostname or parts.port is None or parts.path not in ("", "/"):
                raise ValueError(f"expected tcp://host:port, got {text!r}")
            return cls(host=parts.hostname, port=parts.port)
        raise ValueError(f"expected tcp://host:port or unix:///path, got {text!r}")

    @classmethod
    def tcp(cls, host: str, port: int) -> Address:
        """``host``: a name or an address; one of IPv6 with or without brackets."""
        return cls(
            host=host[1:-1] if host.startswith("[") and host.endswith("]") else host, port=port
        )

    @classmethod
    def unix(cls, path: str) -> Address:
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ValueError(
                f"a Unix socket path has at most {MAX_UNIX_PATH_BYTES} bytes, got {path!r}"
            )
        return cls(path=path)

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine can connect. A host *name* other than ``localhost`` is
        not taken for loopback, whatever it resolves to today."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"
