"""The handshake: two pure machines, one for each end. Frames in, frames out; no I/O, no clock.

    client                                    server
      HELO  versions, identity, nonce  ───►
           ◄───  OKAY  version, identity, nonce, auth_required, proof, attributes
      AUTH  proof                      ───►                              (only if auth_required)
           ◄───  OKAY

The server proves first, so that a client never answers the challenge of somebody who does not know the
secret. Neither side sends anything early: bytes beyond the frame that is due end the handshake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack

from ._codec import MaxLen, Range, Schema, new_pack, unpack_body
from ._errors import (
    AuthenticationError,
    Code,
    IncompatibleError,
    InvalidMessageError,
    PeerProtocolError,
    Phase,
    RemoteError,
    RpcError,
)
from ._frames import AUTH, FAIL, HELO, OKAY, encode_frame, head_name
from ._limits import MAX_HANDSHAKE_ITEMS
from .auth import NONCE_BYTES, PROOF_BYTES, Secret, new_nonce, proofs_match
from .identity import INCARNATION_BYTES, Identity

PROTOCOL_VERSIONS = (1, 1)
"""The versions of this protocol that this code speaks, both ends included."""

MAX_VERSION = 65_535
PROOF_INDEX = 6  # of the proof in the OKAY array
ZERO_PROOF = bytes(PROOF_BYTES)

AUTHENTICATING_HEADS: Mapping[int, bool] = {AUTH: False}
HELLO_HEADS: Mapping[int, bool] = {HELO: False}
ANSWER_HEADS: Mapping[int, bool] = {OKAY: False, FAIL: False}


@dataclass(frozen=True)
class HelloRequest:
    min_version: Annotated[int, Range(0, MAX_VERSION)]
    max_version: Annotated[int, Range(0, MAX_VERSION)]
    role: str
    instance: str
    incarnation: Annotated[bytes, MaxLen(INCARNATION_BYTES)]
    nonce: Annotated[bytes, MaxLen(NONCE_BYTES)]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class HelloAnswer:
    version: Annotated[int, Range(0, MAX_VERSION)]
    role: str
    instance: str
    incarnation: Annotated[bytes, MaxLen(INCARNATION_BYTES)]
    nonce: Annotated[bytes, MaxLen(NONCE_BYTES)]
    auth_required: bool
    proof: Annotated[bytes, MaxLen(PROOF_BYTES)]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class AuthRequest:
    proof: Annotated[bytes, MaxLen(PROOF_BYTES)]


_HELLO_REQUEST = Schema(HelloRequest)
_HELLO_ANSWER = Schema(HelloAnswer)
_AUTH_REQUEST = Schema(AuthRequest)


def _unpack(body: bytes) -> Any:
    return unpack_body(body, MAX_HANDSHAKE_ITEMS, MAX_HANDSHAKE_ITEMS)


def _call_fields(body: bytes) -> Any:
    values = _unpack(body)
    if type(values) is not list or len(values) < 2 or type(values[0]) is not int:
        raise InvalidMessageError(message="call: expected [timeout_ms, fields]")
    return values[1]


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise InvalidMessageError(message=f"nonce: expected {NONCE_BYTES} bytes, got {len(nonce)}")


class ServerHandshake:
    """The accepting end. ``receive`` each frame; when ``peer`` is set the other end has identified (and, with
    a secret, proven) itself. Any ``RpcError`` ends it: answer FAIL and close."""

    def __init__(
        self,
        own: Identity,
        secret: Secret | None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        self._own = own
        self._secret = secret
        self._versions = versions
        self._claimed: Identity | None = None
        self._expected_proof = b""
        self.version = 0
        self.peer: Identity | None = None
        self.heads = HELLO_HEADS  # what may come next

    def receive(self, head: int, body: bytes) -> bytes:
        """The frame to send back. Raises ``RpcError``."""
        if head == HELO and self._claimed is None:
            return self._hello(body)
        if head == AUTH and self._claimed is not None and self.peer is None:
            return self._auth(body)
        raise RpcError(Code.BAD_REQUEST, f"{head_name(head)} is out of turn in the handshake")

    def _hello(self, body: bytes) -> bytes:
        hello = _HELLO_REQUEST.decode(_call_fields(body))
        _check_nonce(hello.nonce)
        low, high = self._versions
        version = min(high, hello.max_version)
        if version < max(low, hello.min_version):
            raise IncompatibleError(
                message=f"protocol versions {hello.min_version}..{hello.max_version} offered, "
                f"{low}..{high} spoken here",
                details={"offered_max": hello.max_version, "spoken_max": high},
            )
        claimed = Identity(hello.role, hello.instance, hello.incarnation, hello.attributes)
        own, secret = self._own, self._secret
        pack = new_pack()
        fields = [
            version,
            own.role,
            own.instance,
            own.incarnation,
            new_nonce(),
            secret is not None,
            b"" if secret is None else ZERO_PROOF,
            dict(own.attributes),
        ]
        answer = pack(fields)
        if secret is not None:
            hello_frame = encode_frame(HELO, body)
            self._expected_proof = secret.client_proof(hello_frame, answer)
            fields[PROOF_INDEX] = secret.server_proof(hello_frame, answer)
            answer = pack(fields)
            self.heads = AUTHENTICATING_HEADS
        else:
            self.peer = claimed
        self._claimed = claimed
        self.version = version
        return encode_frame(OKAY, answer)

    def _auth(self, body: bytes) -> bytes:
        proof = _AUTH_REQUEST.decode(_call_fields(body)).proof
        if not proofs_match(self._expected_proof, proof):
            raise AuthenticationError(message="the client's proof of the secret is wrong")
        self.peer = self._claimed
        return encode_frame(OKAY, new_pack()([]))


class ClientHandshake:
    """The connecting end. Send ``first()``; ``receive`` each frame and send what it returns; done when
    ``peer`` is set. Any ``RpcError`` ends it: close."""

    def __init__(
        self,
        own: Identity,
        secret: Secret | None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
        timeout_ms: int = 0,
    ) -> None:
        self._own = own
        self._secret = secret
        self._versions = versions
        self._hello_frame = b""
        self._claimed: Identity | None = None
        self._timeout_ms = timeout_ms
        self.version = 0
        self.peer: Identity | None = None
        self.heads = ANSWER_HEADS

    def first(self) -> bytes:
        own = self._own
        fields = (
            *self._versions,
            own.role,
            own.instance,
            own.incarnation,
            new_nonce(),
            dict(own.attributes),
        )
        self._hello_frame = encode_frame(HELO, new_pack()((self._timeout_ms, fields)))
        return self._hello_frame

    def receive(self, head: int, body: bytes) -> bytes | None:
        """The frame to send back, or None. Raises ``RpcError``."""
        if head == FAIL:
            raise _refusal(body)
        if head != OKAY:
            raise PeerProtocolError(
                message=f"{head_name(head)} is no answer",
                details={"reason": "bad_answer"},
                phase=Phase.HELLO,
            )
        if self._claimed is not None:  # the answer to AUTH
            self.peer = self._claimed
            return None
        try:
            answer = _HELLO_ANSWER.decode(_unpack(body))
            _check_nonce(answer.nonce)
            claimed = Identity(answer.role, answer.instance, answer.incarnation, answer.attributes)
        except InvalidMessageError as error:
            raise PeerProtocolError(
                message=f"answer to HELLO: {error.message}",
                details={"reason": "bad_answer"},
                phase=Phase.HELLO,
            ) from None
        low, high = self._versions
        if not low <= answer.version <= high:
            raise IncompatibleError(
                message=f"the server chose version {answer.version}, {low}..{high} offered",
                phase=Phase.HELLO,
            )
        self.version = answer.version
        if self._secret is None:
            if answer.auth_required:
                raise AuthenticationError(
                    message="the server requires a secret, and this client has none",
                    phase=Phase.HELLO,
                )
            self.peer = claimed
            return None
        if not answer.auth_required:
            raise AuthenticationError(
                message="this client has a secret, and the server does not prove that it knows it",
                phase=Phase.HELLO,
            )
        blanked = _blank_proof(body)
        if not proofs_match(self._secret.server_proof(self._hello_frame, blanked), answer.proof):
            raise AuthenticationError(
                message="the server's proof of the secret is wrong", phase=Phase.HELLO
            )
        self._claimed = claimed
        proof = self._secret.client_proof(self._hello_frame, blanked)
        return encode_frame(AUTH, new_pack()((0, (proof,))))


def _blank_proof(body: bytes) -> bytes:
    """The OKAY body as it was received, with the bytes of its proof set to zero: nothing is encoded anew,
    so both ends hash the same bytes whatever their msgpack writers prefer."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(body),
        max_ext_len=0,
        max_array_len=MAX_HANDSHAKE_ITEMS,
        max_map_len=MAX_HANDSHAKE_ITEMS,
    )
    unpacker.feed(body)
    unpacker.read_array_header()
    for _ in range(PROOF_INDEX):
        unpacker.skip()
    unpacker.skip()
    end = unpacker.tell()
    return body[: end - PROOF_BYTES] + ZERO_PROOF + body[end:]


def _refusal(body: bytes) -> RpcError:
    try:
        values = _unpack(body)
    except InvalidMessageError:
        values = None
    if (
        type(values) is not list
        or len(values) < 2
        or type(values[0]) is not int
        or type(values[1]) is not str
    ):
        return PeerProtocolError(
            message="FAIL in the handshake: expected [code, message, details]",
            details={"reason": "bad_answer"},
            phase=Phase.HELLO,
        )
    code, message = Code.from_wire(values[0]), values[1][:1024]
    cls = {
        Code.UNAUTHORIZED: AuthenticationError,
        Code.INCOMPATIBLE: IncompatibleError,
    }.get(code, RemoteError)
    return cls(code, message, phase=Phase.HELLO)
