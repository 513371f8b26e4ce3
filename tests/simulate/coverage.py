"""What a long run of the simulation must have exercised; a run that never did proves less than it says.

Names are those of the counters: the world's own (faults, losses, what engines and workers did) and, after
``p.`` and ``d.``, those of the cores.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Runs of at least this many seeds are judged.
MIN_SEEDS = 2000

_FAULTS = (
    *(f"fault.{kind}" for kind in ("kill_scheduler", "kill_worker", "pause", "partition")),
    *(f"fault.{kind}" for kind in ("break_channel", "slow_rank", "undiscovered")),
    *(f"net.{what}" for what in ("calls_lost", "answers_lost", "calls_duplicated")),
    *(f"net.{what}" for what in ("channel_breaks", "channel_resumes", "channels_lost")),
    "news.duplicate_items",
    "net.heartbeats_missed",
    "wire.frames",
    "driver.late_commands",
    "data.connections_broken",
    "engine.steps_failed",
    "substep.acks_lost",
    "prefill.refused",
    "prefill.given_up",
    "fatal.workers",
)
_CLIENTS = (
    *("abort.decode", "abort.prefill", "call.PREF", "call.TRKV"),
    *(f"call.{code}" for code in ("TIMEOUT", "UNREACHABLE", "PEER_LOST")),
    *(f"decode.failed.{code}" for code in ("ABORTED", "BAD_REQUEST", "BUSY", "GONE")),
    *(f"decode.failed.{code}" for code in ("NOT_FOUND", "PEER_LOST", "TIMEOUT", "UNREACHABLE")),
    *(f"decode.recompute.{code}" for code in ("BUSY", "GONE", "NOT_FOUND", "PEER_LOST")),
    *("decode.loaded", "d.d_request.retry", "outcome.engine died"),
)
_STEPS = (
    *("send.main_step", "send.frozen", "substep.early", "substep.timely", "substep.late"),
    *("p.sends.step", "p.sends.frozen", "p.sends.substep", "p.sends.repaired"),
    *("p.substeps.taken", "p.substeps.refused", "p.substeps.unknown", "p.substeps.withdrawn"),
    *("p.substeps.missed", "p.repairs.dropped", "p.ways.step", "p.ways.substep", "p.ways.frozen"),
    *("engine.preemptions", "engine.prefix_hits", "prefill.first_token_early"),
)
_HOLDS = (
    *("hold.renewals", "p.p_request.expired.hold", "p.p_request.expired.pressure"),
    *("p.p_transfer.empty", "p.calls.joined", "p.calls.refused.GONE", "p.calls.refused.ABORTED"),
    "p.carried.over",
)
_LATE = (
    *(f"d.deadline.{name}" for name in ("blocks", "call", "grant_open", "grant_close", "queue")),
    *(f"d.deadline.{name}" for name in ("load", "progress")),
    *(f"p.deadline.{name}" for name in ("ack", "drain", "hold", "park", "pressure")),
    *("d.load_done.while_closing", "d.blocks_allocated.late", "grant.progress_timeouts"),
    *("data.drained_no_grant", "data.unconfirmed_reads"),
)

REQUIRED = (*_FAULTS, *_CLIENTS, *_STEPS, *_HOLDS, *_LATE)


def missing(counts: Mapping[str, int]) -> list[str]:
    """Names of what never happened, in the order of ``REQUIRED``."""
    return [name for name in REQUIRED if not counts.get(name)]
