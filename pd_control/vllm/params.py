"""What routers say about a request, in ``kv_transfer_params``, and what P answers.

The keys keep the meanings that they have for vLLM's own connectors. On P (``do_remote_decode``) the
request becomes known under its *reference*: ``transfer_id`` if the router made one, else its request id.
On D (``do_remote_prefill``) the reference is ``transfer_id`` or ``remote_request_id``, and P is
found by ``remote_host`` and ``remote_port``, or, from routers of Mooncake's convention, by the end of
``remote_engine_id``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simple_rpc import Address

#: vLLM puts "<index>_" before the id of each of several samples.
_CHILD_PREFIX = re.compile(r"^(\d+)_(?=.)")
MAX_REFERENCE_CHARS = 256
#: A name or an address, as far as one can tell without asking.
_HOST = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*)|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9]+)?"
)
_PORT = re.compile(r"[0-9]{1,5}")
MAX_SHOWN_CHARS = 80


class ParamsError(ValueError):
    """``kv_transfer_params`` that cannot be followed; the message names key, expected and got."""


def prompt_id(request_id: str) -> str:
    """The part of a vLLM request id that all samples of one prompt have in common. It ends in a random
    suffix of vLLM's own, so two requests never share it, whatever their routers called them."""
    return _CHILD_PREFIX.sub("", request_id)


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """P's half: hold the KV under ``reference`` for ``num_takers`` decoders."""

    reference: str
    num_takers: int = 1


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """D's half: the KV of ``reference`` is at the P whose control address this is."""

    reference: str
    address: str
    engine_id: str = ""


def _shown(value: object) -> str:
    """What somebody gave, for an error: escaped, and no longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_REFERENCE_CHARS:
        raise ParamsError(
            f"{key}: expected at most {MAX_REFERENCE_CHARS} characters, got {_shown(value)}"
        )
    return value


def parse(request_id: str, params: Mapping[str, Any] | None) -> PrefillParams | DecodeParams | None:
    """The part a request plays; None: it is nobody's half.

    Raises:
        ParamsError: it says that it is one and does not say enough.
    """
    if not params:
        return None
    if params.get("mode") == "single":
        raise ParamsError(
            "mode: single-request mode is not possible through vLLM's hooks (a connector cannot add "
            "requests to P); send the request to both, or to P first"
        )
    if params.get("do_remote_decode"):
        takers = params.get("num_takers", 1)
        if type(takers) is not int or not 1 <= takers <= 1024:
            raise ParamsError(f"num_takers: expected 1 to 1024, got {_shown(takers)}")
        reference = _text(params, "transfer_id") or prompt_id(request_id)
        if len(reference) > MAX_REFERENCE_CHARS:
            raise ParamsError(
                f"request id: expected at most {MAX_REFERENCE_CHARS} characters, got {len(reference)}"
            )
        return PrefillParams(reference, takers)
    if not params.get("do_remote_prefill"):
        return None
    reference = _text(params, "transfer_id") or _text(params, "remote_request_id")
    if not reference:
        raise ParamsError("transfer_id: expected the id under which P has the request, got none")
    engine_id = _text(params, "remote_engine_id")
    host, port = _text(params, "remote_host"), params.get("remote_port")
    where = "remote_host, remote_port"
    if not host and port is None and params.get("remote_bootstrap_addr"):
        where = f"remote_engine_id {engine_id!r}: NAME@HOST:PORT, as P's bootstrap server answers"
        host, _, port = engine_id.rpartition("@")[2].rpartition(":")
    if isinstance(port, str) and _PORT.fullmatch(port):
        port = int(port)
    if (
        not _HOST.fullmatch(Address.tcp(host, 0).host)
        or type(port) is not int
        or not 0 < port < 65536
    ):
        raise ParamsError(
            f"{where}: expected P's control address, got {_shown(host)}, {_shown(port)}"
        )
    return DecodeParams(reference, str(Address.tcp(host, port)), engine_id)


def answer(
    *,
    reference: str,
    engine_id: str,
    host: str,
    port: int,
    tp_size: int,
    num_tokens: int,
) -> dict[str, Any]:
    """P's answer: the whole key set of the pull convention, so that routers copy it as they always do.

    Block ids are null: no reference of ours lets anybody read blocks by number.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": None,
        "remote_engine_id": engine_id,
        "remote_request_id": reference,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "push",
        "transfer_id": reference,
    }
