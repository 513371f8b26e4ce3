"""The fake engine's worker with the native data plane; the only part of the kit that needs kvt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from kvt_bindings import KvCache, LayoutBuilder
from pd_control._schema import build
from pd_control.config import Config
from pd_control.engine import WorkerDriver
from pd_control.runtime.kvt_plane import KvtPlane
from pd_control.testing.fake_model import CacheShard
from pd_control.testing.fake_worker import WorkerSpec
from pd_control.testing.node import open_worker


def cache_of(shard: CacheShard, rank: int, tp_size: int) -> KvCache:
    """The shard's layout and memory, as kvt takes them."""
    geometry = shard.geometry
    builder = LayoutBuilder(model=geometry.name, tp_size=tp_size, tp_rank=rank)
    group = builder.add_group(geometry.block_size_tokens)
    for layer, tensor in enumerate(shard.layers):
        builder.add_layer(layer, group, "nhd", [tensor], heads_total=geometry.num_heads)
    return builder.build()


def end_process(reason: str) -> None:
    """A worker process whose scheduler is gone has no reason to live."""
    os.kill(os.getpid(), signal.SIGTERM)


def open_kvt_worker(shard: CacheShard, spec: WorkerSpec) -> tuple[WorkerDriver, Callable[[], None]]:
    """`OpenDriver` over kvt, for threads and processes; the options are those that `Node` gives."""
    config = build(Config, spec.driver["config"])
    plane = KvtPlane(config, cache_of(shard, spec.rank, spec.tp_size))
    on_lost = end_process if spec.driver["is_process"] else None
    return open_worker(config, spec, spec.driver["address"], plane, on_lost)
