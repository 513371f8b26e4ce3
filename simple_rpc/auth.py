"""The shared secret and the proofs of it. The secret itself never leaves the process."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_SECRET_BYTES = 16
"""A proof can be tested against guesses offline by whoever saw or provoked a handshake: the secret must not
be guessable. 16 random bytes are not; a word is."""

MAX_SECRET_BYTES = 4096

SERVER_LABEL = b"pd-control server v1"
CLIENT_LABEL = b"pd-control client v1"
"""Different labels, so that a proof cannot be reflected to the side that made it."""


class Secret:
    """What both ends of a deployment know. Immutable; its repr shows nothing.

    Surrounding ASCII whitespace is not part of the secret, so that files with a final newline agree with
    environment variables. Raises ``ValueError`` for less than 16 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, value: bytes) -> None:
        value = value.strip()
        if not MIN_SECRET_BYTES <= len(value) <= MAX_SECRET_BYTES:
            raise ValueError(
                f"a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, got {len(value)}"
            )
        self._key = value

    @classmethod
    def from_file(cls, path: str) -> Secret:
        """Read a secret from a regular file that is ours (or root's) and that nobody else may touch.

        Raises ``PermissionError`` if group or others have any access (``chmod 600``) or the owner is
        somebody else, ``OSError`` if it cannot be read, ``ValueError`` if it is too short.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)  # of the file we read from, not of what the path names by now
            if not stat.S_ISREG(status.st_mode):
                raise PermissionError(f"secret {path}: not a regular file")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise PermissionError(
                    f"secret {path}: mode {mode:04o} lets others in; expected 0600 or less"
                )
            if status.st_uid not in (os.geteuid(), 0):
                raise PermissionError(
                    f"secret {path}: owned by uid {status.st_uid}, expected {os.geteuid()} or root"
                )
            return cls(file.read(MAX_SECRET_BYTES + 2))

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """Raises ``KeyError`` if the variable is not set, ``ValueError`` if it is too short."""
        return cls(os.environb[name.encode()])

    def server_proof(self, hello_frame: bytes, answer_body: bytes) -> bytes:
        """See docs/wire.md: both arguments are the bytes on the wire, the proof's own bytes zero."""
        return self._proof(SERVER_LABEL, hello_frame, answer_body)

    def client_proof(self, hello_frame: bytes, answer_body: bytes) -> bytes:
        return self._proof(CLIENT_LABEL, hello_frame, answer_body)

    def _proof(self, label: bytes, hello_frame: bytes, answer_body: bytes) -> bytes:
        transcript = hashlib.sha256(hello_frame).digest() + hashlib.sha256(answer_body).digest()
        return hmac.new(self._key, label + transcript, hashlib.sha256).digest()

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not pickled")


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def proofs_match(expected: bytes, got: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(expected, got)
