"""Simulated ``kvt`` of a P worker: steps, sends and the data connections they go out on.

The contract, here and in ``sim_receiver``, is the native one: sends wait per layer for the step that they
are bound to; substeps are taken in order and only before the step is frozen; grants are opened and closed
in one stream, a close leaves a mark; coverage, not a count, completes a source; the end of a data connection
fails its transfers; every transfer ends in a completion per (own rank, other rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_control.codes import Code
from pd_control.messages import Send, Target
from pd_control.testing.sim_memory import Piece, RankMemory
from pd_control.testing.sim_net import Network, Process
from pd_control.testing.sim_trace import Trace, Violation

if TYPE_CHECKING:
    from pd_control.testing.sim_receiver import SimReceiver

#: Steps a worker remembers after they were frozen, to tell a late substep from an early one.
MAX_OLD_STEPS = 8


class Slice:
    """What one source rank sends to one target rank for one transfer key."""

    __slots__ = ("address", "bound", "code", "done", "key", "pins", "saw_last", "target", "tokens")

    def __init__(self, key: bytes, target: int, address: str) -> None:
        self.key = key
        self.target = target
        self.address = address
        self.bound = 0  # sends not yet read through
        self.saw_last = False
        self.done = False
        self.code = Code.OK
        self.tokens = 0  # end of what was read
        self.pins: dict[int, int] = {}  # source block -> sends that may still read it


class _Bound:
    """One send at one rank, and how many of its layers are still to be read."""

    __slots__ = ("layers_left", "send", "slices")

    def __init__(self, send: Send, slices: list[Slice], num_layers: int) -> None:
        self.send = send
        self.slices = slices
        self.layers_left = num_layers


class _Timeline:
    """One step on a sender: which layers are recorded, which substeps were taken."""

    __slots__ = ("early", "frozen", "recorded", "sends", "started", "taken")

    def __init__(self) -> None:
        self.started = False
        self.frozen = False
        self.recorded = 0  # layers 0..recorded-1 have their event
        self.taken = 0
        self.early: dict[int, Sequence[Send]] = {}
        self.sends: list[_Bound] = []


class DataConnection:
    """One authenticated stream of bytes from a P worker to a D worker; order kept; dies as a whole."""

    __slots__ = ("alive", "arrive_s", "receiver", "sender", "sender_owner", "starts")

    def __init__(self, sender: SimSender, receiver: SimReceiver) -> None:
        self.sender = sender
        self.receiver = receiver
        self.sender_owner = sender.owner_incarnation  # said when the connection was made
        self.starts = (sender.process.num_starts, receiver.process.num_starts)
        self.alive = True
        self.arrive_s = 0.0

    def push(self, send: Send, piece: Slice, layer: int, final: bool) -> None:
        """Send one layer of one token range; it arrives later, in order, unless the connection ends.

        ``tcp``: the bytes leave memory now. ``cma``: only the descriptor travels; the receiver reads
        the sender's memory when it gets to it.
        """
        net = self.sender.net
        if not self.alive:
            return
        s, r = self.sender.process, self.receiver.process
        now_s = net.queue.now_s
        delay_s = net.latency_s(s, r) + self.sender.transfer_s
        at_s = max(self.arrive_s, now_s + delay_s, net.path_up_at_s(s, r))
        self.arrive_s = at_s
        pieces = None if self.sender.reads_remotely else self.read(send, layer)
        net.queue.at(at_s, self._arrive, send, piece, layer, final, pieces)
        if net.break_data_rate and net.rng.random() < net.break_data_rate:
            net.trace.count("data.connections_broken")
            net.queue.after(net.rng.random() * 2 * (at_s - now_s), self.end, "connection reset")

    def atoms(self) -> tuple[int, int]:
        """The heads both ends have."""
        s, r = self.sender.memory, self.receiver.memory
        return max(s.atom_lo, r.atom_lo), min(s.atom_hi, r.atom_hi)

    def read(self, send: Send, layer: int) -> list[Piece]:
        lo, hi = self.atoms()
        blocks = send.src_block_ids[0]
        return self.sender.memory.read(layer, blocks, send.first_token, send.end_token, lo, hi)

    def _arrive(
        self, send: Send, piece: Slice, layer: int, final: bool, pieces: list[Piece] | None
    ) -> None:
        receiver = self.receiver.process
        if not self.alive or not receiver.is_(self.starts[1]):
            return
        queue = self.sender.net.queue
        if queue.now_s < receiver.paused_until_s:
            queue.at(receiver.paused_until_s, self._arrive, send, piece, layer, final, pieces)
            return
        if pieces is None:
            if not self.sender.process.is_(self.starts[0]):
                return
            pieces = self.read(send, layer)
        self.receiver.on_data(self, send, piece, layer, final, pieces)

    def end(self, reason: str) -> None:
        """Both ends see it, each when it gets to it."""
        if not self.alive:
            return
        self.alive = False
        net = self.sender.net
        s, r = self.sender.process, self.receiver.process
        if s.is_(self.starts[0]):
            s.after(net.local_latency_s, self.sender.on_connection_end, self, reason)
        if r.is_(self.starts[1]):
            r.after(net.latency_s(s, r), self.receiver.on_connection_end, self, reason)


class SimSender:
    """The sending half of one P worker. All methods run in the worker's process.

    ``report(key, target_rank, tokens, code, detail)`` is the SEND_DONE of one slice.
    ``connect(sender, target)`` makes the data connection, or None if nobody is there.
    ``sends_to(instance, rank)``: whether this rank is the one that feeds heads to that target.
    """

    def __init__(
        self,
        net: Network,
        process: Process,
        memory: RankMemory,
        instance: str,
        rank: int,
        connect: Callable[[SimSender, Target], DataConnection | None],
        sends_to: Callable[[str, int], bool],
        report: Callable[[bytes, int | None, int, Code, str], None],
    ) -> None:
        self.net = net
        self.process = process
        self.memory = memory
        self.instance = instance
        self.rank = rank
        self.trace: Trace = net.trace
        self.connect = connect
        self.sends_to = sends_to
        self.report = report
        self.num_layers = len(memory.layers)
        self.reads_remotely = False  # cma
        self.transfer_s = 0.0001  # per pushed layer
        self.read_delay_s = 0.0001
        self.progress_s = 30.0  # a bound send without progress fails
        self.owner_incarnation = b""  # the scheduler this worker serves
        self.steps: dict[int, _Timeline] = {}
        self.newest_frozen = 0
        self.slices: dict[bytes, dict[int, Slice]] = {}
        self.cancelled: dict[bytes, None] = {}
        self.connections: dict[str, DataConnection] = {}
        self.pinned: dict[int, int] = {}  # block -> sends that may still read it

    # -- the engine's thread -------------------------------------------------------------------

    def start_step(self, step: int, sends: Sequence[Send]) -> None:
        """Bind the main step's sends and the substeps that came early, before the forward."""
        line = self.steps.setdefault(step, _Timeline())
        line.started = True
        for send in sends:
            self._bind(line, send)
        while line.taken + 1 in line.early:
            self.trace.count("substep.early")
            self._take(line, line.early.pop(line.taken + 1))

    def record_event(self, step: int, layer: int) -> None:
        """The KV of ``layer`` for this step's tokens is in memory."""
        line = self.steps[step]
        line.recorded = layer + 1
        for bound in line.sends:
            self._read_later(bound, layer)

    def freeze_step(self, step: int, completed: bool = True) -> int:
        """No further substep joins this step. Returns the highest contiguous one taken. Sends that
        wait for a layer without a record fail by name."""
        line = self.steps[step]
        line.frozen = True
        if not completed and line.recorded < self.num_layers:
            for bound in line.sends:
                for piece in bound.slices:
                    if not piece.done:
                        text = f"step {step} has no record of layer {line.recorded}"
                        self._finish(piece, Code.INTERNAL, text)
        self.newest_frozen = max(self.newest_frozen, step)
        line.early.clear()
        line.sends.clear()
        for old in [s for s in self.steps if s < step - MAX_OLD_STEPS]:
            del self.steps[old]
        return line.taken

    # -- the scheduler's stream ----------------------------------------------------------------

    def substep(self, incarnation: bytes, step: int, substep: int, sends: Sequence[Send]) -> None:
        """SUBSTEP: early, in time or late is told from the step and substep numbers only (R6)."""
        if incarnation != self.owner_incarnation:
            return
        line = self.steps.get(step)
        if line is None:
            if step <= self.newest_frozen:
                self.trace.count("substep.late")
                return
            line = self.steps[step] = _Timeline()
        if line.frozen:
            self.trace.count("substep.late")
        elif not line.started:
            line.early[substep] = sends
        elif substep == line.taken + 1:
            self.trace.count("substep.timely")
            self._take(line, sends)

    def frozen(self, sends: Sequence[Send]) -> None:
        """All layers of these are complete: independent of any step."""
        for send in sends:
            bound = _Bound(send, self._open(send), self.num_layers)
            for layer in range(self.num_layers):
                self._read_later(bound, layer)

    def cancel(self, key: bytes) -> None:
        """Stop reading for ``key`` and refuse more of it. Idempotent; leaves a mark. Every open target
        ends ABORTED; with none open, one completion without a target says so."""
        self.cancelled[key] = None
        open_ones = [p for p in self.slices.get(key, {}).values() if not p.done]
        for piece in open_ones:
            self._finish(piece, Code.ABORTED, "cancelled")
        if not open_ones:
            self.report(key, None, 0, Code.ABORTED, "cancelled, nothing open")

    def new_owner(self, incarnation: bytes) -> None:
        """A new scheduler incarnation: everything of the old one ends here, unreported."""
        self.owner_incarnation = incarnation
        for slices in self.slices.values():
            for piece in slices.values():
                piece.done = True
        self.slices.clear()
        self.steps.clear()
        self.newest_frozen = 0
        self.cancelled.clear()
        self.pinned.clear()
        for connection in self.connections.values():
            connection.end("the sender's scheduler restarted")
        self.connections.clear()

    # -- inside --------------------------------------------------------------------------------

    def _take(self, line: _Timeline, sends: Sequence[Send]) -> None:
        line.taken += 1
        for send in sends:
            self._bind(line, send)

    def _bind(self, line: _Timeline, send: Send) -> None:
        bound = _Bound(send, self._open(send), self.num_layers)
        if bound.slices:
            line.sends.append(bound)
            for layer in range(line.recorded):
                self._read_later(bound, layer)

    def _open(self, send: Send) -> list[Slice]:
        out = []
        of_key = self.slices.setdefault(send.key, {})
        for target in send.targets:
            if not self.sends_to(send.target_instance, target.rank):
                continue
            piece = of_key.get(target.rank)
            if piece is None:
                piece = of_key[target.rank] = Slice(send.key, target.rank, target.data_address)
            if piece.done and piece.code is not Code.OK:
                continue
            if piece.saw_last:
                raise Violation("send", f"a send after the last one to {target}", send.key.hex())
            piece.bound += 1
            piece.saw_last = send.last
            out.append(piece)
            for block in self._span(send):
                piece.pins[block] = piece.pins.get(block, 0) + 1
                self.pinned[block] = self.pinned.get(block, 0) + 1
            if send.key in self.cancelled:
                self._finish(piece, Code.ABORTED, "cancelled before it was bound")
            elif self._connection(target) is None:
                self._finish(piece, Code.UNREACHABLE, f"no data connection to {target}")
            else:
                self.process.after(
                    self.progress_s, self._check_progress, piece, piece.bound, piece.tokens
                )
        return [p for p in out if not p.done]

    def _check_progress(self, piece: Slice, bound: int, tokens: int) -> None:
        if not piece.done and piece.bound >= bound and piece.tokens == tokens:
            self._finish(piece, Code.TIMEOUT, f"no progress for {self.progress_s:g} s")

    def _span(self, send: Send) -> tuple[int, ...]:
        size = self.memory.block_size
        return send.src_block_ids[0][send.first_token // size : -(-send.end_token // size)]

    def _connection(self, target: Target) -> DataConnection | None:
        address = target.data_address
        connection = self.connections.get(address)
        if connection is None or not connection.alive:
            connection = self.connect(self, target)
            if connection is None:
                return None
            self.connections[address] = connection
        if connection.receiver.process.incarnation != target.incarnation:
            return None
        return connection

    def _read_later(self, bound: _Bound, layer: int) -> None:
        if bound.slices:
            delay_s = self.read_delay_s * (0.5 + self.net.rng.random())
            self.process.after(delay_s, self._read, bound, layer)

    def _read(self, bound: _Bound, layer: int) -> None:
        bound.layers_left -= 1
        final = bound.layers_left == 0
        for piece in bound.slices:
            if piece.done:
                continue
            connection = self.connections.get(piece.address)
            if connection is None or not connection.alive:
                self._finish(piece, Code.PEER_LOST, "data connection ended")
                continue
            connection.push(bound.send, piece, layer, final)
            if final and not self.reads_remotely:
                self.read_through(bound.send, piece)

    def read_through(self, send: Send, piece: Slice) -> bool:
        """Nobody reads this send of this slice any more. False: it had ended before, so what was read
        since is not to be trusted (the confirmation a remote reader asks for)."""
        if piece.done:
            return False
        piece.bound -= 1
        piece.tokens = max(piece.tokens, send.end_token)
        for block in self._span(send):
            self._unpin(piece, block)
        if piece.saw_last and piece.bound == 0:
            self._finish(piece, Code.OK, "")
        return True

    def let_go(self, send: Send, piece: Slice) -> None:
        """The remote reader says that it did not and will not read this."""
        self.read_through(send, piece)

    def _unpin(self, piece: Slice, block: int) -> None:
        for counts in (piece.pins, self.pinned):
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]

    def _finish(self, piece: Slice, code: Code, detail: str) -> None:
        piece.done = True
        piece.code = code
        for block, count in list(piece.pins.items()):
            for _ in range(count):
                self._unpin(piece, block)
        self.report(piece.key, piece.target, piece.tokens, code, detail)

    def on_connection_end(self, connection: DataConnection, reason: str) -> None:
        for slices in list(self.slices.values()):
            for piece in slices.values():
                if not piece.done and self.connections.get(piece.address) is connection:
                    self._finish(piece, Code.PEER_LOST, reason)
