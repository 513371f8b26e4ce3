"""What `benchmarks.vllm_handoff` measures: the connectors, how each is started and asked, and one cell.

Requests are timed by one thread that does nothing else: bodies are made before the clock starts, and each
request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pd_control.testing.http_process import HOST, free_port
from pd_control.testing.vllm_kit import BLOCK_TOKENS, VOCAB, VllmServer, prompt

#: D's request ends by itself after this when P never gets its half. Ours only: the others have no such
#: setting, or one that counts from elsewhere, and their defaults are minutes.
PARK_S = 12.0
#: NIXL's progress thread in the neutral settings.
NIXL_DELAY_US = 100
SLEEPING = ("--scheduler-cls", "pd_control.vllm.sleeping.make_scheduler")
#: The longest cell takes half a minute on two cores; a peer that hangs is given up after this.
ANSWER_S = 60.0
#: The same for one of the first requests, before anything is measured.
WARM_S = 40.0
KV_BYTES_PER_TOKEN = 8192


@dataclass(frozen=True)
class Setting:
    """What is changed for all rows alike."""

    name: str
    what: str
    cpus: tuple[int | None, int | None]  # of P and D
    env: dict[str, str]


SETTINGS = {
    s.name: s
    for s in (
        Setting(
            "neutral",
            "P's compute thread on CPU 0, D's on CPU 1, undivided on CPU 0; "
            f"NIXL's progress thread looks every {NIXL_DELAY_US} us and its connectors pin nothing",
            (0, 1),
            {"PD_BENCH_NIXL_DELAY_US": str(NIXL_DELAY_US)},
        ),
        Setting(
            "shipped",
            "one compute thread each on any CPU; NIXL's progress thread spins and its connectors "
            "move both workers to the last core",
            (None, None),
            {},
        ),
    )
}  # fmt: skip


@dataclass
class Pair:
    """P and D of one connector, started."""

    p: VllmServer
    d: VllmServer
    engine_id: str
    port: int  # of P's control plane, whatever the connector calls it


Params = Callable[[Pair, str], tuple[dict[str, Any], dict[str, Any] | None]]


@dataclass(frozen=True)
class Connector:
    """One row.

    ``params`` gives what P and what D are asked with; None for D means P first: D gets what P answered.
    """

    name: str
    params: dict[str, Params]  # convention → …
    transfer: Callable[[str, int], dict[str, Any]]  # role, port → --kv-transfer-config
    env: Callable[[str, int], dict[str, str]] = lambda role, port: {}
    args: tuple[str, ...] = ()

    def start(
        self,
        servers: list[VllmServer],
        model: Path,
        logs: Path,
        setting: Setting,
        args: Sequence[str],
        gib: int,
        longest: int,
        attempt: int = 1,
    ) -> Pair:
        """Starts both into ``servers``, so that the caller can close the first if the second fails; does not
        wait for them. Each attempt has logs of its own."""
        port, suffix = free_port(), f"{setting.name}-{self.name}"
        suffix += f"-{attempt}" if attempt > 1 else ""
        for role, cpu in zip(("kv_producer", "kv_consumer"), setting.cpus, strict=True):
            letter = "p" if role == "kv_producer" else "d"
            own = port if letter == "p" else free_port()
            servers.append(
                VllmServer(
                    model,
                    logs / f"{suffix}-{letter}.log",
                    cpu=cpu,
                    args=[*args, *self.args],
                    env={"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_HOST_IP": HOST}
                    | setting.env
                    | self.env(role, own),
                    connector={
                        "kv_role": role,
                        "engine_id": f"{suffix}-{letter}",
                        **self.transfer(role, own),
                    },
                    max_model_len=longest,
                )
            )
        return Pair(servers[0], servers[1], f"{suffix}-p", port)


def _ours(*transports: str) -> Callable[[str, int], dict[str, Any]]:
    def make(role: str, port: int) -> dict[str, Any]:
        return {
            "kv_connector": "PDControlConnector",
            "kv_connector_module_path": "pd_control.vllm.connector",
            "kv_connector_extra_config": {
                "control_port": port,
                "pd_control": {
                    "deadlines": {"park_s": PARK_S},
                    "transfer": {"transports": list(transports)},
                },
            },
        }

    return make


def _peer(name: str, **extra: Any) -> Callable[[str, int], dict[str, Any]]:
    def make(role: str, port: int) -> dict[str, Any]:
        return {
            "kv_connector": name,
            "kv_connector_module_path": "benchmarks._vllm_peers",
            "kv_connector_extra_config": dict(extra),
        }

    return make


def _nixl_env(role: str, port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,sm,self",
    }


def _ours_both(pair: Pair, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"do_remote_decode": True, "transfer_id": key}, {
        "do_remote_prefill": True,
        "transfer_id": key,
        "remote_host": HOST,
        "remote_port": pair.port,
    }


def _p_first(pair: Pair, key: str) -> tuple[dict[str, Any], None]:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }, None


def _push_both(pair: Pair, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"do_remote_decode": True, "do_remote_prefill": False}, {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pair.engine_id,
        "remote_host": HOST,
        "remote_port": pair.port,
        "remote_request_id": f"cmpl-{key}-0",
        "tp_size": 1,
        "pp_size": 1,
    }


def _mooncake_both(pair: Pair, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}, {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pair.engine_id,
        "remote_bootstrap_addr": f"http://{HOST}:{pair.port}",
        "transfer_id": key,
    }


_OURS_PARAMS: dict[str, Params] = {"both": _ours_both, "p_first": _p_first}
CONNECTORS = {
    c.name: c
    for c in (
        Connector("pd-control", _OURS_PARAMS, _ours("cma", "tcp"), args=SLEEPING),
        Connector("pd-control-tcp", _OURS_PARAMS, _ours("tcp"), args=SLEEPING),
        Connector("NixlConnector", {"p_first": _p_first}, _peer("NixlConnector"), _nixl_env),
        Connector("NixlPushConnector", {"both": _push_both}, _peer("NixlPushConnector"), _nixl_env),
        Connector(
            "MooncakeConnector",
            {"both": _mooncake_both},
            _peer("MooncakeConnector", mooncake_protocol="tcp"),
            lambda role, port: {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)},
        ),
    )
}


def benchmark_model(folder: Path) -> Path:
    """Eight layers and 8 KiB of KV a token in float32, and as little to compute as that allows."""
    from pd_control.reference.checkpoint import random_weights, save_folder
    from pd_control.reference.spec import ModelSpec

    spec = ModelSpec(
        num_layers=8, hidden=128, num_heads=2, num_kv_heads=2, head_dim=64, intermediate=128, vocab=VOCAB,
        context_tokens=16384, tied_embeddings=False, name="tiny",
    )  # fmt: skip
    save_folder(spec, random_weights(spec, seed=7), folder)
    return folder


#: Without `--only`. The others are measured beside them only if asked for.
USUAL = ("pd-control", "NixlConnector", "NixlPushConnector", "MooncakeConnector")


# -- asking ----------------------------------------------------------------------------------------


class Body:
    """A request for one token, serialised up to its parameters."""

    def __init__(self, tokens: Sequence[int]) -> None:
        whole = {
            "model": "m", "prompt": list(tokens), "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        self._head = json.dumps(whole)[:-1].encode()

    def with_params(self, params: dict[str, Any] | None) -> bytes:
        tail = (
            b"}" if params is None else b', "kv_transfer_params": %s}' % json.dumps(params).encode()
        )
        return self._head + tail


@dataclass
class Reply:
    at: float  # of its last byte, monotonic
    token: int
    params: dict[str, Any] = field(default_factory=dict)


class AskError(RuntimeError):
    """A server did not answer with a token."""


async def ask(http: aiohttp.ClientSession, server: VllmServer, body: bytes, key: str = "") -> Reply:
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": key} if key else {})
    url = f"{server.url}/v1/completions"
    try:
        async with http.post(url, data=body, headers=headers) as answer:
            text = await answer.read()
            at = time.monotonic()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise AskError(f"{server.log}: no answer: {error!r}") from error
    if answer.status != 200:
        raise AskError(f"{server.log}: HTTP {answer.status}: {text[:300].decode(errors='replace')}")
    found = json.loads(text)
    return Reply(at, found["choices"][0]["token_ids"][0], found.get("kv_transfer_params") or {})


def session() -> aiohttp.ClientSession:
    """vLLM drops idle connections after 5 s, so none is kept; as many at once as are asked for."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
    )


# -- one cell --------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Milliseconds of every request of one cell, of all rounds."""

    first_token: list[float] = field(default_factory=list)  # asked → D's first token
    after: list[float] = field(default_factory=list)  # P's answer → D's first token
    floor: list[float] = field(
        default_factory=list
    )  # D over KV that is local, asked when P had answered
    different: int = 0  # tokens that D answered after a transfer and differently over its own copy


def make_prompts(num_tokens: int, count: int, seed: int) -> list[list[int]]:
    """One token longer than a whole number of blocks: a D that has it computes one, as after a transfer."""
    length = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS + 1
    return [prompt(length, seed * 1000 + i) for i in range(count)]


async def one_round(
    http: aiohttp.ClientSession, pair: Pair, params: Params, prompts: list[list[int]], key: str, into: Samples
) -> None:  # fmt: skip
    """All prompts at once through P and D; then the same again on D alone, each when P had answered it."""
    bodies = [Body(p) for p in prompts]
    began = time.monotonic()

    async def split(i: int) -> tuple[Reply, Reply]:
        own = f"{key}-{i}"
        for_p, for_d = params(pair, own)
        p_body = bodies[i].with_params(for_p)
        if for_d is None:
            half = await ask(http, pair.p, p_body, own)
            return half, await ask(http, pair.d, bodies[i].with_params(half.params), own)
        both = ask(http, pair.p, p_body, own), ask(http, pair.d, bodies[i].with_params(for_d), own)
        half, whole = await asyncio.gather(*both)
        return half, whole

    found = await asyncio.gather(*(split(i) for i in range(len(bodies))))
    first = min(half.at for half, _ in found)
    again = [body.with_params(None) for body in bodies]
    start = time.monotonic()

    async def local(i: int) -> tuple[float, Reply]:
        await asyncio.sleep(max(0.0, start + found[i][0].at - first - time.monotonic()))
        asked = time.monotonic()
        return asked, await ask(http, pair.d, again[i])

    floors = await asyncio.gather(*(local(i) for i in range(len(bodies))))
    for (half, whole), (asked, reply) in zip(found, floors, strict=True):
        into.first_token.append((whole.at - began) * 1e3)
        into.after.append((whole.at - half.at) * 1e3)
        into.floor.append((reply.at - asked) * 1e3)
        into.different += reply.token != whole.token


async def undivided_round(
    http: aiohttp.ClientSession, server: VllmServer, prompts: list[list[int]]
) -> list[float]:
    """Milliseconds to the first token of each, all asked at once."""
    bodies = [Body(p).with_params(None) for p in prompts]
    began = time.monotonic()
    replies = await asyncio.gather(*(ask(http, server, b) for b in bodies))
    return [(r.at - began) * 1e3 for r in replies]


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(last, 2)}


def difference(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {k: round(one[k] - other[k], 2) for k in one}
