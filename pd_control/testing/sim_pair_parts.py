"""The parts of :mod:`pd_control.testing.sim_pair`: a pool of references, ranks with memory, steps."""

from __future__ import annotations

from collections.abc import Sequence

from pd_control.ids import Content
from pd_control.messages import BlockIds, Grant, Send
from pd_control.testing.sim_trace import Violation

BLOCK_SIZE = 2
NUM_BLOCKS = 64
#: What a stranger leaves in a block.
FOREIGN = -7


class Refs:
    """A block pool reduced to reference counts."""

    def __init__(self) -> None:
        self.refs = [0] * NUM_BLOCKS
        self.next = 0

    def allocate(self, count: int) -> tuple[int, ...]:
        """Free blocks, never the most recently used first, so that stale references show."""
        out: list[int] = []
        for i in range(NUM_BLOCKS):
            block = (self.next + i) % NUM_BLOCKS
            if not self.refs[block] and len(out) < count:
                out.append(block)
        if len(out) < count:
            raise Violation("pool", "the test uses more blocks than the pool has")
        for block in out:
            self.refs[block] = 1
        self.next = (out[-1] + 1) % NUM_BLOCKS if out else self.next
        return tuple(out)

    def hold(self, block_ids: BlockIds) -> None:
        for block in block_ids[0]:
            if self.refs[block] < 1:
                raise Violation("lease", f"block {block} held while nobody owns it")
            self.refs[block] += 1

    def release(self, block_ids: BlockIds) -> None:
        for block in block_ids[0]:
            if self.refs[block] < 1:
                raise Violation("lease", f"block {block} released twice")
            self.refs[block] -= 1

    def free(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if not self.refs[block]]


class Outgoing:
    """One (transfer, target) at one P rank."""

    __slots__ = ("done", "ok", "open_sends", "saw_last", "tokens")

    def __init__(self) -> None:
        self.open_sends = 0
        self.saw_last = False
        self.done = False
        self.ok = False  # done, and all of it was sent
        self.tokens = 0


class PairRank:
    """One rank of either side: memory, and its half of kvt."""

    def __init__(self, rank: int, num_heads: int) -> None:
        self.rank = rank
        self.heads = range(rank * num_heads, (rank + 1) * num_heads)
        self.memory: dict[tuple[int, int], list[int]] = {}  # (block, head) -> tokens
        # sender
        self.started: dict[int, int] = {}  # step -> substeps taken
        self.frozen: dict[int, None] = {}
        self.early: dict[int, dict[int, tuple[Send, ...]]] = {}
        self.bound: dict[int, list[Send]] = {}
        self.outgoing: dict[tuple[bytes, int], Outgoing] = {}
        self.cancelled: dict[bytes, None] = {}
        # receiver
        self.grants: dict[bytes, Grant] = {}
        self.covered: dict[tuple[bytes, int], set[int]] = {}
        self.ended: dict[tuple[bytes, int], None] = {}
        self.marks: dict[bytes, None] = {}

    def cells(self, block: int, head: int) -> list[int]:
        return self.memory.setdefault((block, head), [FOREIGN] * BLOCK_SIZE)

    def value(self, blocks: Sequence[int], token: int, head: int) -> int:
        return self.cells(blocks[token // BLOCK_SIZE], head)[token % BLOCK_SIZE]

    def write(self, blocks: Sequence[int], token: int, value: int) -> None:
        for head in self.heads:
            self.cells(blocks[token // BLOCK_SIZE], head)[token % BLOCK_SIZE] = value

    def overwrite(self, block: int) -> None:
        """A stranger writes to it."""
        for head in self.heads:
            self.memory.pop((block, head), None)

    def shared_heads(self, other: PairRank) -> range:
        return range(
            max(self.heads.start, other.heads.start), min(self.heads.stop, other.heads.stop)
        )


class PrefillRun:
    """The P engine's view of the one request."""

    __slots__ = (
        "blocks",
        "computed",
        "content",
        "done",
        "first_unplanned",
        "in_flight",
        "reported",
        "request_id",
    )

    def __init__(self, request_id: str, content: Content) -> None:
        self.request_id = request_id
        self.content = content
        self.blocks: tuple[int, ...] = ()
        self.computed = 0
        self.reported = 0
        self.first_unplanned = 0
        self.in_flight: list[int] = []
        self.done = False


class StepRun:
    __slots__ = ("blocks", "end", "first", "owed", "run", "sends", "stale", "step")

    def __init__(
        self,
        step: int,
        run: PrefillRun | None,
        first: int,
        end: int,
        sends: tuple[Send, ...],
        owed: int,
    ) -> None:
        self.step = step
        self.run = run
        self.first = first
        self.end = end
        self.blocks = run.blocks if run else ()
        self.sends = sends
        self.owed = dict.fromkeys(range(owed))
        self.stale = False
