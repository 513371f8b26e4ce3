"""The cut between an engine and the driver: what each side gives the other, and on which thread.

An engine embeds the driver in two places. In its scheduler process it implements `Engine` and calls
`PrefillDriver` and `DecodeDriver`; in each worker process it calls `WorkerDriver`. Nothing here
imports an engine, and an engine needs nothing from `pd_control` beyond this file, `config` and the
constructors in `runtime`.

Threads
  core thread   the engine's scheduler thread, which owns the block pool. All calls of
                `PrefillDriver` and `DecodeDriver` are made on it; they are plain and immediate and
                never wait. All calls of `Engine` are made on it, from inside `drain` or from inside
                the driver call that needs them, except `wake` (any thread) and `on_fatal` (loop
                thread).
  loop thread   the driver's own.
  step thread   the worker's thread that runs the forward. All calls of `WorkerDriver`.

What the engine must guarantee (checked by `tests/conformance/test_engine.py` on any engine)
  1. From `hold_blocks` to `release_blocks` it does not write, zero, move or newly register these
     blocks, except that the steps already planned for a request may write that request's own; on D
     only `request_loaded` may register, and only the tokens it names.
  2. Request ids are unique per try: an id is not used again in this process's life.
  3. Each planned step ends in one `step_finished`, also if it failed (or the engine dies of it).
  4. Preemption may free fewer blocks than it asked for: leased blocks stay, and it goes on.
  5. `wake` is safe at any moment, also between "is the queue empty?" and sleep: a wake that comes
     before the sleep ends the sleep.
  6. Blocks that a step in flight may still write are not handed out before it has ended, whatever
     became of its requests.
  7. `release_blocks` is the only way in which a lease's reference comes back. Finishing, preempting
     or aborting a request drops the engine's own reference and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pd_control.codes import Code
from pd_control.ids import Content, identity_digest
from pd_control.messages import BlockIds
from pd_control.protocol.events import DecodeRequest, Mode, OnFailure
from pd_control.protocol.planner import ScheduledRequest

__all__ = [
    "BlockIds",
    "Code",
    "Content",
    "DecodeDriver",
    "DecodeRequest",
    "Engine",
    "Mode",
    "OnFailure",
    "PrefillDriver",
    "RankReport",
    "Refusal",
    "ScheduledRequest",
    "WorkerDriver",
    "identity_digest",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine does not admit a request. BUSY lets D try another P, BAD_REQUEST does not."""

    code: Code
    message: str


class Engine(Protocol):
    """What the driver asks of the engine. Core thread unless said."""

    # -- both sides ------------------------------------------------------------------------------

    def hold_blocks(self, block_ids: BlockIds) -> None:
        """One more reference on each block. They are a request's own, so each has one already."""
        ...

    def release_blocks(self, block_ids: BlockIds) -> None:
        """Drop one reference on each block; free those that have none left."""
        ...

    def void_rank(self, rank: int) -> None:
        """A worker died: whatever KV the pool held is gone on that rank. Drop all prefix-cache
        entries; compute again, or fail, what runs on them. References are not touched. An engine
        that dies with its workers never sees this."""
        ...

    def wake(self) -> None:
        """Any thread, any moment: call `drain` soon. Never blocks."""
        ...

    def on_fatal(self, reason: str) -> None:
        """Loop thread, at most once: the driver can no longer keep its promises in this process.
        The engine should end; leases of what is in doubt are not returned."""
        ...

    # -- D ---------------------------------------------------------------------------------------

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        """Tokens [0, num_tokens) are in the request's blocks at every rank: it is runnable.
        `first_token` is P's, if it was asked for. It excludes the next two, and none of the three
        follows the engine's own `abort`."""
        ...

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        """Tell the client and drop the engine's own references. Blocks that may still be written
        stay leased for a while; do not wait for them."""
        ...

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        """The KV did not come: prefill it here, in blocks allocated anew, and drop the references
        to the old ones (their lease goes in its own time). No failure of the request."""
        ...

    # -- P ---------------------------------------------------------------------------------------

    def admit_request(self, request_id: str, content: Content, payload: Any) -> Refusal | None:
        """Single-request mode: take this request, prefill it, generate one token. None if taken;
        the driver tracks it already (do not `add` it). `payload` is what D's engine sent along,
        from the network: check it."""
        ...

    def abort_request(self, request_id: str, code: Code, message: str) -> None:
        """Nobody wants it any more: stop it if it still runs. Unknown ids are ignored. Do not call
        `finished` or `abort` for it afterwards."""
        ...


class DecodeDriver(Protocol):
    """D's scheduler process. Core thread."""

    def add(self, request: DecodeRequest) -> None:
        """Take over a request; it may wait for its blocks from now on. Raises ValueError for an id
        that is in use."""
        ...

    def blocks_allocated(self, request_id: str, block_ids: BlockIds, cached_tokens: int) -> bool:
        """The request's blocks, for all tokens wanted from P, from token 0; the first
        `cached_tokens` hold KV already. The lease is taken here (`hold_blocks`), on hit blocks too.
        False, with nothing done, if the request has ended meanwhile: its end is in the queue."""
        ...

    def abort(self, request_id: str, reason: str = "") -> None:
        """The client is gone. The engine may drop its own references at once; no outcome is
        delivered any more. Unknown ids are ignored."""
        ...

    def drain(self) -> int:
        """Execute what the driver has for the engine; returns how many things that were. Call it
        after each `wake` and before each scheduling pass."""
        ...


@dataclass(frozen=True, slots=True)
class RankReport:
    """How one rank ended one step. `ack_substep` is what its `freeze_step` returned; None if that
    did not arrive. `code` other than OK: the forward failed there."""

    rank: int
    ack_substep: int | None
    code: Code = Code.OK
    detail: str = ""


class PrefillDriver(Protocol):
    """P's scheduler process. Core thread."""

    def add(self, request_id: str, content: Content, num_takers: int = 1) -> None:
        """The engine has a request that has or may get a destination. Before its first step.
        Raises ValueError for an id that is in use."""
        ...

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> bytes:
        """What the workers must know of this step: hand it to `WorkerDriver.start_step` at each
        rank, unread. Leases are taken here. Steps are numbered by the engine, upwards; several may
        be planned before the first has ended. All requests of the step are listed, the driver's or
        not: a prefix hit may be on any of them."""
        ...

    def step_finished(self, step: int, reports: Sequence[RankReport]) -> None:
        """Every rank has reported the end of the step, or never will."""
        ...

    def first_token(self, request_id: str, token: int) -> None:
        """Optional: the token sampled for a request that goes on living on P."""
        ...

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks back and will compute it again. To be called for
        every request that was in a step, the driver's or not."""
        ...

    def finished(
        self, request_id: str, code: Code = Code.OK, first_token: int | None = None
    ) -> None:
        """The engine is done with the request; call it before dropping its own references. OK: its
        prompt is computed and stays held for its takers. Another code: it failed, or its own client
        aborted it. To be called for every request that was in a step, the driver's or not (what the
        driver keeps of those goes with it); other ids are ignored."""
        ...

    def blocks_wanted(self, num_blocks: int) -> None:
        """Requests of this engine wait for that many blocks (0: none any more): old holds may have
        to go. Say it after each scheduling pass; a repetition costs nothing."""
        ...

    def drain(self) -> int:
        """As `DecodeDriver.drain`."""
        ...


class WorkerDriver(Protocol):
    """One rank's worker process. Step thread. No call waits for bytes or for the network."""

    def start_step(self, step: int, plan: bytes) -> None:
        """Before the forward. `plan` is what `plan_step` returned. Raises ValueError if not."""
        ...

    def record_event(self, step: int, layer: int, stream: int = 0) -> None:
        """After the attention of a layer (global layer number) was queued on `stream` (a CUDA
        stream handle; 0 on CPU: the layer's KV of this step is written now)."""
        ...

    def freeze_step(self, step: int) -> int:
        """After the forward: the step takes no more substeps from now on. Returns the highest one
        taken, for `RankReport.ack_substep`."""
        ...
