"""What a server tells Prometheus about the requests that it serves. Needs ``prometheus_client``.

All of it lives on the server's asyncio loop. Numbers are counted where things happen; what others
count (engine, control plane, RPC) is copied out of them when somebody scrapes: see ``Collector``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric

if TYPE_CHECKING:
    from pd_control.http.proxy import Proxy

#: From one decode step of a tiny model to a prefill that queued behind many: seconds.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Collector(Protocol):
    """What a registry scrapes; ``collect`` must not block."""

    def collect(self) -> Iterable[Metric]: ...


class Meter:
    """Requests, times and, for an engine's face, tokens; in a registry of its own.

    Args:
        outcomes: every value of the label ``outcome``, so that each is there (as 0) from the start.
        sees_tokens: False for a proxy, which passes bytes on.
    """

    def __init__(self, outcomes: Iterable[str], *, sees_tokens: bool = True) -> None:
        self.registry = CollectorRegistry()
        counted = self.registry if sees_tokens else None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry if labels else counted)

        self._requests = counter("pd_requests", "Completions that ended", "outcome")
        for outcome in outcomes:
            self._requests.labels(outcome)
        self._open = Gauge("pd_open_requests", "Completions under way", registry=self.registry)
        self._prompt = counter("pd_prompt_tokens", "Prompt tokens of completions that began")
        self._cached = counter(
            "pd_cached_prompt_tokens", "Of them, tokens whose KV was here before"
        )
        self._generated = counter("pd_generated_tokens", "Tokens given to clients")
        self._first = Histogram(
            "pd_first_token_seconds", "From a request's arrival to its first token",
            buckets=BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._whole = Histogram(
            "pd_request_seconds", "From a request's arrival to its end",
            buckets=BUCKETS_S, registry=self.registry,
        )  # fmt: skip

    def add(self, collector: Collector) -> None:
        """Also show what this one collects."""
        self.registry.register(collector)

    def refused(self) -> None:
        """A request that was no completion at all."""
        self._requests.labels("refused").inc()

    def begin(self, prompt_tokens: int = 0) -> Measured:
        """A completion has arrived; tell the returned object how it goes on."""
        self._open.inc()
        self._prompt.inc(prompt_tokens)
        return Measured(self)

    def _first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def _end(self, outcome: str, cached: int, generated: int, seconds: float) -> None:
        self._open.dec()
        self._requests.labels(outcome).inc()
        self._cached.inc(cached)
        self._generated.inc(generated)
        self._whole.observe(seconds)

    def response(self) -> web.Response:
        """The text of ``/metrics``."""
        return web.Response(
            body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


class ProxyCollector:
    """What a proxy counts by itself: retries, and requests and failures by server."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterator[Metric]:
        retries = self._proxy.num_retries
        yield CounterMetricFamily("pd_proxy_retries", "Attempts after the first", value=retries)
        yield CounterMetricFamily(
            "pd_proxy_recomputed",
            "Requests that D was asked to compute whole, since no P did its half",
            value=self._proxy.num_recomputed,
        )
        sent = CounterMetricFamily(
            "pd_proxy_requests", "Requests sent to a server", labels=["role", "server"]
        )
        failed = CounterMetricFamily(
            "pd_proxy_failures", "Of them, failed by the server", labels=["role", "server"]
        )
        for role, server in self._proxy.upstreams:
            sent.add_metric([role, server.url], server.num_requests)
            failed.add_metric([role, server.url], server.num_failures)
        yield from (sent, failed)


class Measured:
    """One completion under way. :meth:`end` must be called once; later calls do nothing."""

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock = meter, clock
        self._began = clock()
        self._generated = 0
        self._has_first = self._has_ended = False

    def first(self) -> None:
        """Something of the answer is there; only the first call counts."""
        if not self._has_first:
            self._has_first = True
            self._meter._first_token(self._clock() - self._began)

    def tokens(self, count: int) -> None:
        """``count`` more tokens are on their way out."""
        if count:
            self.first()
        self._generated += count

    def end(self, outcome: str, cached: int = 0) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._meter._end(outcome, cached, self._generated, self._clock() - self._began)
