"""What the simulated engine shows to the driver: ``pd_control.engine.Engine`` over a ``SimInstance``.

The driver's half on the core thread is the real one (``pd_control.runtime.sides``), mailbox included; this is
the engine it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_control.codes import Code
from pd_control.engine import Refusal
from pd_control.ids import Content
from pd_control.messages import BlockIds

if TYPE_CHECKING:
    from pd_control.testing.sim_instance import SimInstance


class EngineFace:
    """One life of one engine. Core thread, except ``wake``."""

    __slots__ = ("instance",)

    def __init__(self, instance: SimInstance) -> None:
        self.instance = instance

    def hold_blocks(self, block_ids: BlockIds) -> None:
        self.instance.pool.hold(block_ids[0])

    def release_blocks(self, block_ids: BlockIds) -> None:
        self.instance.pool.release(block_ids[0])
        self.instance.wake()

    def void_rank(self, rank: int) -> None:
        self.instance.void_rank(rank)

    def wake(self) -> None:
        self.instance.wake_later()

    def on_fatal(self, reason: str) -> None:
        """Not called: the simulated driver hands ``Fatal`` effects to the instance itself."""

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        self.instance.engine.loaded(request_id, num_tokens, first_token)
        self.instance.wake()

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        self.instance.engine.abort(request_id, f"failed {code.name}: {message}")
        self.instance.wake()

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        self.instance.engine.run_locally(request_id)
        self.instance.wake()

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        return self.instance.admit_request(request_id, content, payload)

    def abort_request(self, request_id: str, code: Code, message: str) -> None:
        self.instance.abort_request(request_id)
