"""P transfers: their beginning, their one outcome, and the proof that nobody reads any more."""

from __future__ import annotations

from pd_control.codes import Code
from pd_control.ids import TokenIdsError
from pd_control.messages import CancelSend, Started
from pd_control.protocol.completion import NO_RANKS, Verdict
from pd_control.protocol.effects import Fatal, LinkNews, WithdrawTransfer, WorkerNews
from pd_control.protocol.events import SendDone, TransferWithdrawn
from pd_control.protocol.p_transfer import PTransferInput, PTransferState
from pd_control.protocol.prefill_state import (
    DRAIN,
    QUEUE,
    SEND,
    Ended,
    PrefillState,
    PRequest,
    PTransfer,
)


class TransferLayer(PrefillState):
    """What one transfer does, whoever plans its sends."""

    def _bind(self, transfer: PTransfer, request: PRequest) -> None:
        """The transfer's request is known. Checks that both mean the same request, then plans."""
        problem = self._content_problem(transfer, request)
        if problem is not None:
            self._fail(transfer, Code.BAD_REQUEST, problem)
            return
        if transfer.state is PTransferState.PARKED:
            self._transfer_input(transfer, PTransferInput.BOUND)
        transfer.request = request
        request.transfers[transfer.key] = transfer
        self._set_deadline(transfer, QUEUE, 2 * self._deadlines.queue_s)
        self._plan(transfer)

    @classmethod
    def _content_problem(cls, transfer: PTransfer, request: PRequest) -> str | None:
        return cls._range_problem(transfer.end_token, transfer.digest, request)

    @staticmethod
    def _range_problem(end_token: int, digest: bytes, request: PRequest) -> str | None:
        """Whether D means somebody else's request (F07)."""
        has = request.content.num_tokens
        if end_token > has:
            return f"expected at most the request's {has} tokens, got {end_token}"
        try:
            own = request.content.digest(end_token)
        except TokenIdsError as error:
            return f"P's own request: {error}"
        if own != digest:
            return (
                f"content digest of the first {end_token} tokens differs: "
                "the reference names another request"
            )
        return None

    def _submitted(self, transfer: PTransfer, end_token: int, residence: int, way: str) -> None:
        """A send of it up to `end_token` is planned."""
        transfer.sent_end = end_token
        transfer.first_residence = transfer.first_residence or residence
        transfer.ways += (way,)
        if transfer.state is PTransferState.QUEUED:
            self._set_deadline(transfer, SEND, self._deadlines.send_s)
            self._emit(LinkNews(transfer.peer, transfer.link_id, Started(transfer.key)))
        self._transfer_input(transfer, PTransferInput.SUBMITTED)

    def _source_ranks(self, transfer: PTransfer) -> frozenset[int]:
        return frozenset(member[0] for member in transfer.completion.expected)

    def _check_all_sent(self, transfer: PTransfer) -> None:
        """End the transfer well if nothing is missing any more."""
        request = transfer.request
        if not transfer.completion.whole or request is None or not transfer.live:
            return
        sent = transfer.completion.tokens
        if sent is not None and sent < transfer.end_token:
            self._fail(
                transfer,
                Code.CORRUPT,
                f"expected {transfer.end_token} tokens sent by every rank, got {sent} from one",
            )
            return
        first_token = request.first_token if transfer.want_first_token else None
        if transfer.want_first_token and first_token is None and not request.finished:
            return  # QUEUE or SEND still runs
        self._transfer_input(transfer, PTransferInput.ALL_SENT)
        self._final(transfer, transfer.end_token, first_token)
        self.counters.add("p_transfer.ok")
        self.counters.add(f"ways.{transfer.last_way}")
        self._timers.cancel(transfer.key)
        self._done_with(transfer)
        self._transfer_over(request, transfer)

    def _fail(self, transfer: PTransfer, code: Code, message: str, tell: bool = True) -> None:
        """Decide the transfer's outcome, once. What is still read is drained."""
        if not transfer.live:
            return
        transfer.code = code
        transfer.message = message
        self.counters.add(f"p_transfer.failed.{code.name}")
        self._timers.cancel(transfer.key)
        if tell:
            self._final(transfer, transfer.completion.tokens or 0)
        request = transfer.request
        if transfer.offered_residence and request is not None:
            transfer.withdrawing = True
            self._emit(WithdrawTransfer(request.request_id, transfer.key))
        self._transfer_input(transfer, PTransferInput.FAILED)
        if transfer.state is PTransferState.DONE:
            self._done_with(transfer)
        else:
            if transfer.repair:
                self.counters.add("repairs.dropped", len(transfer.repair))
                transfer.repair = NO_RANKS
            for rank in sorted(transfer.submitted | transfer.tentative):
                self._cancel(transfer, rank)
            self._check_drained(transfer)
        if request is not None:
            self._transfer_over(request, transfer)

    def _cancel(self, transfer: PTransfer, rank: int) -> None:
        incarnation = self._workers.get(rank)
        if incarnation is None:
            self._drop_reader(transfer, rank)
            return
        self._set_deadline(transfer, DRAIN, self._deadlines.grant_s)
        item = CancelSend(transfer.key, transfer.code)
        self._emit(WorkerNews(rank, incarnation, item))

    def _check_drained(self, transfer: PTransfer) -> None:
        if (
            transfer.state is not PTransferState.DRAINING
            or transfer.has_readers
            or transfer.withdrawing
        ):
            return
        self._timers.cancel(transfer.key)
        self._transfer_input(transfer, PTransferInput.DRAINED)
        self._done_with(transfer)

    def _done_with(self, transfer: PTransfer) -> None:
        """DONE: nothing of it is left but a tombstone that answers repeats."""
        key = transfer.key
        del self._transfers[key]
        ended = Ended(transfer.code, transfer.message, transfer.ways, transfer.refusals)
        self._done.put(key, ended, self._now_s)
        link = self._links.get(transfer.peer.instance)
        if link is not None:
            link.keys.pop(key, None)
        request = transfer.request
        if request is not None:
            request.transfers.pop(key, None)
            self._readers_gone(request)

    def _reader_gone(self, transfer: PTransfer, rank: int) -> None:
        """Proof that `rank` reads nothing for this transfer."""
        self._drop_reader(transfer, rank)
        self._check_drained(transfer)
        if transfer.request is not None:
            self._readers_gone(transfer.request)

    # --- events ---------------------------------------------------------------------------------

    def _on_send_done(self, event: SendDone) -> None:
        transfer = self._transfers.get(event.key)
        if (
            self._workers.get(event.rank) != event.incarnation
            or transfer is None
            or not self._can_have_sent(transfer)
        ):
            self.counters.add("send_done.unknown")
            return
        rank = event.rank
        if event.target_rank is None:
            if transfer.live:
                code = event.code if event.code is not Code.OK else Code.INTERNAL
                self._drop_reader(transfer, rank)
                self._fail(transfer, code, f"rank {rank} gave the transfer up: {event.detail}")
            else:
                self._reader_gone(transfer, rank)
            return
        member = (rank, event.target_rank)
        verdict = transfer.completion.report(member, event.tokens, event.code, event.detail)
        if verdict is Verdict.DUPLICATE or verdict is Verdict.UNKNOWN:
            self.counters.add(f"send_done.{verdict.value}")
            return
        if rank in transfer.tentative:  # faster than the step's own report: it was taken
            self.counters.add("substeps.taken")
            transfer.tentative -= {rank}
            transfer.submitted |= {rank}
        if verdict is Verdict.FAILED and transfer.live:
            if not transfer.completion.rank_missing(rank):
                self._drop_reader(transfer, rank)
            self._fail(
                transfer,
                event.code,
                f"rank {rank} to target rank {event.target_rank}: {event.detail}",
            )
        elif not transfer.completion.rank_missing(rank):
            self._reader_gone(transfer, rank)
            self._check_all_sent(transfer)

    @staticmethod
    def _can_have_sent(transfer: PTransfer) -> bool:
        """Whether a rank may have got a send of it. SEND_DONE can overtake the `StepPlanned` that
        carries it, so an offer to the core thread is enough."""
        waiting = (PTransferState.PARKED, PTransferState.QUEUED)
        return transfer.state not in waiting or transfer.offered_residence != 0

    def _on_transfer_withdrawn(self, event: TransferWithdrawn) -> None:
        transfer = self._transfers.get(event.key)
        if transfer is not None and transfer.withdrawing:
            transfer.withdrawing = False
            self._check_drained(transfer)

    def _on_drain_due(self, transfer: PTransfer) -> None:
        for rank in sorted(transfer.submitted | transfer.tentative):
            self.counters.add("fatal.cancel_not_answered")
            self._emit(
                Fatal(
                    rank,
                    self._workers.get(rank, b""),
                    f"rank {rank} has not answered the cancel of transfer "
                    f"{transfer.transfer_id} in {self.settings.deadlines.grant_s:g} s",
                )
            )

    def _on_transfer_due(self, transfer: PTransfer) -> None:
        missing = transfer.completion.missing()
        queued = transfer.deadline_name == QUEUE
        what = "no send could begin" if queued else f"SEND_DONE is missing: {missing}"
        self._fail(transfer, Code.TIMEOUT, what)
