"""One simulated worker process: memory, the forward pass of each step, a kvt sender and receiver."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_control.codes import Code
from pd_control.messages import (
    CancelSend,
    FrozenSends,
    Grant,
    GrantAck,
    GrantOp,
    LoadDoneItem,
    Send,
    SendDoneItem,
    Substep,
)
from pd_control.testing.sim_engine import Item
from pd_control.testing.sim_kvt import SimSender
from pd_control.testing.sim_memory import RankMemory
from pd_control.testing.sim_net import Channel, Process
from pd_control.testing.sim_receiver import SimReceiver
from pd_control.testing.sim_scenario import head_range
from pd_control.testing.sim_trace import Violation

if TYPE_CHECKING:
    from pd_control.testing.sim_instance import SimInstance
    from pd_control.testing.sim_world import World


class StepWork(NamedTuple):
    """What the engine tells every rank about one step."""

    step: int
    items: Sequence[Item]
    sends: Sequence[Send]
    fails: bool  # the forward fails on this rank half-way


class SimWorker:
    """Rank ``rank`` of an instance. Steps run one after another; news is handled at any moment."""

    def __init__(self, world: World, instance: SimInstance, rank: int) -> None:
        spec, scenario = instance.spec, world.scenario
        self.world = world
        self.instance = instance
        self.rank = rank
        self.name = f"{spec.name}/{rank}"
        # Data crosses hosts where the instances do; one host per instance.
        self.process = Process(world.queue, self.name, spec.name)
        lo, hi = head_range(rank, spec.tp, scenario.num_kv_heads)
        self.memory = RankMemory(scenario.num_layers, spec.num_blocks, scenario.block_size, lo, hi)
        self.slowness = 1.0
        self.channel: Channel | None = None
        self.sender: SimSender
        self.receiver: SimReceiver
        self.steps: deque[StepWork] = deque()
        self.busy = False
        self.run = 0  # changes when the scheduler does: what was running then is dropped

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Come up empty. Registration follows from the instance."""
        self.process.start()
        self.memory.wipe()
        self.steps.clear()
        self.busy = False
        self.run += 1
        world = self.world
        self.sender = SimSender(
            world.net,
            self.process,
            self.memory,
            self.instance.spec.name,
            self.rank,
            world.connect_data,
            self._sends_to,
            self._send_done,
        )
        self.sender.reads_remotely = world.scenario.transport == "cma"
        self.sender.transfer_s = world.scenario.transfer_s
        self.sender.read_delay_s = world.scenario.read_delay_s
        self.sender.progress_s *= world.scenario.deadline_scale
        self.receiver = SimReceiver(
            world.net,
            self.process,
            self.memory,
            self.instance.spec.name,
            self.rank,
            self._load_done,
        )
        self.receiver.progress_s *= world.scenario.deadline_scale

    def new_owner(self, incarnation: bytes) -> None:
        """The scheduler is another incarnation: nothing of the old one goes on (before REGISTER)."""
        self.run += 1
        self.steps.clear()
        self.busy = False
        self.sender.new_owner(incarnation)
        self.receiver.close_all()

    def touches(self, block: int) -> str:
        """Why this block must not be reused on this rank now; "" if it may."""
        if self.process.alive:
            if block in self.sender.pinned:
                return f"{self.name} still reads it for a send"
            if block in self.receiver.granted:
                return f"{self.name} has an open grant on it"
        return ""

    def _sends_to(self, instance: str, rank: int) -> bool:
        return (self.rank, rank) in self.world.pairs(self.instance.spec.name, instance)

    def data_address(self) -> str:
        return f"tcp://{self.name}#{self.process.num_starts}"

    # -- the forward pass ----------------------------------------------------------------------

    def take_step(self, work: StepWork) -> None:
        self.steps.append(work)
        if not self.busy:
            self._next_step()

    def _next_step(self) -> None:
        if not self.steps:
            self.busy = False
            return
        self.busy = True
        work = self.steps.popleft()
        self.sender.start_step(work.step, work.sends)
        for item in work.items:
            wrong = self.memory.first_wrong(item.blocks, item.first, item.request.content)
            if wrong is not None:
                token, layer, atom, what = wrong
                raise Violation(
                    "kv",
                    f"{self.name} runs {item.request} in step {work.step} on KV that is not its own: "
                    f"token {token} layer {layer} atom {atom}: {what}",
                    item.request.trace_id,
                )
        layers = self.memory_layers
        step_s = self.instance.spec.step_s * self.slowness if work.items else 0.0002
        if not self.instance.spec.prefill:
            # Nobody waits for the layers of D's steps one by one.
            self.process.after(step_s, self._whole_step, work, self.run)
            return
        self.process.after(step_s / (layers + 1), self._layer_done, work, 0, step_s, self.run)

    @property
    def memory_layers(self) -> int:
        return len(self.memory.layers)

    def _whole_step(self, work: StepWork, run: int) -> None:
        if run == self.run:
            if not work.fails:
                for layer in range(self.memory_layers):
                    for item in work.items:
                        content = item.request.content
                        self.memory.write(layer, item.blocks, item.first, item.end, content)
            self._end_step(work, Code.INTERNAL if work.fails else Code.OK)

    def _layer_done(self, work: StepWork, layer: int, step_s: float, run: int) -> None:
        if run != self.run:
            return
        layers = self.memory_layers
        if work.fails and layer == layers // 2:
            self._end_step(work, Code.INTERNAL)
            return
        for item in work.items:
            self.memory.write(layer, item.blocks, item.first, item.end, item.request.content)
        self.sender.record_event(work.step, layer)
        if layer + 1 < layers:
            self.process.after(
                step_s / (layers + 1), self._layer_done, work, layer + 1, step_s, run
            )
        else:
            self.process.after(step_s / (layers + 1), self._freeze, work, run)

    def _freeze(self, work: StepWork, run: int) -> None:
        if run == self.run:
            self._end_step(work, Code.OK)

    def _end_step(self, work: StepWork, code: Code) -> None:
        ack = self.sender.freeze_step(work.step, completed=code is Code.OK)
        self.instance.step_output(self, work.step, code, ack)
        self._next_step()

    # -- news from the scheduler ---------------------------------------------------------------

    def on_news(self, channel: Channel, side: int, head: str, items: list[Any]) -> None:
        if channel is not self.channel:
            return
        for item in items:
            self.world.trace.record(self.world.queue.now_s, self.name, "", head, item)
            if isinstance(item, Grant):
                self._grant(item)
            elif isinstance(item, Substep):
                self.sender.substep(item.scheduler_incarnation, item.step, item.substep, item.sends)
            elif isinstance(item, FrozenSends):
                self.sender.frozen(item.sends)
            elif isinstance(item, CancelSend):
                self.sender.cancel(item.key)
            else:
                raise Violation("worker", f"unknown item {item!r}")

    def on_channel_lost(self, channel: Channel, side: int, reason: str) -> None:
        """The scheduler is gone (supervision decides what follows) or this worker is being replaced."""

    def _grant(self, item: Grant) -> None:
        if item.op == GrantOp.OPEN:
            code, detail = self.receiver.open_grant(item)
        elif item.op == GrantOp.CLOSE:
            self.receiver.close_grant(item.key)
            code, detail = Code.OK, ""
        else:
            self.receiver.start_clock(item.key)
            return
        self._say("GACK", GrantAck(self.rank, item.key, item.op, code, detail))

    def _say(self, head: str, item: Any) -> None:
        if self.channel is not None:
            self.channel.send(0, head, item)

    def _send_done(
        self, key: bytes, target: int | None, tokens: int, code: Code, detail: str
    ) -> None:
        self._say("SDON", SendDoneItem(self.rank, key, target, tokens, code, detail))

    def _load_done(self, key: bytes, source: int, tokens: int, code: Code, detail: str) -> None:
        self._say("LDON", LoadDoneItem(self.rank, key, source, tokens, code, detail))
