"""Typed methods: a head, a request type, a response type; and the bodies that carry them.

The body of a call is ``[timeout_ms, [field, ...]]``, of an answer ``[field, ...]`` (head OKAY) or
``[code, message, details]`` (head FAIL).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ._codec import Schema, unpack_body
from ._errors import Code, InvalidMessageError, RpcError, shown
from ._frames import RESERVED_HEADS, head_from_name
from ._limits import MAX_ERROR_TEXT_CHARS

Req = TypeVar("Req")
Resp = TypeVar("Resp")
Pack = Callable[[Any], bytes]

MAX_TIMEOUT_MS = 2**53  # far beyond any deadline, exact as a float


class Method(Generic[Req, Resp]):
    """One method, shared by both ends; a module-level constant.

    ``request`` and ``response`` are dataclasses (``frozen=True, slots=True`` recommended) whose fields
    are sent by position, or None for no fields. ``idempotent`` promises that executing a call twice is the
    same as once: only then does the client repeat it, and only as described in ``Client.call``.
    Raises ``ValueError`` or ``TypeError`` at definition for a head or a type that cannot work.
    """

    __slots__ = (
        "_decode_request",
        "_decode_response",
        "_encode_request",
        "_encode_response",
        "head",
        "idempotent",
        "name",
    )

    def __init__(
        self,
        head: str,
        request: type[Req] | None,
        response: type[Resp] | None,
        *,
        idempotent: bool = False,
    ) -> None:
        self.name = head
        self.head = head_from_name(head)
        if self.head in RESERVED_HEADS:
            raise ValueError(f"head {head} belongs to the protocol")
        self.idempotent = idempotent
        request_schema = _Nothing() if request is None else Schema(request)
        response_schema = _Nothing() if response is None else Schema(response)
        self._encode_request: Callable[[Req], tuple[Any, ...]] = request_schema.encode
        self._decode_request: Callable[[Any], Any] = request_schema.decode
        self._encode_response: Callable[[Resp], tuple[Any, ...]] = response_schema.encode
        self._decode_response: Callable[[Any], Any] = response_schema.decode

    def __repr__(self) -> str:
        return f"<Method {self.name}{' idempotent' if self.idempotent else ''}>"

    def pack_request(self, pack: Pack, timeout_ms: int, request: Req) -> bytes:
        """Raises ``InvalidMessageError`` if the request is of another type or cannot be packed."""
        try:
            return pack((timeout_ms, self._encode_request(request)))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidMessageError(message=f"{self.name}: cannot be packed: {error}") from None

    def unpack_request(self, body: bytes) -> tuple[int, Req]:
        """``(timeout_ms, request)``. Raises ``InvalidMessageError``."""
        values = unpack_body(body)
        if type(values) is list and len(values) > 1:
            timeout_ms = values[0]
            if type(timeout_ms) is int and 0 <= timeout_ms <= MAX_TIMEOUT_MS:
                return timeout_ms, self._decode_request(values[1])
        raise _malformed_call(values)

    def pack_response(self, pack: Pack, response: Resp) -> bytes:
        try:
            return pack(self._encode_response(response))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidMessageError(message=f"{self.name}: cannot be packed: {error}") from None

    def unpack_response(self, body: bytes) -> Resp:
        """Raises ``InvalidMessageError``."""
        response: Resp = self._decode_response(unpack_body(body))
        return response


class _Nothing:
    """The schema of a request or response without fields: None."""

    def encode(self, value: Any) -> tuple[Any, ...]:
        if value is not None:
            raise InvalidMessageError(message=f"expected None, got {type(value).__name__}")
        return ()

    def decode(self, fields: Any) -> None:
        if type(fields) is not list:
            raise InvalidMessageError(message=f"expected an array, got {type(fields).__name__}")


def unpack_call(body: bytes) -> tuple[int, Any]:
    """``(timeout_ms, fields)`` of any call, the fields unchecked. Raises ``InvalidMessageError``."""
    values = unpack_body(body)
    if type(values) is list and len(values) > 1:
        timeout_ms = values[0]
        if type(timeout_ms) is int and 0 <= timeout_ms <= MAX_TIMEOUT_MS:
            return timeout_ms, values[1]
    raise _malformed_call(values)


def _malformed_call(values: Any) -> InvalidMessageError:
    if type(values) is not list or len(values) < 2:
        return InvalidMessageError(message="call: expected [timeout_ms, fields]")
    return InvalidMessageError(
        message=f"call.timeout_ms: expected 0..{MAX_TIMEOUT_MS}, got {shown(values[0])}"
    )


def pack_fail(pack: Pack, error: RpcError) -> bytes:
    """The body of FAIL. Never raises: details that cannot travel are left out, long text is cut."""
    message = error.message[:MAX_ERROR_TEXT_CHARS]
    details: Mapping[str, Any] = {
        key: value
        for key, value in list(error.details.items())[:16]
        if isinstance(key, str) and isinstance(value, (str, bytes, int, float, bool, type(None)))
    }
    try:
        body = pack((int(error.code), message, details))
        if len(body) <= 4 * MAX_ERROR_TEXT_CHARS:
            return body
    except (TypeError, ValueError, OverflowError):
        pass
    return pack((int(error.code), message.encode("utf-8", "replace").decode()[:200], {}))


def unpack_fail(body: bytes) -> tuple[Code, str, dict[str, Any]]:
    """Raises ``InvalidMessageError``. Unknown codes become INTERNAL."""
    values = unpack_body(body)
    if (
        type(values) is not list
        or len(values) < 3
        or type(values[0]) is not int
        or type(values[1]) is not str
        or type(values[2]) is not dict
    ):
        raise InvalidMessageError(message="FAIL: expected [code, message, details]")
    code = Code.from_wire(values[0])
    return (
        Code.INTERNAL if code is Code.OK else code,
        values[1][:MAX_ERROR_TEXT_CHARS],
        values[2],
    )


def is_coroutine_handler(handler: Callable[..., Any]) -> bool:
    """True if calling it gives something to await. A plain function is answered without a task."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004
    )
