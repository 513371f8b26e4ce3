"""One address for clients in front of prefill and decode servers.

Each completion goes to one P and one D, chosen round robin. How the two learn of each other is the
*mode*:

``dual``
    both at once, joined by a ``transfer_id`` that the proxy makes; the default.
``sequential``
    P first; what its answer says in ``kv_transfer_params`` goes to D. For servers that hold KV under
    ids of their own.
``single``
    D only; it hands the prompt to a P itself.

A client that disconnects ends both halves: their HTTP requests are cancelled, which each server takes
as an abort. Before the first byte has gone to the client a failed attempt is repeated on the next pair;
after it the error is told and nothing is repeated. If the last attempt ends without KV (P did not do its
half, or D says that it failed), and D's policy for that is ``recompute``, D is asked to compute all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from pd_control.http.completions import (
    MAX_BODY_BYTES,
    BadRequestError,
    error_response,
    no_metrics,
    read_json,
)

if TYPE_CHECKING:  # it needs prometheus_client, which a proxy can do without
    from pd_control.http.metrics import Measured, Meter

log = logging.getLogger(__name__)

MODES = ("dual", "sequential", "single")
#: A server on the same network answers a connect in well under this, or it is not there.
CONNECT_TIMEOUT_S = 3.0
#: A server that sends nothing of a completion for so long is stopped or stuck: longer than the longest
#: wait in a queue and the longest answer that is not streamed.
SILENCE_S = 300.0
#: An event that says an error is short; a longer beginning is none.
MAX_FIRST_EVENT_BYTES = 1 << 16
#: How long a server that refused a connection is passed over while others are left.
PENALTY_S = 2.0

#: A server's control address is believed this long; every answer of it renews that, so only one that
#: was idle, or answers nothing any more, is asked again.
CONTROL_KNOWN_S = 2.0


class UpstreamError(Exception):
    """``server`` did not do its half. ``status`` is what the client gets if nothing else helps;
    ``is_answer``: the server said so itself."""

    def __init__(
        self, server: Upstream, status: int, message: str, *, retry: bool, is_answer: bool = False
    ) -> None:
        super().__init__(message)
        self.server, self.status, self.message = server, status, message
        self.retry, self.is_answer = retry, is_answer


@dataclass
class Upstream:
    """One server. ``control`` is (host, port) of its control plane, asked for when first needed and kept up
    to date by what its answers say."""

    url: str
    control: tuple[str, int] | None = None
    is_asked: bool = True  # not configured; a restarted server may have another one
    asked_at_s: float = -math.inf
    engine_id: str = ""
    unreachable_until: float = 0.0
    num_requests: int = 0
    num_failures: int = 0

    @classmethod
    def parse(cls, text: str) -> Upstream:
        """``http://host:port`` or ``http://host:port@control_host:control_port``.

        Raises:
            ValueError: neither.
        """
        url, _, control = text.partition("@")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port beyond 65535, or none
            good = False
        if not good:
            raise ValueError(f"expected http://host:port[@control_host:port], got {text!r}")
        found = None
        if control:
            host, _, port = control.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"expected control_host:port after the @, got {control!r}")
            found = (host, int(port))
        return cls(parts.geturl().rstrip("/"), found, is_asked=found is None)

    def learn(self, params: Any, now_s: float) -> None:
        """Where its control plane is now, from ``kv_transfer_params`` of an answer."""
        if not self.is_asked or not isinstance(params, dict):
            return
        host, port = params.get("remote_host"), params.get("remote_port")
        if isinstance(host, str) and isinstance(port, int):
            self.control = (host, port)
            self.engine_id = str(params.get("remote_engine_id") or "")
            self.asked_at_s = now_s

    def failed_to_connect(self, now_s: float) -> None:
        self.unreachable_until = now_s + PENALTY_S
        if self.is_asked:
            self.control = None  # whoever comes back there may listen elsewhere


@dataclass
class Pool:
    """Round robin over the servers of one role, those that refused just now last."""

    servers: list[Upstream]
    _turn: itertools.count[int] = field(default_factory=itertools.count)

    def choose(self, now_s: float, avoid: Sequence[Upstream] = ()) -> Upstream:
        start = next(self._turn)
        order = [self.servers[(start + i) % len(self.servers)] for i in range(len(self.servers))]
        return min(order, key=lambda s: (s in avoid, s.unreachable_until > now_s))


def _make_meter(proxy: Proxy) -> Meter | None:
    """None without ``prometheus_client``; ``/metrics`` then says what to install."""
    if find_spec("prometheus_client") is None:
        return None
    from pd_control.http.metrics import Meter, ProxyCollector

    meter = Meter(("ok", "error", "client_left", "refused"), sees_tokens=False)
    meter.add(ProxyCollector(proxy))
    return meter


class Proxy:
    """The aiohttp application. ``retries``: further attempts after the first, on other servers; an attempt
    fails when a server sends nothing for ``silence_s``."""

    def __init__(
        self,
        prefill: Sequence[Upstream],
        decode: Sequence[Upstream],
        *,
        mode: str = "dual",
        retries: int = 1,
        on_failure: str = "",
        silence_s: float = SILENCE_S,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if not decode or (not prefill and mode != "single"):
            raise ValueError(f"mode {mode} needs at least one decode and one prefill server")
        self._prefill, self._decode = Pool(list(prefill)), Pool(list(decode))
        self._mode, self._retries, self._on_failure = mode, retries, on_failure
        self._silence_s = silence_s
        self.num_retries = self.num_recomputed = 0
        self._meter = _make_meter(self)
        self._session: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        self.app.cleanup_ctx.append(self._client)

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._silence_s
        )
        # Servers drop idle connections after a few seconds; a request must never meet one just then.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            yield

    # -- small endpoints ---------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        assert self._session is not None
        try:
            async with self._session.get(
                self._decode.servers[0].url + "/v1/models", timeout=_SMALL
            ) as answer:
                return web.json_response(await answer.json(), status=answer.status)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return error_response(502, f"decode server: {_why(error)}", "upstream_error")

    async def _metrics(self, _: web.Request) -> web.Response:
        return await no_metrics() if self._meter is None else self._meter.response()

    @property
    def upstreams(self) -> list[tuple[str, Upstream]]:
        """Every server with its role."""
        pools = (("prefill", self._prefill), ("decode", self._decode))
        return [(role, server) for role, pool in pools for server in pool.servers]

    async def _health(self, _: web.Request) -> web.Response:
        """200 while at least one server of each role answers."""
        states = await asyncio.gather(
            *(self._probe(s) for s in (*self._prefill.servers, *self._decode.servers))
        )
        split = len(self._prefill.servers)
        groups = {"prefill": states[:split], "decode": states[split:]}
        good = all(any(s["ok"] for s in g) for g in groups.values() if g)
        return web.json_response(
            {"status": "ok" if good else "unavailable", "mode": self._mode, **groups},
            status=200 if good else 503,
        )

    async def _probe(self, server: Upstream) -> dict[str, Any]:
        assert self._session is not None
        row = {"url": server.url, "requests": server.num_requests, "failures": server.num_failures}
        try:
            async with self._session.get(server.url + "/health", timeout=_SMALL) as answer:
                return row | {"ok": answer.status == 200}
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return row | {"ok": False, "error": _why(error)}

    # -- completions -------------------------------------------------------------------------------

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await read_json(http)
        except BadRequestError as error:
            if self._meter is not None:
                self._meter.refused()
            return error_response(error.status, str(error))
        measured = self._meter.begin() if self._meter is not None else None
        sender = _Sender(http, measured)
        outcome = "client_left"  # unless it is still there in the end
        try:
            answer = await self._serve(http.path, body, sender)
            outcome = "ok" if answer.status == 200 and not sender.has_failed else "error"
            return answer
        finally:
            if measured is not None:
                measured.end(outcome)

    async def _serve(self, path: str, body: dict[str, Any], sender: _Sender) -> web.StreamResponse:
        """Attempts until one succeeds, or none is left, or bytes have gone to the client."""
        tried: list[Upstream] = []
        for attempt in range(self._retries + 1):
            now = asyncio.get_running_loop().time()
            p = self._prefill.choose(now, tried) if self._mode != "single" else None
            d = self._decode.choose(now, tried)
            tried += [s for s in (p, d) if s is not None]
            self.num_retries += attempt > 0
            try:
                return await self._attempt(path, body, p, d, sender)
            except UpstreamError as failed:
                error = failed
                log.warning("attempt %d of a completion failed: %s", attempt + 1, error.message)
                if sender.response is not None:
                    return await sender.fail(error.message)
                if not error.retry or attempt == self._retries:
                    break
        # D may be the first to say that P has not done its half; if it cannot be asked, nothing helps.
        is_kv_missing = error.server is p or (p is not None and error.is_answer)
        if error.retry and is_kv_missing and await self._recomputes(d):
            log.warning("%s is asked to compute the prompt by itself", d.url)
            self.num_recomputed += 1
            try:
                return await self._decode_half(
                    path, body, None, f"pd-{uuid.uuid4().hex}", d, sender
                )
            except UpstreamError as last:
                if sender.response is not None:
                    return await sender.fail(last.message)
                error = last
        return error_response(error.status, error.message, "upstream_error")

    async def _recomputes(self, d: Upstream) -> bool:
        """Whether D's last word on KV that does not come is to compute it: by the policy that it is told
        here, else by its own."""
        if self._on_failure in ("fail", "recompute"):
            return self._on_failure == "recompute"
        assert self._session is not None
        try:
            async with self._session.get(d.url + "/pd", timeout=_SMALL) as answer:
                info = await answer.json()
            policy = self._on_failure or info["on_load_failure"]
            return bool((info["after_retries"] if policy == "retry" else policy) == "recompute")
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError):
            return False  # it does not say

    async def _attempt(
        self,
        path: str,
        body: dict[str, Any],
        p: Upstream | None,
        d: Upstream,
        sender: _Sender,
    ) -> web.StreamResponse:
        """One try on one pair. Leaving it, in whatever way, ends both halves."""
        transfer_id = f"pd-{uuid.uuid4().hex}"
        remote: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        if self._on_failure:
            remote["on_failure"] = self._on_failure
        if p is None:
            remote["mode"] = "single"
            return await self._decode_half(path, body, remote, transfer_id, d, sender)
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        is_wrong = most is not None and not (type(most) is int and most >= 1)
        # What D will refuse P must refuse, too, or it would hold KV that nobody asks for.
        half = body | {"max_tokens": most if is_wrong else 1, "stream": False}
        half["request_id"] = transfer_id
        for name in ("max_completion_tokens", "min_tokens", "stream_options"):
            half.pop(name, None)
        half["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        if self._mode == "sequential":
            answer = await self._prefill_half(path, half, p)
            params = answer.get("kv_transfer_params")
            if not isinstance(params, dict):
                raise UpstreamError(
                    p,
                    502,
                    f"{p.url} did not say how to fetch its KV (mode sequential)",
                    retry=False,
                )
            return await self._decode_half(path, body, params, transfer_id, d, sender)
        host, port = await self._control_of(p)
        remote |= {"transfer_id": transfer_id, "remote_host": host, "remote_port": port}
        if p.engine_id:
            remote["remote_engine_id"] = p.engine_id
        prefill = asyncio.ensure_future(self._prefill_half(path, half, p))
        decode = asyncio.ensure_future(
            self._decode_half(path, body, remote, transfer_id, d, sender)
        )
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and prefill.exception() is not None and sender.response is None:
                prefill.result()  # P has failed and D cannot succeed: raise P's own words
            return await decode
        finally:
            for task in (prefill, decode):
                task.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _prefill_half(self, path: str, body: dict[str, Any], p: Upstream) -> dict[str, Any]:
        async with self._post(p, path, body) as answer:
            try:
                result = await answer.json()
            except (aiohttp.ClientError, ValueError) as error:
                p.num_failures += 1
                raise UpstreamError(p, 502, f"{p.url} broke off: {error}", retry=True) from error
        if not isinstance(result, dict):
            return {}
        p.learn(result.get("kv_transfer_params"), asyncio.get_running_loop().time())
        return result

    async def _decode_half(
        self,
        path: str,
        body: dict[str, Any],
        params: dict[str, Any] | None,
        transfer_id: str,
        d: Upstream,
        sender: _Sender,
    ) -> web.StreamResponse:
        """``params``: None for a D that computes the prompt itself."""
        whole = body | {"request_id": f"{transfer_id}-d"}
        whole.pop("kv_transfer_params", None)  # a client's own
        if params is not None:
            whole["kv_transfer_params"] = params
        async with self._post(d, path, whole) as answer:
            try:
                if answer.content_type == "text/event-stream":
                    await sender.send(answer, await _first_event(d, answer))
                async for chunk in answer.content.iter_any():
                    await sender.send(answer, chunk)
            except aiohttp.ClientError as error:
                d.num_failures += 1
                raise UpstreamError(d, 502, f"{d.url} broke off: {error}", retry=True) from error
            return await sender.end(answer)

    @contextlib.asynccontextmanager
    async def _post(
        self, server: Upstream, path: str, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST; raises UpstreamError unless the answer's status is 200."""
        assert self._session is not None
        server.num_requests += 1
        try:
            answer = await self._session.post(server.url + path, json=body)
        except aiohttp.ClientError as error:
            server.num_failures += 1
            if isinstance(error, (aiohttp.ClientConnectorError, asyncio.TimeoutError)):
                server.failed_to_connect(asyncio.get_running_loop().time())
            raise UpstreamError(server, 502, f"{server.url}: {error}", retry=True) from error
        try:
            if answer.status != 200:
                server.num_failures += answer.status >= 500
                message = await _error_message(answer)
                raise UpstreamError(
                    server,
                    answer.status,
                    f"{server.url}: {message}",
                    retry=answer.status >= 500,
                    is_answer=True,
                )
            yield answer
        finally:
            answer.close()

    async def _control_of(self, p: Upstream) -> tuple[str, int]:
        """Where P's control plane listens: configured, told by a recent answer, or asked for."""
        now_s = asyncio.get_running_loop().time()
        if p.control is None or (p.is_asked and now_s - p.asked_at_s > CONTROL_KNOWN_S):
            assert self._session is not None
            try:
                async with self._session.get(p.url + "/pd", timeout=_SMALL) as answer:
                    if answer.status != 200:
                        raise UpstreamError(
                            p, 502, f"{p.url}/pd answered {answer.status}; configure it as "
                            f"{p.url}@control_host:port", retry=True,
                        )  # fmt: skip
                    info = await answer.json()
                p.control = (str(info["control_host"]), int(info["control_port"]))
                p.engine_id = str(info["engine_id"])
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                p.failed_to_connect(asyncio.get_running_loop().time())
                raise UpstreamError(p, 502, f"{p.url}: {_why(error)}", retry=True) from error
            except (ValueError, KeyError, TypeError) as error:
                raise UpstreamError(
                    p,
                    502,
                    f"{p.url}/pd does not say where its control plane is: {error!r}",
                    retry=True,
                ) from error
            p.asked_at_s = now_s
        return p.control


class _Sender:
    """The way back to the client: nothing is sent before the first byte of a good answer."""

    def __init__(self, http: web.Request, measured: Measured | None = None) -> None:
        self._http, self._measured = http, measured
        self.response: web.StreamResponse | None = None
        self.has_failed = False

    async def send(self, answer: aiohttp.ClientResponse, chunk: bytes) -> None:
        await (await self._start(answer)).write(chunk)

    async def end(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = await self._start(answer)
        await response.write_eof()
        return response

    async def fail(self, message: str) -> web.StreamResponse:
        """The answer is under way: an event says what happened, and the stream ends without DONE."""
        assert self.response is not None
        self.has_failed = True
        event = {"error": {"message": message, "type": "upstream_error"}}
        await self.response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await self.response.write_eof()
        return self.response

    async def _start(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        if self.response is None:
            kind = answer.headers.get("Content-Type", "application/json")
            self.response = web.StreamResponse(headers={"Content-Type": kind})
            if self._measured is not None:
                self._measured.first()
            await self.response.prepare(self._http)
        return self.response


async def _first_event(server: Upstream, answer: aiohttp.ClientResponse) -> bytes:
    """The beginning of a stream, up to the end of its first event.

    Raises:
        UpstreamError: it is an error. vLLM streams one, under status 200, if the KV did not come.
    """
    begun = b""
    while b"\n\n" not in begun and len(begun) < MAX_FIRST_EVENT_BYTES:
        chunk = await answer.content.readany()
        if not chunk:
            break
        begun += chunk
    event = begun.partition(b"\n\n")[0].strip()
    if event.startswith(b"data:") and b'"error"' in event:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            error = json.loads(event[5:]).get("error")
            if error is not None:
                server.num_failures += 1
                message = (
                    str(error.get("message") or error) if isinstance(error, dict) else str(error)
                )
                raise UpstreamError(
                    server, 500, f"{server.url}: {message}", retry=True, is_answer=True
                )
    return begun


#: For questions that a server answers at once: one that is stopped still accepts connections.
_SMALL = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)


def _why(error: BaseException) -> str:
    return str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"


async def _error_message(answer: aiohttp.ClientResponse) -> str:
    """The message of an OpenAI-style error body, or the status."""
    try:
        body = await answer.json(content_type=None)
        return str(body["error"]["message"])
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return f"HTTP {answer.status}"
