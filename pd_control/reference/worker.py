"""One tensor-parallel rank of the engine, as a process: ``python -m pd_control.reference.worker FD``.

The scheduler process hands it one end of a socket pair and sends, in order, one ``init`` message and
then ``step`` messages; each is answered. The worker ends when the socket closes.

The main thread is the engine's: it computes. What the control plane does in this process runs beside
it and touches it at four points only, given by :class:`StepHooks`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pd_control.reference.checkpoint import load
from pd_control.reference.model import AllReduce, Model, make_batch
from pd_control.reference.sampling import SamplingParams, sample
from pd_control.reference.wire import MessageSocket, PeerGoneError, WorkerInit


class StepHooks(Protocol):
    """Where a step meets the control plane. All calls come from the worker's main thread, in order."""

    def before_step(self, step: int, metadata: Any) -> None: ...
    def layer_done(self, step: int, layer: int) -> None: ...
    def after_step(self, step: int) -> Any:
        """What goes back to the scheduler with the step's output."""

    def close(self) -> None: ...


class NoHooks:
    """An undivided engine: nobody wants to know."""

    def before_step(self, step: int, metadata: Any) -> None:
        return None

    def layer_done(self, step: int, layer: int) -> None:
        return None

    def after_step(self, step: int) -> Any:
        return None

    def close(self) -> None:
        return None


def make_reduce(init: WorkerInit) -> Any:
    """The sum over ranks, through torch.distributed; None for a single rank."""
    if init.tp_size == 1:
        return None
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if init.device.startswith("cuda") else "gloo",
        init_method=f"file://{init.rendezvous}",
        rank=init.tp_rank,
        world_size=init.tp_size,
    )
    return dist.all_reduce


class ControlHooks:
    """The worker's half of the control plane: kvt over this rank's cache."""

    def __init__(self, init: WorkerInit, cache: list[torch.Tensor], model: Model) -> None:
        """Registers with the scheduler. Raises RpcError, KvtError, ConfigError; nothing runs then."""
        from kvt_bindings import LayoutBuilder
        from pd_control.config import load as load_config
        from pd_control.runtime.kvt_plane import KvtPlane
        from pd_control.runtime.worker_side import WorkerSide

        assert init.control is not None
        config = load_config(environ={}, **init.control["config"])
        builder = LayoutBuilder(
            model=f"{model.spec.name}:{cache[0].dtype}", tp_size=init.tp_size, tp_rank=init.tp_rank
        )
        group = builder.add_group(init.block_tokens)
        for layer, tensor in enumerate(cache):
            builder.add_layer(layer, group, "nhd", [tensor], heads_total=model.spec.num_kv_heads)
        self._side = WorkerSide(
            config,
            init.tp_rank,
            init.control["scheduler_address"],
            KvtPlane(config, builder.build()),
            on_lost=_end_process,
        )
        self._side.start()
        self._device = torch.device(init.device)
        self._is_recording = False

    def before_step(self, step: int, metadata: Any) -> None:
        """``metadata`` is the prefill driver's plan; None on an engine without that role."""
        self._is_recording = metadata is not None
        if self._is_recording:
            self._side.start_step(step, metadata)

    def layer_done(self, step: int, layer: int) -> None:
        if self._is_recording:
            stream = 0
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream(self._device).cuda_stream
            self._side.record_event(step, layer, stream)

    def after_step(self, step: int) -> Any:
        return self._side.freeze_step(step) if self._is_recording else None

    def close(self) -> None:
        self._side.close()


def _end_process(reason: str) -> None:
    """Loop thread: without its scheduler a worker can promise nothing; the kernel tells the peers."""
    print(f"worker {os.getpid()}: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def make_hooks(init: WorkerInit, cache: list[torch.Tensor], model: Model) -> StepHooks:
    return NoHooks() if init.control is None else ControlHooks(init, cache, model)


def run_step(
    message: dict[str, Any],
    model: Model,
    cache: list[torch.Tensor],
    block_tokens: int,
    hooks: StepHooks,
) -> dict[str, Any]:
    """Compute one step. Rank 0 samples; the others answer without tokens.

    A row of the message is (new token ids, cached tokens, block ids, sampling fields or None).
    """
    step: int = message["step"]
    rows = [(ids, context, blocks, s is not None) for ids, context, blocks, s in message["rows"]]
    hooks.before_step(step, message.get("control"))
    logits = model.forward(
        make_batch(rows, block_tokens), cache, lambda layer: hooks.layer_done(step, layer)
    )
    tokens: list[int] = []
    if model.tp_rank == 0:
        wanted = [
            (SamplingParams(**s), context + len(ids))
            for ids, context, _, s in message["rows"]
            if s is not None
        ]
        tokens = [sample(row, p, at) for row, (p, at) in zip(logits, wanted, strict=True)]
    return {"step": step, "tokens": tokens, "control": hooks.after_step(step)}


def serve(
    link: MessageSocket,
    make_reduce: Callable[[WorkerInit], AllReduce | None] = make_reduce,
    make_hooks: Callable[[WorkerInit, list[torch.Tensor], Model], StepHooks] = make_hooks,
) -> None:
    """Compute what comes over `link` until its other end closes.

    What goes wrong before it is ready is told over `link` as the one message `{"failed": why}`.
    """
    is_ready = False
    try:
        init = WorkerInit(**link.receive())
        torch.set_num_threads(init.num_threads)
        reduce = make_reduce(init)
        spec, weights = load(init.source)
        model = Model(
            spec,
            weights,
            tp_rank=init.tp_rank,
            tp_size=init.tp_size,
            device=init.device,
            all_reduce=reduce,
        )
        del weights
        cache = model.new_cache(init.num_blocks, init.block_tokens)
        hooks = make_hooks(init, cache, model)
        link.send({"ready": True, "pid": os.getpid()})
        is_ready = True
        try:
            while True:
                link.send(run_step(link.receive(), model, cache, init.block_tokens, hooks))
        finally:
            hooks.close()
    except PeerGoneError:
        return
    except Exception as error:
        if is_ready:
            raise
        with contextlib.suppress(PeerGoneError):
            link.send({"failed": str(error) or type(error).__name__})


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler process decides when this ends
    serve(MessageSocket(socket.socket(fileno=int(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
