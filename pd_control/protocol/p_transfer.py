"""P transfer: one try to send one request's KV to one D.

Rules
-----
* One per transfer id; the same id again joins it, and after its end is answered from a tombstone.
* STARTED is told when the first send of it is planned; FINAL exactly once, when its outcome is
  known, whatever is still to be drained.
* SEND_DONE is expected from each (rank, target rank) that the plan says exchanges bytes. Any error
  wins; it is OK only when all are in, with all wanted tokens, and with P's first token if wanted.
* DRAINING waits for proof that nobody will read any more: the core thread's answer that it plans no
  more sends, and from each rank the answer to a cancel, a refused substep, or its death. A rank that
  does not answer in `grant_s` is fatal; the lease stays.
* A failed transfer leaves its request HELD for the next try, except where the request was admitted
  for this transfer alone.
"""

from __future__ import annotations

from pd_control.protocol.machine import Row, Table, TableEnum


class PTransferState(TableEnum):
    PARKED = "parked"  # P does not know the request yet
    QUEUED = "queued"  # accepted; no send planned yet
    SENDING = "sending"  # at least one send planned
    DRAINING = "draining"  # failed and said so; some rank may still read
    DONE = "done"


class PTransferInput(TableEnum):
    BOUND = "bound"  # the request became known
    SUBMITTED = "submitted"  # a send is planned in a step, a substep or frozen
    ALL_SENT = "all_sent"  # every expected completion is in, all OK
    FAILED = "failed"  # any error, abort, loss or deadline
    DRAINED = "drained"  # no rank reads for it any more


_S = PTransferState
_I = PTransferInput

P_TRANSFER: Table[PTransferState, PTransferInput] = Table(
    "p_transfer",
    PTransferState,
    PTransferInput,
    initial=(_S.PARKED, _S.QUEUED),
    final=(_S.DONE,),
    rows=[
        Row((_S.PARKED,), _I.BOUND, _S.QUEUED, "digest checked now"),
        Row((_S.QUEUED,), _I.SUBMITTED, _S.SENDING, "STARTED"),
        Row(
            (_S.SENDING,), _I.SUBMITTED, _S.SENDING, "next chunk, or repair of a rank that refused"
        ),
        Row((_S.SENDING,), _I.ALL_SENT, _S.DONE, "FINAL(OK); one taker served"),
        Row((_S.QUEUED,), _I.ALL_SENT, _S.DONE, "nothing to send, only the first token to tell"),
        Row((_S.PARKED,), _I.FAILED, _S.DONE, "FINAL(code); the request never came, or is another"),
        Row(
            (_S.QUEUED, _S.SENDING),
            _I.FAILED,
            _S.DRAINING,
            "FINAL(code); withdrawn from the core thread, cancelled at every rank that may read",
        ),
        Row((_S.DRAINING,), _I.DRAINED, _S.DONE, "the lease may go"),
    ],
)
