"""The records of D, and what every layer of `DecodeCore` shares."""

from __future__ import annotations

import enum
from collections.abc import Callable

from pd_control.codes import Code
from pd_control.ids import PeerId, TransferId
from pd_control.messages import BlockIds, DInfo, RankInfo, Topology
from pd_control.protocol.completion import NO_RANKS, Completion
from pd_control.protocol.d_request import D_REQUEST, DRequestInput, DRequestState
from pd_control.protocol.effects import Effect
from pd_control.protocol.events import DecodeRequest, Mode, OnFailure
from pd_control.protocol.machine import Counters
from pd_control.protocol.peers import Peer, PeerTable
from pd_control.protocol.ranks import Pairs, rank_pairs
from pd_control.protocol.settings import Settings
from pd_control.protocol.timers import Timers
from pd_control.protocol.tombstones import TimedTable

PairsRule = Callable[[Topology, Topology], Pairs]

RENEW = "renew"  # timer key (RENEW, instance)
OPENING = "link"  # (OPENING, instance)
TimerKey = tuple[str, str] | str  # str: a request, which names its deadline


class Outcome(enum.Enum):
    """What a closing try leads to."""

    FAILED = "failed"
    ABORTED = "aborted"
    RECOMPUTE = "recompute"
    RETRY = "retry"


_NOTHING = Completion(frozenset())  # before a try has a peer; never reported to


class DRequest:
    """One request of D, through all its tries."""

    __slots__ = (
        "added_s",
        "attempt",
        "block_ids",
        "cached_tokens",
        "call_id",
        "called",
        "code",
        "completion",
        "deadline_name",
        "digest",
        "first_token",
        "grants",
        "holding",
        "key",
        "lease_id",
        "link_id",
        "load_end_s",
        "message",
        "mode",
        "outcome",
        "peer",
        "peer_id",
        "request",
        "request_id",
        "state",
        "stuck",
        "tried",
        "unacked",
        "wanted_end",
    )

    def __init__(self, request: DecodeRequest, wanted_end: int, now_s: float) -> None:
        self.request = request
        self.request_id = request.request_id
        self.added_s = now_s
        self.state = DRequestState.WAITING_BLOCKS
        self.mode = request.mode
        self.wanted_end = wanted_end  # end of the tokens that P is to provide
        self.attempt = 0
        self.peer: Peer | None = None
        self.peer_id: PeerId | None = None  # the incarnation this try talks to
        self.link_id = 0
        self.tried: tuple[str, ...] = ()  # instances
        self.key = b""
        self.digest = b""
        self.block_ids: BlockIds = ()
        self.cached_tokens = 0
        self.lease_id = 0
        self.completion = _NOTHING
        self.grants = NO_RANKS  # ranks that may hold a grant: opened, close not acked
        self.unacked = NO_RANKS  # ranks whose open is not acked
        self.call_id = 0
        self.holding = False  # its P is asked to keep the KV (dual mode)
        self.called = False  # P may know of this try
        self.first_token: int | None = None
        self.deadline_name = ""
        self.load_end_s = 0.0
        self.outcome: Outcome | None = None  # decided when CLOSING begins
        self.code = Code.OK
        self.message = ""
        self.stuck = False  # a worker was declared fatal over it; its blocks stay leased


class DecodeState:
    """Tables and helpers. Each layer above adds the handling of one kind of event."""

    def __init__(
        self,
        me: PeerId,
        topology: Topology,
        settings: Settings | None = None,
        *,
        model: str = "",
        pairs: PairsRule = rank_pairs,
    ) -> None:
        self.me = me
        self.topology = topology
        self.settings = settings or Settings()
        self._deadlines = self.settings.deadlines
        self.model = model
        self._pairs = pairs
        self.counters = Counters()
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self._timers: Timers[TimerKey] = Timers()
        self._workers: dict[int, RankInfo] = {}
        self._ranks: tuple[RankInfo, ...] = ()  # of all workers, as messages carry them
        self._peers = PeerTable(self.settings.choose)
        self._requests: dict[str, DRequest] = {}
        self._by_key: dict[bytes, DRequest] = {}  # tries from GRANTING to the end of CLOSING
        self._calls: dict[int, DRequest | None] = {}  # None: a courtesy, nobody waits for it
        self._next_call_id = 1
        self._next_link_id = 1
        self._early_aborts: TimedTable[str, str] = TimedTable(
            self.settings.deadlines.park_s, self.settings.limits.max_tombstones
        )

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _input(self, request: DRequest, given: DRequestInput) -> bool:
        after = D_REQUEST.next.get((request.state, given))
        if after is None:
            self.counters.add(f"ignored.d_request.{request.state.name}.{given.name}")
            return False
        request.state = after
        return True

    def _set_deadline(self, request: DRequest, name: str, at_s: float) -> None:
        request.deadline_name = name
        self._timers.set(request.request_id, at_s)

    def _call_id(self) -> int:
        self._next_call_id += 1
        return self._next_call_id - 1

    def _transfer_id(self, request: DRequest, attempt: int) -> TransferId:
        return TransferId(*self.me, request.request_id, attempt)

    def _taker_key(self, request: DRequest) -> bytes:
        """Names this D request among the takers of P's: the key of its first try."""
        return self._transfer_id(request, 0).key()

    def _info(self, request: DRequest, packed: bytes | None = None) -> DInfo:
        if not request.digest:
            request.digest = request.request.content.digest(request.wanted_end, packed)
        return DInfo(
            self.me.instance,
            self.me.incarnation,
            request.request_id,
            request.attempt,
            self.topology,
            self._ranks,
            request.block_ids,
            min(request.cached_tokens, request.wanted_end),
            request.wanted_end,
            request.digest,
            request.request.want_first_token,
        )

    def _on_failure(self, request: DRequest) -> OnFailure:
        own = request.request.on_failure
        return self.settings.on_failure if own is None else own

    def _is_dual(self, request: DRequest) -> bool:
        return request.mode is Mode.DUAL

    # Hooks: implemented by the layer that owns the decision.

    def _linked(self, request: DRequest) -> None:
        """The link that a LINKING request waits for stands."""
        raise NotImplementedError

    def _fail(
        self,
        request: DRequest,
        code: Code,
        message: str,
        *,
        retry: bool = True,
        peer_knows: bool = False,
    ) -> None:
        """The try has failed; the policy decides what follows."""
        raise NotImplementedError
