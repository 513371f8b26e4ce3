"""Addresses and identities: what they accept, and how they say no."""

from __future__ import annotations

import pytest

from simple_rpc import Address, Identity, InvalidMessageError


@pytest.mark.parametrize(
    ("text", "is_unix", "is_loopback"),
    [
        ("tcp://127.0.0.1:0", False, True),
        ("tcp://127.9.9.9:80", False, True),
        ("tcp://[::1]:8000", False, True),
        ("tcp://localhost:8000", False, True),
        ("tcp://0.0.0.0:8000", False, False),
        ("tcp://[::]:8000", False, False),
        ("tcp://10.1.2.3:8000", False, False),
        ("tcp://localhost.example.org:8000", False, False),
        ("unix:///run/pd/s.sock", True, True),
    ],
)
def test_addresses(text, is_unix, is_loopback):
    address = Address.parse(text)
    assert str(address) == text
    assert Address.parse(str(address)) == address
    assert Address.parse(address) is address
    assert (address.is_unix, address.is_loopback) == (is_unix, is_loopback)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://h:70000", "tcp://h:x", "udp://h:1",
     "unix://relative", "unix://", "unix:///" + "x" * 108, "tcp://h:1/path"],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(ValueError):
        Address.parse(text)


def test_every_process_start_is_another_incarnation():
    one, two = Identity("scheduler", "d0"), Identity("scheduler", "d0")
    assert len(one.incarnation) == 16
    assert one.incarnation != two.incarnation
    assert str(one) == f"scheduler d0@{one.incarnation.hex()[:8]}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "d0"), "role: expected 1 to 64 printable"),
        (("r", "x" * 65), "instance: expected 1 to 64 printable"),
        (("r", "a\nb"), "instance"),
        (("r", 5), "instance"),
        (("r", "i", b"short"), "incarnation: expected 16 bytes"),
        (("r", "i", "x" * 16), "incarnation"),
        (("r", "i", bytes(16), []), "attributes: expected a map"),
        (("r", "i", bytes(16), {1: 2}), "expected short string keys"),
        (("r", "i", bytes(16), {"a": [1]}), "expected a scalar, got list"),
        (("r", "i", bytes(16), {"a": "x" * 513}), "at most 512 long"),
        (("r", "i", bytes(16), {str(n): n for n in range(33)}), "at most 32 entries"),
    ],
)
def test_an_identity_is_bounded(arguments, message):
    with pytest.raises(InvalidMessageError, match=message):
        Identity(*arguments)


def test_attributes_do_not_change_afterwards():
    attributes = {"rank": 1}
    identity = Identity("worker", "d0", attributes=attributes)
    attributes["rank"] = 2
    assert identity.attributes["rank"] == 1
    with pytest.raises(TypeError):
        identity.attributes["rank"] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("h", "tcp://h:7"),
        ("10.0.0.1", "tcp://10.0.0.1:7"),
        ("::1", "tcp://[::1]:7"),
        ("[::1]", "tcp://[::1]:7"),
    ],
)
def test_an_address_of_host_and_port_is_what_its_text_parses_to(host: str, text: str) -> None:
    address = Address.tcp(host, 7)
    assert str(address) == text
    assert Address.parse(text) == address
