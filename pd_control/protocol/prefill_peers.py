"""What D says to P: links, PREFILL, TRANSFER_KV, RENEW, ABORT."""

from __future__ import annotations

from pd_control.codes import Code
from pd_control.ids import Content, PeerId, prefill_request_id
from pd_control.messages import AbortKind, DInfo
from pd_control.protocol.checks import (
    MAX_EARLY_TAKERS,
    MAX_RENEWALS,
    MAX_TEXT_CHARS,
    abort_problem,
    attributes_problem,
    prefill_problem,
    transfer_kv_problem,
)
from pd_control.protocol.effects import AdmitRequest, Answer, CloseLink
from pd_control.protocol.events import (
    AbortReceived,
    LinkDown,
    LinkUp,
    PrefillReceived,
    RenewReceived,
    TransferKvReceived,
)
from pd_control.protocol.p_transfer import PTransferState
from pd_control.protocol.prefill_requests import RequestLayer
from pd_control.protocol.prefill_state import ADMIT, PARK, Ended, Link, PRequest, PTransfer


class PeerLayer(RequestLayer):
    """Turns what peers ask into transfers and requests."""

    # --- links ----------------------------------------------------------------------------------

    def _on_link_up(self, event: LinkUp) -> None:
        old = self._links.get(event.peer.instance)
        if old is not None:
            if old.peer == event.peer and old.link_id == event.link_id:
                self.counters.add("link_up.duplicate")
                return
            self._link_lost(old, Code.PEER_LOST, f"replaced by {event.peer} link {event.link_id}")
        problem = attributes_problem(event.attributes)
        if problem is None and event.attributes.model != self.model:
            problem = f"expected model {self.model!r}, got {event.attributes.model!r}"
        if problem is not None:
            self.counters.add("link_up.refused")
            self._emit(CloseLink(event.peer, event.link_id))
            return
        pairs = self._pairs(self.topology, event.attributes.topology)
        link = Link(event.peer, event.link_id, event.attributes, pairs)
        self._links[event.peer.instance] = link

    def _on_link_down(self, event: LinkDown) -> None:
        link = self._links.get(event.peer.instance)
        if link is None or link.peer != event.peer or link.link_id != event.link_id:
            self.counters.add("link_down.unknown")
            return
        self._link_lost(link, event.code, event.reason or "link lost")

    def _link_lost(self, link: Link, code: Code, reason: str) -> None:
        """D cannot hear of these transfers any more, so it has given them up or will."""
        del self._links[link.peer.instance]
        self.counters.add("links.lost")
        for key in list(link.keys):
            transfer = self._transfers.get(key)
            if transfer is not None:
                self._unpark(transfer)
                self._fail(transfer, code, f"{link.peer}: {reason}", tell=False)

    # --- calls ----------------------------------------------------------------------------------

    def _on_prefill(self, event: PrefillReceived) -> None:
        message = event.message
        problem = prefill_problem(message, event.peer)
        if problem is not None:
            self._refuse(event.call_ref, Code.BAD_REQUEST, problem)
            return
        key = message.info.transfer_id.key()
        link = self._admissible(event.call_ref, event.peer, message.link_id, message.info, key)
        if link is None:
            return
        content = Content.unpack(message.tokens, message.identity)
        if content.digest(message.info.max_tokens) != message.info.digest:
            self._refuse(event.call_ref, Code.BAD_REQUEST, "content digest differs from the tokens")
            return
        request_id = prefill_request_id(message.info.request_id, key)
        if request_id in self._requests or request_id in self._forgetting:
            self._refuse(event.call_ref, Code.GONE, "admitted before")
            return
        transfer = self._open(key, message.info, event.peer, link)
        request = PRequest(request_id, content, 1, self._now_s)
        request.admitted_for = key
        request.confirmed = False
        self._requests[request_id] = request
        self._num_queued += 1
        self._bind(transfer, request)  # the offer goes first: the first step can carry it
        self._timers.set((ADMIT, request_id), self._now_s + self.settings.deadlines.admit_s)
        self._emit(AdmitRequest(request_id, content, message.payload))
        self._accept(event.call_ref)

    def _on_transfer_kv(self, event: TransferKvReceived) -> None:
        message = event.message
        problem = transfer_kv_problem(message, event.peer)
        if problem is not None:
            self._refuse(event.call_ref, Code.BAD_REQUEST, problem)
            return
        info = message.info
        key = info.transfer_id.key()
        link = self._admissible(event.call_ref, event.peer, message.link_id, info, key)
        if link is None:
            return
        request = self._requests.get(message.request_id)
        gone = self._gone.get(message.request_id, self._now_s)
        if request is None and (gone is not None or message.request_id in self._forgetting):
            self._refuse(event.call_ref, Code.GONE, f"the request was let go: {gone}")
            return
        if info.cached_tokens >= info.max_tokens and not info.want_first_token:
            self._take_nothing(event.call_ref, message.request_id, request, info, key)
            return
        if request is None:
            if self._num_parked >= self.settings.limits.max_parked:
                self._refuse(event.call_ref, Code.BUSY, "too many transfers are parked")
                return
            transfer = self._open(key, info, event.peer, link)
            transfer.state = PTransferState.PARKED
            self._num_parked += 1
            transfer.parked_for = message.request_id
            self._parked.setdefault(message.request_id, {})[key] = transfer
            self._set_deadline(transfer, PARK, self._deadlines.park_s)
            self._accept(event.call_ref)
            return
        transfer = self._open(key, info, event.peer, link)
        problem = self._content_problem(transfer, request)
        if problem is not None:
            del self._transfers[key], link.keys[key]
            self.counters.add("p_transfer.opened", -1)
            self._refuse(event.call_ref, Code.BAD_REQUEST, problem)
            return
        self._stop_hold(request)
        self._num_queued += 1
        self._accept(event.call_ref)
        self._bind(transfer, request)

    def _admissible(
        self, call_ref: int, peer: PeerId, link_id: int, info: DInfo, key: bytes
    ) -> Link | None:
        """The link a new transfer would use, or None after an answer was given."""
        if key in self._transfers:
            self.counters.add("calls.joined")
            self._accept(call_ref)
            return None
        done = self._done.get(key, self._now_s)
        if done is not None:
            self._emit(Answer(call_ref, done.code, "this transfer is over", self._num_queued))
            return None
        if self._aborted.pop(key, self._now_s) is not None:
            self._refuse(call_ref, Code.ABORTED, "its ABORT came first")
            return None
        link = self._links.get(peer.instance)
        if link is None or link.peer != peer or link.link_id != link_id:
            self._refuse(call_ref, Code.PEER_LOST, f"no link {link_id} of {peer} stands")
            return None
        if info.topology != link.attributes.topology:
            self._refuse(
                call_ref,
                Code.BAD_REQUEST,
                f"expected the topology of the link {link.attributes.topology}, got {info.topology}",
            )
            return None
        if len(self._workers) < self.topology.num_ranks:
            self._refuse(call_ref, Code.BUSY, "not all workers of this P are registered")
            return None
        if len(self._transfers) >= self.settings.limits.max_requests:
            self._refuse(call_ref, Code.BUSY, "too many transfers are open")
            return None
        return link

    def _open(self, key: bytes, info: DInfo, peer: PeerId, link: Link) -> PTransfer:
        link.set_ranks(info.ranks)
        transfer = PTransfer(key, info, peer, link)
        self._transfers[key] = transfer
        self.counters.add("p_transfer.opened")
        link.keys[key] = None
        return transfer

    def _take_nothing(
        self, call_ref: int, request_id: str, request: PRequest | None, info: DInfo, key: bytes
    ) -> None:
        """An empty range: D has it all. One taker served, nothing sent."""
        taker = info.transfer_id._replace(attempt=0).key()
        if request is None:
            self._mark_taker(request_id, taker)
        elif (problem := self._range_problem(info.max_tokens, info.digest, request)) is not None:
            self._refuse(call_ref, Code.BAD_REQUEST, problem)
            return
        else:
            request.takers |= {taker}
            self._check_taken(request)
        self._done.put(key, Ended(Code.OK), self._now_s)
        self.counters.add("p_transfer.empty")
        self._emit(Answer(call_ref, Code.OK, "", self._num_queued))

    def _accept(self, call_ref: int) -> None:
        self._emit(Answer(call_ref, Code.ACCEPTED, "", self._num_queued))

    def _refuse(self, call_ref: int, code: Code, message: str) -> None:
        self.counters.add(f"calls.refused.{code.name}")
        self._emit(Answer(call_ref, code, message, self._num_queued))

    # --- parking --------------------------------------------------------------------------------

    def _on_park_due(self, transfer: PTransfer) -> None:
        waited_s = self.settings.deadlines.park_s
        self._unpark(transfer)
        self._fail(transfer, Code.NOT_FOUND, f"the request did not come in {waited_s:g} s")

    def _unpark(self, transfer: PTransfer) -> None:
        if transfer.state is PTransferState.PARKED:
            waiting = self._parked[transfer.parked_for]
            del waiting[transfer.key]
            self._num_parked -= 1
            if not waiting:
                del self._parked[transfer.parked_for]

    # --- news -----------------------------------------------------------------------------------

    def _on_renew(self, event: RenewReceived) -> None:
        request_ids = event.message.request_ids
        if len(request_ids) > MAX_RENEWALS:
            self.counters.add("renew.too_many")
            return
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                self.counters.add("renew.unknown")
            elif request_id in self._idle:
                self._renew(request)

    def _on_abort(self, event: AbortReceived) -> None:
        message = event.message
        if abort_problem(message) is not None:
            self.counters.add("abort.bad")
            return
        reason = message.reason[:MAX_TEXT_CHARS]
        if message.kind == AbortKind.TAKER:
            self._withdraw_taker(message.request_id, message.key)
            return
        transfer = self._transfers.get(message.key)
        if transfer is None:
            if self._done.get(message.key, self._now_s) is None:
                self._aborted.put(message.key, reason, self._now_s)
            return
        if transfer.peer != event.peer:
            self.counters.add("abort.foreign")
            return
        self._unpark(transfer)
        self._fail(transfer, Code.ABORTED, reason or "aborted by D", tell=False)

    def _withdraw_taker(self, request_id: str, key: bytes) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.takers |= {key}
            self._check_taken(request)
        elif self._gone.get(request_id, self._now_s) is None:
            self._mark_taker(request_id, key)

    def _mark_taker(self, request_id: str, key: bytes) -> None:
        takers = self._early_takers.get(request_id, self._now_s) or frozenset()
        if len(takers) < MAX_EARLY_TAKERS:
            self._early_takers.put(request_id, takers | {key}, self._now_s)
