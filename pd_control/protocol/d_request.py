"""D request: from needing a prompt's KV to running on it, or to being told that it will not come.

Rules
-----
* Blocks (hit blocks too) are leased, and grants opened and acknowledged at every rank, before the
  message to P leaves.
* READY only when every expected LOAD_DONE is in for all wanted tokens (and FINAL, if P's first token
  is wanted). P's word never makes READY; its failure, or the loss of the link, moves to CLOSING.
* CLOSING is final for the try: completions that arrive there are only counted. The engine and the
  client are told on entry (unless the policy tries again); the blocks come back when every rank has
  acknowledged that its grant is closed, or has died. A rank that does neither within `grant_s` is
  fatal and its blocks stay leased.
* A try that ends `queue` unstarted gives its blocks back: it is not retried.
"""

from __future__ import annotations

from pd_control.protocol.machine import Row, Table, TableEnum


class DRequestState(TableEnum):
    WAITING_BLOCKS = "waiting_blocks"
    LINKING = "linking"  # blocks leased; waiting for the link to P
    GRANTING = "granting"  # waiting for each rank's ack of its opened grant
    REQUESTING = "requesting"  # PREFILL or TRANSFER_KV is on its way, or waits its turn
    QUEUED = "queued"  # accepted by P
    LOADING = "loading"  # P has started
    CLOSING = "closing"  # waiting for each rank's ack of its closed grant
    READY = "ready"
    FAILED = "failed"
    ABORTED = "aborted"
    RECOMPUTE = "recompute"


class DRequestInput(TableEnum):
    ALLOCATED = "allocated"  # blocks are leased and something is to be loaded
    NOTHING_WANTED = "nothing_wanted"  # blocks are leased and D has it all
    LINKED = "linked"
    GRANTED = "granted"
    ACCEPTED = "accepted"
    STARTED = "started"  # STARTED, or FINAL(OK) in its place
    LOADED = "loaded"  # the completion is whole and good
    FAILURE = "failure"  # anything that ends the try
    ABORT = "abort"
    CLOSED_FAILED = "closed_failed"  # all grants closed; the outcome decided on entry
    CLOSED_ABORTED = "closed_aborted"
    CLOSED_RECOMPUTE = "closed_recompute"
    CLOSED_RETRY = "closed_retry"


_S = DRequestState
_I = DRequestInput
_TRYING = (_S.LINKING, _S.GRANTING, _S.REQUESTING, _S.QUEUED, _S.LOADING)

D_REQUEST: Table[DRequestState, DRequestInput] = Table(
    "d_request",
    DRequestState,
    DRequestInput,
    initial=(_S.WAITING_BLOCKS,),
    final=(_S.READY, _S.FAILED, _S.ABORTED, _S.RECOMPUTE),
    rows=[
        Row((_S.WAITING_BLOCKS,), _I.ALLOCATED, _S.LINKING, "a P is chosen"),
        Row((_S.WAITING_BLOCKS,), _I.NOTHING_WANTED, _S.READY, "P is told by an empty range"),
        Row((_S.LINKING,), _I.LINKED, _S.GRANTING, "open the grant at every rank"),
        Row((_S.GRANTING,), _I.GRANTED, _S.REQUESTING, "the message to P leaves"),
        Row((_S.REQUESTING,), _I.ACCEPTED, _S.QUEUED, "`queue_s` begins"),
        Row((_S.REQUESTING, _S.QUEUED), _I.STARTED, _S.LOADING, "`load_s` begins"),
        Row(
            (_S.REQUESTING, _S.QUEUED, _S.LOADING),
            _I.LOADED,
            _S.READY,
            "LOADED(n) to the engine; lease released: every rank has closed its grant",
        ),
        Row((*_TRYING, _S.WAITING_BLOCKS), _I.FAILURE, _S.CLOSING, "close grants; policy"),
        Row((*_TRYING, _S.WAITING_BLOCKS), _I.ABORT, _S.CLOSING, "close grants; ABORT to P"),
        Row((_S.CLOSING,), _I.ABORT, _S.CLOSING, "only turns a coming retry into ABORTED"),
        Row((_S.CLOSING,), _I.CLOSED_FAILED, _S.FAILED, "lease released"),
        Row((_S.CLOSING,), _I.CLOSED_ABORTED, _S.ABORTED, "lease released"),
        Row((_S.CLOSING,), _I.CLOSED_RECOMPUTE, _S.RECOMPUTE, "lease released"),
        Row((_S.CLOSING,), _I.CLOSED_RETRY, _S.LINKING, "next attempt on the same blocks"),
    ],
)
