"""Steps, substeps, frozen sends, and the journal that undoes what a rank did not take.

A transfer is the loop's to send once the step that computes its last wanted token has been planned
without it (see the package docstring). Then, by how far that step is: complete KV goes frozen at
once; a running step takes it as a substep; what a rank refuses is sent frozen to that rank alone,
once complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pd_control.codes import Code
from pd_control.messages import FrozenSends, Send, Substep
from pd_control.protocol.completion import NO_RANKS
from pd_control.protocol.effects import OfferTransfer, WithdrawTransfer, WorkerNews
from pd_control.protocol.errors import InvariantError
from pd_control.protocol.events import PlannedRequest, StepFinished, StepPlanned
from pd_control.protocol.p_request import PRequestInput, PRequestState
from pd_control.protocol.prefill_state import ACK, PRequest, PTransfer, StepRecord
from pd_control.protocol.prefill_transfers import TransferLayer
from pd_control.protocol.settings import Generation

MAX_BLOCK_IDS_PER_ITEM = 200_000  # of one SUBS or FRZN item: about 1 MB, far below a frame's limit


class StepLayer(TransferLayer):
    """Plans what the core thread does not."""

    _attach: dict[int, list[PTransfer]]  # step → transfers that join it at the end of `handle`
    _frozen: dict[int, list[Send]]  # rank → complete sends, likewise
    _aligned: dict[bytes, PTransfer]  # generation STEP: complete, waiting for the next step

    # --- one transfer ---------------------------------------------------------------------------

    def _plan(self, transfer: PTransfer) -> None:
        request = transfer.request
        if request is None or not transfer.live:
            return
        if not transfer.completion.expected:  # an empty range: only the first token is wanted
            self._check_all_sent(transfer)
            return
        if transfer.sent_end >= transfer.end_token:
            return
        if request.planned_end < transfer.end_token:
            self._plan_on_core(transfer, request)
            return
        if transfer.offered_residence:  # the core thread can use this offer no more
            self._emit(WithdrawTransfer(request.request_id, transfer.key))
            transfer.offered_residence = 0
        absent = [r for r in sorted(self._source_ranks(transfer)) if r not in self._workers]
        if absent:
            self._fail(transfer, Code.PEER_LOST, f"rank {absent[0]} of this P is not there")
            return
        wait_steps = request.waiting_for(transfer.end_token)
        if wait_steps:
            self._plan_substep(transfer, request, wait_steps)
        elif self.settings.generation is Generation.STEP and self._steps:
            self._aligned[transfer.key] = transfer
        else:
            self._plan_frozen(transfer, request)

    def _plan_on_core(self, transfer: PTransfer, request: PRequest) -> None:
        if request.finished:
            self._fail(
                transfer,
                Code.BAD_REQUEST,
                f"the request ended with {request.planned_end} of "
                f"{transfer.end_token} wanted tokens computed",
            )
        elif transfer.offered_residence != request.residence:
            transfer.offered_residence = request.residence
            self._emit(
                OfferTransfer(
                    request.request_id,
                    request.residence,
                    transfer.key,
                    transfer.peer.instance,
                    transfer.peer.incarnation,
                    transfer.targets,
                    transfer.block_ids,
                    transfer.sent_end,
                    transfer.end_token,
                )
            )

    def _plan_substep(
        self, transfer: PTransfer, request: PRequest, wait_steps: frozenset[int]
    ) -> None:
        """Join the last step that it needs. That one comes after the others on every rank's stream,
        so its events vouch for theirs. Else wait for the end of the steps: `_kv_complete`."""
        step = max(wait_steps)
        record = self._steps[step]
        if (
            self.settings.generation is not Generation.SUBSTEP
            or not record.ranks_left
            or record.num_substeps >= self.settings.limits.max_substeps_per_step
        ):
            return
        self._take(transfer, request)
        transfer.wait_steps = wait_steps
        for needed in wait_steps:
            self._steps[needed].keys[transfer.key] = None
        self._attach.setdefault(step, []).append(transfer)
        self._submitted(transfer, transfer.end_token, request.residence, f"substep of {step}")

    def _plan_frozen(self, transfer: PTransfer, request: PRequest) -> None:
        self._take(transfer, request)
        self._freeze(transfer, self._source_ranks(transfer))
        self._submitted(transfer, transfer.end_token, request.residence, "frozen")
        self.counters.add("sends.frozen")

    @staticmethod
    def _take(transfer: PTransfer, request: PRequest) -> None:
        transfer.src_block_ids = request.block_ids
        transfer.sent_from = transfer.sent_end

    def _freeze(self, transfer: PTransfer, ranks: frozenset[int]) -> None:
        send = transfer.send()
        transfer.submitted |= ranks
        for rank in sorted(ranks):
            self._frozen.setdefault(rank, []).append(send)

    def _repair(self, transfer: PTransfer) -> None:
        """Send frozen to the ranks that refused, as soon as all of it is complete."""
        if transfer.live and transfer.repair and not transfer.wait_steps:
            ranks, transfer.repair = transfer.repair, NO_RANKS
            self._freeze(transfer, ranks)
            self.counters.add("sends.repaired", len(ranks))
            transfer.ways += (f"repair of rank {','.join(map(str, sorted(ranks)))}",)

    def _flush_sends(self) -> None:
        """Put out what this `handle` planned: one substep per step, one frozen item per rank."""
        if self._attach:
            attach, self._attach = self._attach, {}
            for step, transfers in attach.items():
                for chunk in _chunks([t for t in transfers if t.live], _transfer_size):
                    self._push_substep(self._steps[step], chunk)
        if self._frozen:
            frozen, self._frozen = self._frozen, {}
            for rank, sends in frozen.items():
                live = [
                    s for s in sends if s.key in self._transfers and self._transfers[s.key].live
                ]
                incarnation = self._workers.get(rank)
                if incarnation is None:
                    continue  # its death has failed these transfers
                for batch in _chunks(live, _send_size):
                    self._emit(WorkerNews(rank, incarnation, FrozenSends(tuple(batch))))

    def _push_substep(self, record: StepRecord, transfers: list[PTransfer]) -> None:
        record.num_substeps += 1
        number = record.num_substeps
        record.journal.append(tuple(transfers))
        sends = tuple(t.send() for t in transfers)
        item = Substep(self.me.incarnation, record.step, number, sends)
        for rank in sorted(record.ranks_left):
            self._emit(WorkerNews(rank, self._workers[rank], item))
        pushed = missed = 0
        for transfer in transfers:
            sources = self._source_ranks(transfer)
            transfer.tentative |= sources & record.ranks_left
            transfer.repair |= sources - record.ranks_left  # they have frozen this step
            pushed += len(transfer.tentative)
            missed += len(transfer.repair)
            transfer.ways = (*transfer.ways[:-1], f"substep {record.step}.{number}")
        self.counters.add("sends.substep", len(transfers))
        self.counters.add("substeps.pushed", pushed)
        if missed:
            self.counters.add("substeps.missed", missed)

    # --- events ---------------------------------------------------------------------------------

    def _on_step_planned(self, event: StepPlanned) -> None:
        if event.step <= self._last_step:
            raise InvariantError(f"step {event.step} planned after step {self._last_step}")
        self._last_step = event.step
        record = StepRecord(event.step, range(self.topology.num_ranks))
        self._steps[event.step] = record
        for planned in event.requests:
            self._on_planned_request(record, planned)
        absent = [r for r in sorted(record.ranks_left) if r not in self._workers]
        for rank in absent:
            reason = f"rank {rank} was not there for it"
            self._rank_finished(record, rank, Code.PEER_LOST, None, reason)
        self._send_aligned()

    def _on_planned_request(self, record: StepRecord, planned: PlannedRequest) -> None:
        request = self._requests.get(planned.request_id)
        if request is None:
            request = self._forgetting.get(planned.request_id)
        if request is None or request.residence != planned.residence:
            raise InvariantError(
                f"step {record.step} names {planned.request_id} residence {planned.residence}, "
                f"known: {None if request is None else request.residence}"
            )
        request.lease_id = planned.lease_id
        if not request.block_ids:
            request.block_ids = planned.added_block_ids
        elif any(planned.added_block_ids):
            request.block_ids = tuple(
                old + new
                for old, new in zip(request.block_ids, planned.added_block_ids, strict=True)
            )
        for step in planned.waits_for_steps:
            if step in self._steps:
                request.pending.append((step, 0))
                self._steps[step].requests[request] = None
        request.pending.append((record.step, planned.first_token))
        record.requests[request] = None
        request.planned_end = planned.end_token
        for key, (_, end) in zip(planned.carried_keys, planned.carried_sends, strict=True):
            self._on_carried(record, request, key, end)
        if request.state is not PRequestState.RELEASED:
            self._request_input(request, PRequestInput.PLANNED)
            for transfer in request.live_transfers():
                self._plan(transfer)

    def _on_carried(self, record: StepRecord, request: PRequest, key: bytes, end: int) -> None:
        transfer = self._transfers.get(key)
        if (
            transfer is None
        ):  # every rank's SEND_DONE overtook this event on its way from the core thread
            self.counters.add("carried.over")
            ended = self._done.get(key, self._now_s)
            if ended is not None:
                self.counters.add("sends.step")
                ways = (*ended.ways, f"step {record.step}")
                self._done.put(key, ended._replace(ways=ways), self._now_s)
            return
        transfer.submitted |= self._source_ranks(transfer)
        if transfer.live:
            self._submitted(transfer, end, request.residence, f"step {record.step}")
            self.counters.add("sends.step")
            if end >= transfer.end_token:
                transfer.offered_residence = 0
        else:  # planned before the withdrawal arrived
            transfer.first_residence = transfer.first_residence or request.residence
            for rank in sorted(transfer.submitted):
                self._cancel(transfer, rank)

    def _on_step_finished(self, event: StepFinished) -> None:
        record = self._steps.get(event.step)
        if record is None or event.rank not in record.ranks_left:
            self.counters.add("step_finished.unknown")
            return
        self._rank_finished(record, event.rank, event.code, event.ack_substep, event.detail)

    def _rank_finished(
        self, record: StepRecord, rank: int, code: Code, ack: int | None, detail: str
    ) -> None:
        if not record.finished:
            self._timers.set((ACK, record.step), self._now_s + self.settings.deadlines.substep_s)
        record.ranks_left.discard(rank)
        record.finished[rank] = ack
        if code is not Code.OK:
            self._step_failed(record, code, f"step {record.step} at rank {rank}: {detail}")
        self._settle(record, rank, ack)
        if not record.ranks_left:
            self._close_step(record)

    def _settle(self, record: StepRecord, rank: int, ack: int | None) -> None:
        """The journal: what `rank` took is certain now, what it refused is undone, and what nobody
        knows fails. A rank that is no longer tentative has answered already."""
        for number, transfers in enumerate(record.journal, 1):
            for transfer in transfers:
                if rank not in transfer.tentative:
                    continue
                if ack is None:
                    self.counters.add("substeps.unknown")
                    transfer.tentative -= {rank}
                    transfer.submitted |= {rank}  # for all we know
                    self._fail(
                        transfer,
                        Code.TIMEOUT,
                        f"rank {rank} did not say whether it took substep {record.step}.{number}",
                    )
                elif number <= ack:
                    self.counters.add("substeps.taken")
                    transfer.tentative -= {rank}
                    transfer.submitted |= {rank}
                else:
                    self.counters.add("substeps.refused")
                    transfer.tentative -= {rank}
                    transfer.refusals += (f"substep {record.step}.{number} by rank {rank}",)
                    if transfer.live:
                        transfer.repair |= {rank}
                    else:
                        self.counters.add("repairs.dropped")
                        self._check_drained(transfer)

    def _step_failed(self, record: StepRecord, code: Code, reason: str) -> None:
        """What the step should have written is void, and whoever needs it."""
        record.failed = True
        for request in list(record.requests):
            self._void(request, code, reason, tell_engine=True)
        for key in list(record.keys):
            transfer = self._transfers.get(key)
            if transfer is not None:
                self._fail(transfer, code, reason)

    def _close_step(self, record: StepRecord) -> None:
        """Every rank has reported."""
        del self._steps[record.step]
        self._timers.cancel((ACK, record.step))
        for key in record.keys:
            transfer = self._transfers.get(key)
            if transfer is not None:
                transfer.wait_steps -= {record.step}
                self._repair(transfer)
        for request in list(record.requests):
            request.pending = [entry for entry in request.pending if entry[0] != record.step]
            if request.state is not PRequestState.RELEASED:
                self._kv_complete(request)
        if not self._steps:
            self._send_aligned()

    def _on_ack_due(self, step: int) -> None:
        record = self._steps[step]
        for rank in sorted(record.ranks_left):
            self.counters.add("step_reports.lost")
            self._rank_finished(record, rank, Code.TIMEOUT, None, "its report was lost")

    def _send_aligned(self) -> None:
        aligned, self._aligned = self._aligned, {}
        for transfer in aligned.values():
            request = transfer.request
            if transfer.live and request is not None and transfer.sent_end < transfer.end_token:
                if request.planned_end >= transfer.end_token and not request.waiting_for(
                    transfer.end_token
                ):
                    self._plan_frozen(transfer, request)
                else:
                    self._plan(transfer)


_T = TypeVar("_T")


def _chunks(items: Iterable[_T], num_block_ids: Callable[[_T], int]) -> list[list[_T]]:
    """Split so that no item outgrows a frame."""
    chunks: list[list[_T]] = []
    room = 0
    for item in items:
        size = num_block_ids(item)
        if not chunks or size > room:
            chunks.append([])
            room = MAX_BLOCK_IDS_PER_ITEM
        chunks[-1].append(item)
        room -= size
    return chunks


def _transfer_size(transfer: PTransfer) -> int:
    return sum(map(len, transfer.src_block_ids)) + sum(map(len, transfer.block_ids))


def _send_size(send: Send) -> int:
    return sum(map(len, send.src_block_ids)) + sum(map(len, send.dst_block_ids))
