"""What happens in one seed, drawn before it starts: the cluster, the requests, the faults.

A scenario is data. The run's own randomness (latencies, orders of reuse, moments of loss) comes from another
generator, so requests and faults can be left out of a scenario without changing the others: that is how a
failing seed is made small.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Generation = Literal["step", "bypass", "substep"]
FailurePolicy = Literal["fail", "recompute", "retry"]
Mode = Literal["single", "dual"]

FaultKind = Literal[
    "kill_scheduler",
    "kill_worker",
    "pause",
    "partition",
    "break_channel",
    "slow_rank",
    "undiscovered",
]


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One engine."""

    name: str
    prefill: bool
    tp: int
    num_blocks: int
    max_batched_tokens: int
    steps_in_flight: int
    step_s: float  # a step's length, before the slowness of ranks


@dataclass(frozen=True, slots=True)
class Abort:
    side: Literal["prefill", "decode"]
    after_s: float  # since the request's arrival


@dataclass(frozen=True, slots=True)
class Taker:
    """One D request: it generates from the prompt. In dual mode it names the P request it takes from."""

    request_id: str
    decode: str
    delay_s: float  # since the client request's arrival
    policy: FailurePolicy
    wants_first_token: bool
    tail_tokens: int
    max_new_tokens: int
    aborts: tuple[Abort, ...] = ()
    max_attempts: int = 2
    then: Literal["fail", "recompute"] = "recompute"  # when the attempts of a retry are used up
    names_peer: bool = False  # single mode: asks for a P by name instead of leaving the choice
    wrong_content: bool = False  # its reference names somebody else's prompt (F07)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asked for; ``takers`` is empty when it was gone before any D saw it."""

    index: int
    mode: Mode
    prefill: str
    arrival_s: float
    prefix: int  # which shared prefix, -1 for none
    prefix_tokens: int
    num_prompt_tokens: int
    prefill_delay_s: float  # dual: since arrival; negative: P never gets it
    prefill_aborts: tuple[Abort, ...]
    prefill_new_tokens: int  # dual: how many tokens P itself generates
    takers: tuple[Taker, ...]

    @property
    def request_id(self) -> str:
        return f"r{self.index}"


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: str  # an instance, "instance/rank", or "host|host"
    duration_s: float = 0.0
    workers_too: bool = False  # kill_scheduler: its workers die with it
    factor: float = 1.0


@dataclass(slots=True)
class Scenario:
    seed: int
    instances: list[InstanceSpec]
    requests: list[ClientRequest]
    faults: list[Fault]
    block_size: int
    num_layers: int
    num_kv_heads: int
    generation: Generation
    transport: Literal["tcp", "cma"]
    real_wire: bool  # pack, frame and unpack all that is said
    choose: Literal["round_robin", "least_loaded"]
    deadline_scale: float
    odd_deadlines: bool  # each scaled by itself, so that any may be the first to pass
    latency_s: float
    spike_rate: float
    spike_s: float
    lose_call_rate: float
    duplicate_call_rate: float
    break_channel_rate: float
    break_data_rate: float
    lose_ack_rate: float  # of step outputs that do not say which substeps were taken
    step_fail_rate: float
    refuse_rate: float  # of PREFILLs that P's engine does not admit
    give_up_rate: float  # of requests admitted by PREFILL that P's engine later gives up
    small_limits: bool  # tables so small that BUSY is heard
    transfer_s: float  # time on the wire of one layer of a send, besides latency
    read_delay_s: float  # how long a sender takes to read one layer of a send
    stall_rate: float  # of items to workers before which the stream stalls, up to stall_s
    stall_s: float
    substep_delay_s: float  # extra, so that substeps come late as often as in time
    prefix_lengths: list[int] = field(default_factory=list)

    @property
    def is_calm(self) -> bool:
        """Nothing breaks in it, so no transfer may end by a deadline or a lost peer."""
        return not (
            self.faults
            or self.odd_deadlines
            or self.lose_call_rate
            or self.break_channel_rate
            or self.break_data_rate
            or self.lose_ack_rate
            or self.step_fail_rate
            or (self.spike_rate and self.spike_s > 1)
        )

    def without(self, drop_requests: set[int], drop_faults: set[int]) -> Scenario:
        """The same scenario with some requests (by index) and faults (by position) left out."""
        small = Scenario(**{name: getattr(self, name) for name in self.__slots__})
        small.requests = [r for r in self.requests if r.index not in drop_requests]
        small.faults = [f for i, f in enumerate(self.faults) if i not in drop_faults]
        return small


def head_range(rank: int, tp: int, num_kv_heads: int) -> tuple[int, int]:
    """The KV heads [lo, hi) that a TP rank holds; 0 heads (MLA) means one that every rank has."""
    heads = max(1, num_kv_heads)
    if tp >= heads:
        head = rank * heads // tp
        return head, head + 1
    each = heads // tp
    return rank * each, (rank + 1) * each


def _choose_heads(rng: random.Random, sizes: list[int]) -> int:
    """A number of KV heads that fits all TP sizes of the seed: cut to single heads, several a rank,
    replicated over ranks, or MLA."""
    fitting = [h for h in (1, 2, 3, 4, 6, 8, 12) if all(not (h % t and t % h) for t in sizes)]
    most = max(sizes)
    usual = [h for h in fitting if h >= most]
    if rng.random() < 0.7 and usual:
        return usual[0]
    return rng.choice([0, *fitting])


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed. Deterministic, and independent of the code under test."""
    rng = random.Random(f"scenario {seed}")
    rnd = rng.random
    num_p = rng.choices((1, 2, 3, 4), (45, 30, 15, 10))[0]
    num_d = rng.choices((1, 2, 3, 4), (45, 30, 15, 10))[0]
    block_size = rng.choice((2, 4, 4))
    tp_pool = rng.choice(((1,), (1, 2), (1, 2, 4), (2, 4), (1, 3), (2, 3), (1, 2, 3), (4, 4, 3)))
    crowd = rnd() < 0.01
    if crowd:
        num_requests = rng.randint(200, 500)
    else:
        num_requests = max(1, min(60, int(rng.expovariate(1 / 13.5)) + 1))
    step_s = rng.choice((0.005, 0.02, 0.02, 0.1, 1.0))
    tight = rnd() < 0.35  # few blocks: preemption, waiting for blocks, mutual waiting
    max_prompt = rng.choice((6, 16, 24, 40))
    instances = []
    for prefill, count in ((True, num_p), (False, num_d)):
        for i in range(count):
            need = -(-(max_prompt + 10) // block_size)
            num_blocks = int(need * rng.choice((1.3, 2, 3) if tight else (8, 16)))
            instances.append(
                InstanceSpec(
                    name=f"{'p' if prefill else 'd'}{i}",
                    prefill=prefill,
                    tp=rng.choice(tp_pool),
                    num_blocks=num_blocks,
                    max_batched_tokens=rng.choice((8, 16, 32, 64)),
                    steps_in_flight=rng.choice((1, 1, 2, 3)),
                    step_s=step_s * (0.5 + rnd()),
                )
            )
    p_names = [i.name for i in instances if i.prefill]
    d_names = [i.name for i in instances if not i.prefill]
    prefix_lengths = [rng.randint(1, max_prompt) for _ in range(3)]
    span_s = step_s * num_requests * rng.choice((0.2, 1.0, 3.0))
    trickle = rnd() < 0.15
    if trickle:
        span_s = max(span_s, 10.0 + 20.0 * rnd())  # a trickle: engines idle between requests
    abort_rate = rng.choice((0.0, 0.1, 0.1, 0.4))
    mode_mix = rng.choice((0.0, 0.5, 0.5, 1.0))
    policy_mix: tuple[FailurePolicy, ...] = rng.choice(
        (("fail",), ("recompute",), ("retry",), ("fail", "recompute", "retry"))
    )
    first_token_rate = rng.choice((0.0, 0.0, 0.5))

    def aborts(side: Literal["prefill", "decode"]) -> tuple[Abort, ...]:
        if rnd() >= abort_rate:
            return ()
        times = [rnd() * rng.choice((0.2, 2, 8)) * step_s for _ in range(1 if rnd() < 0.8 else 2)]
        return tuple(Abort(side, t) for t in times)

    hot_prefix = rnd() < 0.1  # everybody sends the same system prompt, at once
    if hot_prefix:
        prefix_lengths[0] = max_prompt * 3 // 4
        span_s = 0.5 * step_s

    requests: list[ClientRequest] = []
    for index in range(num_requests):
        dual = rnd() < (0.8 if hot_prefix else mode_mix)
        prefix = 0 if hot_prefix else rng.choice((-1, -1, 0, 1, 2))
        prompt_tokens = rng.randint(1, max_prompt)
        if hot_prefix:
            prompt_tokens = prefix_lengths[0] + rng.randint(0, 2)
        prefix_tokens = min(prefix_lengths[prefix], prompt_tokens) if prefix >= 0 else 0
        if prefix_tokens == prompt_tokens and rnd() < 0.8:
            prompt_tokens += 1
        num_takers = rng.choice((2, 3)) if dual and rnd() < 0.15 else 1
        prefill_delay_s = rnd() * (0.3 if hot_prefix else rng.choice((0.05, 1, 6))) * step_s

        def taker_delay_s(prefill_delay_s: float = prefill_delay_s) -> float:
            # Half of them come while P is at it: that is where bypass and substep differ.
            if hot_prefix or rnd() < 0.5:
                return prefill_delay_s + rnd() * (1.2 if hot_prefix else 2.5) * step_s
            return rnd() * rng.choice((0.05, 1, 4, 10)) * step_s

        gone = dual and rnd() < 0.04
        takers = [
            Taker(
                request_id=f"r{index}.{t}",
                decode=rng.choice(d_names),
                delay_s=taker_delay_s() if dual else 0.0,
                policy=rng.choice(policy_mix),
                wants_first_token=rnd() < first_token_rate,
                tail_tokens=rng.choice((3, 5, 7) if hot_prefix else (0, 1, 1, 1, 1, 2, 3, 4)),
                max_new_tokens=rng.randint(1, 4),
                aborts=aborts("decode"),
                max_attempts=rng.choice((1, 2, 2, 3)),
                then=rng.choice(("fail", "recompute")),
                names_peer=rnd() < 0.2,
                wrong_content=dual and rnd() < 0.03,
            )
            for t in range(0 if gone else num_takers)
        ]
        lost = dual and not gone and rnd() < 0.04
        requests.append(
            ClientRequest(
                index=index,
                mode="dual" if dual else "single",
                prefill=p_names[0] if hot_prefix else rng.choice(p_names),
                arrival_s=rnd() * span_s,
                prefix=prefix,
                prefix_tokens=prefix_tokens,
                num_prompt_tokens=prompt_tokens,
                prefill_delay_s=-1.0 if lost else prefill_delay_s,
                prefill_aborts=aborts("prefill") if dual else (),
                prefill_new_tokens=rng.choice((1, 1, 1, 3)),
                takers=tuple(takers),
            )
        )
    requests.sort(key=lambda r: r.arrival_s)

    faults: list[Fault] = []
    calm = rnd() < 0.2
    fault_level = 0 if calm else rng.choices((0, 1, 2, 6), (25, 35, 24, 16))[0]
    for _ in range(fault_level):
        kind: FaultKind = rng.choice(
            (
                "kill_scheduler",
                "kill_worker",
                "kill_worker",
                "pause",
                "pause",
                "partition",
                "partition",
                "break_channel",
                "slow_rank",
                "undiscovered",
            )
        )
        spec = rng.choice(instances)
        rank = f"{spec.name}/{rng.randrange(spec.tp)}"
        at_s = rnd() * (span_s + 5 * step_s)
        target = {
            "kill_scheduler": spec.name,
            "undiscovered": f"{rng.choice(p_names)}|{rng.choice(d_names)}",
            "partition": f"{rng.choice(p_names)}|{rng.choice(d_names)}",
            "break_channel": "",
        }.get(kind, rank)
        if kind == "pause" and rnd() < 0.5:
            target = spec.name
        faults.append(
            Fault(
                at_s=at_s,
                kind=kind,
                target=target,
                duration_s=rng.choice((0.05, 0.5, 2.0, 4.0, 9.0)) * (0.5 + rnd()),
                workers_too=rnd() < 0.5,
                factor=rng.choice((3.0, 10.0, 40.0)),
            )
        )
    if trickle and not calm and rnd() < 0.5:
        # A D worker that hangs for longer than a grant may take, while requests go on coming.
        spec = rng.choice([i for i in instances if not i.prefill])
        at_s = rnd() * span_s * 0.7
        worker = f"{spec.name}/{rng.randrange(spec.tp)}"
        faults.append(Fault(at_s, "pause", worker, duration_s=2.0 + 8.0 * rnd()))
    lossy = not calm and rnd() < 0.4
    return Scenario(
        seed=seed,
        instances=instances,
        requests=requests,
        faults=faults,
        block_size=block_size,
        num_layers=rng.choice((1, 2, 2, 3)),
        num_kv_heads=_choose_heads(rng, [i.tp for i in instances]),
        generation=rng.choice(("step", "bypass", "substep", "substep")),
        transport=rng.choice(("tcp", "tcp", "cma")),
        real_wire=rnd() < 0.1,
        choose=rng.choice(("round_robin", "least_loaded")),
        # Deadlines shorter than a few steps would expire without any fault.
        deadline_scale=1.0 if step_s >= 1.0 else rng.choice((0.2, 1.0)),
        odd_deadlines=not calm and rnd() < 0.15,
        latency_s=rng.choice((0.0001, 0.0005, 0.005)),
        spike_rate=rng.choice((0.0, 0.05, 0.2)),
        spike_s=rng.choice((0.01, 0.2, 0.2 if calm else 1.5)),
        lose_call_rate=rng.choice((0.01, 0.1)) if lossy else 0.0,
        duplicate_call_rate=rng.choice((0.0, 0.1)),
        break_channel_rate=rng.choice((0.002, 0.02)) if lossy else 0.0,
        break_data_rate=rng.choice((0.002, 0.02)) if lossy else 0.0,
        lose_ack_rate=0.0 if calm else rng.choice((0.0, 0.0, 0.3)),
        step_fail_rate=0.0 if calm else rng.choice((0.0, 0.0, 0.0, 0.05)),
        refuse_rate=rng.choice((0.0, 0.0, 0.05)),
        give_up_rate=rng.choice((0.0, 0.0, 0.05)),
        small_limits=rnd() < 0.08,
        transfer_s=rng.choice((0.0001, 0.0001, 0.1 * step_s)),
        read_delay_s=rng.choice((0.0001, 0.001, 0.4 * step_s)),
        stall_rate=rng.choice((0.0, 0.0, 0.1)),
        stall_s=min(0.5, 2 * step_s),
        substep_delay_s=rng.choice((0.0, 0.5, 1.0)) * step_s,
        prefix_lengths=prefix_lengths,
    )
