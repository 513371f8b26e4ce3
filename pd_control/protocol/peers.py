"""The Ps that a D knows: their links, their load, their health, and which to choose."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator

from pd_control.ids import PeerId
from pd_control.messages import Abort, HeloAttributes, Topology, TransferKv
from pd_control.protocol.completion import FINAL_MEMBER, NO_RANKS, Member
from pd_control.protocol.ranks import Pairs


class LinkState(enum.Enum):
    NONE = "none"
    OPENING = "opening"
    UP = "up"


class Peer:
    """One P instance as D sees it. `waiting`, `users` and `unsent` are ordered sets of request ids."""

    __slots__ = (
        "address",
        "attributes",
        "courtesies",
        "discovered",
        "healthy_from_s",
        "held",
        "instance",
        "link",
        "link_id",
        "members",
        "members_with_final",
        "num_calls",
        "own_ranks",
        "peer_id",
        "queue_depth",
        "sources",
        "unsent",
        "users",
        "waiting",
    )

    def __init__(self, instance: str, address: str) -> None:
        self.instance = instance
        self.address = address
        self.discovered = False
        self.link = LinkState.NONE
        self.link_id = 0  # of the link that stands or is being opened
        self.peer_id: PeerId | None = None  # while the link is UP
        self.attributes: HeloAttributes | None = None
        self.members: frozenset[Member] = frozenset()  # (own rank, source rank)
        self.members_with_final: frozenset[Member] = frozenset()
        self.sources: dict[int, tuple[int, ...]] = {}  # own rank → source ranks
        self.own_ranks = NO_RANKS  # those that receive; shared by all requests
        self.waiting: dict[str, None] = {}  # need the link: LINKING
        self.users: dict[str, None] = {}  # depend on the link: GRANTING to LOADING
        self.num_calls = 0  # of `users`: PREFILL or TRANSFER_KV sent and not answered
        self.unsent: dict[str, None] = {}  # of `users`: may call when others have been answered
        self.held: dict[
            str, int
        ] = {}  # P's request ids whose holds we renew, and for how many of ours
        self.courtesies: list[
            TransferKv | Abort
        ] = []  # to tell once the link is up: D needs nothing
        self.queue_depth = 0  # transfers that P had not started, as last reported
        self.healthy_from_s = 0.0  # not chosen before, if there is another

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.users) + self.queue_depth

    @property
    def is_used(self) -> bool:
        return bool(self.waiting or self.users or self.held or self.courtesies)

    def up(self, peer_id: PeerId, attributes: HeloAttributes, pairs: Pairs) -> None:
        """The link stands. `pairs` are (source rank, own rank)."""
        self.link = LinkState.UP
        self.peer_id = peer_id
        self.attributes = attributes
        self.members = frozenset((own, source) for source, own in pairs)
        self.members_with_final = self.members | {FINAL_MEMBER}
        by_rank: dict[int, list[int]] = {}
        for source, own in pairs:
            by_rank.setdefault(own, []).append(source)
        self.sources = {own: tuple(sorted(found)) for own, found in sorted(by_rank.items())}
        self.own_ranks = frozenset(by_rank)

    def down(self) -> None:
        self.link = LinkState.NONE
        self.peer_id = None
        self.courtesies.clear()


class PeerTable:
    """All of them, by instance. Choosing costs one pass over the peers, which are few."""

    __slots__ = ("_peers", "_turn", "choose_by")

    def __init__(self, choose_by: str) -> None:
        self.choose_by = choose_by
        self._peers: dict[str, Peer] = {}
        self._turn = 0

    def found(self, instance: str, address: str) -> Peer:
        """Discovery knows it."""
        peer = self.get_or_add(instance, address)
        peer.discovered = True
        return peer

    def get(self, instance: str) -> Peer | None:
        return self._peers.get(instance)

    def of_link(self, instance: str, link_id: int, state: LinkState) -> Peer | None:
        """The peer with this link in this state: `instance`, or one known by its address only."""
        peer = self._peers.get(instance)
        if peer is None or peer.link_id != link_id or peer.link is not state:
            peer = next((p for p in self._peers.values() if p.link_id == link_id), None)
            if peer is None or peer.link is not state or peer.instance != peer.address:
                return None
        return peer

    def get_or_add(self, instance: str, address: str) -> Peer:
        peer = self._peers.get(instance)
        if peer is None:
            peer = self._peers[instance] = Peer(instance, address)
        elif address and peer.link is LinkState.NONE:
            peer.address = address
        return peer

    def gone(self, instance: str) -> None:
        peer = self._peers.get(instance)
        if peer is not None:
            peer.discovered = False
            self.drop_unused(peer)

    def drop_unused(self, peer: Peer) -> None:
        """Forget a peer that discovery does not name and nobody uses (a link keeps it)."""
        if not peer.discovered and not peer.is_used and peer.link is LinkState.NONE:
            self._peers.pop(peer.instance, None)

    def choose(self, now_s: float, avoid: Container[str]) -> Peer | None:
        """A discovered peer outside `avoid`, healthy before unhealthy, then by load or in turn."""
        candidates = [p for p in self._peers.values() if p.discovered and p.instance not in avoid]
        healthy = [p for p in candidates if p.healthy_from_s <= now_s] or candidates
        if not healthy:
            return None
        self._turn += 1
        turned = [healthy[(self._turn + i) % len(healthy)] for i in range(len(healthy))]
        if self.choose_by == "round_robin":
            return turned[0]
        return min(turned, key=lambda p: p.load)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)


def same_model_problem(own_model: str, own: Topology, peer: HeloAttributes) -> str | None:
    """Why KV cannot be exchanged at all (F12); the native planner checks the layouts in full."""
    if peer.model != own_model:
        return f"expected model {own_model!r}, got {peer.model!r}"
    if peer.topology.num_kv_heads != own.num_kv_heads:
        return f"expected {own.num_kv_heads} KV heads, got {peer.topology.num_kv_heads}"
    if sum(own.pp_layers) and sum(peer.topology.pp_layers):
        ours, theirs = sum(own.pp_layers), sum(peer.topology.pp_layers)
        if ours != theirs:
            return f"expected {ours} layers, got {theirs}"
    return None
