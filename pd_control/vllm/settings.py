"""vLLM's configuration as ours, and what is refused at start-up by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_control.config import Config, load
from simple_rpc import Address

#: Versions that the connector is tested with; others may work and are refused unless told otherwise.
SUPPORTED = ("0.31", "0.32")
#: vLLM's core thread keeps Python's lock for seconds at a time, most of all while it starts, and the loop
#: thread beside it cannot beat then; 5 s have been too few on a crowded machine. A dead process needs no
#: heartbeat to be noticed.
HEARTBEAT_S = 10.0
#: Routers that ask P first send the request to D at once, but D may be busy; vLLM's default policy then turns
#: a hold that was let go too early into an error. Elsewhere 1 s.
PRESSURE_HOLD_S = 30.0
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


class UnsupportedError(RuntimeError):
    """This vLLM, or this configuration of it, cannot be served; the message names what and why."""


def check_version(version: str, allow_untested: bool) -> None:
    """Raises UnsupportedError for a version that was not tested."""
    if not version.startswith(tuple(s + "." for s in SUPPORTED)) and not allow_untested:
        raise UnsupportedError(
            f"vLLM {version} is not among the tested versions ({', '.join(SUPPORTED)}); set "
            '"allow_untested_version": true in kv_connector_extra_config to try it'
        )


def check_supported(vllm_config: Any) -> None:
    """Raises UnsupportedError, naming every feature that stands in the way."""
    parallel = vllm_config.parallel_config
    found = []
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if "bootstrap_port" in extra and parallel.data_parallel_size > 1:
        found.append("bootstrap_port with data parallel")
    if parallel.pipeline_parallel_size > 1:
        found.append(f"pipeline_parallel_size {parallel.pipeline_parallel_size}")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.append(f"{name} {getattr(parallel, name)}")
    if getattr(parallel, "enable_dbo", False):
        found.append("enable_dbo")
    if vllm_config.model_config.is_encoder_decoder:
        found.append("an encoder-decoder model")
    if vllm_config.model_config.is_hybrid:
        found.append("a model with per-request state (mamba, GDN)")
    if found:
        raise UnsupportedError(f"not supported by this connector: {', '.join(found)}")


def make_config(
    engine_id: str,
    kv_role: str,
    extra: Mapping[str, Any],
    on_load_failure: str,
    *,
    data_parallel_index: int = 0,
) -> Config:
    """Our configuration from ``kv_connector_extra_config``.

    ``pd_control`` holds our sections as they would stand in a TOML file; ``control_port`` and
    ``control_host`` are short for the address on which P listens (D's may be any); the engines of a
    data-parallel group listen on consecutive ports. The environment counts as always.

    Raises:
        ConfigError, UnsupportedError: with the name of the setting.
    """
    if kv_role not in ROLES:
        raise UnsupportedError(f"kv_role {kv_role!r}: expected one of {', '.join(ROLES)}")
    known = {
        "pd_control", "control_port", "control_host", "bootstrap_port", "allow_untested_version",
    }  # fmt: skip
    unknown = sorted(set(extra) - known)
    if unknown:
        raise UnsupportedError(
            f"kv_connector_extra_config: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    sections = _section(extra, "pd_control")
    for name in ("instance", "role"):
        if name in sections:
            raise UnsupportedError(
                f"pd_control.{name}: inside vLLM it is engine_id and kv_role that say so"
            )
    for name in ("path", "environ"):  # of `load`, not of the configuration
        if name in sections:
            raise UnsupportedError(f"pd_control: unknown {name}")
    network = _section(sections, "network", "pd_control.")
    port_of(extra, "bootstrap_port")
    if "control_port" in extra or "control_host" in extra:
        host, port = extra.get("control_host", "127.0.0.1"), port_of(extra, "control_port")
        if not isinstance(host, str) or not host:
            raise UnsupportedError(f"control_host: expected a name or an address, got {host!r}")
        port += data_parallel_index if port else 0
        network.setdefault("listen", str(Address.tcp(host, port)))
    policy = _section(sections, "policy", "pd_control.")
    policy.setdefault("on_load_failure", on_load_failure)
    if policy["on_load_failure"] != on_load_failure:
        raise UnsupportedError(
            f"policy.on_load_failure {policy['on_load_failure']!r}: inside vLLM it is vLLM's own "
            f"kv_load_failure_policy that decides, which is {on_load_failure!r}"
        )
    deadlines = {
        "heartbeat_s": HEARTBEAT_S,
        "worker_heartbeat_s": HEARTBEAT_S,
        "pressure_hold_s": PRESSURE_HOLD_S,
        **_section(sections, "deadlines", "pd_control."),
    }
    rest: dict[str, Any] = {name: _section(sections, name, "pd_control.") for name in sections}
    return load(
        instance=engine_id,
        role=ROLES[kv_role],
        **(rest | {"network": network, "policy": policy, "deadlines": deadlines}),
    )


def port_of(extra: Mapping[str, Any], name: str) -> int:
    """A port in ``kv_connector_extra_config``; 0, any free one, if it is not there.

    Raises:
        UnsupportedError: it is none.
    """
    port = extra.get(name, 0)
    if type(port) is not int or not 0 <= port < 65536:
        raise UnsupportedError(f"{name}: expected 0 to 65535, got {port!r}")
    return port


def _section(of: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    found = of.get(name, {})
    if not isinstance(found, Mapping):
        raise UnsupportedError(f"{prefix}{name}: expected an object, got {found!r}")
    return dict(found)
