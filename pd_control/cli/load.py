"""Requests over HTTP with their times taken at the client, and what many of them add up to."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

#: A request sent this long after its time was held back, not merely scheduled by a busy machine.
LATE_S = 0.25


@dataclass(frozen=True)
class Job:
    """One completion to ask for, ``at_s`` after the start of the run."""

    name: str
    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass
class Result:
    """What the client saw. Times are seconds since the request was sent."""

    name: str
    prompt_tokens: int
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between tokens after the first
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    request_id: str = ""  # the server's
    error: str = ""
    late_s: float = 0.0  # how long after its time it was sent


async def complete(
    http: aiohttp.ClientSession,
    url: str,
    job: Job,
    on_text: Callable[[str], None] = lambda text: None,
    **fields: Any,
) -> Result:
    """Stream one completion. Never raises for what a server does: that is ``Result.error``."""
    result = Result(job.name, len(job.prompt))
    body = {
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields
    began = last = time.monotonic()
    try:
        async with http.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                result.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return result
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    result.error = str(event["error"].get("message", event["error"]))
                    return result
                result.request_id = event.get("id", "")
                now = time.monotonic()
                for choice in event.get("choices", ()):
                    new = choice.get("token_ids") or []
                    if new and result.first_token_s is None:
                        result.first_token_s = now - began
                    elif new:
                        result.gaps_s.append(now - last)
                    if new:
                        last = now
                        result.tokens += new
                        on_text(choice.get("text", ""))
                usage = event.get("usage")
                if usage:
                    details = usage.get("prompt_tokens_details") or {}
                    result.cached_tokens = details.get("cached_tokens", 0)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:  # or no JSON
        result.error = str(error) or type(error).__name__
    finally:
        result.total_s = time.monotonic() - began
    if not result.tokens and not result.error:
        result.error = "the stream ended without a token"
    return result


async def run_jobs(
    url: str,
    jobs: Sequence[Job],
    *,
    max_concurrent: int = 256,
    on_done: Callable[[Result], None] = lambda result: None,
    timeout_s: float | None = None,
    **fields: Any,
) -> tuple[list[Result], float]:
    """Send each job at its time; returns results in the order of ``jobs`` and the seconds it took.

    A job whose time comes while ``max_concurrent`` are open waits; its clock starts when it is sent.
    """
    gate = asyncio.Semaphore(max_concurrent)
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        began = loop.time()

        async def one(job: Job) -> Result:
            await asyncio.sleep(max(0.0, began + job.at_s - loop.time()))
            async with gate:
                late_s = loop.time() - began - job.at_s
                result = await complete(http, url, job, **fields)
            result.late_s = late_s
            on_done(result)
            return result

        results = await asyncio.gather(*(one(job) for job in jobs))
        return list(results), loop.time() - began


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile, ``q`` in [0, 100]; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


def spread_ms(values_s: Sequence[float]) -> dict[str, float | None]:
    """Percentiles of seconds, in milliseconds; None of nothing."""
    found = {f"p{q}": percentile(values_s, q) * 1e3 for q in (50, 90, 99)}
    return {k: None if math.isnan(v) else round(v, 3) for k, v in found.items()}


def summarise(results: Sequence[Result], took_s: float) -> dict[str, Any]:
    """Percentiles in milliseconds over the requests that succeeded; counts over all."""
    good = [r for r in results if not r.error]
    firsts = [r.first_token_s for r in good if r.first_token_s is not None]
    gaps = [g for r in good for g in r.gaps_s]
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": sorted({r.error for r in results if r.error})[:5],
        "sent_late": sum(r.late_s > LATE_S for r in results),
        "took_s": round(took_s, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": sum(len(r.tokens) for r in good),
        "output_tokens_per_s": round(sum(len(r.tokens) for r in good) / took_s, 3),
        "first_token_ms": spread_ms(firsts),
        "inter_token_ms": spread_ms(gaps),
    }
