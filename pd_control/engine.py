"""The cut between an engine and the driver: what each side gives the other, and on which thread.

An engine embeds the driver in two places. In its scheduler process it implements `Engine` and calls
`PrefillDriver` and `DecodeDriver`; in each worker process it calls `WorkerDriver`. Nothing here
imports an engine, and an engine needs nothing from `pd_control` beyond this file, `config` and the
constructors in `runtime`.

Threads
  core thread   the engine's scheduler thread, which owns the block pool. All calls of
                `PrefillDriver` and `DecodeDriver` are made on it; they are plain and immediate and
                never wait. All calls of `Engine` are made on it, from inside `drain`, except `wake`
                (any thread) and `on_fatal` (loop thread).
  loop thread   the driver's own.
  step thread   the worker's thread that runs the forward. All calls of `WorkerDriver`.

What the engine must guarantee (checked by `tests/conformance/test_engine.py` on any engine)
  1. From `hold_blocks` to `release_blocks` it does not write, zero, move or newly register these
     blocks; only `load_finished` may register, and only the tokens it names.
  2. Request ids are unique per try: an id is not used again in this process's life.
  3. Each planned step ends in `step_finished` or `step_failed` (or the engine dies of it).
  4. Preemption may free fewer blocks than it asked for: leased blocks stay, and it goes on.
  5. `wake` is safe at any moment, also between "is the queue empty?" and sleep: a wake that comes
     before the sleep ends the sleep.
  6. `release_blocks` is the only way in which a lease's reference comes back. Finishing, preempting
     or aborting a request drops the engine's own reference and nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids of a request, one tuple a KV cache group, each from token 0 of the request on."""


class OnFailure(enum.Enum):
    """What D does when a load fails."""

    FAIL = "fail"  # the request ends with an error
    RECOMPUTE = "recompute"  # the engine computes the prompt itself
    RETRY = "retry"  # another attempt, on another P where there is one


@dataclass(frozen=True, slots=True)
class Content:
    """What a request's KV is a function of. Equal content, equal KV; the digest is taken over it."""

    token_ids: Sequence[int]
    adapter: str = ""
    multimodal_hashes: tuple[str, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """A request that D will continue with KV computed elsewhere.

    `num_wanted_tokens` counts from token 0 and includes what D already has. `prefill_instance` None
    lets the driver choose. `is_dual`: the router gave P the request too (TRANSFER_KV); otherwise D
    hands it over itself (PREFILL), and `engine_params` travel to P's `admit_prefill` untouched.
    """

    request_id: str
    content: Content
    num_wanted_tokens: int
    is_dual: bool
    remote_request_id: str = ""  # P's id of it; the same as request_id if empty
    prefill_instance: str | None = None
    on_failure: OnFailure | None = None  # None: as configured
    engine_params: Mapping[str, Any] = field(default_factory=dict)  # msgpack values only


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A request as P's engine knows it."""

    request_id: str
    content: Content
    num_takers: int = 1  # successful transfers after which P lets it go
    engine_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """D: the first `num_tokens` tokens of the request are in its blocks at every rank.

    `first_token` is P's sampled token, or None if D computes the rest of the prompt itself.
    """

    request_id: str
    num_tokens: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """D: nothing was loaded; the request's engine-owned blocks hold nothing of value.

    `action` is FAIL or RECOMPUTE. `code` is the name of a code (`PEER_LOST`), `detail` a sentence.
    The driver's lease on the blocks may outlast this call; the engine need not wait for it.
    """

    request_id: str
    action: OnFailure
    code: str
    detail: str


class Engine(Protocol):
    """What the driver asks of the engine. Core thread, from inside `drain`, unless said."""

    def hold_blocks(self, block_ids: BlockIds) -> None:
        """One more reference on each block. The blocks are the request's own (never blank)."""
        ...

    def release_blocks(self, block_ids: BlockIds) -> None:
        """Drop one reference on each block, as taken by one `hold_blocks` of the same blocks."""
        ...

    def forget_blocks(self, block_ids: BlockIds) -> None:
        """The content of these blocks is not to be trusted (a rank restarted): drop their
        prefix-cache entries. References are not touched."""
        ...

    def load_finished(self, loaded: Loaded) -> None:
        """D. The request is runnable. Called at most once a request, never after `abort`."""
        ...

    def load_failed(self, failed: LoadFailed) -> None:
        """D. Called at most once a request and never together with `load_finished`."""
        ...

    def admit_prefill(self, request: PrefillRequest) -> str | None:
        """P, single-request mode. None: admitted (the driver knows it; do not `add` it). Else the
        reason why not, which D gets as BUSY."""
        ...

    def abort_prefill(self, request_id: str, reason: str) -> None:
        """P. Nobody wants it any more. Unknown or finished ids are ignored."""
        ...

    def wake(self) -> None:
        """Any thread, any moment: call `drain` soon. Never blocks."""
        ...

    def on_fatal(self, reason: str) -> None:
        """Loop thread, once: the driver of this process can no longer keep its promises. The
        engine should end; leases of what is in doubt are not returned."""
        ...


class DecodeDriver(Protocol):
    """D's scheduler process. Core thread."""

    def add(self, request: DecodeRequest) -> None:
        """Take over a request that waits for its blocks. Raises ValueError for one that is
        malformed, whose id is in use, or after close."""
        ...

    def blocks_allocated(
        self, request_id: str, block_ids: BlockIds, num_cached_tokens: int
    ) -> None:
        """The request's blocks, for all wanted tokens; the first `num_cached_tokens` (whole
        blocks) hold KV already. The lease is taken here, by `hold_blocks`, hit blocks included.
        If the request has failed meanwhile nothing happens."""
        ...

    def abort(self, request_id: str) -> None:
        """The client is gone. No outcome is delivered. Unknown ids are ignored."""
        ...

    def drain(self) -> int:
        """Execute what the driver has for the engine; returns how many things that were. To be
        called after each `wake` and before each scheduling pass."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part in one step of P."""

    request_id: str
    block_ids: BlockIds  # from token 0, including the blocks that this step will write
    num_computed_tokens: int  # before this step, prefix hits included
    num_scheduled_tokens: int  # computed by this step


@dataclass(frozen=True, slots=True)
class StepAck:
    """What one rank's `freeze_step` returned: every substep up to `highest_substep` was taken."""

    rank: int
    highest_substep: int


class PrefillDriver(Protocol):
    """P's scheduler process. Core thread."""

    def add(self, request: PrefillRequest) -> None:
        """P's engine has the request (dual mode). Raises ValueError as `DecodeDriver.add`."""
        ...

    def plan_step(self, step: int, scheduled: Sequence[ScheduledRequest]) -> bytes:
        """What the workers must know of this step: hand it to `WorkerDriver.start_step` at each
        rank, unread. Leases are taken here. Steps are numbered by the engine, ascending; several
        may be planned before the first is finished. Empty bytes if there is nothing to tell."""
        ...

    def step_finished(self, step: int, acks: Sequence[StepAck]) -> None:
        """Every rank has ended the step well. `acks` from the ranks that reported one."""
        ...

    def step_failed(self, step: int, reason: str) -> None:
        """The step did not end well at some rank: what it wrote is void."""
        ...

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks back (its own reference) and will recompute it."""
        ...

    def finished(self, request_id: str, first_token: int | None) -> None:
        """The prompt is computed; call it after the `step_finished` that computed its end. The
        engine drops its own reference after this call, not before."""
        ...

    def abort(self, request_id: str) -> None:
        """The client on P's side is gone, or the engine gave up. Unknown ids are ignored."""
        ...

    def drain(self) -> int:
        """As `DecodeDriver.drain`."""
        ...


class WorkerDriver(Protocol):
    """One rank's worker process. Step thread. No call waits for bytes or for the network."""

    def start_step(self, step: int, plan: bytes) -> None:
        """Before the forward. `plan` is what `plan_step` returned. Raises ValueError if it is not."""
        ...

    def record_event(self, step: int, layer: int, stream: int = 0) -> None:
        """After the attention of a layer (global layer number) has been queued on `stream` (a
        CUDA stream handle; 0 on CPU: the layer's KV is written now)."""
        ...

    def freeze_step(self, step: int) -> StepAck:
        """After the forward: from now on the step takes no more substeps."""
        ...
