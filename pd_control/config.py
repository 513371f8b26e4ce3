"""Configuration: one frozen, validated object from Python, the environment or a TOML file.

Every name carries its unit. An unknown key is refused with the nearest valid one; a wrong value is
refused with what was expected, what was given and where. Nothing is read at import, and nothing is
read later: a `Config` in hand is the whole truth, and `pdctl config` prints it.

Precedence of `load`: keyword arguments, then environment (`PD_CONTROL__SECTION__NAME`), then file.
"""

# ruff: noqa: RUF009  `setting` is dataclasses.field with documentation; it makes nothing mutable.
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from pd_control import dial
from pd_control._schema import (
    ConfigError,
    UnknownSettingError,
    build,
    check,
    hints,
    parse_text,
    setting,
    to_mapping,
)
from pd_control.protocol import settings as core
from pd_control.protocol.events import OnFailure
from simple_rpc.auth import Secret

# tomli is the same parser under its older name; 3.10 has it as a dependency.
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

__all__ = [
    "Config",
    "ConfigError",
    "Deadlines",
    "Discovery",
    "Inspect",
    "Network",
    "Policy",
    "Transfer",
    "UnknownSettingError",
    "load",
]

ENV_PREFIX = "PD_CONTROL__"
MAX_INSTANCE_CHARS = 64  # instance ids travel in every handshake and transfer id
MAX_CONFIG_FILE_BYTES = 1 << 20  # a configuration larger than this is some other file

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every wait of the system, who owns it, and what happens when it ends. All in seconds."""

    connect_s: float = setting(
        3.0,
        low=0.01,
        high=60,
        unit="s",
        doc="Caller: connect and HELLO. Then UNREACHABLE → policy.",
    )
    blocks_s: float = setting(
        60.0, low=0.01, high=3600, unit="s", doc="D: waiting for free blocks. Then FAILED(BUSY)."
    )
    grant_s: float = setting(
        5.0,
        low=0.01,
        high=60,
        unit="s",
        doc="D: a worker's acknowledgement of a grant opened or closed. Then that worker is fatal "
        "for its engine; its blocks stay leased.",
    )
    park_s: float = setting(
        10.0,
        low=0.01,
        high=600,
        unit="s",
        doc="P: a TRANSFER_KV for a request not known yet; also how long an ABORT for something "
        "unknown is remembered. Then NOT_FOUND.",
    )
    queue_s: float = setting(
        60.0,
        low=0.01,
        high=3600,
        unit="s",
        doc="D: accepted by P, not STARTED. Then CLOSING → policy.",
    )
    progress_s: float = setting(
        10.0,
        low=0.01,
        high=600,
        unit="s",
        doc="D's worker: STARTED and no byte placed for this long. Then a TIMEOUT completion.",
    )
    load_s: float = setting(
        120.0, low=0.01, high=3600, unit="s", doc="D: the whole load. Then CLOSING → policy."
    )
    hold_s: float = setting(
        30.0,
        low=0.01,
        high=3600,
        unit="s",
        doc="P: has KV and no taker; renewed by a live D. Then EXPIRED, released.",
    )
    hold_max_s: float = setting(
        120.0, low=0.01, high=7200, unit="s", doc="P: end of all renewals of a hold. Then EXPIRED."
    )
    pressure_hold_s: float = setting(
        1.0,
        low=0,
        high=3600,
        unit="s",
        doc="P: youngest age at which a hold may be let go because requests wait for blocks.",
    )
    admit_s: float = setting(
        10.0,
        low=0.01,
        high=600,
        unit="s",
        doc="P: its engine's answer to an admission. Then NOT_FOUND.",
    )
    send_progress_s: float = setting(
        30.0,
        low=0.01,
        high=600,
        unit="s",
        doc="P's worker: a send without progress. Then DRAINING.",
    )
    send_s: float = setting(
        120.0, low=0.01, high=3600, unit="s", doc="P: a whole send. Then DRAINING."
    )
    substep_s: float = setting(
        5.0,
        low=0.01,
        high=60,
        unit="s",
        doc="P and its worker: after the end of its step, an early substep is refused and a "
        "missing acknowledgement counts as unknown.",
    )
    tombstone_s: float = setting(
        60.0,
        low=0.01,
        high=3600,
        unit="s",
        doc="P: how long GONE is answered at once for a request that was let go.",
    )
    heartbeat_s: float = setting(
        1.0,
        low=0.01,
        high=60,
        unit="s",
        doc="Both: interval of the pushed heartbeat of a link; three missed are PEER_LOST.",
    )
    # A process that dies is noticed by its closed socket; the beat is for one that hangs, and an
    # overloaded host must not pass for that: what it ends is an engine.
    worker_heartbeat_s: float = setting(
        5.0,
        low=0.01,
        high=60,
        unit="s",
        doc="Worker and its scheduler: interval of the heartbeat between them; three missed end "
        "the worker.",
    )

    def __post_init__(self) -> None:
        check(self, "deadlines")
        if self.hold_max_s < self.hold_s:
            raise ConfigError(
                "deadlines.hold_max_s",
                f"at least deadlines.hold_s ({self.hold_s:g} s)",
                f"{self.hold_max_s:g} s",
            )
        if self.load_s < self.progress_s:
            raise ConfigError(
                "deadlines.load_s",
                f"at least deadlines.progress_s ({self.progress_s:g} s)",
                f"{self.load_s:g} s",
            )
        # A call may be repeated for as long as it lives, and must not be executed twice.
        if self.tombstone_s < self.connect_s:
            raise ConfigError(
                "deadlines.tombstone_s",
                f"at least deadlines.connect_s ({self.connect_s:g} s)",
                f"{self.tombstone_s:g} s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where this process listens and how it proves who it is."""

    listen: str = setting(
        "tcp://127.0.0.1:0",
        doc="Control address of the scheduler process; port 0 picks a free one.",
    )
    advertise_host: str | None = setting(
        None, doc="Host that peers are told to connect to; default: the one listened on."
    )
    worker_socket_dir: Path | None = setting(
        None,
        doc="Folder of the Unix sockets between a scheduler and its workers; default: a "
        "private temporary folder.",
    )
    data_listen: str = setting(
        "tcp://127.0.0.1:0", doc="Address on which each D worker accepts data connections."
    )
    data_off_loopback: bool = setting(
        False, doc="Allow data connections off loopback. They are authenticated, not encrypted."
    )
    secret: str | None = setting(
        None, secret=True, doc="Shared secret of the handshake. Prefer `secret_file`."
    )
    secret_file: Path | None = setting(
        None,
        doc="File that holds the shared secret (mode 0600); surrounding white space is not part of "
        "it.",
    )
    tls_cert_file: Path | None = setting(None, doc="Certificate chain (PEM) for the control plane.")
    tls_key_file: Path | None = setting(None, doc="Private key (PEM) for `tls_cert_file`.")
    tls_ca_file: Path | None = setting(None, doc="CA bundle (PEM) that peers are checked against.")
    insecure: bool = setting(
        False, doc="Allow listening off loopback with neither TLS nor a secret."
    )
    dial: tuple[str, ...] = setting(
        (),
        doc="Control addresses that D may connect to, such as `tcp://10.0.3.*:5600`; none: any. `*` stands "
        "for a part of one label of a name or address, of a port, or of one step of a path. Requests name "
        "their P, so without this whoever may send some can make D connect anywhere.",
    )
    max_body_bytes: int = setting(
        4 << 20, low=4096, high=1 << 30, unit="bytes", doc="Largest frame body accepted."
    )
    max_connections: int = setting(
        4096, low=8, high=1 << 20, doc="Control connections accepted at one time."
    )

    def __post_init__(self) -> None:
        check(self, "network")
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError(
                "network.secret", "only one of secret and secret_file", "both of them"
            )
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError(
                "network.tls_cert_file", "both tls_cert_file and tls_key_file, or neither", "one"
            )
        for name, value in (("listen", self.listen), ("data_listen", self.data_listen)):
            if not value.startswith(("tcp://", "unix://")):
                raise ConfigError(f"network.{name}", "tcp://HOST:PORT or unix:///PATH", repr(value))
        try:
            dial.matcher(self.dial)
        except ValueError as error:
            raise ConfigError("network.dial", "patterns of addresses", str(error)) from None

    def may_dial(self, address: str) -> bool:
        """Whether D may connect to a control address, as a request or a source of peers gave it."""
        return not self.dial or dial.is_allowed(self.dial, address)

    def load_secret(self) -> Secret | None:
        """The shared secret, from either place. Raises ConfigError saying what is wrong with it."""
        try:
            if self.secret_file is not None:
                return Secret.from_file(str(self.secret_file))
            return None if self.secret is None else Secret(self.secret.encode())
        except (OSError, ValueError) as e:
            where = "network.secret" if self.secret_file is None else "network.secret_file"
            raise ConfigError(where, "a usable secret", str(e)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """How peers are found."""

    peers: Mapping[str, str] = setting(
        factory=dict, doc="Static peers: instance id → control address."
    )
    directory: Path | None = setting(
        None, doc="Folder in which each instance keeps a file about itself (file-based discovery)."
    )
    refresh_s: float = setting(
        2.0,
        low=0.05,
        high=600,
        unit="s",
        doc="How often a live instance touches its file; a file untouched for three of these is "
        "stale.",
    )
    choose: Literal["round_robin", "least_loaded"] = setting(
        "least_loaded", doc="How D chooses a P: in turn, or by the queue that each P reports."
    )

    def __post_init__(self) -> None:
        check(self, "discovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What D does when a load fails, and what it asks of P."""

    on_load_failure: Literal["fail", "recompute", "retry"] = setting(
        "recompute", doc="Per engine; a request may carry its own."
    )
    max_attempts: int = setting(
        2, low=1, high=10, doc="Attempts in all under `retry`, the first included."
    )
    after_retries: Literal["fail", "recompute"] = setting(
        "recompute", doc="What follows when the attempts of `retry` are used up."
    )
    recompute_tail_tokens: int = setting(
        1,
        low=0,
        high=1024,
        unit="tokens",
        doc="Prompt tokens at the end that D computes itself; 1 gives it the logits of the last.",
    )
    generation: Literal["step", "bypass", "substep"] = setting(
        "substep",
        doc="How soon P sends for a TRANSFER_KV: with the next main step; complete KV at once; also "
        "into the running step.",
    )

    def __post_init__(self) -> None:
        check(self, "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The data plane."""

    transports: tuple[str, ...] = setting(
        ("cma", "tcp"), doc="Transports offered, best first; the first that both sides can use is."
    )
    checksum: bool = setting(False, doc="CRC32C of what was sent against what was placed.")

    def __post_init__(self) -> None:
        check(self, "transfer")
        if not self.transports:
            raise ConfigError("transfer.transports", "at least one transport", "an empty list")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what one process remembers. Exceeding one is answered BUSY, never by growing."""

    max_requests: int = setting(100_000, low=1, high=10_000_000, doc="Requests in flight.")
    max_parked: int = setting(
        65_536, low=1, high=10_000_000, doc="P: transfers parked for a request not known yet."
    )
    max_tombstones: int = setting(
        65_536, low=1, high=10_000_000, doc="P: requests let go and still answered GONE."
    )

    max_substeps_per_step: int = setting(
        1024, low=1, high=1_000_000, doc="P: substeps of one step; beyond it, wait for its end."
    )
    max_calls_per_peer: int = setting(
        128,
        low=1,
        high=1024,
        doc="D: calls in flight to one P; beyond it, requests wait for their turn (`queue_s`).",
    )

    def __post_init__(self) -> None:
        check(self, "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Trace and snapshots."""

    trace_events: int = setting(
        65_536, low=64, high=1 << 24, doc="Stage events kept in the ring (about 110 bytes each)."
    )
    page_requests: int = setting(
        200, low=1, high=250, doc="Requests in one INSPECT page unless the caller wants fewer."
    )

    def __post_init__(self) -> None:
        check(self, "inspect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything one engine process is told. Immutable; shared freely between threads."""

    instance: str = setting(
        doc="Name of this instance (one DP rank of one engine); unique, stable."
    )
    role: Role = setting("both", doc="What this engine does.")
    deadlines: Deadlines = setting(factory=Deadlines, doc="Every wait.")
    network: Network = setting(factory=Network, doc="Addresses, secret, TLS.")
    discovery: Discovery = setting(factory=Discovery, doc="Peers.")
    policy: Policy = setting(factory=Policy, doc="Failures, tails, takers.")
    transfer: Transfer = setting(factory=Transfer, doc="Data plane.")
    limits: Limits = setting(factory=Limits, doc="Bounds.")
    inspect: Inspect = setting(factory=Inspect, doc="Trace and snapshots.")

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= len(self.instance) <= MAX_INSTANCE_CHARS or not self.instance.isprintable():
            raise ConfigError(
                "instance", f"1 to {MAX_INSTANCE_CHARS} printable characters", repr(self.instance)
            )

    def core_settings(self) -> core.Settings:
        """What the pure cores are told."""
        d, n, p = self.deadlines, self.limits, self.policy
        return core.Settings(
            deadlines=core.Deadlines(
                **{f.name: getattr(d, f.name) for f in fields(core.Deadlines)}
            ),
            limits=core.Limits(**{f.name: getattr(n, f.name) for f in fields(core.Limits)}),
            generation=core.Generation(p.generation),
            on_failure=OnFailure[p.on_load_failure.upper()],
            max_attempts=p.max_attempts,
            after_retries=OnFailure[p.after_retries.upper()],
            recompute_tail_tokens=p.recompute_tail_tokens,
            choose=self.discovery.choose,
        )

    def to_mapping(self, *, show_secrets: bool = False) -> dict[str, Any]:
        """Plain nested values for JSON; the secret is masked unless asked for."""
        return to_mapping(self, show_secrets=show_secrets)


def load(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Config:
    """A `Config` from a TOML file, the environment and keywords, the last winning.

    `overrides` are top-level settings; a section may be given as a mapping, which is merged over
    the other sources key by key. Raises ConfigError, whose text names the source.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        _merge(tree, _read_file(Path(path)))
    _merge(tree, _from_environ(os.environ if environ is None else environ))
    _merge(tree, overrides)
    return build(Config, tree)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_FILE_BYTES:
            raise ConfigError(str(path), f"at most {MAX_CONFIG_FILE_BYTES} bytes", "a larger file")
        tree = cast(dict[str, Any], tomllib.loads(path.read_text()))
    except OSError as e:
        raise ConfigError(str(path), "a readable file", str(e)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(str(path), "TOML", str(e)) from None
    try:
        _check_tree(tree)
    except ConfigError as e:
        e.args = (f"{path}: {e}",)
        raise
    return tree


def _check_tree(tree: Mapping[str, Any]) -> None:
    """Refuse a bad file while its name is still known; required keys may come from elsewhere."""
    build(Config, {"instance": "unnamed", **tree})


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    kinds = hints(Config)
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        where = f"environment {name}"
        parts = name[len(ENV_PREFIX) :].lower().split("__")
        cls: type = Config
        node = tree
        if len(parts) == 2 and parts[0] in kinds and hasattr(kinds[parts[0]], "__post_init__"):
            cls = kinds[parts[0]]
            node = tree.setdefault(parts[0], {})
        known = {f.name: f for f in fields(cls)}
        key = parts[-1]
        if len(parts) > 2 or (len(parts) == 2 and cls is Config):
            raise UnknownSettingError(where, kinds, parts[0])
        if key not in known:
            raise UnknownSettingError(where, known, key)
        node[key] = parse_text(hints(cls)[key], text, where, known[key].metadata)
    return tree
