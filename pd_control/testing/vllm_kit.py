"""Real vLLM servers in processes of their own, on a CPU, and the ways in which a prompt is divided over two.

Everything that a test starts is in a process group of its own and ends with the fixture, whatever happened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pd_control.testing.http_process import (
    ANSWER_S,
    END_S,
    HOST,
    Answer,
    HttpProcess,
    HttpServer,
    free_port,
)

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
VOCAB = 512


def tiny_model(folder: Path, num_layers: int = 4, head_dim: int = 32) -> Path:
    """A Llama whose output depends on the whole context; its head size is one that vLLM knows."""
    from pd_control.reference.checkpoint import random_weights, save_folder
    from pd_control.reference.spec import ModelSpec

    if not (folder / "config.json").exists():
        spec = ModelSpec(
            num_layers=num_layers, hidden=4 * head_dim, num_heads=4, num_kv_heads=2,
            head_dim=head_dim, intermediate=256, vocab=VOCAB, context_tokens=8192,
            tied_embeddings=False, name="tiny",
        )  # fmt: skip
        save_folder(spec, random_weights(spec, seed=7), folder)
    return folder


def _python_path() -> dict[str, str]:
    """What this process can import, its children can."""
    return {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


class VllmServer(HttpProcess):
    """One ``vllm`` API server and the processes under it."""

    #: Those that run, for reports of failures.
    running: ClassVar[list[VllmServer]] = []

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        role: str = "",
        name: str = "",
        control_port: int = 0,
        settings: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        args: Sequence[str] = (),
        cpu: int | None = None,
        env: dict[str, str] | None = None,
        connector: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        port, self.control_port = free_port(), control_port
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "m", "--host", HOST,
            "--port", str(port), "--enforce-eager", "--dtype", "float32",
            "--max-model-len", str(max_model_len), "--block-size", str(block_tokens),
            "--max-num-seqs", "16", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if not (model / "tokenizer.json").exists():
            command += ["--skip-tokenizer-init"]
        if role:
            extra = {"pd_control": settings or {}} | (extra or {})
            if control_port:
                extra["control_port"] = control_port
            connector = {
                "kv_connector": "PDControlConnector",
                "kv_connector_module_path": "pd_control.vllm.connector",
                "kv_role": role,
                "kv_connector_extra_config": extra,
                **(transfer or {}),
            }
            if name:
                connector["engine_id"] = name
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        command += args
        environment = _python_path() | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if cpu is None else str(cpu),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0",
        }
        super().__init__(command, port, log, environment | (env or {}))
        self.running.append(self)

    def close(self, wait_s: float = END_S) -> None:
        super().close(wait_s)
        if self in self.running:
            self.running.remove(self)

    @classmethod
    def close_all(cls) -> None:
        for server in list(cls.running):
            server.close()

    @property
    def control(self) -> str:
        return f"tcp://{HOST}:{self.control_port}"

    @property
    def upstream(self) -> str:
        """As `pdctl proxy` wants to be told of a P."""
        return f"{self.url}@{HOST}:{self.control_port}"


class Proxy(HttpProcess):
    """``pdctl proxy`` in front of them."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], mode: str, log: Path, model: str = "m"
    ) -> None:
        """``prefill``: see :attr:`VllmServer.upstream`; ``decode``: URLs."""
        port = free_port()
        command = [sys.executable, "-m", "pd_control.cli", "proxy", "--mode", mode]
        for p in prefill:
            command += ["--prefill", p]
        for d in decode:
            command += ["--decode", d]
        # A second attempt on the same pair would only hide what the first one came to.
        command += ["--retries", "0", "--host", HOST, "--port", str(port)]
        super().__init__(command, port, log, _python_path(), model=model)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all of them at the same time; results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(c) for c in calls]]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


# -- the two conventions -----------------------------------------------------------------------------

#: What a router tells a P that it asks first.
FIRST: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def p_first(
    p: HttpServer, d: HttpServer, tokens: Sequence[int] | str, n: int = 8, **more: Any
) -> Answer:
    """P, then D with what P said."""
    half = p.ask(tokens, 1, FIRST)
    assert half.status == 200, half.body
    return d.ask(tokens, n, half.params, **more)


def both_params(p: VllmServer, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(P's, D's) for both at once."""
    for_p = {"do_remote_decode": True, "transfer_id": transfer_id}
    for_d = {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_host": HOST,
        "remote_port": p.control_port,
    }
    return for_p, for_d


def both_at_once(
    p: VllmServer,
    d: VllmServer,
    tokens: Sequence[int] | str,
    transfer_id: str,
    n: int = 8,
    **more: Any,
) -> Answer:
    """P and D at the same time, joined by an id that neither of them made."""
    for_p, for_d = both_params(p, transfer_id)
    half, answer = at_once(
        [lambda: p.ask(tokens, 1, for_p), lambda: d.ask(tokens, n, for_d, **more)]
    )
    assert half.status == 200, half.body
    assert isinstance(answer, Answer)
    return answer


@contextlib.contextmanager
def closing(servers: Sequence[HttpProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = ANSWER_S) -> None:
    """Waits for something that another process does; fails, naming it, if it never comes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)


def pdctl(*args: str) -> Any:
    """What ``pdctl ARGS --json`` prints."""
    command = [sys.executable, "-m", "pd_control.cli", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.stdout, f"{command}: exit {done.returncode}: {done.stderr}"
    return json.loads(done.stdout)
