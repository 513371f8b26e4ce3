"""Which control addresses D may connect to (`network.dial`).

A request names its P's address, so without a bound whoever may send requests to D can make it connect
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from simple_rpc import Address


def matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    """What ``str(Address)`` of an allowed address matches in full.

    A pattern is an address in which ``*`` stands for any part of one label of a host name or IPv4 address,
    of a port, or of one step of a path: ``tcp://10.0.3.*:5600``, ``tcp://p-*.cluster.local:*``,
    ``unix:///run/pd/*``. Names are compared as they are given, not resolved.

    Raises:
        ValueError: one that is no such pattern.
    """
    parts = []
    for pattern in patterns:
        if not re.fullmatch(r"tcp://[^/@\s]+:[0-9*]+|unix:///\S+", pattern):
            raise ValueError(f"expected tcp://HOST:PORT or unix:///PATH, got {pattern!r}")
        text = pattern.lower() if pattern.startswith("tcp:") else pattern
        parts.append(re.escape(text).replace(r"\*", "[^.:/]*"))
    return re.compile("|".join(parts))


def is_allowed(patterns: Iterable[str], address: str) -> bool:
    """Whether an address, as a request or a source of peers gave it, is one of them."""
    try:
        return matcher(patterns).fullmatch(str(Address.parse(address))) is not None
    except ValueError:
        return False
