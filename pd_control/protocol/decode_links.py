"""D's peers: opening links, losing them, renewing what their Ps hold for us."""

from __future__ import annotations

from dataclasses import replace

from pd_control.codes import Code
from pd_control.messages import Abort, AbortKind, Renew, TransferKv
from pd_control.protocol.checks import MAX_RENEWALS, attributes_problem
from pd_control.protocol.decode_state import OPENING, RENEW, DecodeState, DRequest
from pd_control.protocol.effects import Call, CloseLink, LinkNews, OpenLink
from pd_control.protocol.events import LinkDown, LinkFailed, LinkUp, PeerFound, PeerGone
from pd_control.protocol.peers import LinkState, Peer, same_model_problem

RENEWALS_PER_HOLD = 3  # a renewal may be lost with its link and the next still comes in time
MAX_COURTESIES = 4096  # kept while a link opens; beyond it P's holds just expire


class LinkLayer(DecodeState):
    """Everything about a peer that no single request owns."""

    def _on_peer_found(self, event: PeerFound) -> None:
        self._peers.found(event.instance, event.address)

    def _on_peer_gone(self, event: PeerGone) -> None:
        self._peers.gone(event.instance)

    def _open_link(self, peer: Peer) -> None:
        """See to it that a link to this peer stands or is being opened."""
        if peer.link is not LinkState.NONE:
            return
        peer.link = LinkState.OPENING
        peer.link_id = self._next_link_id
        self._next_link_id += 1
        deadline = self._now_s + self.settings.deadlines.connect_s
        self._timers.set((OPENING, peer.instance), deadline)
        self._emit(OpenLink(peer.instance, peer.address, peer.link_id, deadline))

    def _on_opening_due(self, peer: Peer) -> None:
        """The driver owed an answer by now. A LinkUp that comes later is closed."""
        if peer.link is LinkState.OPENING:
            self._link_failed(peer, Code.UNREACHABLE, f"{peer.instance}: no link in time")

    def _on_link_up(self, event: LinkUp) -> None:
        peer = self._peers.of_link(event.peer.instance, event.link_id, LinkState.OPENING)
        if peer is None:
            self.counters.add("link_up.unknown")
            self._emit(CloseLink(event.peer, event.link_id))
            return
        problem = attributes_problem(event.attributes) or same_model_problem(
            self.model, self.topology, event.attributes
        )
        if problem is not None:
            self._emit(CloseLink(event.peer, event.link_id))
            self._link_failed(peer, Code.INCOMPATIBLE, f"{peer.instance}: {problem}")
            return
        self._timers.cancel((OPENING, peer.instance))
        peer.up(event.peer, event.attributes, self._pairs(event.attributes.topology, self.topology))
        peer.queue_depth = 0
        self.counters.add("links.up")
        waiting, peer.waiting = peer.waiting, {}
        for request_id in waiting:
            self._linked(self._requests[request_id])
        courtesies, peer.courtesies = peer.courtesies, []
        for message in courtesies:
            if isinstance(message, Abort):
                self._emit(LinkNews(event.peer, peer.link_id, message))
            else:
                self._call_courtesy(peer, message)
        if peer.held:
            self._renew(peer)

    def _on_link_failed(self, event: LinkFailed) -> None:
        peer = self._peers.get(event.instance)
        if peer is None or peer.link is not LinkState.OPENING or peer.link_id != event.link_id:
            self.counters.add("link_failed.unknown")
            return
        self._link_failed(peer, event.code, f"{event.instance}: {event.message or 'no link'}")

    def _link_failed(self, peer: Peer, code: Code, reason: str) -> None:
        self.counters.add("links.failed")
        self._shun(peer)
        waiting, peer.waiting = peer.waiting, {}
        for request_id in waiting:
            self._fail(self._requests[request_id], code, reason)
        self._peers.drop_unused(peer)

    def _on_link_down(self, event: LinkDown) -> None:
        peer = self._peers.of_link(event.peer.instance, event.link_id, LinkState.UP)
        if peer is None:
            self.counters.add("link_down.unknown")
            return
        self.counters.add("links.lost")
        self._shun(peer)
        users, peer.users = peer.users, {}
        for request_id in users:
            reason = event.reason or "link lost"
            self._fail(self._requests[request_id], event.code, f"{event.peer}: {reason}")
        if peer.held:  # P may be there and hold for us: once more, then only when needed
            self._open_link(peer)
        self._peers.drop_unused(peer)

    def _shun(self, peer: Peer) -> None:
        peer.down()
        self._timers.cancel((RENEW, peer.instance))
        self._timers.cancel((OPENING, peer.instance))
        peer.healthy_from_s = self._now_s + self.settings.deadlines.connect_s

    # --- what travels on a link -----------------------------------------------------------------

    def _hold_for(self, request: DRequest) -> None:
        """Have P keep the request's KV while D is not ready to take it (dual mode)."""
        peer = request.peer
        if peer is None or request.holding or not self._is_dual(request):
            return
        request.holding = True
        remote_id = request.request.remote_request_id
        peer.held[remote_id] = peer.held.get(remote_id, 0) + 1
        self._open_link(peer)
        if peer.link is LinkState.UP and self._timers.get((RENEW, peer.instance)) is None:
            self._set_renewal(peer)

    def _unhold(self, request: DRequest) -> None:
        peer = request.peer
        if peer is None or not request.holding:
            return
        request.holding = False
        remote_id = request.request.remote_request_id
        peer.held[remote_id] -= 1
        if not peer.held[remote_id]:
            del peer.held[remote_id]

    def _set_renewal(self, peer: Peer) -> None:
        interval_s = self.settings.deadlines.hold_s / RENEWALS_PER_HOLD
        self._timers.set((RENEW, peer.instance), self._now_s + interval_s)

    def _renew(self, peer: Peer) -> None:
        if peer.link is LinkState.UP and peer.peer_id is not None and peer.held:
            held = tuple(peer.held)
            for first in range(0, len(held), MAX_RENEWALS):
                item = Renew(held[first : first + MAX_RENEWALS])
                self._emit(LinkNews(peer.peer_id, peer.link_id, item))
            self._set_renewal(peer)

    def _tell_peer(self, request: DRequest, kind: AbortKind, reason: str) -> None:
        """ABORT to P, if the link is there or is being opened: best effort."""
        peer = request.peer
        if peer is None:
            return
        if kind is AbortKind.TRANSFER:
            if peer.link_id != request.link_id:
                return  # its loss has already told P
            item = Abort(kind, request.key, "", Code.ABORTED, reason)
        else:
            key = self._taker_key(request)
            item = Abort(kind, key, request.request.remote_request_id, Code.ABORTED, reason)
        if peer.link is LinkState.UP and peer.peer_id is not None:
            self._emit(LinkNews(peer.peer_id, peer.link_id, item))
        elif peer.link is LinkState.OPENING and kind is AbortKind.TAKER:
            self._when_linked(peer, item)

    @staticmethod
    def _when_linked(peer: Peer, message: TransferKv | Abort) -> None:
        if len(peer.courtesies) < MAX_COURTESIES:
            peer.courtesies.append(message)

    def _courtesy(self, request: DRequest) -> None:
        """Tell a P that holds for us that we need nothing: an empty range."""
        peer = request.peer
        if peer is None or not self._is_dual(request):
            return
        message = TransferKv(0, request.request.remote_request_id, self._info(request))
        if peer.link is LinkState.UP:
            self._call_courtesy(peer, message)
        elif peer.link is LinkState.OPENING:
            self._when_linked(peer, message)

    def _call_courtesy(self, peer: Peer, message: TransferKv) -> None:
        assert peer.peer_id is not None
        call_id = self._call_id()
        self._calls[call_id] = None
        message = replace(message, link_id=peer.link_id)
        deadline = self._now_s + self.settings.deadlines.connect_s
        self._emit(Call(call_id, peer.peer_id, peer.address, message, deadline))
