"""Real vLLM servers in processes of their own, on a CPU: started, asked, inspected, killed.

Everything that a test starts is in a process group of its own and ends with the fixture, whatever happened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
#: On two cores that other jobs use as well, three engines at once have taken up to two minutes.
START_S = 600.0
#: Longer than every deadline that the tests configure.
ANSWER_S = 60.0
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
VOCAB = 512


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


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


@dataclass
class Answer:
    """One HTTP answer. ``tokens`` of each choice, in order; empty unless the status is 200."""

    status: int
    body: dict[str, Any]
    seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        choices = sorted(self.body.get("choices", []), key=lambda c: c["index"])
        return [list(c["token_ids"]) for c in choices]

    @property
    def params(self) -> dict[str, Any]:
        found = self.body.get("kv_transfer_params")
        assert isinstance(found, dict), self.body
        return found


class VllmServer:
    """One ``vllm`` API server and the processes under it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        role: str = "",
        name: str = "",
        control_port: int = 0,
        settings: dict[str, Any] | None = None,
        args: Sequence[str] = (),
        cpu: int | None = None,
        env: dict[str, str] | None = None,
        connector: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.port, self.log, self.control_port = free_port(), log, control_port
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "m", "--host", HOST,
            "--port", str(self.port), "--enforce-eager", "--dtype", "float32",
            "--max-model-len", str(max_model_len), "--block-size", str(BLOCK_TOKENS),
            "--max-num-seqs", "16", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if not (model / "tokenizer.json").exists():
            command += ["--skip-tokenizer-init"]
        if role:
            extra: dict[str, Any] = {"pd_control": settings or {}}
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
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if cpu is None else str(cpu),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment | (env or {}), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.url = f"http://{HOST}:{self.port}"

    # -- life --------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until it serves. Raises with the end of its log if it ended, or did not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.log}: exit {self._process.returncode}\n{self.tail()}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(self.url + "/health", timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self.log}: does not serve\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self, name: str) -> list[int]:
        """Pids in this server's session whose title contains ``name`` (vLLM sets them)."""
        return [
            pid for pid in _pids() if _session(pid) == self._process.pid and name in _command(pid)
        ]

    def kill(self, name: str) -> None:
        """kill -9 of the processes with that title."""
        found = self.processes(name)
        assert found, f"no process {name!r} under {self._process.pid}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_end(self, timeout_s: float = ANSWER_S) -> int:
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """Asks, then kills; every process of the session is gone afterwards."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        for pid in _pids():
            if _session(pid) == self._process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    # -- asking ------------------------------------------------------------------------------------

    def ask(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 8,
        params: dict[str, Any] | None = None,
        *,
        timeout_s: float = ANSWER_S,
        request_id: str = "",
        **more: Any,
    ) -> Answer:
        """One completion, greedy. An HTTP error is an answer too; no answer raises OSError."""
        body: dict[str, Any] = {
            "model": "m", "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), headers
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        seconds = time.monotonic() - began
        if body.get("stream"):
            return Answer(status, _join_stream(text), seconds)
        return Answer(status, json.loads(text), seconds)

    @property
    def control(self) -> str:
        return f"tcp://{HOST}:{self.control_port}"

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time used so far, per process title."""
        found: dict[str, float] = {}
        for pid in _pids():
            if _session(pid) == self._process.pid:
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    ticks = int(fields[11]) + int(fields[12])
                    name = _command(pid).split("\0")[0][:40]
                    found[f"{name}:{pid}"] = ticks / os.sysconf("SC_CLK_TCK")
        return found


def _pids() -> list[int]:
    return [int(p) for p in os.listdir("/proc") if p.isdigit()]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _join_stream(text: bytes) -> dict[str, Any]:
    """The events of a streamed completion as one body."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for line in text.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            whole["error"] = event["error"]
        for choice in event.get("choices", []):
            kept = choices.setdefault(choice["index"], {"index": choice["index"], "token_ids": []})
            kept["token_ids"] += choice.get("token_ids") or []
    return whole | {"choices": list(choices.values())}


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all of them at the same time; results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(c) for c in calls]]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


# -- the two conventions -----------------------------------------------------------------------------


def p_first(p: VllmServer, d: VllmServer, tokens: Sequence[int], n: int = 8, **more: Any) -> Answer:
    """P, then D with what P said."""
    half = p.ask(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    assert half.status == 200, half.body
    return d.ask(tokens, n, half.params, **more)


def both_params(p: VllmServer, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for_p = {"do_remote_decode": True, "transfer_id": transfer_id}
    for_d = {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_host": HOST,
        "remote_port": p.control_port,
    }
    return for_p, for_d


def both_at_once(
    p: VllmServer, d: VllmServer, tokens: Sequence[int], transfer_id: str, n: int = 8, **more: Any
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
def closing(servers: Sequence[VllmServer]) -> Iterator[None]:
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


def leave(server: VllmServer, tokens: Sequence[int], params: dict[str, Any]) -> socket.socket:
    """A client that asks and does not wait: close the socket to leave."""
    body = json.dumps(
        {"model": "m", "prompt": list(tokens), "max_tokens": 8, "kv_transfer_params": params}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    sock = socket.create_connection((HOST, server.port))
    sock.sendall(head.encode() + body)
    return sock
