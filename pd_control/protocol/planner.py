"""The core-thread half of P: which sends ride which main step, and the leases under them.

Core thread only. The engine calls, in the order in which things happen there: `add_request`,
`plan_step` (after each scheduling pass, also an empty one), `step_finished`, `preempt`,
`finish_request`; the loop's commands come through `apply`. Whatever these return is posted to the
loop, in the order of the calls. All calls are immediate and cost nothing per request in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_control.codes import Code
from pd_control.messages import BlockIds, Send
from pd_control.protocol.effects import (
    ForgetRequest,
    OfferTransfer,
    ReleaseLease,
    WithdrawTransfer,
)
from pd_control.protocol.errors import EngineContractError
from pd_control.protocol.events import (
    BlocksWanted,
    PlannedRequest,
    RequestFinished,
    RequestForgotten,
    RequestPreempted,
    StepPlanned,
    TransferWithdrawn,
)
from pd_control.protocol.leases import BlockRefs, LeaseKind, LeaseTable

PlannerCommand = OfferTransfer | WithdrawTransfer | ForgetRequest | ReleaseLease


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request in the engine's schedule of one step, ours or not.

    `added_block_ids` are appended per group since the request's last step, () if there are none; all of
    its blocks, hits included, in its first step and in the first after a preemption.
    """

    request_id: str
    first_token: int  # num_computed_tokens before the step; prefix hits count
    end_token: int  # after it
    added_block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`sends` go to every rank with the engine's own step message; `event` goes to the loop."""

    sends: tuple[Send, ...]
    event: StepPlanned


class _Offer:
    __slots__ = ("offer", "sent_end")

    def __init__(self, offer: OfferTransfer) -> None:
        self.offer = offer
        self.sent_end = offer.first_token


class _Running:
    """A request that the engine schedules, or has finished while we hold it."""

    __slots__ = (
        "block_ids",
        "finished",
        "last_send_step",
        "lease_id",
        "leases",
        "planned_end",
        "residence",
        "tracked",
    )

    def __init__(self, tracked: bool) -> None:
        self.tracked = tracked
        self.finished = False
        self.residence = 1
        self.block_ids: BlockIds = ()
        self.planned_end = 0
        self.lease_id = 0  # of this residence
        self.leases: list[int] = []  # all that are not released
        self.last_send_step = 0


class StepPlanner:
    """Plans main-step sends and owns P's leases.

    From the moment `plan_step` returns, the engine's own references to the blocks of tracked
    requests may go at any time. `block_sizes`: tokens per block, one for all cache groups or one
    each; needed to tell which steps wrote the blocks of a prefix hit.
    """

    def __init__(self, refs: BlockRefs, block_sizes: int | Sequence[int]) -> None:
        self.leases = LeaseTable(refs)
        self._block_sizes = block_sizes
        self._running: dict[str, _Running] = {}
        self._offers: dict[str, dict[bytes, _Offer]] = {}
        # Unfinished step → per group the blocks that it writes. Sets: asked once per new request,
        # kept up for every block of every step, so that side must run at C speed.
        self._written: dict[int, list[set[int]]] = {}
        self._last_step = 0
        self._wanted_blocks = 0  # as last told to the loop
        self._released_then = 0  # leases released when it was told

    # --- from the engine ------------------------------------------------------------------------

    def add_request(self, request_id: str) -> None:
        """Track a request that has or may get a destination, before its first step. The caller
        posts `RequestAdded`. Raises EngineContractError if the id is in use: ids are unique per
        try."""
        if request_id in self._running:
            raise EngineContractError(f"request id {request_id!r} is in use: unique per try")
        self._running[request_id] = _Running(tracked=True)

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """Plan step `step`: take or extend leases, and attach sends. Raises EngineContractError,
        with nothing taken, if the step's number is not above every earlier one."""
        if step <= self._last_step:
            raise EngineContractError(f"step {step} after step {self._last_step}: must go up")
        self._last_step = step
        self._written[step] = []
        sends: list[Send] = []
        planned = []
        for one in scheduled:
            found = self._plan_request(step, one, sends)
            if found is not None:
                planned.append(found)
        return StepPlan(tuple(sends), StepPlanned(step, tuple(planned)))

    def step_finished(self, step: int) -> None:
        """Every rank has reported the end of the step, or never will. Post the `StepFinished` events
        first. Hits on its blocks are hits on complete KV from now on."""
        self._written.pop(step, None)

    def preempt(self, request_id: str) -> RequestPreempted | None:
        """The engine takes the request's blocks back (None: not tracked; nothing to post). To be
        told of every request that was in a step: its next blocks begin at token 0 again."""
        running = self._running.get(request_id)
        if running is None:
            return None
        if not running.tracked:
            del self._running[request_id]
            return None
        residence = running.residence
        running.residence += 1
        running.block_ids = ()
        running.planned_end = 0
        running.lease_id = 0
        return RequestPreempted(request_id, residence)

    def finish_request(
        self, request_id: str, code: Code = Code.OK, first_token: int | None = None
    ) -> RequestFinished | None:
        """The engine is done with the request (None: not tracked). Our leases stay. To be told of
        every request that was in a step, ours or not, or its record stays for ever."""
        running = self._running.get(request_id)
        if running is None:
            return None
        if not running.tracked:
            del self._running[request_id]
            return None
        if running.finished:
            raise EngineContractError(f"request {request_id!r} finished twice")
        running.finished = True
        return RequestFinished(request_id, code, first_token)

    def stopped(self, request_id: str) -> RequestFinished | None:
        """The engine was told to stop the request (`AbortRequest`) and has. None if it was done with
        it before. It need not report the end by `finish_request` then, and must not."""
        running = self._running.get(request_id)
        if running is None or running.finished:
            return None
        return self.finish_request(request_id, Code.ABORTED)

    def want_blocks(self, num_blocks: int) -> BlocksWanted | None:
        """After a scheduling pass: its requests still wait for so many blocks. Returns what to post.

        The loop lets holds go for each event and cannot see what that brought: the blocks may be
        shared with other holds, or be gone to a request that then left the same number missing.
        So the number is told again whenever leases have come back since it was told.
        """
        released = sum(self.leases.released.values())
        is_old = num_blocks == self._wanted_blocks
        if is_old and (num_blocks == 0 or released == self._released_then):
            return None
        self._wanted_blocks, self._released_then = num_blocks, released
        return BlocksWanted(num_blocks)

    # --- from the loop --------------------------------------------------------------------------

    def apply(self, command: PlannerCommand) -> RequestForgotten | TransferWithdrawn | None:
        """Execute one command of the loop. Raises InvariantError for a lease that is not live."""
        if isinstance(command, OfferTransfer):
            self._offers.setdefault(command.request_id, {})[command.key] = _Offer(command)
            return None
        if isinstance(command, WithdrawTransfer):
            self._drop_offer(command.request_id, command.key)
            return TransferWithdrawn(command.key)
        if isinstance(command, ForgetRequest):
            return self._forget(command)
        lease = self.leases.get(command.lease_id)
        self.leases.release(command.lease_id)
        running = None if lease is None else self._running.get(lease.request_id)
        if running is not None and command.lease_id in running.leases:
            running.leases.remove(command.lease_id)
        return None

    # --- inside ---------------------------------------------------------------------------------

    def _plan_request(
        self, step: int, one: ScheduledRequest, sends: list[Send]
    ) -> PlannedRequest | None:
        running = self._running.get(one.request_id)
        if running is None:
            running = self._running[one.request_id] = _Running(tracked=False)
        fresh = running.planned_end == 0
        if fresh:
            running.block_ids = one.added_block_ids
        elif any(one.added_block_ids):
            running.block_ids = tuple(
                old + new for old, new in zip(running.block_ids, one.added_block_ids, strict=True)
            )
        waits = self._writers_of_hits(running, one.first_token) if fresh else ()
        self._note_written(step, running, one.first_token, one.end_token)
        before, running.planned_end = running.planned_end, one.end_token
        if not running.tracked:
            return None
        if running.lease_id == 0:
            running.lease_id = self.leases.acquire(
                LeaseKind.HOLD, one.request_id, running.block_ids
            )
            running.leases.append(running.lease_id)
        elif any(one.added_block_ids):
            self.leases.extend(running.lease_id, one.added_block_ids)
        keys: list[bytes] = []
        ranges: list[tuple[int, int]] = []
        offers = self._offers.get(one.request_id)
        if offers is not None:
            for offered in list(offers.values()):
                send = self._next_send(offered, running, before)
                if send is not None:
                    sends.append(send)
                    keys.append(send.key)
                    ranges.append((send.first_token, send.end_token))
                    running.last_send_step = step
                    if send.last:
                        self._drop_offer(one.request_id, send.key)
        return PlannedRequest(
            one.request_id,
            running.residence,
            running.lease_id,
            one.first_token,
            one.end_token,
            one.added_block_ids,
            waits,
            tuple(keys),
            tuple(ranges),
        )

    @staticmethod
    def _next_send(offered: _Offer, running: _Running, before: int) -> Send | None:
        """The rule of ownership: this residence, and tokens that were still to be computed."""
        offer = offered.offer
        end = min(running.planned_end, offer.end_token)
        if (
            offer.residence != running.residence
            or before >= offer.end_token
            or end <= offered.sent_end
        ):
            return None
        first, offered.sent_end = offered.sent_end, end
        return Send(
            offer.key,
            offer.target_instance,
            offer.target_incarnation,
            offer.targets,
            running.block_ids,
            offer.dst_block_ids,
            first,
            end,
            end == offer.end_token,
        )

    def _drop_offer(self, request_id: str, key: bytes) -> None:
        offers = self._offers.get(request_id)
        if offers is not None:
            offers.pop(key, None)
            if not offers:
                del self._offers[request_id]

    def _forget(self, command: ForgetRequest) -> RequestForgotten:
        request_id = command.request_id
        self._offers.pop(request_id, None)
        running = self._running.get(request_id)
        if running is None or not running.tracked:
            return RequestForgotten(request_id, (), True)
        leases = tuple(running.leases)
        running.tracked = False
        running.leases = []
        running.lease_id = 0
        if running.finished:
            del self._running[request_id]
        if not command.release or running.last_send_step > command.seen_step:
            return RequestForgotten(request_id, leases, False)
        for lease_id in leases:
            self.leases.release(lease_id)
        return RequestForgotten(request_id, leases, True)

    def _block_size(self, group: int) -> int:
        sizes = self._block_sizes
        return sizes if isinstance(sizes, int) else sizes[group]

    def _writers_of_hits(self, running: _Running, first_token: int) -> tuple[int, ...]:
        """The unfinished steps that write a block which the request's prefix hits; ascending."""
        if first_token == 0:
            return ()
        hits = [
            blocks[: -(-first_token // self._block_size(group))]
            for group, blocks in enumerate(running.block_ids)
        ]
        return tuple(
            step
            for step, groups in self._written.items()
            if any(not written.isdisjoint(hit) for written, hit in zip(groups, hits, strict=False))
        )

    def _note_written(self, step: int, running: _Running, first: int, end: int) -> None:
        if end <= first:
            return
        groups = self._written[step]
        while len(groups) < len(running.block_ids):
            groups.append(set())
        for group, blocks in enumerate(running.block_ids):
            size = self._block_size(group)
            groups[group].update(blocks[first // size : -(-end // size)])

    @property
    def num_requests(self) -> int:
        """Requests whose end or release is still to come, those of the engine's own included."""
        return len(self._running)

    def is_idle(self) -> bool:
        """No lease, no offer, no tracked request."""
        return not (
            len(self.leases) or self._offers or any(r.tracked for r in self._running.values())
        )
