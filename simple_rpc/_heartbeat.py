"""When to say "I am alive", and when to stop believing that of the peer. Pure."""

from __future__ import annotations

import math

# Beats a peer may miss. One is a hiccup, two a collector's pause; three in a row is a loss.
MISSED_BEATS = 3
# Bounds for what a peer may ask for: faster would be load, slower would be no heartbeat.
MIN_HEARTBEAT_S = 0.02
MAX_HEARTBEAT_S = 60.0


class Heartbeat:
    """Both directions of one connection. `interval_s` 0: never beats and never gives up.

    Any frame counts as a beat, in both directions. Times are passed in; nothing is read or started.
    """

    __slots__ = ("_expected_tick_s", "_graced_s", "interval_s", "received_s", "sent_s")

    def __init__(self, interval_s: float, now_s: float) -> None:
        if interval_s and not MIN_HEARTBEAT_S <= interval_s <= MAX_HEARTBEAT_S:
            raise ValueError(
                f"heartbeat: expected 0 or {MIN_HEARTBEAT_S}..{MAX_HEARTBEAT_S} s, got {interval_s}"
            )
        self.interval_s = interval_s
        self.sent_s = now_s
        self.received_s = now_s
        self._expected_tick_s = math.inf
        self._graced_s = -math.inf  # `received_s` as it was set by the last grace

    @property
    def beat_due_s(self) -> float:
        """When a beat must be sent if nothing else is until then."""
        return self.sent_s + self.interval_s if self.interval_s else math.inf

    @property
    def lost_due_s(self) -> float:
        """When the peer counts as lost if nothing arrives until then."""
        return self.received_s + MISSED_BEATS * self.interval_s if self.interval_s else math.inf

    def next_tick_s(self) -> float:
        """When `is_lost` should be asked next."""
        self._expected_tick_s = min(self.beat_due_s, self.lost_due_s)
        return self._expected_tick_s

    def is_lost(self, now_s: float) -> bool:
        """True if the peer has been silent for `MISSED_BEATS` intervals of *our* attention.

        A tick that comes late by an interval or more means that we were not listening: the peer's
        beats may lie unread in the socket. It then gets one more interval to be heard, once.
        """
        if now_s < self.lost_due_s:
            return False
        was_late = now_s - self._expected_tick_s >= self.interval_s
        if was_late and self.received_s != self._graced_s:
            self.received_s = self._graced_s = now_s - (MISSED_BEATS - 1) * self.interval_s
            return False
        return True
