"""F02, the data side: one of P's ranks cannot send. That is said, by that rank's completion."""

from __future__ import annotations

import pytest

from tests.kvt_kit import TRANSPORTS, Shape, Target, sender_process

OK, INTERNAL, BAD_REQUEST = 0, 14, 12
HALF = Shape(tp=2)
WHOLE = Shape()
BLOCKS = [4, 2, 31, 0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_rank_that_fails_is_named(transport: str) -> None:
    with (
        Target(WHOLE) as target,
        sender_process(HALF, rank=0) as good,
        sender_process(HALF, rank=1) as bad,
    ):
        for sender in (good, bad):
            sender.call("connect", target.port, [transport])
        target.grant(1, BLOCKS, 0, 64, sources=(0, 1))
        ours = good.call("open", 1, 0, 64)
        theirs = bad.call("open", 1, 0, 64)
        bad.call("cancel", theirs, INTERNAL, "layer 2: its event was never recorded")
        _, source, tokens, code, detail = target.completion(1)
        assert (source, tokens, code) == (1, 0, INTERNAL)
        assert "rank 1 of p0" in detail
        assert "layer 2" in detail
        # The other rank's slice is unharmed, and D's count never has to reach a number: each rank
        # that was expected has said its word.
        good.call("send", ours, BLOCKS, BLOCKS, 0, 64, target_shape=WHOLE)
        assert target.completion(2)[1:4] == (0, 64, OK)
        assert target.receiver.snapshot()["grants"] == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_outside_the_cache_is_an_error_of_that_transfer(transport: str) -> None:
    with Target(WHOLE) as target, sender_process(WHOLE) as sender:
        sender.call("connect", target.port, [transport])
        target.grant(1, BLOCKS, 0, 64)
        transfer = sender.call("open", 1, 0, 64)
        sender.call("send_runs", transfer, 0, 0, 64, [(1 << 30, 0, 64)])
        assert sender.call("result", transfer)[0] == BAD_REQUEST
        assert target.completion(1)[3] == BAD_REQUEST
        target.grant(2, BLOCKS, 0, 64)
        again = sender.call("open", 2, 0, 64)
        sender.call("send", again, BLOCKS, BLOCKS, 0, 64)
        assert target.completion(2)[3] == OK
