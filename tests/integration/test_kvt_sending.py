"""Sender and receiver, two processes, real sockets: layer by layer along the engine's steps, and
every byte of the receiver's cache compared with what those steps computed."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from kvt_bindings import code_name
from tests.kvt_kit import TRANSPORTS, Shape, Target, raw, receiver_process
from tests.kvt_sender_kit import computed, expected_after, step_process

SHAPE = Shape(layers=3, blocks=16)
LAYER_BYTES = SHAPE.block_bytes * 2 * 2  # two blocks, K and V

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def same(target: Target, expected: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(mine, want) for mine, want in zip(target.bytes(), expected, strict=True)
    )


@transports
def test_each_layer_leaves_when_its_event_completes(transport: str) -> None:
    """The host runs ahead: all layers are recorded before the device has computed the first."""
    with Target(SHAPE) as target, step_process(SHAPE, transports=[transport]) as p:
        before = target.bytes()
        target.grant(1, [9, 8], 0, 32)
        p.call("submit", 7, 1, [target.port], [3, 5], [9, 8], 0, 32)
        p.call("start", 7)
        for layer in range(SHAPE.layers):
            p.call("launch", 7, layer)
        assert p.call("finish", 7) == 0
        assert target.receiver.snapshot()["bytes_placed"] == 0
        for layer in range(SHAPE.layers):
            p.call("run_kernel", 7, layer, 1)
            placed = (layer + 1) * LAYER_BYTES
            target.until(lambda s, placed=placed: s["bytes_placed"] >= placed)
            assert target.receiver.snapshot()["bytes_placed"] == placed
        assert target.completion(1) == (1, 0, 32, 0, "")
        assert p.call("completion", 1) == (1, 0, 32, 0, "")
        assert same(target, expected_after(SHAPE, before, [(1, [3, 5], [9, 8], 0, 32)]))
        assert p.call("transport") == [transport]
        assert p.call("close") == (1, 0)


@transports
def test_any_token_range_arrives_byte_for_byte(transport: str) -> None:
    rng = np.random.default_rng(4)
    with Target(SHAPE) as target, step_process(SHAPE, transports=[transport]) as p:
        for n in range(1, 13):
            src = [int(b) for b in rng.permutation(SHAPE.blocks)[:4]]
            dst = [int(b) for b in rng.permutation(SHAPE.blocks)[:4]]
            first, end = sorted(int(t) for t in rng.choice(65, 2, replace=False))
            before = target.bytes()
            target.grant(n, dst, first, end)
            p.call("submit", n, n, [target.port], src, dst, first, end)
            p.call("whole_step", n, n)
            assert target.completion(n) == (n, 0, end, 0, "")
            assert p.call("completion", n) == (n, 0, end, 0, "")
            assert same(target, expected_after(SHAPE, before, [(n, src, dst, first, end)]))


def test_a_prompt_in_chunks_a_substep_and_a_frozen_rest() -> None:
    """Tokens of one transfer leave in four ways; each chunk carries its own step's bytes."""
    src, dst = [3, 5, 7, 2], [9, 8, 1, 0]
    with Target(SHAPE) as target, step_process(SHAPE) as p:

        def placed_tokens(n: int) -> None:
            """Before the next `compute`, which writes the whole cache anew."""
            placed = n * LAYER_BYTES // 32 * SHAPE.layers
            target.until(lambda s: s["bytes_placed"] == placed)

        before = target.bytes()
        target.grant(1, dst, 0, 64)
        p.call("submit", 1, 1, [target.port], src[:1], dst, 0, 10, False)
        p.call("whole_step", 1, 1)
        placed_tokens(10)
        p.call("delta", 2, 1, src[1:3], 10, 40, False)
        p.call("whole_step", 2, 2)
        placed_tokens(40)
        p.call("start", 3)
        p.call("compute", 0, 3)
        p.call("record", 3, 0)
        send = (1, [target.port], src, dst, 40, 50, False)
        assert p.call("substep", 3, 1, *send) == "taken"
        for layer in (1, 2):
            p.call("compute", layer, 3)
            p.call("record", 3, layer)
        assert p.call("finish", 3) == 1
        placed_tokens(50)
        for layer in range(SHAPE.layers):
            p.call("compute", layer, 4)
        p.call("frozen", 1, [target.port], src, dst, 50, 64)
        assert target.completion(1) == (1, 0, 64, 0, "")
        assert p.call("completion", 1) == (1, 0, 64, 0, "")
        pieces = [(1, 0, 10), (2, 10, 40), (3, 40, 50), (4, 50, 64)]
        assert same(
            target, expected_after(SHAPE, before, [(s, src, dst, a, b) for s, a, b in pieces])
        )


def test_a_refused_substep_is_repaired_by_a_frozen_send() -> None:
    with Target(SHAPE) as target, step_process(SHAPE) as p:
        before = target.bytes()
        for key in (1, 2):
            target.grant(key, [key], 0, 16)
        assert p.call("substep", 1, 1, 1, [target.port], [3], [1], 0, 16) == "kept"
        assert p.call("whole_step", 1, 1) == 1
        assert p.call("substep", 1, 2, 2, [target.port], [4], [2], 0, 16) == "late"
        assert target.completion(1) == (1, 0, 16, 0, "")
        p.call("frozen", 2, [target.port], [4], [2], 0, 16)
        assert target.completion(2) == (2, 0, 16, 0, "")
        assert same(
            target, expected_after(SHAPE, before, [(1, [3], [1], 0, 16), (1, [4], [2], 0, 16)])
        )
        assert p.call("close") == (2, 0)


def test_two_receivers_each_get_their_heads() -> None:
    """TP 1 → 2: one send, two targets, two completions at each end."""
    half = Shape(layers=3, blocks=16, tp=2)
    with (
        Target(half, rank=0) as left,
        Target(half, rank=1) as right,
        step_process(SHAPE) as p,
    ):
        for target in (left, right):
            target.grant(1, [4, 2], 5, 30)
        p.call("submit", 1, 1, [left.port, right.port], [3, 6], [4, 2], 5, 30)
        p.call("whole_step", 1, 8)
        assert {p.call("completion", n)[:4] for n in (1, 2)} == {(1, 0, 30, 0), (1, 1, 30, 0)}
        for rank, target in enumerate((left, right)):
            assert target.completion(1) == (1, 0, 30, 0, "")
            for layer in range(SHAPE.layers):
                theirs = computed(SHAPE, 8, layer)
                for token in range(5, 30):
                    src, dst = [3, 6][token // 16], [4, 2][token // 16]
                    want = theirs[:, src, token % 16, rank * 2 : rank * 2 + 2]
                    mine = target.cache.tensors[layer][:, dst, token % 16]
                    assert np.array_equal(raw(mine), want.view(np.uint16))


@transports
def test_old_bytes_never_complete(transport: str) -> None:
    """A layer is recorded again after its bytes went out: the transfer fails at both ends."""
    with Target(SHAPE) as target, step_process(SHAPE, transports=[transport]) as p:
        target.grant(1, [9], 0, 16)
        p.call("submit", 1, 1, [target.port], [3], [9], 0, 16)
        p.call("start", 1)
        p.call("compute", 0, 1)
        p.call("record", 1, 0)
        target.until(lambda s: s["bytes_placed"] == LAYER_BYTES // 2)
        p.call("compute", 0, 2)
        p.call("record", 1, 0)
        _, _, _, code, detail = p.call("completion", 1)
        assert (code_name(code), "recorded again" in detail) == ("INTERNAL", True)
        _, _, _, code, detail = target.completion(1)
        assert code_name(code) == "INTERNAL", detail


def test_a_layer_that_was_not_recorded_fails_both_ends_by_name() -> None:
    with Target(SHAPE) as target, step_process(SHAPE) as p:
        target.grant(1, [9], 0, 16)
        p.call("submit", 5, 1, [target.port], [3], [9], 0, 16)
        p.call("start", 5)
        for layer in (0, 2):
            p.call("compute", layer, 1)
            p.call("record", 5, layer)
        target.until(lambda s: s["bytes_placed"] == LAYER_BYTES)
        p.call("finish", 5)
        _, _, _, code, detail = p.call("completion", 1)
        assert (code_name(code), detail) == ("INTERNAL", "layer 1 of step 5 was not recorded")
        assert target.completion(1)[3] == code


@transports
def test_cancel_in_the_middle_ends_both_ends_once(transport: str) -> None:
    with Target(SHAPE) as target, step_process(SHAPE, transports=[transport]) as p:
        target.grant(1, [9], 0, 16)
        p.call("submit", 1, 1, [target.port], [3], [9], 0, 16)
        p.call("start", 1)
        p.call("compute", 0, 1)
        p.call("record", 1, 0)
        target.until(lambda s: s["bytes_placed"] == LAYER_BYTES // 2)
        p.call("cancel", 1, 6, "hold is over")
        p.call("cancel", 1, 5, "again")
        assert p.call("completion", 1)[3:] == (6, "hold is over")
        assert code_name(target.completion(1)[3]) == "EXPIRED"
        # The connection lives on.
        target.grant(2, [8], 0, 16)
        p.call("frozen", 2, [target.port], [3], [8], 0, 16)
        assert target.completion(2)[:4] == (2, 0, 16, 0)
        assert p.call("close") == (2, 0)


def test_a_closed_grant_is_the_senders_completion_too() -> None:
    with Target(SHAPE) as target, step_process(SHAPE) as p:
        p.call("frozen", 1, [target.port], [3], [9], 0, 16)  # no grant at all
        key, rank, _, code, detail = p.call("completion", 1)
        assert (key, rank) == (1, 0)
        assert code_name(code) != "OK", detail
        assert target.receiver.snapshot()["num_refused_opens"] == 1


def test_a_receiver_that_nobody_serves_is_unreachable() -> None:
    with socket.socket() as nobody, step_process(SHAPE) as p:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        p.call("frozen", 1, [nobody.getsockname()[1]], [3], [9], 0, 16)
        assert code_name(p.call("completion", 1)[3]) == "UNREACHABLE"
        assert p.call("close") == (1, 0)


def test_kill_9_of_the_receiver_ends_every_send_to_it() -> None:
    with receiver_process(SHAPE) as d, step_process(SHAPE) as p:
        port = d.call("port")
        d.call("grant", 1, [9], 0, 16)
        p.call("submit", 1, 1, [port], [3], [9], 0, 16)
        p.call("start", 1)
        for layer in range(SHAPE.layers):
            p.call("launch", 1, layer)
        p.call("run_kernel", 1, 0, 1)
        p.call("until_sent", 1)
        d.kill()
        assert code_name(p.call("completion", 1)[3]) == "PEER_LOST"
        p.call("finish", 1)
        assert p.call("close") == (1, 0)
