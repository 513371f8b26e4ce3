"""P requests: holds, takers, pressure, residences, and the end with the core thread's consent."""

from __future__ import annotations

from pd_control.codes import Code
from pd_control.protocol.effects import AbortRequest, ForgetRequest, ReleaseLease, VoidRankKv
from pd_control.protocol.errors import InvariantError
from pd_control.protocol.events import (
    BlocksWanted,
    FirstToken,
    RequestAdded,
    RequestFinished,
    RequestForgotten,
    RequestPreempted,
    RequestRefused,
    WorkerDied,
    WorkerRegistered,
)
from pd_control.protocol.p_request import PRequestInput, PRequestState
from pd_control.protocol.prefill_state import ADMIT, HOLD, PRESSURE, PRequest, PTransfer
from pd_control.protocol.prefill_steps import StepLayer


class RequestLayer(StepLayer):
    """What one request does, and what the engine says of it."""

    # --- from the engine ------------------------------------------------------------------------

    def _on_request_added(self, event: RequestAdded) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            if request.confirmed:
                self.counters.add("request_added.duplicate")
            request.confirmed = True
            self._timers.cancel((ADMIT, request.request_id))
            return
        if event.request_id in self._forgetting:
            # Either its admission was taken back while it was on its way, or the planner let a live
            # id be used again, which it refuses.
            self.counters.add("request_added.released")
            return
        request = PRequest(event.request_id, event.content, event.num_takers, self._now_s)
        self._requests[event.request_id] = request
        self._gone.pop(event.request_id, self._now_s)
        early = self._early_takers.pop(event.request_id, self._now_s)
        if early is not None:
            request.takers = early
        parked = self._parked.pop(event.request_id, {})
        self._num_parked -= len(parked)
        for transfer in parked.values():
            self._bind(transfer, request)
        self._check_taken(request)

    def _on_request_refused(self, event: RequestRefused) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.confirmed:
            self.counters.add("request_refused.unknown")
            return
        message = event.message or "refused by the engine"
        self._void(request, event.code, message, tell_engine=False)

    def _on_request_finished(self, event: RequestFinished) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.finished:
            self.counters.add("request_finished.unknown")
            return
        request.finished = True
        if event.first_token is not None:
            request.first_token = event.first_token
        if event.code is not Code.OK or request.planned_end == 0:
            code = event.code if event.code is not Code.OK else Code.INTERNAL
            message = f"the engine ended the request with {request.planned_end} tokens computed"
            self._void(request, code, message, tell_engine=False)
            return
        self._request_input(request, PRequestInput.FINISHED)
        self._progress(request)

    def _on_first_token(self, event: FirstToken) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            self.counters.add("first_token.unknown")
            return
        request.first_token = event.token
        for transfer in request.live_transfers():
            self._check_all_sent(transfer)

    def _on_request_preempted(self, event: RequestPreempted) -> None:
        request = self._requests.get(event.request_id)
        if request is None:  # released; the planner lists its leases in RequestForgotten
            released = self._forgetting.get(event.request_id)
            if released is not None:  # steps of the next residence may come before that
                released.residence = event.residence + 1
                released.block_ids = ()
            return
        if request.residence != event.residence:
            raise InvariantError(
                f"{event.request_id}: residence {event.residence} preempted, "
                f"known: {request.residence}"
            )
        self._request_input(request, PRequestInput.PREEMPTED)
        self._stop_hold(request)
        request.held_since_s = None
        if request.lease_id:
            request.old_leases.append((request.residence, request.lease_id))
        for step, _ in request.pending:
            if step in self._steps:
                self._steps[step].requests.pop(request, None)
        request.residence += 1
        request.planned_end = 0
        request.block_ids = ()
        request.lease_id = 0
        request.pending = []
        for transfer in request.live_transfers():
            self._plan(transfer)  # what is submitted goes on, from blocks that stay leased
        self._readers_gone(request)

    def _on_blocks_wanted(self, event: BlocksWanted) -> None:
        self._blocks_wanted = event.num_blocks
        self._relieve()

    # --- progress and holds ---------------------------------------------------------------------

    def _kv_complete(self, request: PRequest) -> None:
        whole = request.planned_end >= request.content.num_tokens and not request.pending
        if whole and request.state is PRequestState.PREFILLING:
            self._request_input(request, PRequestInput.COMPLETE)
        self._progress(request)

    def _progress(self, request: PRequest) -> None:
        """Something about its KV or its end has changed: plan again."""
        for transfer in request.live_transfers():
            self._plan(transfer)
            if transfer.live:
                self._check_all_sent(transfer)
        self._rest(request)

    def _rest(self, request: PRequest) -> None:
        """Start the hold clock if it is HELD and nobody is taking it."""
        if request.state is not PRequestState.HELD:
            return
        if request.held_since_s is None:
            request.held_since_s = self._now_s
        if request.request_id in self._idle or request.has_live_transfer():
            return
        self._idle[request.request_id] = request
        self._renew(request)
        self._relieve()

    def _renew(self, request: PRequest) -> None:
        deadlines = self.settings.deadlines
        since = request.held_since_s if request.held_since_s is not None else self._now_s
        end = min(self._now_s + deadlines.hold_s, since + deadlines.hold_max_s)
        self._timers.set((HOLD, request.request_id), end)

    def _stop_hold(self, request: PRequest) -> None:
        self._timers.cancel((HOLD, request.request_id))
        self._idle.pop(request.request_id, None)

    def _on_hold_due(self, request: PRequest) -> None:
        self._expire(request, "hold")

    def _on_admit_due(self, request: PRequest) -> None:
        waited_s = self.settings.deadlines.admit_s
        message = f"the engine has not admitted it in {waited_s:g} s"
        self._void(request, Code.BUSY, message, tell_engine=True)

    def _expire(self, request: PRequest, why: str) -> None:
        if self._request_input(request, PRequestInput.EXPIRED):
            self.counters.add(f"p_request.expired.{why}")
            self._release(request, f"EXPIRED: {why}")

    def _relieve(self) -> None:
        """While requests wait for blocks, the oldest holds that nobody is taking end early."""
        grace_s = self.settings.deadlines.pressure_hold_s
        while self._blocks_wanted > 0 and self._idle:
            request = next(iter(self._idle.values()))
            due = (request.held_since_s or 0.0) + grace_s
            if due > self._now_s:
                self._timers.set((PRESSURE, 0), due)
                return
            self._blocks_wanted -= request.num_blocks
            self._expire(request, "pressure")

    # --- the end --------------------------------------------------------------------------------

    def _transfer_over(self, request: PRequest, transfer: PTransfer) -> None:
        if request.state is PRequestState.RELEASED:
            return
        if transfer.code is Code.OK:
            request.takers |= {transfer.taker_key}
            self._check_taken(request)
        elif request.admitted_for == transfer.key:
            self._void(request, transfer.code, transfer.message, tell_engine=True)
        else:
            self._rest(request)

    def _check_taken(self, request: PRequest) -> None:
        if len(request.takers) < request.num_takers:
            self._rest(request)
        elif self._request_input(request, PRequestInput.TAKEN):
            self._release(request, "taken")

    def _void(self, request: PRequest, code: Code, message: str, tell_engine: bool) -> None:
        if not self._request_input(request, PRequestInput.VOID):
            return
        self.counters.add(f"p_request.void.{code.name}")
        if tell_engine and not request.finished:
            self._emit(AbortRequest(request.request_id, code, message))
        self._release(request, message, code)

    def _release(self, request: PRequest, reason: str, code: Code = Code.GONE) -> None:
        """RELEASED: nothing new begins; what is read is drained; the core thread is told."""
        request.reason = reason
        self._stop_hold(request)
        self._timers.cancel((ADMIT, request.request_id))
        del self._requests[request.request_id]
        for transfer in request.live_transfers():
            self._fail(transfer, code, reason)
        self._gone.put(request.request_id, reason, self._now_s)
        self._forgetting[request.request_id] = request
        release = not request.has_readers()
        self._emit(ForgetRequest(request.request_id, self._last_step, release))

    def _on_request_forgotten(self, event: RequestForgotten) -> None:
        request = self._forgetting.pop(event.request_id, None)
        if request is None:
            raise InvariantError(f"{event.request_id} forgotten, but nobody asked for that")
        request.forgotten = True
        request.last_leases = () if event.released else event.lease_ids
        if request.last_leases:
            self._fading[request] = None
            self._readers_gone(request)

    def _readers_gone(self, request: PRequest) -> None:
        if request.state is not PRequestState.RELEASED:
            if request.old_leases:
                self._release_old_leases(request)
        elif request.last_leases and not request.has_readers():
            for lease_id in request.last_leases:
                self._emit(ReleaseLease(lease_id))
            request.last_leases = ()
            del self._fading[request]

    def _release_old_leases(self, request: PRequest) -> None:
        """Leases of ended residences that no send reads any more."""
        reading = [t.first_residence for t in request.transfers.values() if t.has_readers]
        oldest = min(reading, default=request.residence)
        kept = []
        for residence, lease_id in request.old_leases:
            if residence < oldest:
                self._emit(ReleaseLease(lease_id))
            else:
                kept.append((residence, lease_id))
        request.old_leases = kept

    # --- workers --------------------------------------------------------------------------------

    def _on_worker_registered(self, event: WorkerRegistered) -> None:
        if not 0 <= event.rank < self.topology.num_ranks:
            self.counters.add("worker_registered.bad_rank")
            return
        known = self._workers.get(event.rank)
        if known == event.incarnation:
            return
        if known is not None:
            self._worker_lost(event.rank, "a new process has taken its place")
        self._workers[event.rank] = event.incarnation

    def _on_worker_died(self, event: WorkerDied) -> None:
        if self._workers.get(event.rank) == event.incarnation:
            self._worker_lost(event.rank, event.reason or "its process died")
        else:
            self.counters.add("worker_died.unknown")

    def _worker_lost(self, rank: int, reason: str) -> None:
        """The death of a rank: it reads nothing more, and no KV that has a slice there is whole."""
        incarnation = self._workers.pop(rank)
        reason = f"rank {rank}: {reason}"
        self._emit(VoidRankKv(rank, incarnation))
        for transfer in list(self._transfers.values()):
            self._drop_reader(transfer, rank)
        for request in list(self._requests.values()):
            if request.planned_end > 0:
                self._void(request, Code.PEER_LOST, reason, tell_engine=True)
        for record in list(self._steps.values()):
            if rank in record.ranks_left:
                self._rank_finished(record, rank, Code.PEER_LOST, None, reason)
        for transfer in list(self._transfers.values()):
            if transfer.live and (transfer.sent_end > transfer.first_token):
                self._fail(transfer, Code.PEER_LOST, reason)
            else:
                self._check_drained(transfer)
        for request in [*self._requests.values(), *self._fading]:
            self._readers_gone(request)
