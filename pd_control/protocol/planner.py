"""The core-thread half of P: which sends ride which main step, and the leases under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_control.codes import Code
from pd_control.messages import BlockIds, Send
from pd_control.protocol.effects import (
    ForgetRequest,
    OfferTransfer,
    ReleaseLease,
    WithdrawTransfer,
)
from pd_control.protocol.events import (
    RequestFinished,
    RequestForgotten,
    RequestPreempted,
    StepPlanned,
)
from pd_control.protocol.leases import BlockRefs

PlannerCommand = OfferTransfer | WithdrawTransfer | ForgetRequest | ReleaseLease


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request in the engine's schedule of one step, ours or not.

    `added_block_ids` are appended per group since the request's last step; all of them, hits
    included, when `first_token` is what it starts from (its first step, or after a preemption).
    """

    request_id: str
    first_token: int  # num_computed_tokens before the step (prefix hits count)
    end_token: int  # after it
    added_block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`sends` go to every rank with the engine's own step message; `event` goes to the loop."""

    sends: tuple[Send, ...]
    event: StepPlanned


class StepPlanner:
    """Plans main-step sends and owns P's leases. Core thread only; every method is immediate.

    The engine calls, in the order in which things happen on its thread: `add_request`, `plan_step`
    (after each scheduling pass, also an empty one), `step_finished`, `preempt`, `finish_request`.
    Returned events are posted to the loop in that order. `plan_step` takes the leases: from the
    moment it returns, the engine's own references to tracked blocks may go at any time.
    """

    def __init__(self, refs: BlockRefs, block_size: int) -> None: ...

    def add_request(self, request_id: str) -> None:
        """Track a request that has or may get a destination. Before its first step. The caller
        posts `RequestAdded`."""

    def apply(self, command: PlannerCommand) -> RequestForgotten | None:
        """Execute one command of the loop; post the event if there is one."""
        raise NotImplementedError

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """Plan step `step` (greater than every earlier one)."""
        raise NotImplementedError

    def step_finished(self, step: int) -> None:
        """Every rank has reported the end of the step (or will never)."""

    def preempt(self, request_id: str) -> RequestPreempted | None:
        """The engine takes the request's blocks back (None: not tracked)."""
        raise NotImplementedError

    def finish_request(
        self, request_id: str, code: Code = Code.OK, first_token: int | None = None
    ) -> RequestFinished | None:
        """The engine is done with the request (None: not tracked). Our lease stays."""
        raise NotImplementedError

    def tracked(self) -> Iterable[str]:
        raise NotImplementedError
