"""The handshake: both machines back to back, no network; and everything that must not pass."""

from __future__ import annotations

import msgpack
import pytest

from simple_rpc import (
    AuthenticationError,
    Code,
    Identity,
    IncompatibleError,
    InvalidMessageError,
    PeerProtocolError,
    RpcError,
    Secret,
)
from simple_rpc._frames import AUTH, FAIL, HELO, OKAY
from simple_rpc.hello import ClientHandshake, ServerHandshake

ONE = Secret(b"the one shared secret")
TWO = Secret(b"quite another secret!")
D = Identity("scheduler", "d0", attributes={"model": "m", "fingerprint": b"\x01\x02"})
P = Identity("scheduler", "p0", attributes={"rank": 3})


def split(frame: bytes) -> tuple[int, bytes]:
    assert len(frame) == 8 + int.from_bytes(frame[4:8], "little")
    return int.from_bytes(frame[:4], "little"), frame[8:]


def shake(
    client: ClientHandshake, server: ServerHandshake, change=lambda step, frame: frame
) -> int:
    """Run both to the end, ``change`` being the man in the middle. Returns the number of frames."""
    frame: bytes | None = client.first()
    steps = 0
    while frame is not None:
        frame = server.receive(*split(change(steps, frame)))
        steps += 1
        frame = client.receive(*split(change(steps, frame)))
        steps += 1
    return steps


def pair(client_secret=None, server_secret=None, client_versions=(1, 1), server_versions=(1, 1)):
    return (
        ClientHandshake(D, client_secret, client_versions),
        ServerHandshake(P, server_secret, server_versions),
    )


def test_without_a_secret_one_round_trip():
    client, server = pair()
    assert shake(client, server) == 2
    assert client.peer == P
    assert server.peer == D
    assert server.peer.attributes == D.attributes
    assert client.version == server.version == 1


def test_with_a_secret_two_round_trips():
    client, server = pair(ONE, ONE)
    assert shake(client, server) == 4
    assert (client.peer, server.peer) == (P, D)


def test_nothing_of_the_secret_travels():
    client, server = pair(ONE, ONE)
    seen = b""

    def listen(step: int, frame: bytes) -> bytes:
        nonlocal seen
        seen += frame
        return frame

    shake(client, server, listen)
    assert b"secret" not in seen


def test_every_handshake_is_fresh():
    def transcript() -> list[bytes]:
        frames: list[bytes] = []
        shake(*pair(ONE, ONE), lambda step, frame: (frames.append(frame), frame)[1])
        return frames

    one, two = transcript(), transcript()
    assert all(a != b for a, b in zip(one[:3], two[:3], strict=True))


def test_the_client_refuses_a_server_with_another_secret_before_it_proves_anything():
    client, server = pair(ONE, TWO)
    answer = server.receive(*split(client.first()))
    with pytest.raises(AuthenticationError, match="server's proof"):
        client.receive(*split(answer))
    assert server.peer is None


def test_the_server_refuses_a_client_with_another_secret():
    client, server = pair(TWO, ONE)
    answer = server.receive(*split(client.first()))
    # A client that does not care whom it talks to, and proves with what it has.
    forged = msgpack.packb([0, [TWO.client_proof(client.first(), answer)]])
    with pytest.raises(AuthenticationError, match="client's proof"):
        server.receive(AUTH, forged)
    assert server.peer is None


@pytest.mark.parametrize(
    ("client_secret", "server_secret", "message"),
    [(None, ONE, "the server requires a secret"), (ONE, None, "the server does not prove")],
)
def test_a_secret_on_one_side_only(client_secret, server_secret, message):
    client, server = pair(client_secret, server_secret)
    with pytest.raises(AuthenticationError, match=message):
        shake(client, server)
    assert client.peer is None


@pytest.mark.parametrize("proof", [b"", b"x" * 32, b"x" * 31])
def test_guessed_proofs(proof):
    client, server = pair(ONE, ONE)
    server.receive(*split(client.first()))
    with pytest.raises(AuthenticationError):
        server.receive(AUTH, msgpack.packb([0, [proof]]))


def test_the_servers_own_proof_sent_back_is_refused():
    client, server = pair(ONE, ONE)
    _, body = split(server.receive(*split(client.first())))
    server_proof = msgpack.unpackb(body)[6]
    with pytest.raises(AuthenticationError):
        server.receive(AUTH, msgpack.packb([0, [server_proof]]))


def test_a_proof_from_another_connection_is_refused():
    client, server = pair(ONE, ONE)
    recorded = client.receive(*split(server.receive(*split(client.first()))))
    assert recorded is not None
    again = ServerHandshake(P, ONE)
    again.receive(*split(client._hello_frame))
    with pytest.raises(AuthenticationError):
        again.receive(*split(recorded))


def test_no_single_changed_byte_of_the_first_three_frames_goes_unnoticed():
    """Whatever a man in the middle changes, at least one end refuses: no end is deceived."""
    client, server = pair(ONE, ONE)
    lengths: list[int] = []
    shake(client, server, lambda step, frame: (lengths.append(len(frame)), frame)[1])
    for step in range(3):
        for offset in range(lengths[step]):
            client, server = pair(ONE, ONE)

            def change(at: int, frame: bytes, step=step, offset=offset) -> bytes:
                if at != step:
                    return frame
                changed = bytearray(frame)
                changed[offset] ^= 0x01
                return bytes(changed)

            if (step, offset) == (2, 9):
                continue  # the timeout of AUTH, which means nothing to anybody
            # AssertionError: it is no longer one whole frame.
            with pytest.raises((RpcError, AssertionError)):
                shake(client, server, change)
            assert client.peer is None or server.peer is None


@pytest.mark.parametrize(
    ("client_versions", "server_versions", "expected"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4)],
)
def test_the_highest_common_version(client_versions, server_versions, expected):
    client, server = pair(None, None, client_versions, server_versions)
    shake(client, server)
    assert client.version == server.version == expected


@pytest.mark.parametrize(
    ("client_versions", "server_versions"), [((1, 1), (2, 3)), ((4, 5), (2, 3))]
)
def test_no_common_version(client_versions, server_versions):
    client, server = pair(None, None, client_versions, server_versions)
    with pytest.raises(
        IncompatibleError, match=r"versions \d\.\.\d offered, 2\.\.3 spoken"
    ) as failure:
        shake(client, server)
    assert failure.value.code is Code.INCOMPATIBLE


def test_a_server_that_chooses_a_version_that_was_not_offered():
    client, server = pair(None, None, (1, 1), (1, 1))
    _, body = split(server.receive(*split(client.first())))
    fields = msgpack.unpackb(body)
    fields[0] = 2
    with pytest.raises(IncompatibleError, match="chose version 2"):
        client.receive(OKAY, msgpack.packb(fields))


def test_out_of_turn():
    client, server = pair(ONE, ONE)
    with pytest.raises(RpcError, match="AUTH is out of turn"):
        server.receive(AUTH, msgpack.packb([0, [b""]]))
    hello = split(client.first())
    server.receive(*hello)
    with pytest.raises(RpcError, match="HELO is out of turn"):
        server.receive(*hello)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [1, 1],
        [1, 1, "r", "i", b"x" * 16, b"n" * 31, {}],
        [1, 1, "r", "i", b"x" * 15, b"n" * 32, {}],
        [1, 1, "", "i", b"x" * 16, b"n" * 32, {}],
        [1, 1, "r", "i" * 65, b"x" * 16, b"n" * 32, {}],
        [-1, 1, "r", "i", b"x" * 16, b"n" * 32, {}],
        [1, 1, "r", "i", b"x" * 16, b"n" * 32, {"a": [1]}],
        [1, 1, "r", "i", b"x" * 16, b"n" * 32, {str(n): 1 for n in range(40)}],
        [1, 1, "r", "i", b"x" * 16, b"n" * 32, []],
        ["1", 1, "r", "i", b"x" * 16, b"n" * 32, {}],
    ],
)
def test_a_malformed_hello(fields):
    with pytest.raises(InvalidMessageError):
        ServerHandshake(P, None).receive(HELO, msgpack.packb([0, fields]))


def test_deep_or_long_containers_are_refused_early():
    for body in (b"\xdc\x10\x00" * 1000, b"\x91" * 2000, msgpack.packb([0, [0] * 65])):
        with pytest.raises(InvalidMessageError):
            ServerHandshake(P, None).receive(HELO, body)


@pytest.mark.parametrize(
    "body", [b"", b"\x90", b"\xc0", msgpack.packb([1, "r", "i"]), b"\xff" * 10]
)
def test_a_malformed_answer(body):
    client, _ = pair()
    client.first()
    with pytest.raises((PeerProtocolError, InvalidMessageError)):
        client.receive(OKAY, body)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (Code.UNAUTHORIZED, AuthenticationError),
        (Code.INCOMPATIBLE, IncompatibleError),
        (Code.BUSY, RpcError),
    ],
)
def test_a_refusal_keeps_its_code(code, cls):
    client, _ = pair()
    client.first()
    with pytest.raises(cls, match="because") as failure:
        client.receive(FAIL, msgpack.packb([int(code), "because", {}]))
    assert failure.value.code is code
