"""The proxy in front of servers that misbehave: HTTP servers with scripted answers, on one loop.

What well-behaved engines do behind it is shown with the real ones, in tests/system.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pd_control.http.completions import serve_app
from pd_control.http.proxy import Proxy, Upstream

GUARD_S = 30.0
Handler = Callable[["Scripted", web.Request], Awaitable[web.StreamResponse]]


class Scripted:
    """A server whose completions are answered by ``handler``; keeps what it was asked."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.url = ""
        self.policy = ("fail", "fail")
        self.asked: list[dict[str, Any]] = []
        self.num_cancelled = 0
        self.is_asked, self.is_cancelled = asyncio.Event(), asyncio.Event()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        self.asked.append(await http.json())
        self.is_asked.set()
        try:
            return await self.handler(self, http)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.is_cancelled.set()
            raise

    async def pd(self, _: web.Request) -> web.Response:
        info = {"engine_id": "p", "control_host": "127.0.0.1", "control_port": 7, "role": "prefill"}
        policy = dict(zip(("on_load_failure", "after_retries"), self.policy, strict=True))
        return web.json_response(info | policy)


async def good(server: Scripted, _: web.Request) -> web.StreamResponse:
    return web.json_response(
        {"choices": [{"text": server.url}], "kv_transfer_params": {"from": "p"}}
    )


async def never(_: Scripted, __: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def failing(_: Scripted, __: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of order"}}, status=500)


async def refusing(_: Scripted, __: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "n: only 1"}}, status=400)


async def rambling(_: Scripted, __: web.Request) -> web.StreamResponse:
    return web.Response(text="{not json", content_type="application/json")


async def breaking_off(_: Scripted, http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    assert http.transport is not None
    http.transport.abort()
    return response


@asynccontextmanager
async def running(
    prefill: list[Handler], decode: list[Handler], **options: Any
) -> AsyncIterator[tuple[list[Scripted], list[Scripted], str, Proxy]]:
    async with contextlib.AsyncExitStack() as stack:

        async def serve(app: web.Application) -> str:
            runner, port = await serve_app(app, "127.0.0.1", 0)
            stack.push_async_callback(runner.cleanup)
            return f"http://127.0.0.1:{port}"

        async def start(handler: Handler) -> Scripted:
            server = Scripted(handler)
            app = web.Application()
            app.add_routes(
                [web.post("/v1/completions", server.completions), web.get("/pd", server.pd)]
            )
            server.url = await serve(app)
            return server

        ps, ds = [await start(h) for h in prefill], [await start(h) for h in decode]
        proxy = Proxy(
            [Upstream.parse(p.url) for p in ps], [Upstream.parse(d.url) for d in ds], **options
        )
        yield ps, ds, await serve(proxy.app), proxy


async def ask(url: str, **body: Any) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/completions", json={"prompt": "x"} | body) as answer,
    ):
        return answer.status, await answer.content.read()


async def test_both_halves_are_joined_by_one_id() -> None:
    async with running([good], [good]) as ([p], [d], url, _):
        status, body = await ask(url, max_tokens=9, kv_transfer_params={"forged": 1})
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, d.url)
        of_p, of_d = p.asked[0], d.asked[0]
        assert (of_p["max_tokens"], of_p["stream"], of_d["max_tokens"]) == (1, False, 9)
        told = of_d["kv_transfer_params"]
        assert (
            told["transfer_id"] == of_p["request_id"] == of_p["kv_transfer_params"]["transfer_id"]
        )
        assert (told["remote_host"], told["remote_port"]) == ("127.0.0.1", 7)
        assert "forged" not in told


async def test_sequential_mode_gives_d_what_p_says_and_single_mode_asks_no_p() -> None:
    async with running([good], [good], mode="sequential") as (_, [d], url, _):
        assert (await ask(url))[0] == 200
        assert d.asked[0]["kv_transfer_params"] == {"from": "p"}
    async with running([], [good], mode="single", on_failure="fail") as (_, [d], url, _):
        assert (await ask(url))[0] == 200
        params = d.asked[0]["kv_transfer_params"]
        assert (params["mode"], params["on_failure"]) == ("single", "fail")


@pytest.mark.parametrize("bad", [failing, rambling])
async def test_a_half_that_fails_is_tried_on_another_pair(bad: Handler) -> None:
    for prefill, decode in (([bad, good], [never, good]), ([never, good], [failing, good])):
        async with running(prefill, decode) as (ps, ds, url, proxy):
            status, body = await asyncio.wait_for(ask(url), GUARD_S)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, ds[1].url)
            assert proxy.num_retries == 1
            assert sum(s.num_cancelled for s in (*ps, *ds)) == 1, "the other half of the first pair"


async def test_what_a_server_refuses_is_not_tried_again() -> None:
    async with running([refusing], [refusing], retries=5) as ([p], _, url, _):
        status, body = await ask(url, max_tokens=0)
        assert status == 400
        assert b"n: only 1" in body
        assert len(p.asked) == 1
        assert p.asked[0]["max_tokens"] == 0, "P is to refuse it as well"


@pytest.mark.parametrize("mode", ["dual", "sequential"])
@pytest.mark.parametrize(
    ("option", "policy"),
    [
        ("recompute", ("fail", "fail")),
        ("retry", ("fail", "recompute")),
        ("", ("recompute", "fail")),
        ("", ("retry", "recompute")),
    ],
)
async def test_a_d_that_recomputes_serves_alone_while_no_p_does_its_half(
    mode: str, option: str, policy: tuple[str, str]
) -> None:
    """By the proxy's option, or else by what D says of itself."""

    async def alone(server: Scripted, http: web.Request) -> web.StreamResponse:
        with_p = "kv_transfer_params" in await http.json()
        return await (never if with_p else good)(server, http)

    async with running([failing], [alone], mode=mode, on_failure=option) as ([p], [d], url, proxy):
        d.policy = policy
        status, body = await asyncio.wait_for(ask(url, max_tokens=9), GUARD_S)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, d.url)
        assert d.asked[-1]["max_tokens"] == 9
        assert (len(p.asked), proxy.num_retries, proxy.num_recomputed) == (2, 1, 1)
        # What P refuses D refuses as well: nothing to compute.
        p.handler = refusing
        assert (await asyncio.wait_for(ask(url), GUARD_S))[0] == 400
        assert proxy.num_recomputed == 1


@pytest.mark.parametrize("prefill", [failing, never, breaking_off])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_d_that_fails_first_for_want_of_kv_serves_alone(
    prefill: Handler, is_streamed: bool
) -> None:
    """As vLLM's does under its policy `fail`: status 500, or 200 and an error as the stream's first event."""

    async def without_kv(server: Scripted, http: web.Request) -> web.StreamResponse:
        if "kv_transfer_params" not in await http.json():
            return await good(server, http)
        if not is_streamed:
            return await failing(server, http)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for part in (
            b'data: {"err',
            b'or": {"message": "no KV", "code": 500}}\n',
            b"\ndata: [DONE]",
        ):
            await response.write(part)
        return response

    async with running([prefill], [without_kv], on_failure="recompute") as (_, [d], url, proxy):
        status, body = await asyncio.wait_for(ask(url), GUARD_S)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, d.url)
        assert proxy.num_recomputed == 1
    async with running([prefill], [without_kv], on_failure="fail") as (_, _, url, proxy):
        status, _ = await asyncio.wait_for(ask(url), GUARD_S)
        assert status in (500, 502)
        assert proxy.num_recomputed == 0


async def test_a_stream_arrives_as_it_was_sent() -> None:
    """The proxy looks at the first event; text that speaks of errors is none, and no byte is lost."""
    parts = [b"da", b'ta: {"choices": [{"text": "an \\"error\\""}]}\n', b"\nda", b"ta: [DONE]\n\n"]

    async def streaming(_: Scripted, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for part in parts:
            await response.write(part)
        return response

    async with running([good], [streaming]) as (_, _, url, _):
        assert await asyncio.wait_for(ask(url), GUARD_S) == (200, b"".join(parts))

    async def empty(_: Scripted, __: web.Request) -> web.StreamResponse:
        return web.Response(content_type="text/event-stream")

    async with running([good], [empty]) as (_, _, url, _):
        assert await asyncio.wait_for(ask(url), GUARD_S) == (200, b"")


@pytest.mark.parametrize(
    ("option", "policy"),
    [("fail", ("recompute", "recompute")), ("", ("fail", "recompute")), ("", ("retry", "fail"))],
)
async def test_a_d_of_another_policy_does_not(option: str, policy: tuple[str, str]) -> None:
    async with running([failing], [never], on_failure=option) as (_, [d], url, proxy):
        d.policy = policy
        status, body = await asyncio.wait_for(ask(url), GUARD_S)
        assert (status, b"out of order" in body) == (500, True)
        assert all("kv_transfer_params" in asked for asked in d.asked)
        assert proxy.num_recomputed == 0


async def test_after_the_first_byte_an_error_is_told_and_nothing_repeated() -> None:
    async with running([good], [breaking_off], retries=3) as (_, [d], url, _):
        status, body = await asyncio.wait_for(ask(url), GUARD_S)
        assert status == 200
        assert b'"text": "a"' in body
        assert b'"upstream_error"' in body.splitlines()[-2]
        assert b"[DONE]" not in body
        assert len(d.asked) == 1


async def test_a_client_that_leaves_ends_both_halves() -> None:
    async with running([never], [never]) as ([p], [d], url, _):
        task = asyncio.ensure_future(ask(url))
        await asyncio.wait_for(asyncio.gather(p.is_asked.wait(), d.is_asked.wait()), GUARD_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

        ends = asyncio.gather(p.is_cancelled.wait(), d.is_cancelled.wait())
        await asyncio.wait_for(ends, GUARD_S)


@pytest.mark.parametrize("mode", ["dual", "sequential", "single"])
async def test_servers_that_accept_and_say_nothing_cost_one_silence_each(mode: str) -> None:
    async with running([never], [never], mode=mode, silence_s=0.3) as (ps, ds, url, proxy):
        status, body = await asyncio.wait_for(ask(url), GUARD_S)
        assert status == 502
        message = json.loads(body)["error"]["message"]
        assert ds[0].url in message or ps[0].url in message
        assert proxy.num_retries == 1
    async with running([never, good], [never, good], mode=mode, silence_s=0.3) as (_, ds, url, _):
        assert (await asyncio.wait_for(ask(url), GUARD_S))[0] == 200
        assert len(ds[1].asked) == 1


async def test_a_stopped_p_does_not_keep_a_client() -> None:
    """The kernel accepts connections for a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        p = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        async with running([], [good], mode="single") as (_, [d], _, _):
            runner, port = await serve_app(
                Proxy([Upstream.parse(p)], [Upstream.parse(d.url)], retries=0).app, "127.0.0.1", 0
            )
            try:
                status, body = await asyncio.wait_for(ask(f"http://127.0.0.1:{port}"), GUARD_S)
            finally:
                await runner.cleanup()
    assert (status, json.loads(body)["error"]["message"]) == (502, f"{p}: no answer within 3 s")


async def test_nobody_there_is_said_with_the_address() -> None:
    async with running([good], [good], retries=0) as (_, _, _, proxy):
        pass
    lone = Proxy([Upstream.parse("127.0.0.1:1")], [Upstream.parse("127.0.0.1:1")], retries=1)
    runner, port = await serve_app(lone.app, "127.0.0.1", 0)
    try:
        status, body = await asyncio.wait_for(ask(f"http://127.0.0.1:{port}"), GUARD_S)
    finally:
        await runner.cleanup()
    assert status == 502
    assert b"http://127.0.0.1:1" in body
    assert proxy.num_retries == 0


@pytest.mark.parametrize(
    "text", ["", "ftp://x:1", "http://", "x:99999", "x:y", "http://x:1@nowhere", "x:1@y:z"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Upstream.parse(text)


def test_addresses() -> None:
    plain = Upstream.parse("localhost:8100")
    assert (plain.url, plain.control) == ("http://localhost:8100", None)
    assert Upstream.parse("http://h:1/@c:2").control == ("c", 2)
    told = {"remote_host": "n", "remote_port": 3, "remote_engine_id": "e"}
    plain.learn(told, 0.0)
    assert (plain.control, plain.engine_id) == (("n", 3), "e")
    fixed = Upstream.parse("http://h:1@c:2")
    fixed.learn(told, 0.0)
    fixed.failed_to_connect(0.0)
    assert fixed.control == ("c", 2), "what was configured stays"
