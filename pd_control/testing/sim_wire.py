"""Some seeds speak the real wire: what is sent is packed, framed, unpacked and checked as between processes.

The news streams of such a seed are the machines of ``simple_rpc.news`` themselves, and every message passes
through the schemas of ``pd_control.runtime.wire``, so that a field that does not survive the wire, or a
stream that loses, repeats or reorders, shows as a broken promise of the whole system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from pd_control import messages as m
from pd_control.runtime import wire
from pd_control.testing.sim_net import Channel, ChannelOwner, Network, Process
from simple_rpc._codec import unpack_body
from simple_rpc.news import NewsReceiver, NewsSender

_CALLS = {
    m.Prefill: wire.ItemCodec(m.Prefill, m.Prefill.HEAD),
    m.TransferKv: wire.ItemCodec(m.TransferKv, m.TransferKv.HEAD),
}
_FROM_SIDE_0: Mapping[str, wire.ItemCodec[Any]] = {
    codec.head: codec
    for codec in (wire.RENEW, wire.ABORT, wire.GRANT_ACK, wire.SEND_DONE, wire.LOAD_DONE)
}
_FROM_SIDE_1: Mapping[str, wire.ItemCodec[Any]] = {
    codec.head: codec for codec in (wire.STARTED, wire.FINAL, wire.GRANT, wire.SUBSTEP)
}
#: ABRT to a worker is another message than ABRT between schedulers; a channel carries one of the two.
_CANCEL = wire.CANCEL_SEND


def call_over_wire(message: m.Prefill | m.TransferKv) -> Any:
    """What the callee reads of a call's request."""
    codec: wire.ItemCodec[Any] = _CALLS[type(message)]  # type: ignore[assignment]
    return codec.decode(unpack_body(msgpack.packb(codec.encode(message))))


def _encode(side: int, head: str, item: Any) -> Any:
    if isinstance(item, m.FrozenSends):
        return [wire.SEND.encode(send) for send in item.sends]
    if isinstance(item, m.CancelSend):
        return _CANCEL.encode(item)
    return (_FROM_SIDE_0 if side == 0 else _FROM_SIDE_1)[head].encode(item)


def _decode(side: int, head: str, fields: Any) -> Any:
    if head == m.FrozenSends.HEAD:
        return m.FrozenSends(tuple(wire.SEND.decode(send) for send in fields))
    if side == 1 and head == m.CancelSend.HEAD:
        return _CANCEL.decode(fields)
    return (_FROM_SIDE_0 if side == 0 else _FROM_SIDE_1)[head].decode(fields)


class WireChannel(Channel):
    """A channel whose two streams are real ones."""

    __slots__ = ("in_flight_end", "receivers", "senders")

    def __init__(
        self, net: Network, ends: tuple[Process, Process], owners: tuple[ChannelOwner, ChannelOwner]
    ) -> None:
        super().__init__(net, ends, owners)
        self.senders = (NewsSender(), NewsSender())
        self.receivers = (NewsReceiver(), NewsReceiver())  # receivers[side] reads senders[side]
        self.in_flight_end = [1, 1]
        net.trace.count("wire.channels")

    def publish(self, side: int, head: str, item: Any) -> None:
        self.senders[side].publish(head, _encode(side, head, item))

    def attach(self, side: int) -> None:
        sender = self.senders[side]
        is_fresh = sender.receiver_incarnation is None
        expected = self.receivers[side].expected_seq
        attached = sender.attach(self.ends[1 - side].incarnation, expected, is_fresh=is_fresh)
        assert attached.is_new == is_fresh
        assert not attached.num_dropped

    def detach(self, side: int) -> None:
        self.senders[side].detach()

    def acked(self, side: int) -> None:
        if self.senders[side].num_in_flight:
            self.senders[side].acknowledge(self.in_flight_end[side])

    def next_frame(self, side: int) -> Any:
        sender = self.senders[side]
        frame = sender.next_frame()
        if frame is not None:
            self.in_flight_end[side] = sender.next_seq - (sender.num_unacked - sender.num_in_flight)
            self.net.trace.count("wire.frames")
        return frame

    def accept(self, side: int, frame: Any) -> list[tuple[str, list[Any]]]:
        first, groups = unpack_body(frame)
        receiver = self.receivers[side]
        before = receiver.stats.num_duplicates
        kept = receiver.accept(first, [(head, items) for head, items in groups])
        self.net.trace.count("news.duplicate_items", receiver.stats.num_duplicates - before)
        return [(head, [_decode(side, head, item) for item in items]) for head, items in kept]
