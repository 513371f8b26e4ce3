"""Every bound of this package: a named constant with its unit, and why it is what it is.

Exceeding a limit ends the connection it happened on (with a logged, counted reason), never the
process. All of them can be changed through :class:`Limits`, for a server and for a client alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_BODY_BYTES = 4 * 1024 * 1024
"""A request for a million tokens at 16 tokens a block names 65,536 blocks in less than 350 KB per group;
4 MiB leaves room for several groups and sides, and keeps what one connection can hold small."""

MAX_HANDSHAKE_BODY_BYTES = 4 * 1024
"""All that an unauthenticated peer can make us keep. HELLO with full attributes fits in 2 KB."""

HANDSHAKE_S = 3.0
"""From accept to the end of the handshake. One round trip, or two with a secret: seconds are generous."""

CONNECT_S = 3.0
"""Client side: resolve, connect, TLS and handshake together, if the caller's deadline is not earlier."""

FRAME_S = 10.0
"""From a frame's first byte to its last. 4 MiB in 10 s is 3.4 Mbit/s: slower is a slow-loris."""

SEND_S = 10.0
"""How long a peer may leave our bytes unread once the socket buffer is full, before it is given up."""

IDLE_S = 900.0
"""A server closes a connection without a call for this long. Longer than a client keeps it."""

POOL_IDLE_S = 300.0
"""A client closes a pooled connection unused for this long: before the server does, so that a call
rarely meets a connection that is being closed, and before most firewalls forget it."""

MAX_CALL_S = 600.0
"""Upper bound of a call's time at the server, whatever the client says. Calls are short by design."""

CLOSE_S = 1.0
"""How long a closing connection may take to flush its last answer before it is cut."""

MAX_CONNECTIONS = 4096
"""Per server. Each idle connection costs some kilobytes and a descriptor."""

MAX_HANDSHAKING = 512
"""Connections that have not proven themselves. Bounds unauthenticated memory to
512 x (4 KiB + one socket read) and keeps strangers from using up MAX_CONNECTIONS. With TLS a connection
counts from the end of its TLS handshake, which has the same deadline but no such bound."""

MAX_IN_FLIGHT_PER_PEER = 1024
"""Calls in progress of one peer (instance and incarnation) at one server; beyond it the answer is BUSY."""

MAX_CONNECTIONS_PER_PEER = 128
"""Client side: concurrency to one peer is the number of connections, so this is the calls in flight;
more callers queue, within their deadlines."""

MAX_PEERS = 1024
"""Client side: peers with a pool. The least recently used peer without a call makes room."""

READ_AHEAD_BYTES = 64 * 1024
"""What a connection may send beyond the call in progress before we stop reading from it."""

LISTEN_BACKLOG = 1024
"""Connections the kernel accepts for us while the loop is busy: a burst of one per peer."""

MAX_ARRAY_ITEMS = 131_072
"""Longest array in a body: twice the blocks of a million tokens. With msgpack's own nesting bound (1024)
it caps what a hostile body can make the decoder reserve."""

MAX_MAP_ITEMS = 4096
"""Longest map in a body. Maps are for attributes and details; the data is positional."""

MAX_HANDSHAKE_ITEMS = 64
"""The same two for the handshake, where the sender is still a stranger."""

MAX_HEAD_METHODS = 1024
"""Registered heads per server: far beyond any real use, so that a leak is noticed."""

MAX_ERROR_TEXT_CHARS = 1024
"""Longest message of a FAIL that we send; a peer's text is cut to it before it is logged."""


@dataclass(frozen=True)
class Limits:
    """The limits one server or client works under; the constants above are the defaults."""

    max_body_bytes: int = MAX_BODY_BYTES
    max_handshake_body_bytes: int = MAX_HANDSHAKE_BODY_BYTES
    handshake_s: float = HANDSHAKE_S
    connect_s: float = CONNECT_S
    frame_s: float = FRAME_S
    send_s: float = SEND_S
    idle_s: float = IDLE_S
    pool_idle_s: float = POOL_IDLE_S
    max_call_s: float = MAX_CALL_S
    close_s: float = CLOSE_S
    max_connections: int = MAX_CONNECTIONS
    max_handshaking: int = MAX_HANDSHAKING
    max_in_flight_per_peer: int = MAX_IN_FLIGHT_PER_PEER
    max_connections_per_peer: int = MAX_CONNECTIONS_PER_PEER
    max_peers: int = MAX_PEERS
    read_ahead_bytes: int = READ_AHEAD_BYTES
    listen_backlog: int = LISTEN_BACKLOG

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"Limits.{field.name}: expected more than 0, got {value!r}")
        if self.max_body_bytes > 0xFFFF_FFFF:
            raise ValueError(f"Limits.max_body_bytes: a u32 length, got {self.max_body_bytes}")
