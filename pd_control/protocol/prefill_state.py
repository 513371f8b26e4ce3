"""The records of P, and what every layer of `PrefillCore` shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pd_control.codes import Code
from pd_control.ids import Content, PeerId, TransferId
from pd_control.messages import (
    BlockIds,
    DInfo,
    Final,
    HeloAttributes,
    RankInfo,
    Send,
    Target,
    Topology,
)
from pd_control.protocol.completion import NO_RANKS, Completion, Member, members
from pd_control.protocol.effects import Effect, LinkNews
from pd_control.protocol.machine import Counters
from pd_control.protocol.p_request import P_REQUEST, PRequestInput, PRequestState
from pd_control.protocol.p_transfer import P_TRANSFER, PTransferInput, PTransferState
from pd_control.protocol.ranks import Pairs, rank_pairs
from pd_control.protocol.settings import Settings
from pd_control.protocol.timers import Timers
from pd_control.protocol.tombstones import TimedTable

PairsRule = Callable[[Topology, Topology], Pairs]

NO_STEPS: frozenset[int] = frozenset()
NO_TAKERS: frozenset[bytes] = frozenset()

# Timer keys: what waits, and its name.
ADMIT = "admit"  # (ADMIT, request id)
HOLD = "hold"  # (HOLD, request id)
ACK = "ack"  # (ACK, step)
PRESSURE = "pressure"  # (PRESSURE, 0)
TimerKey = tuple[str, str | int] | bytes  # bytes: a transfer, which names its deadline

# Names of a transfer's deadline.
PARK = "park"
QUEUE = "queue"
SEND = "send"
DRAIN = "drain"


class Ended(NamedTuple):
    """What is remembered of a transfer that is over: answers to repeats, and to `pdctl`."""

    code: Code
    message: str = ""
    ways: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


class Link:
    """A link that stands, and what is the same for every transfer of its D."""

    __slots__ = (
        "attributes",
        "keys",
        "link_id",
        "members",
        "peer",
        "ranks",
        "source_ranks",
        "targets",
    )

    def __init__(
        self, peer: PeerId, link_id: int, attributes: HeloAttributes, pairs: Pairs
    ) -> None:
        self.peer = peer
        self.link_id = link_id
        self.attributes = attributes
        self.keys: dict[bytes, None] = {}  # open transfers that came by it
        self.members: frozenset[Member] = members(pairs)
        self.source_ranks = tuple(sorted({source for source, _ in pairs}))
        self.ranks: tuple[RankInfo, ...] = ()
        self.targets: tuple[Target, ...] = ()
        self.set_ranks(attributes.ranks)

    def set_ranks(self, ranks: tuple[RankInfo, ...]) -> None:
        """D's workers as its latest message describes them (one may have restarted)."""
        if ranks != self.ranks:
            self.ranks = ranks
            self.targets = tuple(Target(r.rank, r.incarnation, r.data_address) for r in ranks)


class PTransfer:
    """One transfer. The readers (`submitted`, `tentative`) are the ranks that may still read source
    blocks for it; it cannot be DONE while there are any."""

    __slots__ = (
        "attempt",
        "block_ids",
        "code",
        "completion",
        "d_request_id",
        "deadline_name",
        "digest",
        "end_token",
        "first_residence",
        "first_token",
        "key",
        "link_id",
        "message",
        "offered_residence",
        "parked_for",
        "peer",
        "refusals",
        "repair",
        "request",
        "sent_end",
        "sent_from",
        "src_block_ids",
        "state",
        "submitted",
        "targets",
        "tentative",
        "wait_steps",
        "want_first_token",
        "ways",
        "withdrawing",
    )

    def __init__(self, key: bytes, info: DInfo, peer: PeerId, link: Link) -> None:
        self.key = key
        self.d_request_id = info.request_id
        self.attempt = info.attempt
        self.peer = peer
        self.link_id = link.link_id
        self.targets = link.targets
        self.block_ids = info.block_ids
        self.first_token = info.cached_tokens
        self.end_token = info.max_tokens
        self.digest = info.digest
        self.want_first_token = info.want_first_token
        self.state = PTransferState.QUEUED
        self.request: PRequest | None = None
        self.parked_for = ""  # P's request id, while it is PARKED
        empty = info.cached_tokens >= info.max_tokens
        self.completion = Completion(frozenset() if empty else link.members)
        self.sent_end = info.cached_tokens  # end of what is submitted, in order, without gaps
        self.sent_from = info.cached_tokens  # beginning of the loop's own send (repairs repeat it)
        self.src_block_ids: BlockIds = ()  # of the loop's own send
        self.offered_residence = 0  # residence for which the core thread has the offer; 0: none
        self.withdrawing = False  # failed while the core thread could still plan a send of it
        self.first_residence = 0  # oldest residence whose blocks a send reads; 0: none
        self.submitted = NO_RANKS  # ranks that took a send
        self.tentative = NO_RANKS  # ranks that got a substep and have not said
        self.repair = NO_RANKS  # ranks that refused; frozen once complete
        self.wait_steps = NO_STEPS  # unfinished steps behind the loop's own send
        self.ways: tuple[str, ...] = ()  # how it went: "step 7", "substep 7.2", "frozen"
        self.refusals: tuple[str, ...] = ()  # which rank refused it: "substep 7.2 by rank 1"
        self.deadline_name = ""
        self.code = Code.OK
        self.message = ""

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(*self.peer, self.d_request_id, self.attempt)

    @property
    def taker_key(self) -> bytes:
        """Names D's request among the takers, whichever try serves it."""
        return self.key if self.attempt == 0 else self.transfer_id._replace(attempt=0).key()

    @property
    def live(self) -> bool:
        return self.state not in (PTransferState.DRAINING, PTransferState.DONE)

    @property
    def has_readers(self) -> bool:
        """Whether some rank may still read, or is to (a repair that waits for its steps)."""
        return bool(self.submitted or self.tentative or self.repair)

    def is_reader(self, rank: int) -> bool:
        return rank in self.submitted or rank in self.tentative

    @property
    def last_way(self) -> str:
        """Kind of the send that closed it, repairs apart: step, substep, frozen; nothing, if there was
        nothing to send. Without a word of it yet, the core thread's step has carried it."""
        for way in reversed(self.ways):
            kind = way.partition(" ")[0]
            if kind != "repair":
                return kind
        return "step" if self.completion.expected else "nothing"

    def send(self) -> Send:
        """The loop's own send of all that the core thread has not planned."""
        return Send(
            self.key,
            self.peer.instance,
            self.peer.incarnation,
            self.targets,
            self.src_block_ids,
            self.block_ids,
            self.sent_from,
            self.end_token,
            True,
        )


class PRequest:
    """One request that P holds, or will."""

    __slots__ = (
        "added_s",
        "admitted_for",
        "block_ids",
        "confirmed",
        "content",
        "finished",
        "first_token",
        "forgotten",
        "held_since_s",
        "last_leases",
        "lease_id",
        "num_takers",
        "old_leases",
        "pending",
        "planned_end",
        "reason",
        "request_id",
        "residence",
        "state",
        "takers",
        "transfers",
    )

    def __init__(self, request_id: str, content: Content, num_takers: int, now_s: float) -> None:
        self.request_id = request_id
        self.added_s = now_s
        self.content = content
        self.num_takers = num_takers
        self.takers = NO_TAKERS  # served or withdrawn, by `taker_key`
        self.state = PRequestState.KNOWN
        self.admitted_for: bytes | None = None  # the transfer whose PREFILL brought it
        self.confirmed = True  # the engine has it
        self.finished = False  # the engine is done with it
        self.residence = 1
        self.planned_end = 0  # tokens computed when the last planned step ends
        self.block_ids: BlockIds = ()
        self.lease_id = 0  # of this residence; 0: no step yet
        self.old_leases: list[tuple[int, int]] = []  # (residence, lease id), ended residences
        self.pending: list[tuple[int, int]] = []  # (unfinished step, first token that needs it)
        self.transfers: dict[bytes, PTransfer] = {}
        self.first_token: int | None = None
        self.held_since_s: float | None = None
        self.forgotten = False  # the core thread names it no more
        self.last_leases: tuple[int, ...] = ()  # to release after that, when the readers are done
        self.reason = ""

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.block_ids))

    def waiting_for(self, end_token: int) -> frozenset[int]:
        """The unfinished steps that tokens [0, end_token) need; empty: those are *complete*."""
        return frozenset(step for step, first in self.pending if first < end_token)

    def has_live_transfer(self) -> bool:
        return any(t.live for t in self.transfers.values())

    def live_transfers(self) -> list[PTransfer]:
        return [t for t in self.transfers.values() if t.live]

    def has_readers(self) -> bool:
        return any(t.has_readers for t in self.transfers.values())


class StepRecord:
    """One step in flight, and the journal of what substeps added to it."""

    __slots__ = (
        "failed",
        "finished",
        "journal",
        "keys",
        "num_substeps",
        "ranks_left",
        "requests",
        "step",
    )

    def __init__(self, step: int, ranks: range) -> None:
        self.step = step
        self.ranks_left = set(ranks)
        self.finished: dict[int, int | None] = {}  # rank → highest substep taken; None: not known
        self.requests: dict[PRequest, None] = {}  # whose KV needs this step
        self.keys: dict[bytes, None] = {}  # transfers of the loop that wait for its end
        self.journal: list[tuple[PTransfer, ...]] = []  # entry k-1: what substep k carries
        self.num_substeps = 0
        self.failed = False


class PrefillState:
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
        deadlines, limits = self.settings.deadlines, self.settings.limits
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self._timers: Timers[TimerKey] = Timers()
        self._workers: dict[int, bytes] = {}  # rank → incarnation
        self._links: dict[str, Link] = {}  # by instance: one life of a D at a time
        self._requests: dict[str, PRequest] = {}
        self._forgetting: dict[str, PRequest] = {}  # released, until RequestForgotten
        self._fading: dict[PRequest, None] = {}  # forgotten, until its readers are done
        self._idle: dict[str, PRequest] = {}  # HELD without a live transfer, oldest first
        self._blocks_wanted = 0  # P's own requests wait for so many blocks
        self._transfers: dict[bytes, PTransfer] = {}
        self._parked: dict[str, dict[bytes, PTransfer]] = {}  # by P's request id
        self._steps: dict[int, StepRecord] = {}  # in flight
        self._last_step = 0
        self._num_queued = 0  # transfers in QUEUED
        self._num_parked = 0  # transfers in PARKED
        self._done: TimedTable[bytes, Ended] = TimedTable(
            deadlines.tombstone_s, limits.max_tombstones
        )
        self._gone: TimedTable[str, str] = TimedTable(deadlines.tombstone_s, limits.max_tombstones)
        self._aborted: TimedTable[bytes, str] = TimedTable(deadlines.park_s, limits.max_tombstones)
        self._early_takers: TimedTable[str, frozenset[bytes]] = TimedTable(
            deadlines.park_s, limits.max_tombstones
        )

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _request_input(self, request: PRequest, given: PRequestInput) -> bool:
        after = P_REQUEST.next.get((request.state, given))
        if after is None:
            self.counters.add(f"ignored.p_request.{request.state.name}.{given.name}")
            return False
        request.state = after
        return True

    def _transfer_input(self, transfer: PTransfer, given: PTransferInput) -> bool:
        after = P_TRANSFER.next.get((transfer.state, given))
        if after is None:
            self.counters.add(f"ignored.p_transfer.{transfer.state.name}.{given.name}")
            return False
        if transfer.state is PTransferState.QUEUED:
            self._num_queued -= 1
        if after is PTransferState.QUEUED:
            self._num_queued += 1
        transfer.state = after
        return True

    def _drop_reader(self, transfer: PTransfer, rank: int) -> None:
        """`rank` reads nothing for the transfer, nor will: it is dead or has answered."""
        if rank in transfer.tentative:
            self.counters.add("substeps.withdrawn")
        if rank in transfer.repair:
            self.counters.add("repairs.dropped")
        gone = {rank}
        transfer.submitted -= gone
        transfer.tentative -= gone
        transfer.repair -= gone

    def _set_deadline(self, transfer: PTransfer, name: str, wait_s: float) -> None:
        transfer.deadline_name = name
        self._timers.set(transfer.key, self._now_s + wait_s)

    def _final(self, transfer: PTransfer, tokens: int, first_token: int | None = None) -> None:
        link = self._links.get(transfer.peer.instance)
        if link is not None and link.link_id == transfer.link_id and link.peer == transfer.peer:
            item = Final(transfer.key, transfer.code, tokens, transfer.message, first_token)
            self._emit(LinkNews(transfer.peer, transfer.link_id, item))

    # Hooks: implemented by the layer that owns the decision.

    def _plan(self, transfer: PTransfer) -> None:
        """Send what can be sent of a live, bound transfer, or see to it that it will be."""
        raise NotImplementedError

    def _transfer_over(self, request: PRequest, transfer: PTransfer) -> None:
        """The transfer's outcome is known (it may still drain)."""
        raise NotImplementedError

    def _readers_gone(self, request: PRequest) -> None:
        """A reader of its blocks is gone; it may have been the last."""
        raise NotImplementedError

    def _void(self, request: PRequest, code: Code, message: str, tell_engine: bool) -> None:
        """The request or its KV is worth nothing any more."""
        raise NotImplementedError

    def _kv_complete(self, request: PRequest) -> None:
        """A step of it ended well on every rank."""
        raise NotImplementedError
