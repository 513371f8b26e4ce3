"""When a peer counts as lost."""

from __future__ import annotations

import math

import pytest

from simple_rpc._heartbeat import MISSED_BEATS, Heartbeat


def test_without_an_interval_nothing_is_ever_due():
    heartbeat = Heartbeat(0.0, 100.0)
    assert heartbeat.next_tick_s() == math.inf
    assert not heartbeat.is_lost(1e9)


@pytest.mark.parametrize("interval_s", [-1.0, 0.019, 60.1])
def test_an_interval_out_of_bounds_is_refused(interval_s):
    with pytest.raises(ValueError, match="heartbeat"):
        Heartbeat(interval_s, 0.0)


def test_a_beat_is_due_an_interval_after_anything_was_sent():
    heartbeat = Heartbeat(1.0, 100.0)
    assert heartbeat.beat_due_s == 101.0
    heartbeat.sent_s = 100.7
    assert heartbeat.beat_due_s == 101.7


def test_lost_exactly_after_three_silent_intervals_and_any_frame_counts():
    heartbeat = Heartbeat(1.0, 100.0)
    heartbeat.sent_s = 102.5
    heartbeat.next_tick_s()
    assert not heartbeat.is_lost(102.999)
    heartbeat.received_s = 102.0
    heartbeat.sent_s = 104.5
    assert heartbeat.next_tick_s() == 105.0
    assert not heartbeat.is_lost(104.999)
    assert heartbeat.is_lost(105.0)


def test_a_late_look_earns_the_peer_one_more_interval_and_only_one():
    heartbeat = Heartbeat(1.0, 100.0)
    heartbeat.next_tick_s()  # at 101
    assert not heartbeat.is_lost(110.0), "we were not listening"
    assert heartbeat.lost_due_s == 111.0
    heartbeat.next_tick_s()
    assert heartbeat.is_lost(120.0), "late again, and still nothing was heard"


def test_a_sign_of_life_after_a_late_look_starts_over():
    heartbeat = Heartbeat(1.0, 100.0)
    heartbeat.next_tick_s()
    assert not heartbeat.is_lost(110.0)
    heartbeat.received_s = 110.1
    heartbeat.next_tick_s()
    assert not heartbeat.is_lost(120.0), "a new silence, a new late look"
    assert MISSED_BEATS == 3
