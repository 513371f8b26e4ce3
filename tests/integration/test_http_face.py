"""The OpenAI-compatible face over a real engine: what curl and the openai client rely on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from pd_control.http.completions import (
    MAX_BODY_BYTES,
    BadRequestError,
    CompletionServer,
    TextStream,
    parse,
    serve_app,
)
from pd_control.http.front import Front
from pd_control.reference.engine import Engine, EngineConfig
from pd_control.reference.spec import TINY
from pd_control.reference.tokenizer import ByteTokenizer

#: One engine serves all of these tests, on one loop.
on_one_loop = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Serving:
    url: str
    front: Front
    engine: Engine
    http: aiohttp.ClientSession

    async def post(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + "/v1/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def events(self, **body: Any) -> list[Any]:
        async with self.http.post(self.url + "/v1/completions", json=body | {"stream": True}) as a:
            assert a.status == 200, await a.text()
            assert a.content_type == "text/event-stream"
            lines = [line async for line in a.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving() -> AsyncIterator[Serving]:
    front = Front()
    engine = Engine(EngineConfig(num_blocks=64, block_tokens=8), TINY, front.on_output)
    await asyncio.to_thread(engine.start)
    front.attach(engine)
    server = CompletionServer(front, ByteTokenizer(), "tiny")
    runner, port = await serve_app(server.app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        yield Serving(f"http://127.0.0.1:{port}", front, engine, http)
    await runner.cleanup()
    await asyncio.to_thread(engine.close)


@on_one_loop
async def test_a_completion_whole_and_streamed_is_the_same(serving: Serving) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "ignore_eos": True}
    status, whole = await serving.post(**body, return_token_ids=True)
    assert status == 200
    choice = whole["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (6, "length")
    assert whole["usage"]["prompt_tokens"] == 5
    assert whole["usage"]["completion_tokens"] == 6
    events = await serving.events(**body, stream_options={"include_usage": True})
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 5 + ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 6
    status, by_ids = await serving.post(**body | {"prompt": list(b"hello")})
    assert by_ids["choices"][0]["text"] == choice["text"]


@on_one_loop
async def test_a_client_that_disconnects_ends_its_request(serving: Serving) -> None:
    body = {"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with serving.http.post(serving.url + "/v1/completions", json=body) as answer:
        await answer.content.readline()
        answer.close()
    await serving.front.wait_idle()
    status, after = await serving.post(prompt="x", max_tokens=1)
    assert status == 200
    assert after["choices"]
    assert serving.engine.pool.num_held == 0


@on_one_loop
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "prompt: expected a string or a list of token ids"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"prompt": "x", "max_tokens": "7"}, 400, "max_tokens: expected int, got str"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature must lie in"),
        ({"prompt": "x", "temperature": 10**400}, 400, "too large"),
        ({"prompt": "x", "seed": 1 << 64}, 400, "seed must be of 64 bits"),
        ({"prompt": "half of a pair: \ud800"}, 400, "surrogates not allowed"),
        ({"prompt": "x", "logprobs": 3}, 400, "not supported here: logprobs"),
        ({"prompt": "x", "n": 2}, 400, "n: only 1"),
        ({"prompt": "x", "model": "other"}, 404, "'tiny' is"),
        ({"prompt": [100000]}, 400, "token ids must lie in [0, 512)"),
        ({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}, 400, "no decode role"),
    ],
)
async def test_what_cannot_be_served_is_said_in_openai_shape(
    serving: Serving, body: dict[str, Any], status: int, message: str
) -> None:
    got, answer = await serving.post(**body)
    assert (got, message in answer["error"]["message"]) == (status, True), answer


@on_one_loop
async def test_a_body_that_is_too_large_is_said_in_openai_shape(serving: Serving) -> None:
    status, answer = await serving.post(prompt="x" * MAX_BODY_BYTES)
    assert (status, str(MAX_BODY_BYTES) in answer["error"]["message"]) == (413, True), answer


@on_one_loop
async def test_an_address_that_is_taken_is_named(serving: Serving) -> None:
    port = int(serving.url.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await serve_app(web.Application(), "127.0.0.1", port)
    with pytest.raises(
        OSError, match=r"cannot listen on no\.such\.host\.invalid:1: (?!Unknown error)"
    ):
        await serve_app(web.Application(), "no.such.host.invalid", 1)


@on_one_loop
@pytest.mark.parametrize(
    "odd",
    [
        {"seed": (1 << 64) - 1, "temperature": 1.0},
        {"seed": -(1 << 63), "temperature": 1.0},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 5e-324},
        {"prompt": "\0"},
    ],
    ids=str,
)
async def test_the_extremes_of_what_is_allowed_are_served(
    serving: Serving, odd: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "ignore_eos": True} | odd
    status, answer = await serving.post(**body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 2


@on_one_loop
async def test_the_small_endpoints(serving: Serving) -> None:
    async with serving.http.get(serving.url + "/health") as answer:
        assert await answer.json() == {"status": "ok", "open_requests": 0}
    async with serving.http.get(serving.url + "/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "tiny"
    async with serving.http.post(serving.url + "/v1/completions", data=b"{") as answer:
        assert answer.status == 400


def test_half_a_character_waits_for_its_other_half() -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    stream = TextStream(Bytes())
    euro = list("a€b".encode())
    assert [stream.push([i], last=False) for i in euro] == ["a", "", "", "€", "b"]
    assert stream.push([euro[1]], last=True) == "\N{REPLACEMENT CHARACTER}"


def test_parse_refuses_what_is_no_object() -> None:
    with pytest.raises(BadRequestError, match="expected a JSON object, got list"):
        parse([], ByteTokenizer())
