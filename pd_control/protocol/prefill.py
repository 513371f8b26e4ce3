"""P's side of every request of one scheduler process.

The class is built in layers, one file each, lowest first: `prefill_state` (records), `_transfers`
(one transfer), `_steps` (who sends what when), `_requests` (holds and their end), `_peers` (what D
says). This file is the top: dispatch, deadlines, and what `pdctl` sees (`prefill_view`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_control.ids import PeerId
from pd_control.messages import Topology
from pd_control.protocol import events as ev
from pd_control.protocol.effects import Effect
from pd_control.protocol.prefill_peers import PeerLayer
from pd_control.protocol.prefill_state import (
    ACK,
    ADMIT,
    DRAIN,
    HOLD,
    PARK,
    PRESSURE,
    PairsRule,
    PTransfer,
    TimerKey,
)
from pd_control.protocol.prefill_view import ended_transfer, inspect_request, snapshot
from pd_control.protocol.ranks import rank_pairs
from pd_control.protocol.settings import Settings


class PrefillCore(PeerLayer):
    """All P requests and P transfers of one scheduler process. Loop thread only.

    `model` must equal the model that a D names in its link's attributes. `pairs` says which ranks
    exchange bytes; both sides and the native planner must agree on it.
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
        self._attach = {}
        self._frozen = {}
        self._aligned = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Tick: self._on_tick,
            ev.WorkerRegistered: self._on_worker_registered,
            ev.WorkerDied: self._on_worker_died,
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.PrefillReceived: self._on_prefill,
            ev.TransferKvReceived: self._on_transfer_kv,
            ev.RenewReceived: self._on_renew,
            ev.AbortReceived: self._on_abort,
            ev.RequestAdded: self._on_request_added,
            ev.RequestRefused: self._on_request_refused,
            ev.StepPlanned: self._on_step_planned,
            ev.StepFinished: self._on_step_finished,
            ev.RequestFinished: self._on_request_finished,
            ev.FirstToken: self._on_first_token,
            ev.RequestPreempted: self._on_request_preempted,
            ev.RequestForgotten: self._on_request_forgotten,
            ev.TransferWithdrawn: self._on_transfer_withdrawn,
            ev.BlocksWanted: self._on_blocks_wanted,
            ev.SendDone: self._on_send_done,
        }

    def handle(self, event: ev.PrefillEvent, now_s: float) -> list[Effect]:
        """Take one event; returns what is to be done, in order.

        Raises InvariantError, and is of no further use then, if the driver or the core thread broke
        their contract or this program is wrong. TypeError: not an event of P.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"expected an event of P, got {type(event).__name__}")
        if now_s > self._now_s:
            self._now_s = now_s
        handler(event)
        if self._attach or self._frozen:
            self._flush_sends()
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None: nothing waits."""
        return self._timers.next()

    def _on_tick(self, event: ev.Tick) -> None:
        for key in self._timers.due(self._now_s):
            self._on_due(key)
        for table in (self._done, self._gone, self._aborted, self._early_takers):
            table.expire(self._now_s)

    def _on_due(self, timer: TimerKey) -> None:
        if isinstance(timer, bytes):
            self._on_due_of(self._transfers[timer])
            return
        name, owner = timer
        self.counters.add(f"deadline.{name}")
        if name == HOLD:
            self._on_hold_due(self._requests[str(owner)])
        elif name == ADMIT:
            self._on_admit_due(self._requests[str(owner)])
        elif name == ACK:
            self._on_ack_due(int(owner))
        else:
            assert name == PRESSURE
            self._relieve()

    def _on_due_of(self, transfer: PTransfer) -> None:
        name = transfer.deadline_name
        self.counters.add(f"deadline.{name}")
        if name == PARK:
            self._on_park_due(transfer)
        elif name == DRAIN:
            self._on_drain_due(transfer)
        else:  # QUEUE, SEND
            self._on_transfer_due(transfer)

    def inspect(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """Everything about one live request (R10), or None."""
        return inspect_request(self, request_id, now_s)

    def ended(self, key: bytes, now_s: float) -> dict[str, Any] | None:
        """Of a transfer that is over: its outcome and which way it went, for `tombstone_s`; or None."""
        return ended_transfer(self, key, now_s)

    def snapshot(self, now_s: float, after: str = "", limit: int = 500) -> dict[str, Any]:
        """Counters, tables' sizes, and a page of live requests in order of their ids."""
        return snapshot(self, now_s, after, limit)

    def is_idle(self) -> bool:
        """Nothing is remembered but links, workers, steps in flight, tombstones and marks."""
        return not (
            self._requests
            or self._forgetting
            or self._fading
            or self._transfers
            or self._parked
            or self._idle
            or self._aligned
        )
