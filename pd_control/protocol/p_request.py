"""P request: who needs the KV of a request, and for how long.

Rules
-----
* It owns the hold: from `RequestAdded` until it is RELEASED its KV stays leased.
* A hold without an open transfer lasts `hold_s`, renewable by a live D up to `hold_max_s` after the
  first moment of HELD. An open transfer stops that clock; the transfer has its own.
* It ends when `num_takers` transfers have succeeded (an empty range and a taker that withdrew count),
  when the hold ends, on the oldest first while requests wait for blocks, or when the request or its
  KV is void (abort, failed step, dead rank).
* RELEASED is told to the core thread at once; the leases go when the last reader is proved gone.
* A preemption ends a residence: the KV must be computed again, what was sent stays sent.
"""

from __future__ import annotations

from pd_control.protocol.machine import Row, Table, TableEnum


class PRequestState(TableEnum):
    KNOWN = "known"  # taken by the engine (or being admitted for a PREFILL), in no step yet
    PREFILLING = "prefilling"  # in at least one step of this residence
    HELD = "held"  # its prompt's KV is complete, or the engine has finished it
    RELEASED = "released"  # over; the record lives until the core thread and all readers let go


class PRequestInput(TableEnum):
    PLANNED = "planned"  # a step computes tokens of it
    COMPLETE = "complete"  # every rank succeeded with every step that wrote its prompt
    FINISHED = "finished"  # the engine is done with it, KV intact
    PREEMPTED = "preempted"
    TAKEN = "taken"  # the last taker is served or has withdrawn
    EXPIRED = "expired"  # hold ended, or pressure for blocks
    VOID = "void"  # abort, refusal, failed step, dead rank


_S = PRequestState
_I = PRequestInput

P_REQUEST: Table[PRequestState, PRequestInput] = Table(
    "p_request",
    PRequestState,
    PRequestInput,
    initial=(_S.KNOWN,),
    final=(_S.RELEASED,),
    rows=[
        Row((_S.KNOWN,), _I.PLANNED, _S.PREFILLING, "its first step; the core has taken the lease"),
        Row((_S.PREFILLING,), _I.PLANNED, _S.PREFILLING, "next chunk of a chunked prefill"),
        Row((_S.HELD,), _I.PLANNED, _S.HELD, "the engine goes on with it (decoding on P)"),
        Row((_S.PREFILLING,), _I.COMPLETE, _S.HELD, "hold begins; queued transfers go frozen"),
        Row((_S.PREFILLING,), _I.FINISHED, _S.HELD, "hold begins; younger steps may still end"),
        Row((_S.HELD,), _I.FINISHED, _S.HELD, "the engine's own references are gone"),
        Row(
            (_S.PREFILLING, _S.HELD), _I.PREEMPTED, _S.KNOWN, "residence over; replan what is open"
        ),
        Row((_S.KNOWN,), _I.PREEMPTED, _S.KNOWN, "preempted before its first step"),
        Row((_S.KNOWN, _S.PREFILLING, _S.HELD), _I.TAKEN, _S.RELEASED, "nobody else will come"),
        Row((_S.HELD,), _I.EXPIRED, _S.RELEASED, "EXPIRED; a tombstone answers GONE"),
        Row(
            (_S.KNOWN, _S.PREFILLING, _S.HELD), _I.VOID, _S.RELEASED, "open transfers fail with it"
        ),
    ],
)
