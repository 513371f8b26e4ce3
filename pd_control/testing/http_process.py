"""Servers in process groups of their own: started, asked over HTTP, killed; and nothing left of them.

Blocking; for tests, drills and benchmarks of engines that this repository does not contain.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
#: On two cores that other jobs use as well, three vLLM engines at once have taken up to three minutes.
START_S = 600.0
#: Longer than every deadline that the tests configure.
ANSWER_S = 60.0
#: After being asked to end.
END_S = 20.0


def free_port() -> int:
    """For programs that cannot be told to take any port and say which."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@dataclass
class Answer:
    """One HTTP answer. ``tokens`` and ``texts`` of each choice, in order; empty unless the status is 200."""

    status: int
    body: dict[str, Any]
    seconds: float

    @property
    def _choices(self) -> list[dict[str, Any]]:
        return sorted(self.body.get("choices", []), key=lambda c: c["index"])

    @property
    def tokens(self) -> list[list[int]]:
        return [list(c["token_ids"]) for c in self._choices]

    @property
    def texts(self) -> list[str]:
        return [c["message"]["content"] if "message" in c else c["text"] for c in self._choices]

    @property
    def params(self) -> dict[str, Any]:
        found = self.body.get("kv_transfer_params")
        assert isinstance(found, dict), self.body
        return found


class HttpServer:
    """A server somewhere, which knows its model under the name ``model``."""

    def __init__(self, url: str, model: str = "m") -> None:
        self.url, self.model = url, model
        self.port = int(url.rpartition(":")[2])

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float = ANSWER_S,
        request_id: str = "",
    ) -> Answer:
        """An HTTP error is an answer too; no answer raises OSError."""
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        seconds = time.monotonic() - began
        if body.get("stream") and status == 200:
            return Answer(status, _join_stream(text), seconds)
        return Answer(status, json.loads(text), seconds)

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
        """One completion, greedy. Raises as :meth:`post`."""
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        return self.post("/v1/completions", body, timeout_s=timeout_s, request_id=request_id)

    def leave(
        self, prompt: Sequence[int], max_tokens: int = 8, params: dict[str, Any] | None = None
    ) -> socket.socket:
        """A client that asks and does not wait: close the socket to leave."""
        request: dict[str, Any] = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True,
        }  # fmt: skip
        if params is not None:
            request["kv_transfer_params"] = params
        body = json.dumps(request).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection((HOST, self.port))
        sock.sendall(head.encode() + body)
        return sock


class HttpProcess(HttpServer):
    """One program that serves HTTP, and all processes in its session."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        env: Mapping[str, str],
        *,
        model: str = "m",
    ) -> None:
        super().__init__(f"http://{HOST}:{port}", model)
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | env,
            )  # fmt: skip

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

    def session(self) -> list[int]:
        """Pids of all its processes."""
        return [pid for pid in _pids() if _session(pid) == self._process.pid]

    def processes(self, name: str) -> list[int]:
        """Those whose title or command line contains ``name``."""
        return [pid for pid in self.session() if name in _command(pid)]

    def signal(self, name: str, number: signal.Signals) -> None:
        """To every process with that title."""
        found = self.processes(name)
        assert found, f"no process {name!r} under {self._process.pid}"
        for pid in found:
            os.kill(pid, number)

    def kill(self, name: str = "") -> None:
        """kill -9 of the processes with that title; of all of them by default."""
        self.signal(name, signal.SIGKILL)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_end(self, timeout_s: float = ANSWER_S) -> int:
        return self._process.wait(timeout_s)

    def close(self, wait_s: float = END_S) -> None:
        """Asks, then kills; every process of the session is gone afterwards."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time used so far, per process title."""
        found: dict[str, float] = {}
        for pid in self.session():
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
    """The events of a streamed answer as one body; of a chat, with ``text`` in the place of deltas."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"events": 0}
    for line in text.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        whole["events"] += 1
        if "error" in event:
            whole["error"] = event["error"]
        for choice in event.get("choices", []):
            kept = choices.setdefault(
                choice["index"], {"index": choice["index"], "token_ids": [], "text": ""}
            )
            kept["token_ids"] += choice.get("token_ids") or []
            delta = choice.get("delta") or {}
            kept["text"] += choice.get("text") or delta.get("content") or ""
    return whole | {"choices": list(choices.values())}
