"""A worker and its data plane: the half of the connector that lives in each worker process.

The worker's main thread runs the forward; it meets the control plane in four calls per step, none of which
waits: the plan before the forward, one native call after each layer's attention, the freeze after it, and
the acknowledgement that goes back with the step's output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from pd_control.config import Config
from pd_control.runtime.kvt_plane import KvtPlane
from pd_control.runtime.worker_side import WorkerSide
from pd_control.vllm.layouts import build_cache, opaque_kernels

log = logging.getLogger(__name__)

#: The scheduler half connects right after the engine has started; see :class:`Introduction`.
MAX_INTRODUCTION_BYTES = 16 << 10


class Introduction:
    """How a worker learns its scheduler's address: vLLM carries messages from worker to scheduler when the
    engine starts, but none the other way. So the worker listens on a Unix socket in a private folder, sends
    that path, and the scheduler half connects once and says where it is."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pd-vllm-")  # mode 0700
        self.path = str(Path(self._folder) / "introduce.sock")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(self.path)
        self._sock.listen(1)

    def wait(self) -> str:
        """Blocks for the address. Raises OSError if nobody comes before :meth:`close`."""
        connection, _ = self._sock.accept()
        with connection:
            data = b""
            while chunk := connection.recv(4096):
                data += chunk
                if len(data) > MAX_INTRODUCTION_BYTES:
                    raise OSError("the introduction is too long")
        self.close()
        return data.decode()

    def close(self) -> None:
        """Wakes :meth:`wait` up. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


def introduce(path: str, address: str) -> None:
    """The scheduler half's side of :class:`Introduction`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10.0)
        sock.connect(path)
        sock.sendall(address.encode())


class WorkerHalf:
    """One rank. Main thread, except the introduction."""

    def __init__(self, config: Config, *, rank: int, tp_size: int) -> None:
        self._config, self.rank, self._tp_size = config, rank, tp_size
        self._side: WorkerSide | None = None
        self._introduction = Introduction()
        self._thread: threading.Thread | None = None
        self._layers: dict[str, int] = {}
        self._step = 0
        self._is_recording = False
        self._failed: set[str] = set()
        self._ack: int | None = None

    @property
    def introduction_path(self) -> str:
        return self._introduction.path

    def register(
        self,
        tensors: dict[str, Any],
        kv_cache_config: Any,
        static_forward_context: Any,
        *,
        model: str,
        num_kv_heads: int,
    ) -> None:
        """vLLM has allocated the cache. Raises LayoutError, KvtError: the engine must not start."""
        from vllm.model_executor.models.utils import extract_layer_index

        cache = build_cache(
            tensors,
            kv_cache_config,
            model=model,
            tp_size=self._tp_size,
            tp_rank=self.rank,
            num_kv_heads=num_kv_heads,
            cell_kernels=opaque_kernels(static_forward_context),
        )
        self._layers = {name: extract_layer_index(name) for name in tensors}
        plane = KvtPlane(self._config, cache)
        self._thread = threading.Thread(
            target=self._introduced, args=(plane,), name="pd-control introduction", daemon=True
        )
        self._thread.start()

    def _introduced(self, plane: KvtPlane) -> None:
        try:
            address = self._introduction.wait()
        except OSError:
            return  # shut down before anybody came
        side = WorkerSide(self._config, self.rank, address, plane, on_lost=self._lost)
        try:
            side.start()
        except Exception as error:
            self._lost(f"registration failed: {error}")
            return
        self._side = side

    def _lost(self, reason: str) -> None:
        """Without its scheduler this worker can promise nothing to anybody; vLLM ends with its workers."""
        log.error("pd-control: rank %d: %s", self.rank, reason)
        os.kill(os.getpid(), signal.SIGTERM)

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self, step: int, plan: bytes | None, failed: list[str]) -> None:
        """Before the forward."""
        self._step, self._failed, self._ack = step, set(failed), None
        self._is_recording = plan is not None and self._side is not None
        if self._is_recording and plan is not None and self._side is not None:
            self._side.start_step(step, plan)

    def layer_done(self, layer_name: str, stream: int) -> None:
        """After one layer's attention."""
        if self._is_recording and self._side is not None:
            self._side.record_event(self._step, self._layers[layer_name], stream)

    def end_step(self) -> None:
        """After the forward; also after a step that computed nothing."""
        if self._is_recording and self._side is not None:
            self._ack = self._side.freeze_step(self._step)
            self._is_recording = False

    def take_failed(self) -> set[str]:
        """Requests that the scheduler half wants to be reported as failed, once."""
        failed, self._failed = self._failed, set()
        return failed

    @property
    def ack(self) -> tuple[int, int, int | None]:
        """(step, rank, highest substep taken)."""
        return self._step, self.rank, self._ack

    def close(self) -> None:
        """Idempotent; no byte moves afterwards."""
        self._introduction.close()
        if self._side is not None:
            self._side.close()
