"""Prefill and decode on two real vLLM servers, on this machine's CPU: one command.

    tools/vllm_venv.sh .venv-vllm
    .venv-vllm/bin/python -m examples.vllm_pair

Starts P, D and a proxy before them, asks a question with curl, and says what the control plane did. With
``--keep`` everything stays up until Ctrl-C. Everything it starts ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
LOGS = Path("build/vllm-pair")
#: Loading vLLM takes half a minute on a quiet machine, and several on a busy one.
START_S = 600.0
PROGRESS_S = 5.0
END_S = 20.0
QUESTION = "The capital of France is"
#: How the small model was trained to be spoken to.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def in_session(leader: int) -> list[int]:
    """vLLM's engine core leaves its parent's process group, but not its session."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


class Programs:
    """What was started, and its end."""

    def __init__(self) -> None:
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        say(f"starting {name} (log: {LOGS / name}.log)")
        with (LOGS / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | env, start_new_session=True,
            )  # fmt: skip
        self._running.append((name, process))

    def wait_for(self, name: str, url: str) -> None:
        """Until it answers. Exits with a log's end if a program has ended meanwhile."""
        began = told = time.monotonic()
        while time.monotonic() < began + START_S:
            self.check()
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return
            if time.monotonic() > told + PROGRESS_S:
                told = time.monotonic()
                say(f"waiting for {name} ({told - began:.0f} s)")
            time.sleep(0.2)
        sys.exit(f"{url} does not answer after {START_S:g} s")

    def check(self) -> None:
        """Exits, with the end of its log, if a program has ended."""
        for name, process in self._running:
            if process.poll() is not None:
                log = (LOGS / f"{name}.log").read_text(errors="replace").splitlines()
                sys.exit("\n".join(log[-20:]) + f"\n{name} ended with {process.returncode}")

    def close(self) -> None:
        """Everything is gone afterwards, however impatient the user is."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for _, process in reversed(self._running):
            process.terminate()
        deadline = time.monotonic() + END_S
        for _, process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            for pid in in_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def vllm_command(model: str, port: int, role: str, name: str, control_port: int) -> list[str]:
    transfer = {
        "kv_connector": "PDControlConnector",
        "kv_connector_module_path": "pd_control.vllm.connector",
        "kv_role": role,
        "engine_id": name,
        "kv_connector_extra_config": {"control_port": control_port},
    }
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--served-model-name", "smollm2", "--host", HOST, "--port", str(port), "--enforce-eager",
        "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32",
        "--chat-template", CHAT_TEMPLATE,
        "--scheduler-cls", "pd_control.vllm.sleeping.make_scheduler",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip


def model_folder(given: str) -> str:
    """A folder that vLLM loads; the small model is dequantised into a cache once."""
    if given:
        return given
    from pd_control.reference.checkpoint import CheckpointError, prepared

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-control"
    say(f"the small model (SmolLM2-135M), under {cache}")
    try:
        return prepared("smollm2", cache)
    except CheckpointError as error:
        sys.exit(f"{error}; or give --model FOLDER")


def run(arguments: argparse.Namespace, programs: Programs) -> None:
    model = model_folder(arguments.model)
    p_port, d_port, proxy_port, p_control, d_control = (free_port() for _ in range(5))
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    programs.start("prefill", vllm_command(model, p_port, "kv_producer", "p0", p_control), env)
    programs.start("decode", vllm_command(model, d_port, "kv_consumer", "d0", d_control), env)
    proxy = [
        sys.executable, "-m", "pd_control.cli", "proxy", "--mode", arguments.mode,
        "--prefill", f"http://{HOST}:{p_port}@{HOST}:{p_control}",
        "--decode", f"http://{HOST}:{d_port}", "--port", str(proxy_port),
    ]  # fmt: skip
    programs.start("proxy", proxy, env)
    for name, port in (("prefill", p_port), ("decode", d_port), ("proxy", proxy_port)):
        programs.wait_for(name, f"http://{HOST}:{port}/health")
    url = f"http://{HOST}:{proxy_port}"
    body = {"model": "smollm2", "prompt": arguments.prompt, "max_tokens": 24, "temperature": 0}
    answer = ask(f"{url}/v1/completions", body)
    say(f"\n{arguments.prompt}\033[1m{answer['choices'][0]['text']}\033[0m\n")
    pdctl("doctor", "-e", f"{HOST}:{d_control}", "-e", f"{HOST}:{p_control}")
    if arguments.json:
        ready = {
            "proxy": url, "answer": answer["choices"][0]["text"],
            "prefill": {"url": f"http://{HOST}:{p_port}", "control": f"{HOST}:{p_control}"},
            "decode": {"url": f"http://{HOST}:{d_port}", "control": f"{HOST}:{d_control}"},
        }  # fmt: skip
        print(json.dumps(ready), flush=True)
    if arguments.keep:
        say(f"\nproxy {url}; pdctl ps -e {HOST}:{d_control} -e {HOST}:{p_control}; Ctrl-C ends it")
        while True:
            programs.check()
            time.sleep(1.0)


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """With curl, as anybody would."""
    command = ["curl", "-sS", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    say("\n$ " + shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"curl: {done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "choices" not in answer:
        sys.exit(f"no answer: {done.stdout}")
    return answer


def pdctl(*arguments: str) -> None:
    say("$ pdctl " + shlex.join(arguments))
    subprocess.run(
        [sys.executable, "-m", "pd_control.cli", *arguments], check=True, stdout=sys.stderr
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a folder; default: the small real model")
    parser.add_argument("--mode", default="dual", choices=["dual", "sequential"])
    parser.add_argument("--prompt", default=QUESTION)
    parser.add_argument("--keep", action="store_true", help="stay up until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a line with all addresses")
    arguments = parser.parse_args()
    if shutil.which("curl") is None:
        sys.exit("curl is needed")
    programs = Programs()
    # A shell's background jobs ignore SIGINT unless they say otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(arguments, programs)
    except KeyboardInterrupt:
        say("")
        return 130
    finally:
        programs.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
