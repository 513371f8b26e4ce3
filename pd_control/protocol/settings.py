"""What the cores are told at start. Frozen; every wait of the system with its owner and its end.

The runtime builds this from its configuration; the simulation builds it directly.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pd_control.protocol.events import OnFailure


class Generation(str, enum.Enum):
    """How soon a TRANSFER_KV becomes a send on P."""

    STEP = "step"  # with the next main step
    BYPASS = "bypass"  # complete KV at once, the rest as in STEP
    SUBSTEP = "substep"  # and a request of the running step joins that step


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. The comment says who waits for what, and what follows."""

    connect_s: float = 3.0  # D: a link, and the answer to a call; UNREACHABLE, TIMEOUT → policy
    blocks_s: float = 60.0  # D: blocks from its engine; FAILED(BUSY)
    grant_s: float = 5.0  # D: acks of an open or close, P: of a cancel; the worker is fatal
    park_s: float = 10.0  # P: a request it does not know (NOT_FOUND); also marks of early ABORTs
    queue_s: float = 60.0  # D: accepted, not STARTED (P: twice that); CLOSING → policy, no retry
    progress_s: float = 10.0  # D: P says all is sent and data is missing; TIMEOUT → policy
    load_s: float = 120.0  # D: STARTED to all LOAD_DONE; CLOSING → policy
    hold_s: float = 30.0  # P: KV held, no taker; renewable; EXPIRED
    hold_max_s: float = 120.0  # P: end of all renewals, from the first moment of HELD; EXPIRED
    pressure_hold_s: float = 1.0  # P: least age of a hold that pressure for blocks may expire
    send_s: float = 120.0  # P: STARTED to the last SEND_DONE; DRAINING
    substep_s: float = 5.0  # P: from a step's first report, the others; unknown → transfers fail
    admit_s: float = 10.0  # P: its engine's answer to an admission by PREFILL; BUSY
    tombstone_s: float = 60.0  # P: how long GONE is answered for what was let go


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds; beyond them BUSY is answered or the oldest is forgotten (and counted)."""

    max_requests: int = 100_000  # in flight on D; transfers on P
    max_parked: int = 65_536  # P
    max_tombstones: int = 65_536  # P, and marks
    max_substeps_per_step: int = 1024  # P: beyond it, wait for the end of the step
    max_calls_per_peer: int = 128  # D: calls in flight to one P; more wait for their turn


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a core is told besides who it is."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: Limits = field(default_factory=Limits)
    generation: Generation = Generation.SUBSTEP
    on_failure: OnFailure = OnFailure.RECOMPUTE
    max_attempts: int = 2  # under RETRY, the first included
    after_retries: OnFailure = OnFailure.RECOMPUTE
    recompute_tail_tokens: int = 1
    choose: str = "least_loaded"  # or "round_robin"
