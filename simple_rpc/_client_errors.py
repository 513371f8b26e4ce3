"""What went wrong with a call, in the caller's words."""

from __future__ import annotations

from typing import Any

from ._client_connection import ClientConnection
from ._errors import (
    Code,
    DeadlineError,
    IncarnationError,
    InvalidMessageError,
    PeerProtocolError,
    Phase,
    RemoteError,
    RpcError,
)
from .methods import Method, unpack_fail


def incarnation_error(connection: ClientConnection, expected: bytes) -> IncarnationError:
    got = connection.peer.incarnation
    return IncarnationError(
        message=f"expected incarnation {expected.hex()[:8]}, found {got.hex()[:8]}",
        details={"expected": expected, "got": got},
        phase=Phase.HELLO,
        peer=str(connection.address),
    )


def too_large(method: Method[Any, Any], packed: bytes, limit_bytes: int) -> InvalidMessageError:
    return InvalidMessageError(
        message=f"{method.name}: request of {len(packed)} bytes, at most {limit_bytes} allowed"
    )


def bad_answer(
    method: Method[Any, Any], error: InvalidMessageError, connection: ClientConnection
) -> PeerProtocolError:
    return PeerProtocolError(
        message=f"answer to {method.name}: {error.message}",
        details={"reason": "bad_answer"},
        phase=Phase.ANSWER,
        peer=str(connection.address),
    )


def refusal(method: Method[Any, Any], body: bytes, connection: ClientConnection) -> RpcError:
    """The error that a FAIL stands for."""
    try:
        code, message, details = unpack_fail(body)
    except InvalidMessageError as error:
        return bad_answer(method, error, connection)
    # Whose timer was quicker, the server's or ours, makes no difference to the caller.
    is_deadline = code is Code.TIMEOUT and details.get("reason") == "deadline"
    cls = DeadlineError if is_deadline else RemoteError
    return cls(code, message, details, phase=Phase.HANDLER, peer=str(connection.address))
