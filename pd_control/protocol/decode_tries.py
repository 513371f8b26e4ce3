"""One try of a D request: grants, the message to P, completions, and the orderly end."""

from __future__ import annotations

from pd_control.codes import Code
from pd_control.ids import TokenIdsError
from pd_control.messages import AbortKind, Grant, GrantOp, Prefill, TransferKv
from pd_control.protocol.completion import FINAL_MEMBER, NO_RANKS, Completion, Verdict
from pd_control.protocol.d_request import DRequestInput, DRequestState
from pd_control.protocol.decode_links import LinkLayer
from pd_control.protocol.decode_state import DRequest, Outcome
from pd_control.protocol.effects import (
    Call,
    Fatal,
    RecomputeRequest,
    ReleaseLease,
    RequestFailed,
    RequestLoaded,
    WorkerNews,
)
from pd_control.protocol.events import Mode, OnFailure
from pd_control.protocol.peers import LinkState, Peer

SAME_P_AGAIN = frozenset({Code.TIMEOUT, Code.CORRUPT, Code.INTERNAL, Code.ABORTED, Code.BUSY})
"""After these a P in dual mode may still hold the request: retry there with TRANSFER_KV."""

NEVER_AGAIN = frozenset({Code.BAD_REQUEST, Code.INCOMPATIBLE, Code.UNAUTHORIZED})
"""A retry cannot end otherwise."""


class TryLayer(LinkLayer):
    """From blocks to an outcome."""

    # --- forward --------------------------------------------------------------------------------

    def _begin_try(self, request: DRequest) -> None:
        """LINKING: a key, a peer, and its link."""
        peer = request.peer
        if peer is None:
            peer = self._peers.choose(self._now_s, ())
            if peer is None:
                self._fail(request, Code.UNREACHABLE, "no P is known")
                return
            request.peer = peer
        request.tried = (*request.tried, peer.instance)
        request.key = self._transfer_id(request, request.attempt).key()
        self._by_key[request.key] = request
        self._hold_for(request)
        self._open_link(peer)
        if peer.link is LinkState.UP:
            self._linked(request)
        else:
            peer.waiting[request.request_id] = None
            self._set_deadline(request, "connect", self._now_s + self._deadlines.connect_s)

    def _linked(self, request: DRequest) -> None:
        peer = request.peer
        if peer is None or peer.peer_id is None or not self._input(request, DRequestInput.LINKED):
            return
        request.peer_id = peer.peer_id
        request.link_id = peer.link_id
        peer.users[request.request_id] = None
        if len(self._workers) < self.topology.num_ranks:
            self._fail(request, Code.INTERNAL, "not all workers of this D are there", retry=False)
            return
        with_final = request.request.want_first_token
        members = peer.members_with_final if with_final else peer.members
        if request.cached_tokens >= request.wanted_end:
            members = members - peer.members
        request.completion = Completion(members)
        if request.cached_tokens < request.wanted_end:
            self._open_grants(request, peer)
        if request.grants:
            self._set_deadline(request, "grant open", self._now_s + self._deadlines.grant_s)
        else:
            self._granted(request)

    def _open_grants(self, request: DRequest, peer: Peer) -> None:
        assert peer.peer_id is not None
        request.grants = request.unacked = peer.own_ranks
        for rank, sources in peer.sources.items():
            grant = Grant(
                GrantOp.OPEN,
                request.key,
                peer.peer_id.instance,
                peer.peer_id.incarnation,
                request.block_ids,
                request.cached_tokens,
                request.wanted_end,
                sources,
            )
            self._emit(WorkerNews(rank, self._workers[rank].incarnation, grant))

    def _granted(self, request: DRequest) -> None:
        """Every rank may be written to: now, and not before, P is told.

        A call's deadline is short, so a burst must not spend it in a queue before the wire: what
        is more than a P is asked at one time waits here, as long as it may wait at P (F17).
        """
        peer = request.peer
        if peer is None or not self._input(request, DRequestInput.GRANTED):
            return
        if peer.num_calls >= self.settings.limits.max_calls_per_peer:
            self.counters.add("d_request.call_waits")
            peer.unsent[request.request_id] = None
            self._set_deadline(request, "turn to call", self._now_s + self._deadlines.queue_s)
        else:
            self._call(request, peer)

    def _call_ended(self, request: DRequest) -> None:
        request.call_id = 0
        if request.peer is not None:
            request.peer.num_calls -= 1
            self._next_calls(request.peer)

    def _next_calls(self, peer: Peer) -> None:
        """A call has ended: the oldest that waits takes its place."""
        most = self.settings.limits.max_calls_per_peer
        while peer.unsent and peer.num_calls < most and peer.link is LinkState.UP:
            request_id = next(iter(peer.unsent))
            del peer.unsent[request_id]
            self._call(self._requests[request_id], peer)

    def _call(self, request: DRequest, peer: Peer) -> None:
        assert request.peer_id is not None
        try:
            message = self._message(request)
        except TokenIdsError as error:
            self._fail(request, Code.BAD_REQUEST, str(error), retry=False)
            return
        request.call_id = self._call_id()
        request.called = True
        peer.num_calls += 1
        self._calls[request.call_id] = request
        deadline = self._now_s + self._deadlines.connect_s
        self._set_deadline(request, "call", deadline)
        self._emit(Call(request.call_id, request.peer_id, peer.address, message, deadline))

    def _message(self, request: DRequest) -> Prefill | TransferKv:
        asked = request.request
        if self._is_dual(request):
            return TransferKv(request.link_id, asked.remote_request_id, self._info(request))
        tokens = asked.content.packed()
        info = self._info(request, tokens)
        return Prefill(request.link_id, info, tokens, asked.content.identity, asked.payload)

    def _started(self, request: DRequest) -> None:
        """P has begun, by its own word or by its FINAL(OK)."""
        if self._input(request, DRequestInput.STARTED):
            self._unhold(request)
            request.load_end_s = self._now_s + self._deadlines.load_s
            self._set_deadline(request, "load", request.load_end_s)
            for rank in sorted(request.grants):
                item = Grant(GrantOp.START, request.key)
                self._emit(WorkerNews(rank, self._workers[rank].incarnation, item))

    def _all_sent(self, request: DRequest) -> None:
        """P says OK. What is missing must land soon."""
        if request.state in (DRequestState.REQUESTING, DRequestState.QUEUED):
            self._started(request)
        if request.state is DRequestState.LOADING and not request.completion.whole:
            end = self._now_s + self._deadlines.progress_s
            if end < request.load_end_s:
                self._set_deadline(request, "progress", end)

    def _report(
        self, request: DRequest, member: tuple[int, int], tokens: int, code: Code, detail: str
    ) -> None:
        """One completion of this try."""
        verdict = request.completion.report(member, tokens, code, detail)
        if request.state is DRequestState.CLOSING:
            self.counters.add("load_done.while_closing")
        elif verdict is Verdict.FAILED:
            self._fail(request, code, detail, peer_knows=member == FINAL_MEMBER)
        elif verdict is Verdict.WHOLE:
            self._loaded(request)
        elif verdict is not Verdict.PENDING:
            self.counters.add(f"load_done.{verdict.value}")

    def _loaded(self, request: DRequest) -> None:
        has = request.completion.tokens
        if has is not None and has < request.wanted_end:
            message = f"expected {request.wanted_end} tokens from every rank, got {has} from one"
            self._fail(request, Code.CORRUPT, message)
        elif request.request.want_first_token and request.first_token is None:
            self._fail(request, Code.INTERNAL, "P sent no first token", peer_knows=True)
        elif self._input(request, DRequestInput.LOADED):
            self._ready(request, request.wanted_end)

    def _ready(self, request: DRequest, num_tokens: int) -> None:
        """READY: every rank has closed its grant before it reported, so nobody can write."""
        self.counters.add("d_request.ready")
        self._emit(RequestLoaded(request.request_id, num_tokens, request.first_token))
        request.grants = NO_RANKS
        self._leave_peer(request)
        self._end(request)

    def _end(self, request: DRequest) -> None:
        """The request is over and its blocks are safe."""
        if request.lease_id:
            self._emit(ReleaseLease(request.lease_id))
        self._timers.cancel(request.request_id)
        self._by_key.pop(request.key, None)
        del self._requests[request.request_id]

    # --- the end of a try -----------------------------------------------------------------------

    def _fail(
        self,
        request: DRequest,
        code: Code,
        message: str,
        *,
        retry: bool = True,
        peer_knows: bool = False,
    ) -> None:
        if self._input(request, DRequestInput.FAILURE):
            self.counters.add(f"d_request.failure.{code.name}")
            self._close(request, code, message, self._policy(request, code, retry), peer_knows)

    def _policy(self, request: DRequest, code: Code, retry: bool) -> Outcome:
        wanted = self._on_failure(request)
        if wanted is OnFailure.RETRY:
            own = request.request.max_attempts
            most = self.settings.max_attempts if own is None else own
            if (
                retry
                and request.lease_id
                and request.attempt + 1 < most
                and code not in NEVER_AGAIN
            ):
                return Outcome.RETRY
            return self._without_retry(request)
        return Outcome.RECOMPUTE if wanted is OnFailure.RECOMPUTE else Outcome.FAILED

    def _without_retry(self, request: DRequest) -> Outcome:
        own = request.request.after_retries
        after = self.settings.after_retries if own is None else own
        return Outcome.RECOMPUTE if after is OnFailure.RECOMPUTE else Outcome.FAILED

    def _close(
        self,
        request: DRequest,
        code: Code,
        message: str,
        outcome: Outcome,
        peer_knows: bool = False,
    ) -> None:
        """CLOSING: tell engine and client at once, take the grants back, tell P."""
        request.outcome = outcome
        request.code = code
        request.message = message
        if outcome is not Outcome.RETRY:
            self._tell(request)
        if request.called and not peer_knows:
            self._tell_peer(request, AbortKind.TRANSFER, message)
        self._leave_peer(request)
        if outcome is not Outcome.RETRY:
            self._give_up_taking(request)
        request.unacked = NO_RANKS
        self._set_deadline(request, "grant close", self._now_s + self._deadlines.grant_s)
        for rank in sorted(request.grants):
            item = Grant(GrantOp.CLOSE, request.key)
            self._emit(WorkerNews(rank, self._workers[rank].incarnation, item))
        self._check_closed(request)

    def _tell(self, request: DRequest) -> None:
        """Exactly one word to the engine, when the outcome is decided."""
        assert request.outcome is not None
        self.counters.add(f"d_request.{request.outcome.value}")
        if request.outcome is Outcome.RECOMPUTE:
            self._emit(RecomputeRequest(request.request_id, request.code, request.message))
        else:
            code = Code.ABORTED if request.outcome is Outcome.ABORTED else request.code
            self._emit(RequestFailed(request.request_id, code, request.message))

    def _give_up_taking(self, request: DRequest) -> None:
        if self._is_dual(request):
            self._unhold(request)
            # What P called somebody else's is not ours to give up: its owner would lose its hold.
            if request.code is not Code.BAD_REQUEST:
                self._tell_peer(request, AbortKind.TAKER, request.message)

    def _leave_peer(self, request: DRequest) -> None:
        """This try waits for its peer no more."""
        peer = request.peer
        if peer is not None:
            peer.waiting.pop(request.request_id, None)
            peer.users.pop(request.request_id, None)
            peer.unsent.pop(request.request_id, None)
        if request.call_id:
            self._calls.pop(request.call_id, None)
            self._call_ended(request)
        if peer is not None and request.outcome is not Outcome.RETRY:
            self._unhold(request)

    def _check_closed(self, request: DRequest) -> None:
        if request.grants or request.state is not DRequestState.CLOSING:
            return
        self._by_key.pop(request.key, None)
        if request.outcome is Outcome.RETRY and self._try_again(request):
            return
        given = {
            Outcome.ABORTED: DRequestInput.CLOSED_ABORTED,
            Outcome.RECOMPUTE: DRequestInput.CLOSED_RECOMPUTE,
        }.get(request.outcome or Outcome.FAILED, DRequestInput.CLOSED_FAILED)
        self._input(request, given)
        self._end(request)
        if request.peer is not None:
            self._peers.drop_unused(request.peer)

    def _try_again(self, request: DRequest) -> bool:
        """Next attempt on the same blocks; False (and the engine told) if no P is left to ask."""
        peer = request.peer
        same = (
            peer is not None
            and self._is_dual(request)
            and peer.link is LinkState.UP
            and request.code in SAME_P_AGAIN
        )
        if not same:
            other = self._peers.choose(self._now_s, request.tried)
            if other is None and not self._is_dual(request):
                other = self._peers.choose(self._now_s, ()) or peer
            if other is None:
                self._change_outcome(request, self._without_retry(request))
                return False
            self._give_up_taking(request)
            request.mode = Mode.SINGLE
            request.peer = other
        self.counters.add("d_request.retry")
        self._input(request, DRequestInput.CLOSED_RETRY)
        request.outcome = None
        request.attempt += 1
        request.called = False
        request.first_token = None
        self._begin_try(request)
        return True

    def _change_outcome(self, request: DRequest, outcome: Outcome) -> None:
        """A retry that was to come will not."""
        request.outcome = outcome
        self._tell(request)
        self._give_up_taking(request)

    def _on_close_due(self, request: DRequest) -> None:
        """Workers that do not acknowledge a close: nobody can prove that they leave the blocks
        alone, so these stay leased and the engine learns that the worker is lost."""
        request.stuck = True
        request.deadline_name = ""
        if request.outcome is Outcome.RETRY:
            self._change_outcome(request, self._without_retry(request))
        self._declare_fatal(request, request.grants, "close")

    def _declare_fatal(self, request: DRequest, ranks: frozenset[int], verb: str) -> None:
        for rank in sorted(ranks):
            self.counters.add("fatal.grant_not_acked")
            reason = (
                f"rank {rank} has not acknowledged the {verb} of the grant for "
                f"{request.request_id} in {self._deadlines.grant_s:g} s"
            )
            self._emit(Fatal(rank, self._workers[rank].incarnation, reason))
