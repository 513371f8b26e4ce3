"""The HTTP faces as others use them: the openai client, curl, and Prometheus, on P, D and the proxy.

Prompts and answers are text; the tiny model's tokens are bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from pd_control.reference.cluster import Cluster
from pd_control.reference.spec import TINY
from tests.system.split_kit import GUARD_S, Farm, open_farm

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

#: (metric, labels in order of their names) → value
Metrics = dict[tuple[str, ...], float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm() -> AsyncIterator[Farm]:
    cluster = Cluster(model="tiny:3", engine_args=["--blocks", "256", "--step-tokens", "64"])
    async with open_farm(cluster) as farm:
        await farm.start("undivided", "undivided", "--split-last-token")
        await farm.start("p", "prefill")
        await farm.start("d", "decode")
        await cluster.start_proxy("proxy", "dual")
        yield farm


def client_of(farm: Farm, name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=farm.child(name).url + "/v1", api_key="none", max_retries=0)


async def metrics(farm: Farm, name: str) -> Metrics:
    async with farm.http.get(farm.child(name).url + "/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = await answer.text()
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def test_a_completion_is_the_undivided_engines(farm: Farm) -> None:
    args = {"model": "tiny", "prompt": "The quick brown fox " * 9, "max_tokens": 12}
    async with client_of(farm, "proxy") as split, client_of(farm, "undivided") as whole:
        assert [m.id async for m in split.models.list()] == ["tiny"]
        answer = await split.completions.create(**args)  # type: ignore[call-overload]
        expected = await whole.completions.create(**args)  # type: ignore[call-overload]
    assert answer.choices[0].text == expected.choices[0].text != ""
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (180, 12)


async def test_a_stream_is_the_same_text_in_pieces(farm: Farm) -> None:
    args = {"model": "tiny", "prompt": "Jumps over the lazy dog " * 5, "max_tokens": 10}
    async with client_of(farm, "proxy") as client:
        stream = await client.completions.create(  # type: ignore[call-overload]
            **args, stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
        whole = await client.completions.create(**args)  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert len(chunks) == 10
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 10


async def test_errors_are_the_clients_own_kinds(farm: Farm) -> None:
    async with client_of(farm, "proxy") as client:
        with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
            await client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature must lie in"):
            await client.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(openai.BadRequestError, match="not supported here: stop"):
            await client.completions.create(model="tiny", prompt="x", stop="y")


async def until_open(farm: Farm, name: str, count: int) -> None:
    """Until that server has ``count`` completions under way."""

    async def turn() -> None:
        # The state of another process can only be asked for.
        while (await metrics(farm, name))["pd_open_requests",] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    await asyncio.wait_for(turn(), GUARD_S)


async def test_a_client_that_leaves_while_p_computes_ends_both_halves(farm: Farm) -> None:
    before = {name: await metrics(farm, name) for name in ("p", "d", "proxy")}
    worker = farm.child("p").info["workers"][0]
    os.kill(worker, signal.SIGSTOP)  # it stays in its first step
    try:
        async with client_of(farm, "proxy") as client:
            task = asyncio.ensure_future(
                client.completions.create(model="tiny", prompt="never " * 60, max_tokens=5)
            )
            await asyncio.gather(until_open(farm, "p", 1), until_open(farm, "d", 1))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(until_open(farm, name, 0) for name in ("p", "d", "proxy")))
    finally:
        os.kill(worker, signal.SIGCONT)
    for name, outcome in (("p", "abort"), ("d", "abort"), ("proxy", "client_left")):
        now, then = (await metrics(farm, name)), before[name]
        row = ("pd_requests_total", outcome)
        assert now[row] == then[row] + 1, name
    await farm.wait_unpinned()


async def test_a_client_that_leaves_its_stream_ends_ds_half(farm: Farm) -> None:
    row = ("pd_requests_total", "abort")
    before = (await metrics(farm, "d"))[row]
    async with client_of(farm, "proxy") as client:
        stream = await client.completions.create(
            model="tiny", prompt="for ever", max_tokens=3000, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
    await until_open(farm, "d", 0)
    assert (await metrics(farm, "d"))[row] == before + 1
    await farm.wait_unpinned()


async def test_curl_as_documented(farm: Farm) -> None:
    """Without a content type of its own, as ``-d`` sends it."""
    body = '{"prompt": "The capital of France is", "max_tokens": 8}'
    process = await asyncio.create_subprocess_exec(
        "curl", "-s", f"{farm.cluster.proxy_url}/v1/completions", "-d", body,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), GUARD_S)
    assert process.returncode == 0
    assert json.loads(output)["usage"]["completion_tokens"] == 8


async def test_metrics_count_what_happens(farm: Farm) -> None:
    before = {name: await metrics(farm, name) for name in ("p", "d", "proxy")}
    prompt = "Count me " * 20  # 180 tokens, 179 of which D gets from P
    async with client_of(farm, "proxy") as client:
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=7)
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=7)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt="x", max_tokens=0)
    await farm.wait_unpinned()
    now = {name: await metrics(farm, name) for name in ("p", "d", "proxy")}

    def grown(name: str, *row: str) -> float:
        return now[name][row] - before[name].get(row, 0.0)

    assert grown("d", "pd_requests_total", "length") == 2
    assert grown("d", "pd_requests_total", "refused") == 1
    assert grown("d", "pd_prompt_tokens_total") == 360
    assert grown("d", "pd_cached_prompt_tokens_total") == 176, (
        "eleven whole blocks, the second time"
    )
    assert grown("d", "pd_generated_tokens_total") == 14
    assert grown("d", "pd_first_token_seconds_count") == 2
    loaded = 179 + 3
    assert grown("d", "pd_kv_loaded_tokens_total") == loaded
    per_token = TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4
    assert grown("d", "pd_kv_loaded_bytes_total") == loaded * per_token
    assert grown("d", "pd_control_leases_total", "load", "decode", "acquired") == 2
    assert grown("d", "pd_control_leases_total", "load", "decode", "released") == 2
    assert now["d"]["pd_control_leased_blocks", "load", "decode"] == 0
    assert now["d"]["pd_kv_blocks", "held"] == 0
    assert now["d"]["pd_kv_blocks", "free"] == 256
    assert grown("d", "pd_steps_total") >= 12
    assert grown("p", "pd_requests_total", "length") == 2
    assert grown("p", "pd_control_events_total", "p_transfer.ok", "prefill") == 2
    assert grown("p", "simple_rpc_events_total", "news.received.SDON") >= 2
    assert now["p"]["pd_control_answers",] == now["d"]["pd_control_answers",] == 1
    assert grown("proxy", "pd_requests_total", "ok") == 2
    assert grown("proxy", "pd_requests_total", "error") == 1
    d_url = farm.child("d").url
    assert grown("proxy", "pd_proxy_requests_total", "decode", d_url) == 3
    assert now["proxy"]["pd_proxy_retries_total",] == before["proxy"]["pd_proxy_retries_total",]


async def test_an_undivided_engine_has_metrics_without_a_control_plane(farm: Farm) -> None:
    found = await metrics(farm, "undivided")
    assert found["pd_kv_blocks", "free"] == 256
    assert not [row for row in found if row[0].startswith(("pd_control", "simple_rpc"))]


async def test_a_p_that_came_back_elsewhere_is_found_again(farm: Farm) -> None:
    """Same HTTP port, another control port: the proxy has asked the old one where it listens. Until it is
    back D serves alone, since its policy is to recompute."""
    port = farm.child("p").url.rpartition(":")[2]
    await farm.cluster.stop("p")
    texts = []
    for name in ("proxy", "undivided"):
        async with client_of(farm, name) as client:
            answer = await client.completions.create(
                model="tiny", prompt="nobody there", max_tokens=5
            )
            texts.append(answer.choices[0].text)
    assert texts[0] == texts[1]
    assert (await metrics(farm, "proxy"))["pd_proxy_recomputed_total",] == 1
    await farm.start("p", "prefill", "--port", port)
    row = ("pd_kv_loaded_tokens_total",)
    before = await metrics(farm, "d")

    async def turn() -> None:
        """Until D gets KV from it. The first ones may still name the old address: D computes them."""
        async with client_of(farm, "proxy") as client:
            while (await metrics(farm, "d"))[row] == before[row]:
                await client.completions.create(
                    model="tiny", prompt="again and again", max_tokens=2
                )

    await asyncio.wait_for(turn(), GUARD_S)
