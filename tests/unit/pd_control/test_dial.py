"""Which addresses a request may make D connect to."""

from __future__ import annotations

import pytest

from pd_control.config import Config, ConfigError, Network


@pytest.mark.parametrize(
    ("pattern", "address", "allowed"),
    [
        ("tcp://10.0.3.*:5600", "tcp://10.0.3.7:5600", True),
        ("tcp://10.0.3.*:5600", "tcp://10.0.3.7:5601", False),
        ("tcp://10.0.3.*:5600", "tcp://10.0.3.7.evil.org:5600", False),
        ("tcp://10.0.3.*:5600", "tcp://10.0.3.:5600", True),  # no such host: connecting fails
        ("tcp://10.0.3.*:*", "tcp://10.0.3.7:22", True),
        ("tcp://p-*.Cluster.local:*", "tcp://P-1.cluster.local:7", True),
        ("tcp://p-*.cluster.local:*", "tcp://p-1.a.cluster.local:7", False),
        ("tcp://p-1:5600", "tcp://x@p-1:5600", True),  # the host is what counts
        ("tcp://p-1:5600", "tcp://p-1@x:5600", False),
        ("tcp://[::1]:*", "tcp://[::1]:5600", True),
        ("tcp://*:5600", "tcp://localhost:5600", True),
        ("tcp://*:5600", "tcp://127.0.0.1:5600", False),
        ("unix:///run/pd/*", "unix:///run/pd/p0", True),
        ("unix:///run/pd/*", "unix:///run/pd/a/p0", False),
        ("unix:///run/pd/*", "tcp://127.0.0.1:5600", False),
        ("tcp://a.b:1", "tcp://axb:1", False),  # a dot is a dot
        ("tcp://a:1", "nonsense", False),
    ],
)
def test_patterns(pattern: str, address: str, allowed: bool) -> None:
    network = Network(dial=("tcp://elsewhere:1", pattern))
    assert network.may_dial(address) is allowed


def test_without_patterns_any_address_will_do() -> None:
    assert Network().may_dial("tcp://anywhere:1")


@pytest.mark.parametrize(
    "pattern", ["", "10.0.3.1:5600", "tcp://10.0.3.1", "http://x:1", "tcp://a/b:1"]
)
def test_what_is_no_pattern_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.dial"):
        Config(instance="d0", role="decode", network=Network(dial=(pattern,)))
