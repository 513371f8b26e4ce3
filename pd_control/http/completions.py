"""``/v1/completions`` over a :class:`Front`: parsing, streaming, errors in OpenAI's shape."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pd_control.http.front import DuplicateRequestError, Front
from pd_control.reference.engine import Output, Request
from pd_control.reference.sampling import SamplingParams
from pd_control.reference.tokenizer import Tokenizer

#: A prompt of 8,192 tokens is some 40 KiB of text; token ids in JSON take six bytes each.
MAX_BODY_BYTES = 4 << 20
#: What the parser takes; everything else is refused by name rather than silently ignored.
KNOWN_FIELDS = frozenset(
    [
        "model",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stream",
        "stream_options",
        "n",
        "echo",
        "user",
        "ignore_eos",
        "return_token_ids",
        "kv_transfer_params",
        "request_id",
    ]
)


class BadRequestError(ValueError):
    """What the client sent cannot be served; the message says field, expected and got, ``status`` how."""

    status = 400


@dataclass(frozen=True)
class Completion:
    """A parsed request body."""

    prompt: list[int]
    sampling: SamplingParams
    stream: bool
    return_token_ids: bool
    include_usage: bool
    control: dict[str, Any] | None
    request_id: str
    model: str


def _field(body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        want = kind.__name__ if isinstance(kind, type) else "/".join(k.__name__ for k in kind)
        raise BadRequestError(f"{name}: expected {want}, got {type(value).__name__}")
    return value


def parse(body: Any, tokenizer: Tokenizer) -> Completion:
    """Validate a JSON body.

    Raises:
        BadRequestError: with the field's name.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"expected a JSON object, got {type(body).__name__}")
    unknown = sorted(set(body) - KNOWN_FIELDS)
    if unknown:
        raise BadRequestError(f"not supported here: {', '.join(unknown)}")
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(type(t) is int for t in prompt):
        ids = prompt
    else:
        raise BadRequestError("prompt: expected a string or a list of token ids")
    if not ids:
        raise BadRequestError("prompt: expected at least one token")
    if _field(body, "n", int, 1) != 1:
        raise BadRequestError("n: only 1 is supported by the reference engine")
    if _field(body, "echo", bool, False):
        raise BadRequestError("echo: only false is supported by the reference engine")
    most = _field(body, "max_tokens", int, _field(body, "max_completion_tokens", int, 16))
    try:
        sampling = SamplingParams(
            max_tokens=most,
            temperature=float(_field(body, "temperature", (int, float), 0.0)),
            top_p=float(_field(body, "top_p", (int, float), 1.0)),
            seed=_field(body, "seed", int, 0),
            ignore_eos=_field(body, "ignore_eos", bool, False),
        )
    except (ValueError, OverflowError) as error:  # out of range, or of what a float holds
        raise BadRequestError(str(error)) from error
    options = _field(body, "stream_options", dict, {})
    return Completion(
        prompt=ids,
        sampling=sampling,
        stream=_field(body, "stream", bool, False),
        return_token_ids=_field(body, "return_token_ids", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        control=_field(body, "kv_transfer_params", dict, None),
        request_id=_field(body, "request_id", str, "") or f"cmpl-{uuid.uuid4().hex}",
        model=_field(body, "model", str, ""),
    )


def _loads(text: str) -> Any:
    """JSON without half surrogate pairs: they can be escaped, but nothing can carry them on as UTF-8."""
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


async def read_json(http: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        BadRequestError: it is none.
    """
    try:
        body = await http.json(loads=_loads)
    except web.HTTPRequestEntityTooLarge:
        refusal = BadRequestError(f"expected a body of at most {MAX_BODY_BYTES} bytes")
        refusal.status = 413
        raise refusal from None
    except (ValueError, LookupError, RecursionError) as error:  # syntax, bytes, charset, depth
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError(f"expected a JSON object, got {type(body).__name__}")
    return body


class TextStream:
    """Token ids in, text out; a character that is not complete yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def push(self, ids: list[int], *, last: bool) -> str:
        """The text that became certain with these ids."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        new = text[self._sent :]
        self._sent = len(text)
        return new


def error_response(status: int, message: str, kind: str = "invalid_request_error") -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind}}, status=status)


def _engine_error(output: Output) -> web.Response:
    if output.is_refusal:
        return error_response(400, output.error)
    return error_response(500, output.error, "engine_error")


async def no_metrics() -> web.Response:
    return error_response(
        501, "no metrics here: they need pip install 'pd-control[prometheus]'", "not_available"
    )


class CompletionServer:
    """The aiohttp application of one engine.

    Args:
        model: the name that ``/v1/models`` and answers carry.
        health: returns "" while the engine can serve, else why not (answered with 503).
        metrics: answers ``/metrics``.
        on_refused: told of each request that is answered with an error before an engine sees it.
        answer_params: what goes into an answer as ``kv_transfer_params``, for routers that ask P first.
        control_info: what ``/pd`` tells a proxy: engine_id, control_host, control_port, role,
            on_load_failure, after_retries.
    """

    def __init__(
        self,
        front: Front,
        tokenizer: Tokenizer,
        model: str,
        *,
        health: Callable[[], str] = lambda: "",
        metrics: Callable[[], Awaitable[web.Response]] = no_metrics,
        on_refused: Callable[[], None] = lambda: None,
        answer_params: Callable[[Request], dict[str, Any] | None] = lambda request: None,
        control_info: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self._front, self._tokenizer, self._model = front, tokenizer, model
        self._health, self._metrics, self._answer_params = health, metrics, answer_params
        self._control_info, self._on_refused = control_info, on_refused
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._get_health),
                web.get("/metrics", self._get_metrics),
                web.get("/pd", self._get_control),
            ]
        )

    async def _get_control(self, _: web.Request) -> web.Response:
        info = self._control_info()
        if info is None:
            return error_response(404, "this engine has no control plane", "not_found")
        return web.json_response(info)

    async def _get_health(self, _: web.Request) -> web.Response:
        reason = self._health()
        if reason:
            return error_response(503, reason, "unavailable")
        return web.json_response({"status": "ok", "open_requests": self._front.num_open})

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return await self._metrics()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self._model, "object": "model"}]}
        )

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        parsed = await self._parsed(http)
        if isinstance(parsed, web.Response):
            self._on_refused()
            return parsed
        request = Request(parsed.request_id, parsed.prompt, parsed.sampling, control=parsed.control)
        try:
            if parsed.stream:
                return await self._stream(http, parsed, request)
            return await self._whole(parsed, request)
        except DuplicateRequestError as error:
            self._on_refused()
            return error_response(409, str(error))

    async def _parsed(self, http: web.Request) -> Completion | web.Response:
        """The request in the body, or the answer that refuses it."""
        try:
            parsed = parse(await read_json(http), self._tokenizer)
        except BadRequestError as error:
            return error_response(error.status, str(error))
        if parsed.model not in ("", self._model):
            message = f"the model {parsed.model!r} is not served here, {self._model!r} is"
            return error_response(404, message, "model_not_found")
        return parsed

    def _base(self, parsed: Completion) -> dict[str, Any]:
        return {
            "id": parsed.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
        }

    def _usage(self, parsed: Completion, num_output: int, num_cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(parsed.prompt),
            "completion_tokens": num_output,
            "total_tokens": len(parsed.prompt) + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    async def _whole(self, parsed: Completion, request: Request) -> web.Response:
        ids: list[int] = []
        last: Output | None = None
        async with aclosing(self._front.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                ids += output.tokens
                last = output
        assert last is not None
        if last.finish_reason == "error":
            return _engine_error(last)
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(ids),
            "finish_reason": last.finish_reason,
            "logprobs": None,
        }
        if parsed.return_token_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = parsed.prompt
        body = self._base(parsed) | {
            "choices": [choice],
            "usage": self._usage(parsed, len(ids), last.num_cached),
        }
        params = self._answer_params(request)
        if params is not None:
            body["kv_transfer_params"] = params
        return web.json_response(body)

    async def _stream(
        self, http: web.Request, parsed: Completion, request: Request
    ) -> web.StreamResponse:
        """Server-sent events. An error before the first token is an HTTP error; after it, an event."""
        response: web.StreamResponse | None = None
        text = TextStream(self._tokenizer)
        count = 0
        async with aclosing(self._front.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if response is None and output.finish_reason == "error":
                    return _engine_error(output)
                if response is None:
                    response = web.StreamResponse(
                        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                    )
                    await response.prepare(http)
                count += len(output.tokens)
                event = self._event(parsed, output, text)
                if output.finish_reason and parsed.include_usage:
                    event["usage"] = self._usage(parsed, count, output.num_cached)
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        assert response is not None
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _event(self, parsed: Completion, output: Output, text: TextStream) -> dict[str, Any]:
        if output.finish_reason == "error":
            return {"error": {"message": output.error, "type": "engine_error"}}
        choice: dict[str, Any] = {
            "index": 0,
            "text": text.push(output.tokens, last=output.finish_reason is not None),
            "finish_reason": output.finish_reason,
            "logprobs": None,
        }
        if parsed.return_token_ids:
            choice["token_ids"] = output.tokens
        return self._base(parsed) | {"choices": [choice]}


async def serve_app(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start serving; returns the runner (``await runner.cleanup()`` stops it) and the real port.

    Handlers are cancelled when their client disconnects, which aborts the request behind them. Raises
    OSError, naming the address, if it cannot be had.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        # asyncio's own text repeats the address; numbers below zero are the resolver's.
        code = error.errno or 0
        why = os.strerror(code) if code > 0 else error.strerror or str(error)
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {why}") from error
    return runner, int(runner.addresses[0][1])
