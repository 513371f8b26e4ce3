"""D's side of every request of one scheduler process.

The class is built in layers, one file each, lowest first: `decode_state` (records), `decode_links`
(peers), `decode_tries` (one try). This file is the top: dispatch, what engine, peers and workers
say, deadlines, and what `pdctl` sees (`decode_view`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_control.codes import Code
from pd_control.ids import PeerId
from pd_control.messages import GrantOp, RankInfo, Topology
from pd_control.protocol import events as ev
from pd_control.protocol.checks import MAX_TEXT_CHARS
from pd_control.protocol.completion import FINAL_MEMBER, NO_RANKS
from pd_control.protocol.d_request import DRequestInput, DRequestState
from pd_control.protocol.decode_state import RENEW, DRequest, Outcome, PairsRule
from pd_control.protocol.decode_tries import TryLayer
from pd_control.protocol.decode_view import inspect_request, snapshot
from pd_control.protocol.effects import Effect, ReleaseLease, RequestFailed, VoidRankKv
from pd_control.protocol.ranks import rank_pairs
from pd_control.protocol.settings import Settings

_S = DRequestState
_I = DRequestInput


class DecodeCore(TryLayer):
    """All D requests of one scheduler process, its grants, peers and links. Loop thread only.

    `model` must equal the model that a P names in its link's attributes. `pairs` says which ranks
    exchange bytes (source topology, target topology); both sides and the native planner must agree.
    """

    def __init__(
        self,
        me: PeerId,
        topology: Topology,
        settings: Settings | None = None,
        *,
        model: str = "",
        pairs: PairsRule = rank_pairs,
    ) -> None:
        super().__init__(me, topology, settings, model=model, pairs=pairs)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Tick: self._on_tick,
            ev.WorkerRegistered: self._on_worker_registered,
            ev.WorkerDied: self._on_worker_died,
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.LinkFailed: self._on_link_failed,
            ev.PeerFound: self._on_peer_found,
            ev.PeerGone: self._on_peer_gone,
            ev.DecodeRequestAdded: self._on_request_added,
            ev.BlocksAllocated: self._on_blocks_allocated,
            ev.AbortRequested: self._on_abort_requested,
            ev.CallResult: self._on_call_result,
            ev.StartedReceived: self._on_started,
            ev.FinalReceived: self._on_final,
            ev.AbortReceived: self._on_abort_received,
            ev.LoadDone: self._on_load_done,
            ev.GrantAcked: self._on_grant_acked,
        }

    def handle(self, event: ev.DecodeEvent, now_s: float) -> list[Effect]:
        """Take one event; returns what is to be done, in order.

        Raises InvariantError, and is of no further use then, if this program is wrong. TypeError:
        not an event of D.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"expected an event of D, got {type(event).__name__}")
        if now_s > self._now_s:
            self._now_s = now_s
        handler(event)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None: nothing waits."""
        return self._timers.next()

    # --- from the engine ------------------------------------------------------------------------

    def _on_request_added(self, event: ev.DecodeRequestAdded) -> None:
        asked = event.request
        request_id = asked.request_id
        if request_id in self._requests:
            self.counters.add("request_added.duplicate")
            return
        why = self._early_aborts.pop(request_id, self._now_s)
        if why is not None:
            self._emit(RequestFailed(request_id, Code.ABORTED, why))
            return
        if len(self._requests) >= self.settings.limits.max_requests:
            self.counters.add("d_request.refused")
            self._emit(RequestFailed(request_id, Code.BUSY, "too many requests are in flight"))
            return
        tail = asked.recompute_tail_tokens
        tail = self.settings.recompute_tail_tokens if tail is None else tail
        tail = 0 if asked.want_first_token else tail
        request = DRequest(asked, max(0, asked.content.num_tokens - tail), self._now_s)
        self._requests[request_id] = request
        if asked.peer_instance:
            request.peer = self._peers.get_or_add(asked.peer_instance, asked.peer_address)
        self._set_deadline(request, "blocks", self._now_s + self._deadlines.blocks_s)
        self._hold_for(request)

    def _on_blocks_allocated(self, event: ev.BlocksAllocated) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.state is not _S.WAITING_BLOCKS:
            self.counters.add("blocks_allocated.late")
            self._emit(ReleaseLease(event.lease_id))
            return
        request.block_ids = event.block_ids
        request.cached_tokens = event.cached_tokens
        request.lease_id = event.lease_id
        nothing = event.cached_tokens >= request.wanted_end
        if nothing and not request.request.want_first_token:
            self._courtesy(request)
            self._input(request, _I.NOTHING_WANTED)
            self._ready(request, event.cached_tokens)
        else:
            self._input(request, _I.ALLOCATED)
            self._begin_try(request)

    def _on_abort_requested(self, event: ev.AbortRequested) -> None:
        request = self._requests.get(event.request_id)
        reason = event.reason or "aborted by the client"
        if request is None:
            self._early_aborts.put(event.request_id, reason, self._now_s)
        elif request.state is _S.CLOSING:
            self._input(request, _I.ABORT)
            if request.outcome is Outcome.RETRY:
                request.message = reason
                self._change_outcome(request, Outcome.ABORTED)
        elif self._input(request, _I.ABORT):
            self._close(request, Code.ABORTED, reason, Outcome.ABORTED)

    # --- from P ---------------------------------------------------------------------------------

    def _on_call_result(self, event: ev.CallResult) -> None:
        if event.call_id not in self._calls:
            self.counters.add("call_result.late")
            return
        request = self._calls.pop(event.call_id)
        if request is None:
            return
        self._call_ended(request)
        if event.code in (Code.OK, Code.ACCEPTED) and request.peer is not None:
            request.peer.queue_depth = event.queue_depth
        if event.code is Code.ACCEPTED:
            # STARTED, which comes by another connection, may be here first: nothing unexpected.
            if request.state is _S.REQUESTING and self._input(request, _I.ACCEPTED):
                self._unhold(request)
                self._set_deadline(request, "queue", self._now_s + self._deadlines.queue_s)
        elif event.code is Code.OK:
            self._all_sent(request)
        elif request.state is _S.REQUESTING:
            self._fail(request, event.code, event.message[:MAX_TEXT_CHARS])
        else:
            self.counters.add("call_result.contradicted")  # STARTED came: P did accept

    def _on_started(self, event: ev.StartedReceived) -> None:
        request = self._of_peer(event.message.key, event.peer, "started")
        if request is not None:
            self._started(request)

    def _on_final(self, event: ev.FinalReceived) -> None:
        final = event.message
        request = self._of_peer(final.key, event.peer, "final")
        if request is None:
            return
        code = Code.from_wire(final.code)
        if code is not Code.OK:
            self._fail(request, code, final.message[:MAX_TEXT_CHARS], peer_knows=True)
            return
        if request.request.want_first_token:
            request.first_token = final.first_token
            self._report(request, FINAL_MEMBER, final.tokens, code, "")
        if self._by_key.get(final.key) is request:
            self._all_sent(request)

    def _of_peer(self, key: bytes, peer: PeerId, what: str) -> DRequest | None:
        """The try that `key` names, if this peer may speak of it."""
        request = self._by_key.get(key)
        if request is None or request.peer_id != peer:
            self.counters.add(f"{what}.unknown")
            return None
        return request

    def _on_abort_received(self, event: ev.AbortReceived) -> None:
        self.counters.add("abort.from_p")  # P says what it has to say in FINAL

    # --- from workers ---------------------------------------------------------------------------

    def _on_load_done(self, event: ev.LoadDone) -> None:
        request = self._of_worker(event.rank, event.incarnation, event.key, "load_done")
        if request is not None:
            source, detail = event.source_rank, event.detail
            if event.code is not Code.OK:
                detail = f"rank {event.rank} from source rank {source}: {detail}"
            self._report(request, (event.rank, source), event.tokens, event.code, detail)

    def _on_grant_acked(self, event: ev.GrantAcked) -> None:
        request = self._of_worker(event.rank, event.incarnation, event.key, "grant_acked")
        if request is None:
            return
        if event.op == GrantOp.CLOSE:
            if request.state is _S.CLOSING:
                request.grants -= {event.rank}
                self._check_closed(request)
            else:
                self.counters.add("grant_acked.unasked")
        elif event.op == GrantOp.OPEN and event.rank in request.unacked:
            request.unacked -= {event.rank}
            if event.code is not Code.OK:
                message = f"rank {event.rank} did not open the grant: {event.detail}"
                self._fail(request, event.code, message)
            elif not request.unacked:
                request.unacked = NO_RANKS
                self._granted(request)

    def _of_worker(self, rank: int, incarnation: bytes, key: bytes, what: str) -> DRequest | None:
        worker = self._workers.get(rank)
        request = self._by_key.get(key)
        if worker is None or worker.incarnation != incarnation or request is None:
            self.counters.add(f"{what}.unknown")
            return None
        return request

    def _on_worker_registered(self, event: ev.WorkerRegistered) -> None:
        if not 0 <= event.rank < self.topology.num_ranks:
            self.counters.add("worker_registered.bad_rank")
            return
        known = self._workers.get(event.rank)
        if known is not None and known.incarnation != event.incarnation:
            self._worker_lost(event.rank, "a new process has taken its place")
        pp_rank, tp_rank = divmod(event.rank, self.topology.tp_size)
        self._workers[event.rank] = RankInfo(
            event.rank, pp_rank, tp_rank, event.incarnation, event.data_address, event.fingerprint
        )
        self._ranks = tuple(self._workers[rank] for rank in sorted(self._workers))

    def _on_worker_died(self, event: ev.WorkerDied) -> None:
        worker = self._workers.get(event.rank)
        if worker is not None and worker.incarnation == event.incarnation:
            self._worker_lost(event.rank, event.reason or "its process died")
        else:
            self.counters.add("worker_died.unknown")

    def _worker_lost(self, rank: int, reason: str) -> None:
        """The death of a rank: nothing can land there any more, and what had landed is gone."""
        worker = self._workers.pop(rank)
        self._ranks = tuple(self._workers[r] for r in sorted(self._workers))
        self._emit(VoidRankKv(rank, worker.incarnation))
        for request in list(self._requests.values()):
            request.grants -= {rank}
            request.unacked -= {rank}
            if request.state is _S.CLOSING:
                if request.outcome is Outcome.RETRY:
                    self._change_outcome(request, self._without_retry(request))
                self._check_closed(request)
            elif request.lease_id:
                self._fail(request, Code.PEER_LOST, f"rank {rank}: {reason}", retry=False)

    # --- deadlines ------------------------------------------------------------------------------

    def _on_tick(self, event: ev.Tick) -> None:
        for timer in self._timers.due(self._now_s):
            if isinstance(timer, str):
                self._on_request_due(self._requests[timer])
            else:
                peer = self._peers.get(timer[1])
                if peer is not None and timer[0] == RENEW:
                    self._renew(peer)
                elif peer is not None:
                    self._on_opening_due(peer)
        self._early_aborts.expire(self._now_s)

    def _on_request_due(self, request: DRequest) -> None:
        name = request.deadline_name
        self.counters.add(f"deadline.{name.replace(' ', '_')}")
        waits = f"the {name} deadline has passed"
        if request.state is _S.WAITING_BLOCKS:
            self._input(request, _I.FAILURE)
            self._close(request, Code.BUSY, f"no free blocks: {waits}", Outcome.FAILED)
        elif request.state is _S.LINKING:
            self._fail(request, Code.UNREACHABLE, f"no link to P: {waits}")
        elif request.state is _S.GRANTING:
            self._declare_fatal(request, request.unacked, "open")
            self._fail(request, Code.INTERNAL, f"a worker is stuck: {waits}", retry=False)
        elif request.state is _S.REQUESTING and not request.called:
            message = f"P is busy with other calls of ours: {waits}"
            self._fail(request, Code.BUSY, message, retry=False)  # as for QUEUED
        elif request.state is _S.REQUESTING:
            self._fail(request, Code.TIMEOUT, f"no answer from P: {waits}")
        elif request.state is _S.QUEUED:  # P may be full of what waits for our blocks: give back
            self._fail(request, Code.TIMEOUT, f"P has not started: {waits}", retry=False)
        elif request.state is _S.LOADING:
            missing = request.completion.missing()
            self._fail(request, Code.TIMEOUT, f"missing {missing}: {waits}")
        elif request.state is _S.CLOSING:
            self._on_close_due(request)

    # --- views ----------------------------------------------------------------------------------

    def inspect(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """Everything about one live request (R10), or None."""
        return inspect_request(self, request_id, now_s)

    def snapshot(self, now_s: float, after: str = "", limit: int = 500) -> dict[str, Any]:
        """Counters, tables' sizes, and a page of live requests in order of their ids."""
        return snapshot(self, now_s, after, limit)

    def is_idle(self) -> bool:
        """No request, no grant, no call: every table but the peers', workers' and marks' is empty."""
        return not (
            self._requests or self._by_key or self._calls or any(p.is_used for p in self._peers)
        )
