"""F13: main-step metadata is taken for a substep because the path was guessed from the thread.

Here step and substep are fields of the message (R6): whoever calls, from whatever thread and in whatever
order, a send rides exactly the step that it names.
"""

from __future__ import annotations

import pytest

from kvt_bindings import code_name
from tests.kvt_kit import Shape, Target
from tests.kvt_sender_kit import expected_after, step_process

SHAPE = Shape(layers=3, blocks=16)
LAYER_BYTES = SHAPE.block_bytes * 2  # one block, K and V


@pytest.mark.parametrize("engine_thread_sends_substeps", [True, False])
def test_each_send_rides_the_step_it_names(engine_thread_sends_substeps: bool) -> None:
    """Two steps in flight; their sends come interleaved, each kind from both kinds of thread."""
    with Target(SHAPE) as target, step_process(SHAPE) as p:

        def engine(name: str, *args: object) -> object:
            return p.call(name, *args)

        def other(name: str, *args: object) -> object:
            return p.call("elsewhere", name, *args)

        substeps, mains = (engine, other) if engine_thread_sends_substeps else (other, engine)
        before = target.bytes()
        for key in (1, 2, 3, 4):
            target.grant(key, [key], 0, 16)

        mains("submit", 7, 1, [target.port], [10], [1], 0, 16)
        engine("start", 7)
        mains("submit", 8, 2, [target.port], [11], [2], 0, 16)  # while 7 runs
        assert substeps("substep", 7, 1, 3, [target.port], [12], [3], 0, 16) == "taken"
        engine("start", 8)  # both are open now
        assert substeps("substep", 8, 1, 4, [target.port], [13], [4], 0, 16) == "taken"

        for layer in range(SHAPE.layers):
            engine("compute", layer, 7)
            engine("record", 7, layer)
        assert engine("finish", 7) == 1
        # All of step 7's sends have landed and none of step 8's: no layer of 8 was recorded.
        assert {target.completion(n)[0] for n in (1, 2)} == {1, 3}
        assert target.receiver.snapshot()["bytes_placed"] == 2 * SHAPE.layers * LAYER_BYTES
        for layer in range(SHAPE.layers):
            engine("compute", layer, 8)
            engine("record", 8, layer)
        assert engine("finish", 8) == 1
        assert {target.completion(n)[0] for n in (3, 4)} == {2, 4}
        want = expected_after(
            SHAPE,
            before,
            [
                (7, [10], [1], 0, 16),
                (8, [11], [2], 0, 16),
                (7, [12], [3], 0, 16),
                (8, [13], [4], 0, 16),
            ],
        )
        assert all((a == b).all() for a, b in zip(target.bytes(), want, strict=True))


def test_the_forward_may_run_on_another_thread_than_the_one_that_initialised() -> None:
    """Every call of the engine comes from a thread of its own; early, timely and late stay what they are."""
    with Target(SHAPE) as target, step_process(SHAPE) as p:

        def elsewhere(name: str, *args: object) -> object:
            return p.call("elsewhere", name, *args)

        before = target.bytes()
        for key in (1, 2, 3, 4):
            target.grant(key, [key], 0, 16)
        elsewhere("submit", 7, 1, [target.port], [10], [1], 0, 16)
        assert p.call("substep", 7, 1, 2, [target.port], [11], [2], 0, 16) == "kept"  # early
        elsewhere("start", 7)
        assert p.call("substep", 7, 2, 3, [target.port], [12], [3], 0, 16) == "taken"
        for layer in range(SHAPE.layers):
            elsewhere("compute", layer, 7)
            elsewhere("record", 7, layer)
        assert elsewhere("finish", 7) == 2
        assert p.call("substep", 7, 3, 4, [target.port], [13], [4], 0, 16) == "late"
        assert {target.completion(n)[0] for n in (1, 2, 3)} == {1, 2, 3}
        sent = [(7, [10], [1], 0, 16), (7, [11], [2], 0, 16), (7, [12], [3], 0, 16)]
        want = expected_after(SHAPE, before, sent)
        assert all((a == b).all() for a, b in zip(target.bytes(), want, strict=True))


def test_a_substep_of_another_step_is_not_this_ones() -> None:
    """The same numbers from the same thread: only the step in the message tells them apart."""
    with Target(SHAPE) as target, step_process(SHAPE) as p:
        target.grant(1, [1], 0, 16)
        p.call("whole_step", 7, 7)
        p.call("start", 8)
        # Substep 1 of step 7 is late, though step 8 is running on this very thread and would have
        # a place for it.
        assert p.call("substep", 7, 1, 1, [target.port], [10], [1], 0, 16) == "late"
        for layer in range(SHAPE.layers):
            p.call("record", 8, layer)
        assert p.call("finish", 8) == 0  # nothing was attached to it
        assert target.receiver.snapshot()["bytes_placed"] == 0


def test_main_step_sends_are_refused_once_the_step_runs() -> None:
    """They are not quietly made a substep."""
    with Target(SHAPE) as target, step_process(SHAPE) as p:
        p.call("start", 7)
        with pytest.raises(Exception) as refused:
            p.call("submit", 7, 1, [target.port], [10], [1], 0, 16)
        code = getattr(refused.value, "code", None)
        assert code is not None
        assert code_name(code) == "BAD_REQUEST"
