"""What the control plane itself costs: cores, hand-offs and runtime, without a network or bytes.

    python -m benchmarks.control [--json] [--quick]

One P and one D scheduler live in this process: the real cores, planner, lease tables, runners and
sides of the runtime. What simple_rpc and kvt would do is done by plain calls: a link delivers an
item (packed and unpacked as on the wire), a worker acknowledges a grant, completes a send, reports
a load. The engine is a counter. Everything runs on one thread, so a rate is a rate per core.

  life        whole lives of requests, dual mode and single mode: requests per second, events, µs
  in_flight   memory of requests in flight, beyond their block ids, and cost per event from 100 to
              100,000 of them (flat, or something is not O(1))
  trace       cost of recording one stage event
  inspect     the longest slice of a paged snapshot of 10,000 requests, and of the search for one
              request's stages in a full ring
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import platform
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from pd_control import messages as m
from pd_control.codes import Code
from pd_control.engine import Content, Mode, RankReport, ScheduledRequest, identity_digest
from pd_control.ids import PeerId
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.decode import DecodeCore
from pd_control.protocol.prefill import PrefillCore
from pd_control.protocol.settings import Deadlines, Limits, Settings
from pd_control.runtime import wire
from pd_control.runtime.runner import CoreRunner
from pd_control.runtime.sides import DecodeSide, PrefillSide
from pd_control.trace import Stage, Trace

NUM_BLOCKS = 64
BLOCK_SIZE_TOKENS = 16
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE_TOKENS
GOAL_REQUESTS_PER_S = 10_000
GOAL_BYTES_PER_REQUEST = 4096
FLATNESS = 2.0  # cost per event at 100,000 in flight over that at 100
SLICE_GOAL_S = 0.005
REPEATS = 7


class CountingEngine:
    """An engine that only counts references and outcomes."""

    def __init__(self) -> None:
        self.num_held = 0
        self.num_loaded = 0
        self.num_failed = 0
        self.admitted: list[tuple[str, Content]] = []

    def hold_blocks(self, block_ids: m.BlockIds) -> None:
        self.num_held += len(block_ids[0])

    def release_blocks(self, block_ids: m.BlockIds) -> None:
        self.num_held -= len(block_ids[0])

    def void_rank(self, rank: int) -> None: ...

    def wake(self) -> None: ...

    def on_fatal(self, reason: str) -> None:
        raise RuntimeError(reason)

    def request_loaded(self, request_id: str, num_tokens: int, first_token: int | None) -> None:
        self.num_loaded += 1

    def request_failed(self, request_id: str, code: Code, message: str) -> None:
        self.num_failed += 1

    def recompute_request(self, request_id: str, code: Code, message: str) -> None:
        self.num_failed += 1

    def admit_request(self, request_id: str, content: Content, payload: Any) -> None:
        self.admitted.append((request_id, content))

    def abort_request(self, request_id: str, code: Code, message: str) -> None: ...


class Pair:
    """P and D back to back. `pack` sends every message through its wire codec."""

    def __init__(
        self, *, pack: bool = True, trace: bool = True, num_tokens: int = NUM_TOKENS
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pack = pack
        self.tokens = [(i * 7919) % 50_000 for i in range(num_tokens)]
        num_blocks = -(-num_tokens // BLOCK_SIZE_TOKENS)
        self.p_blocks = tuple(range(num_blocks))
        self.d_blocks = tuple(range(1000, 1000 + num_blocks))
        self.trace = Trace(1 << 16)
        if not trace:
            self.trace.record = lambda *a, **k: None  # type: ignore[method-assign]
        self.p_engine, self.d_engine = CountingEngine(), CountingEngine()
        far = 1e6
        settings = Settings(
            Deadlines(
                blocks_s=far, queue_s=far, load_s=far, hold_s=far, hold_max_s=far, park_s=far,
                tombstone_s=60.0, progress_s=far, send_s=far, grant_s=far, admit_s=far,
                connect_s=far,
            ),
            Limits(max_requests=200_000, max_parked=200_000),
        )  # fmt: skip
        topology = m.Topology(1, 1, 8)
        self.p_id, self.d_id = PeerId("p", b"p" * 16), PeerId("d", b"d" * 16)
        self.p_core = PrefillCore(self.p_id, topology, settings, model="m")
        self.d_core = DecodeCore(self.d_id, topology, settings, model="m")
        self.answers: dict[int, fx.Answer] = {}
        self.to_p: list[Callable[[], None]] = []
        self.worker_work: list[Callable[[], None]] = []

        def fail(reason: str, error: BaseException | None) -> None:
            raise RuntimeError(reason) from error

        self.p_runner = CoreRunner("prefill", self.p_core, self._p_executors(), fail, loop=loop)
        self.d_runner = CoreRunner("decode", self.d_core, self._d_executors(), fail, loop=loop)
        self.p_side = PrefillSide(
            self.p_engine, BLOCK_SIZE_TOKENS, self.p_runner.post, fail, self.trace
        )
        self.d_side = DecodeSide(self.d_engine, self.d_runner.post, fail, self.trace)
        self.p_rank = m.RankInfo(0, 0, 0, b"P" * 16, "", "f")
        self.d_rank = m.RankInfo(0, 0, 0, b"D" * 16, "", "f")
        self.p_runner.post(ev.WorkerRegistered(0, b"P" * 16, "", "f"))
        self.d_runner.post(ev.WorkerRegistered(0, b"D" * 16, "", "f"))
        self.topology = topology
        self.d_runner.post(ev.PeerFound("p", "tcp://127.0.0.1:1"))
        self.identity = identity_digest("m")
        self.steps = count(1)
        self.call_refs = count(1)

    # -- effects -----------------------------------------------------------------------------------

    def _p_executors(self) -> dict[type, Callable[[Any], object]]:
        def put(e: Any) -> object:
            return self.p_side.mailbox.put(e)

        commands = (
            fx.OfferTransfer, fx.WithdrawTransfer, fx.ReleaseLease, fx.ForgetRequest,
            fx.AdmitRequest, fx.AbortRequest, fx.VoidRankKv,
        )  # fmt: skip
        return {
            fx.CloseLink: lambda e: None,
            fx.Answer: lambda e: self.answers.__setitem__(e.call_ref, e),
            fx.LinkNews: self._to_d,
            fx.WorkerNews: self._p_worker,
            **dict.fromkeys(commands, put),
        }

    def _d_executors(self) -> dict[type, Callable[[Any], object]]:
        def put(e: Any) -> object:
            return self.d_side.mailbox.put(e)

        commands = (fx.ReleaseLease, fx.RequestFailed, fx.RecomputeRequest, fx.VoidRankKv)
        return {
            fx.OpenLink: self._open,
            fx.CloseLink: lambda e: None,
            fx.Call: lambda e: self.worker_work.append(lambda: self._call(e)),
            fx.LinkNews: self._to_p,
            fx.WorkerNews: self._d_worker,
            fx.RequestLoaded: put,
            **dict.fromkeys(commands, put),
        }

    def _open(self, e: fx.OpenLink) -> None:
        d_about = m.HeloAttributes(self.topology, (self.d_rank,), "m", e.link_id)
        p_about = m.HeloAttributes(self.topology, (self.p_rank,), "m")
        self.p_runner.post(ev.LinkUp(self.d_id, e.link_id, d_about))
        self.worker_work.append(
            lambda: self.d_runner.post(ev.LinkUp(self.p_id, e.link_id, p_about))
        )

    def _through(self, codec: wire.ItemCodec[Any], item: Any) -> Any:
        if not self.pack:
            return item
        return codec.decode(wire.unpack_body(wire.msgpack.packb(codec.encode(item))))

    def _to_d(self, e: fx.LinkNews) -> None:
        item = e.item
        if isinstance(item, m.Started):
            item = self._through(wire.STARTED, item)
            self.worker_work.append(lambda: self.d_runner.post(ev.StartedReceived(self.p_id, item)))
        elif isinstance(item, m.Final):
            item = self._through(wire.FINAL, item)
            self.worker_work.append(lambda: self.d_runner.post(ev.FinalReceived(self.p_id, item)))

    def _to_p(self, e: fx.LinkNews) -> None:
        item = e.item
        if isinstance(item, m.Abort):
            item = self._through(wire.ABORT, item)
            self.worker_work.append(lambda: self.p_runner.post(ev.AbortReceived(self.d_id, item)))

    def _call(self, e: fx.Call) -> None:
        ref = next(self.call_refs)
        self.trace.record(Stage.MESSAGE_SENT, e.message.info.request_id, key=b"k")
        self.trace.record(Stage.MESSAGE_RECEIVED, e.message.info.request_id, key=b"k")
        event: Any
        if isinstance(e.message, m.Prefill):
            message: Any = self._through(PREFILL_CODEC, e.message)
            event = ev.PrefillReceived(ref, self.d_id, message)
        else:
            message = self._through(TRANSFER_CODEC, e.message)
            event = ev.TransferKvReceived(ref, self.d_id, message)
        self.p_runner.post(event)
        answer = self.answers.pop(ref)
        self.d_runner.post(
            ev.CallResult(e.call_id, answer.code, answer.message, answer.queue_depth)
        )

    def _d_worker(self, e: fx.WorkerNews) -> None:
        grant = self._through(wire.GRANT, e.item)
        if grant.op != m.GrantOp.START:
            ack = m.GrantAck(0, grant.key, grant.op, 0)
            ack = self._through(wire.GRANT_ACK, ack)
            self.worker_work.append(
                lambda: self.d_runner.post(
                    ev.GrantAcked(0, b"D" * 16, ack.key, ack.op, Code(ack.code))
                )
            )

    def _p_worker(self, e: fx.WorkerNews) -> None:
        item = e.item
        if isinstance(item, (m.FrozenSends, m.Substep)):
            for send in item.sends:
                self._complete(self._through(wire.SEND, send))
        elif isinstance(item, m.CancelSend):
            self.worker_work.append(
                lambda: self.p_runner.post(
                    ev.SendDone(0, b"P" * 16, item.key, None, 0, Code.ABORTED)
                )
            )

    def _complete(self, send: m.Send) -> None:
        """The bytes of a last send have moved: both workers say so."""
        if not send.last:
            return
        end = send.end_token
        load = self._through(wire.LOAD_DONE, m.LoadDoneItem(0, send.key, 0, end, 0))
        done = self._through(wire.SEND_DONE, m.SendDoneItem(0, send.key, 0, end, 0))

        def report() -> None:
            self.trace.record(Stage.PLACED, key=load.key, rank=0)
            self.d_runner.post(ev.LoadDone(0, b"D" * 16, load.key, 0, end, Code.OK))
            self.trace.record(Stage.SEND_DONE, key=done.key, rank=0)
            self.p_runner.post(ev.SendDone(0, b"P" * 16, done.key, 0, end, Code.OK))

        self.worker_work.append(report)

    # -- driving -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything that workers, links and the core threads have to do, until nothing is left."""
        while True:
            work, self.worker_work = self.worker_work, []
            for one in work:
                one()
            drained = self.d_side.drain() + self.p_side.drain()
            if not work and not drained:
                return

    def decode(self, request_id: str, mode: Mode) -> None:
        content = Content(self.tokens, self.identity)
        self.d_side.add(
            ev.DecodeRequest(
                request_id, content, mode, "p", "tcp://127.0.0.1:1",
                request_id if mode is Mode.DUAL else "",
            )
        )  # fmt: skip
        self.d_side.blocks_allocated(request_id, (self.d_blocks,), 0)

    def prefill(self, request_ids: list[str], *, add: bool) -> None:
        """One step computes these prompts whole."""
        if add:
            for request_id in request_ids:
                self.p_side.add(request_id, Content(self.tokens, self.identity))
        step = next(self.steps)
        scheduled = [
            ScheduledRequest(r, 0, len(self.tokens), (self.p_blocks,)) for r in request_ids
        ]
        plan = self.p_side.plan_step(step, scheduled)
        for send in wire.unpack_plan(plan):
            self._complete(send)
        self.p_side.step_finished(step, [RankReport(0, 0)])
        for request_id in request_ids:
            self.p_side.finished(request_id, Code.OK, 1)

    def dual(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.decode(request_id, Mode.DUAL)
        self.prefill(request_ids, add=True)
        self.settle()

    def single(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.decode(request_id, Mode.SINGLE)
        self.settle()
        admitted = [r for r, _ in self.p_engine.admitted]
        self.p_engine.admitted.clear()
        self.prefill(admitted, add=False)
        self.settle()

    @property
    def num_events(self) -> int:
        return self.p_runner.num_events + self.d_runner.num_events

    def check_clean(self, num_loaded: int) -> None:
        assert self.d_engine.num_failed == 0, "requests failed"
        assert self.d_engine.num_loaded == num_loaded, (self.d_engine.num_loaded, num_loaded)
        assert self.p_engine.num_held == self.d_engine.num_held == 0, "leases leaked"
        assert self.p_core.is_idle(), "P's tables are not empty"
        assert self.d_core.is_idle(), "D's tables are not empty"


PREFILL_CODEC: wire.ItemCodec[m.Prefill] = wire.ItemCodec(m.Prefill, "PREF")
TRANSFER_CODEC: wire.ItemCodec[m.TransferKv] = wire.ItemCodec(m.TransferKv, "TRKV")


def batches(total: int, size: int, prefix: str) -> Iterator[list[str]]:
    for start in range(0, total, size):
        yield [f"{prefix}{i}" for i in range(start, min(start + size, total))]


def best_of(pair: Pair, run: Callable[[list[str]], None], num: int) -> tuple[float, float]:
    """(CPU µs per request, events per request): the best of `REPEATS` runs of `num` requests.

    CPU time of this process, so that other processes cost little; the best, because what they cost
    is never negative.
    """
    best_us, events = math.inf, 0.0
    gc.collect()
    gc.freeze()  # as a long-lived process would be; the collector still runs on what is new
    for repeat in range(REPEATS):
        before = pair.num_events
        start_s = time.process_time()
        for ids in batches(num, 32, f"{repeat}-"):
            run(ids)
        elapsed_s = time.process_time() - start_s
        best_us = min(best_us, elapsed_s / num * 1e6)
        events = (pair.num_events - before) / num
    gc.unfreeze()
    return best_us, events


def measure_life(
    mode: str, num: int, *, pack: bool, trace: bool = True, num_tokens: int = NUM_TOKENS
) -> dict[str, float]:
    pair = Pair(pack=pack, trace=trace, num_tokens=num_tokens)
    run = pair.dual if mode == "dual" else pair.single
    run(["warm"])
    us, events = best_of(pair, run, num)
    pair.check_clean(REPEATS * num + 1)
    return {
        "prompt_tokens": num_tokens,
        "requests_per_s": 1e6 / us,
        "us_per_request": us,
        "events_per_request": events,
        "us_per_event": us / events,
    }


def measure_rare_gc(num: int) -> dict[str, float]:
    """The collector's default threshold of 700 objects is met every few requests; a server process
    may raise it."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        return measure_life("dual", num, pack=False)
    finally:
        gc.set_threshold(*before)


def measure_in_flight(num: int, probes: int) -> dict[str, float]:
    """`num` requests wait at D, and parked at P, for a prefill that does not come; beside them whole
    lives of others."""
    pair = Pair(pack=False)
    pair.dual(["warm"])
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for i in range(num):
        pair.decode(f"parked{i}", Mode.DUAL)
        if len(pair.worker_work) > 64:
            pair.settle()
    pair.settle()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    us, events = best_of(pair, pair.dual, probes)
    return {
        "in_flight": num,
        "bytes_per_request": (after - before) / num,
        "us_per_event": us / events,
    }


def measure_trace(num: int) -> dict[str, float]:
    trace = Trace(1 << 16)
    record = trace.record
    key = b"k" * 16
    start_s = time.process_time()
    for _ in range(num):
        record(Stage.PLACED, "request", key, 0, 1024)
    with_s = time.process_time() - start_s
    start_s = time.process_time()
    for _ in range(num):
        pass
    loop_s = time.process_time() - start_s
    return {
        "ns_per_event": (with_s - loop_s) / num * 1e9,
        "us_per_request_of_13_stages": 13 * (with_s - loop_s) / num * 1e6,
    }


def measure_inspect(num: int) -> dict[str, float]:
    """`num` requests that wait at D, and `num` others that P has computed and holds."""
    pair = Pair(pack=False)
    for ids in batches(num, 32, "held"):
        pair.prefill(ids, add=True)
        pair.settle()
    for i in range(num):
        pair.decode(f"r{i:06d}", Mode.DUAL)
        if len(pair.worker_work) > 64:
            pair.settle()
    pair.settle()
    gc.collect()
    gc.freeze()  # a full collection of all these is not the slice's cost
    out: dict[str, float] = {"requests": num}
    for name, core in (("decode", pair.d_core), ("prefill", pair.p_core)):
        slices: list[float] = []
        after, seen = "", 0
        while True:
            start_s = time.thread_time()
            page = core.snapshot(time.monotonic(), after, 200)
            slices.append(time.thread_time() - start_s)
            rows = page["requests"]
            seen += len(rows)
            if not rows:
                break
            after = rows[-1]["request_id"]
        out[f"{name}_rows"] = seen
        out[f"{name}_slices"] = len(slices)
        out[f"{name}_longest_slice_ms"] = max(slices) * 1e3
    full = Trace(1 << 16)
    for i in range(1 << 16):
        full.record(Stage.PLANNED, f"r{i % 5_000}", key=b"k%15d" % (i % 5_000))
    slices = [0.0]
    for _ in range(5):
        parts = full.search("r7")
        start_s = time.thread_time()
        for _ in parts:
            slices.append(time.thread_time() - start_s)
            start_s = time.thread_time()
    out["one_request_longest_slice_ms"] = max(slices) * 1e3
    gc.unfreeze()
    return out


def machine_us() -> float:
    values = list(range(100_000, 101_024))
    best = math.inf
    for _ in range(200):
        start_s = time.process_time()
        for _ in range(20):
            array("I", values)
        best = min(best, (time.process_time() - start_s) / 20)
    return best * 1e6


async def run(quick: bool) -> dict[str, Any]:
    scale = 10 if quick else 1
    life = {
        "dual": measure_life("dual", 3_000 // scale, pack=False),
        "single": measure_life("single", 3_000 // scale, pack=False),
        "dual, short prompt": measure_life("dual", 3_000 // scale, pack=False, num_tokens=128),
        "dual, rare gc": measure_rare_gc(3_000 // scale),
        "dual, packed": measure_life("dual", 2_000 // scale, pack=True),
        "single, packed": measure_life("single", 2_000 // scale, pack=True),
    }
    untraced = measure_life("dual", 3_000 // scale, pack=False, trace=False)
    sizes = (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000)
    in_flight = [measure_in_flight(n, 1_000 // scale) for n in sizes]
    trace = measure_trace(1_000_000 // scale)
    trace["share_of_life"] = 1 - untraced["us_per_request"] / life["dual"]["us_per_request"]
    return {
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "load_1min": os.getloadavg()[0],
            # How fast this machine is just now, by something that everybody can repeat; a busy
            # sibling core shows here as it does in the figures below.
            "us_to_convert_1024_ints": machine_us(),
        },
        "life": life,
        "in_flight": in_flight,
        "flatness": in_flight[-1]["us_per_event"] / in_flight[0]["us_per_event"],
        "trace": trace,
        "inspect": measure_inspect(10_000),
        "goals": {
            "requests_per_s": GOAL_REQUESTS_PER_S,
            "bytes_per_request": GOAL_BYTES_PER_REQUEST,
            "flatness": FLATNESS,
            "slice_ms": SLICE_GOAL_S * 1e3,
        },
    }


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(
        f"Python {machine['python']}, {machine['cores']} cores, load {machine['load_1min']:.0f}, "
        f"{machine['us_to_convert_1024_ints']:.1f} µs to convert 1,024 ints"
    )
    print("life of a request, P and D, one core")
    for name, row in result["life"].items():
        print(
            f"  {name:19} {row['requests_per_s']:9,.0f} requests/s  {row['us_per_request']:6.1f} µs"
            f"  {row['events_per_request']:.1f} events of {row['us_per_event']:.2f} µs"
        )
    print("requests in flight")
    for row in result["in_flight"]:
        print(
            f"  {row['in_flight']:9,}  {row['bytes_per_request']:6.0f} bytes each  "
            f"{row['us_per_event']:.2f} µs per event"
        )
    print(f"  flatness {result['flatness']:.2f}")
    trace, inspect = result["trace"], result["inspect"]
    print(
        f"trace: {trace['ns_per_event']:.0f} ns a stage, {trace['share_of_life']:.1%} of a life\n"
        f"inspect: {inspect['requests']:,} requests, longest slice "
        f"{inspect['decode_longest_slice_ms']:.2f} ms (D), "
        f"{inspect['prefill_longest_slice_ms']:.2f} ms (P), "
        f"{inspect['one_request_longest_slice_ms']:.2f} ms (one request's stages)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    args = parser.parse_args()
    result = asyncio.run(run(args.quick))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
