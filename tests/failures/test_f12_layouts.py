"""F12: P and D differ in what cannot be bridged. It is said at the handshake, with both values, and
no transfer is ever opened."""

from __future__ import annotations

import dataclasses

import pytest

from tests.kvt_kit import RemoteError, Shape, Target, sender_process

INCOMPATIBLE = 7
D = Shape()


@pytest.mark.parametrize(
    ("change", "values"),
    [
        pytest.param({"model": "llama-70b"}, ("llama-70b", "kit"), id="another model"),
        pytest.param({"dim": 64}, ("64", "32"), id="head size"),
        pytest.param({"heads": 8}, ("8", "4"), id="number of KV heads"),
        pytest.param({"layers": 5}, ("4",), id="number of layers"),
    ],
)
def test_incompatible_at_the_handshake(change: dict[str, object], values: tuple[str, ...]) -> None:
    with Target(D) as target, sender_process(dataclasses.replace(D, **change)) as sender:
        with pytest.raises(RemoteError) as refused:
            sender.call("connect", target.port, ["tcp"])
        assert refused.value.code == INCOMPATIBLE
        for value in values:
            assert value in str(refused.value)
        snapshot = target.until(lambda s: s["connections"] == [])
        assert snapshot["num_violations"] == 0


@pytest.mark.parametrize("change", [{"tp": 2}, {"block_tokens": 8}, {"blocks": 64}])
def test_what_can_be_bridged_is(change: dict[str, int]) -> None:
    """Different TP size, block size and number of blocks are no reason to refuse."""
    with Target(D) as target, sender_process(dataclasses.replace(D, **change)) as sender:
        assert sender.call("connect", target.port, ["tcp"]) == "tcp"


def test_a_rank_that_is_not_there() -> None:
    with (
        Target(D) as target,
        sender_process(D) as sender,
        pytest.raises(RemoteError, match="rank 5 was meant, this is rank 0"),
    ):
        sender.call("connect", target.port, ["tcp"], target_rank=5)


def test_no_common_transport() -> None:
    with (
        Target(D, transports=["cma"]) as target,
        sender_process(D) as sender,
        pytest.raises(RemoteError, match="cma: not offered"),
    ):
        sender.call("connect", target.port, ["tcp"])
