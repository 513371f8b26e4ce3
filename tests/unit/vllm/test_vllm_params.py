"""What routers say, and what P answers: without vLLM."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from pd_control.vllm.bootstrap import Bootstrap
from pd_control.vllm.params import (
    DecodeParams,
    ParamsError,
    PrefillParams,
    answer,
    parse,
    prompt_id,
)
from pd_control.vllm.settings import UnsupportedError, check_version, make_config

WHERE = {"remote_host": "10.0.0.1", "remote_port": 5600}


def test_an_ordinary_request_is_nobodys_half() -> None:
    assert parse("cmpl-1", None) is None
    assert parse("cmpl-1", {}) is None
    assert parse("cmpl-1", {"do_remote_prefill": False, "remote_host": None}) is None


def test_samples_of_one_prompt_share_its_reference() -> None:
    params = {"do_remote_decode": True}
    ids = [f"{i}_cmpl-abc-0-0123abcd" for i in range(3)]
    assert {parse(i, params) for i in ids} == {PrefillParams("cmpl-abc-0-0123abcd")}


def test_two_requests_of_one_client_id_do_not_share_a_reference() -> None:
    assert prompt_id("cmpl-abc-0-0123abcd") != prompt_id("cmpl-abc-0-0123abce")


def test_a_transfer_id_names_the_prompt_on_both_sides() -> None:
    on_p = parse("cmpl-1", {"do_remote_decode": True, "transfer_id": "t", "num_takers": 2})
    on_d = parse("cmpl-2", {"do_remote_prefill": True, "transfer_id": "t", **WHERE})
    assert on_p == PrefillParams("t", 2)
    assert on_d == DecodeParams("t", "tcp://10.0.0.1:5600")


def test_d_takes_what_p_answers() -> None:
    said = answer(
        reference="r", engine_id="p0", host="10.0.0.1", port=5600, tp_size=1, num_tokens=7
    )
    assert parse("cmpl-2", said) == DecodeParams("r", "tcp://10.0.0.1:5600", "p0")


def test_the_answer_has_every_key_of_the_pull_convention() -> None:
    said = answer(reference="r", engine_id="p", host="h", port=1, tp_size=2, num_tokens=7)
    assert set(said) >= {
        "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
        "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
        "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
    }  # fmt: skip
    assert said["remote_block_ids"] is None  # nobody reads our blocks by number


@pytest.mark.parametrize(
    "host", ["p-1.cluster.local", "10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "x"]
)
def test_hosts(host: str) -> None:
    params = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_host": host,
        "remote_port": "9",
    }
    found = parse("x", params)
    assert isinstance(found, DecodeParams)
    bare = host.strip("[]")
    assert found.address == (f"tcp://[{bare}]:9" if ":" in bare else f"tcp://{bare}:9")


def test_an_ipv6_host_is_bracketed() -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "::1", "remote_port": 9}
    assert parse("x", params) == DecodeParams("t", "tcp://[::1]:9")


@pytest.mark.parametrize("host", ["10.0.0.1", "[::1]"])
def test_mooncakes_convention(host: str) -> None:
    """The router gives D the engine id that our bootstrap server told it."""
    params = {
        "do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": f"a@b@{host}:9",
        "remote_bootstrap_addr": "http://elsewhere:8998",
    }  # fmt: skip
    found = parse("x", params)
    assert found == DecodeParams("t", f"tcp://{host}:9", f"a@b@{host}:9")
    # What says more precisely where P is comes first.
    assert parse("x", params | WHERE) == DecodeParams("t", "tcp://10.0.0.1:5600", f"a@b@{host}:9")


@pytest.mark.parametrize(
    ("control", "engine_id"),
    [(("10.0.0.1", 5600), "p0@10.0.0.1:5600"), (("::1", 7), "p0@[::1]:7")],
)
def test_the_bootstrap_server_answers_as_mooncakes(
    control: tuple[str, int], engine_id: str
) -> None:
    server = Bootstrap("127.0.0.1", 0, engine_id="p0", control=control, tp_size=2)
    try:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{url}/query", timeout=10) as answer:
            said = json.load(answer)
        with pytest.raises(OSError, match=f"bootstrap_port: .*127.0.0.1:{server.port}"):
            Bootstrap("127.0.0.1", server.port, engine_id="p1", control=control, tp_size=1)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/register", timeout=10)
    finally:
        server.close()
        server.close()
    assert list(said) == ["0"]
    assert said["0"]["engine_id"] == engine_id
    assert list(said["0"]["worker_addr"]) == ["0", "1"]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"mode": "single", "do_remote_prefill": True}, "single-request"),
        ({"do_remote_decode": True, "num_takers": 0}, "num_takers"),
        ({"do_remote_decode": True, "num_takers": True}, "num_takers"),
        ({"do_remote_decode": True, "transfer_id": 7}, "transfer_id"),
        ({"do_remote_decode": True, "transfer_id": "x" * 257}, "transfer_id"),
        ({"do_remote_prefill": True, **WHERE}, "transfer_id"),
        ({"do_remote_prefill": True, "transfer_id": "t", "remote_port": 1}, "remote_host"),
        ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h"}, "remote_port"),
        (
            {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 0},
            "remote_port",
        ),
        (
            {
                "do_remote_prefill": True,
                "transfer_id": "t",
                "remote_bootstrap_addr": "http://h:1",
                "remote_engine_id": "p0",
            },
            "NAME@HOST:PORT",
        ),
        *(
            (
                {
                    "do_remote_prefill": True,
                    "transfer_id": "t",
                    "remote_host": host,
                    "remote_port": port,
                },
                "remote_host, remote_port: .{0,260}$",
            )
            for host, port in [
                ("h", "7" * 5000),
                ("h", "\u0667"),
                ("h", -1),
                ("h", 10**5000),
                ("h", True),
                ("h", 1.5),
                ("x/y\nERROR forged", 1),
                ("h\r", 1),
                ("h\0", 1),
                ("tcp://h", 1),
                ("h:99", 1),
                ("[", 1),
                ("user@h", 1),
                (" h", 1),
                ("-h", 1),
                ("é", 1),
            ]
        ),
        ({"do_remote_decode": True, "num_takers": [0] * 9999}, "num_takers: .{0,160}$"),
        ({"do_remote_decode": True, "num_takers": 10**5000}, "num_takers: .{0,160}$"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ParamsError, match=named):
        parse("cmpl-1", params)


def test_an_id_that_is_too_long_to_be_a_reference_is_refused() -> None:
    with pytest.raises(ParamsError, match="request id"):
        parse("c" * 300, {"do_remote_decode": True})


# -- settings ----------------------------------------------------------------------------------------


def test_untested_versions_are_refused_unless_allowed() -> None:
    for tested in ("0.31.0", "0.32.0", "0.32.1"):
        check_version(tested, False)
    with pytest.raises(UnsupportedError, match=r"0\.29\.1"):
        check_version("0.29.1", False)
    check_version("0.29.1", True)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"control_port": "abc"}, "control_port: expected 0 to 65535, got 'abc'"),
        ({"control_port": None}, "control_port"),
        ({"control_port": -5}, "control_port"),
        ({"control_port": 70000}, "control_port"),
        ({"control_port": True}, "control_port"),
        ({"control_port": 5600.7}, "control_port"),
        ({"bootstrap_port": 70000}, "bootstrap_port"),
        ({"bootstrap_port": "x"}, "bootstrap_port"),
        ({"control_host": None}, "control_host"),
        ({"control_host": ""}, "control_host"),
        ({"pd_control": [1]}, "pd_control: expected an object"),
        ({"pd_control": None}, "pd_control: expected an object"),
        ({"pd_control": {"deadlines": 5}}, r"pd_control\.deadlines: expected an object"),
        ({"pd_control": {"network": "x"}}, r"pd_control\.network"),
        ({"pd_control": {"policy": None}}, r"pd_control\.policy"),
        ({"pd_control": {"limits": 1}}, r"pd_control\.limits"),
        ({"pd_control": {"instance": "x"}}, r"pd_control\.instance.*engine_id"),
        ({"pd_control": {"role": "x"}}, r"pd_control\.role"),
        ({"pd_control": {"path": {}}}, "unknown path"),
    ],
)
def test_what_is_wrong_in_the_extra_config_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        make_config("e", "kv_producer", extra, "fail")


def test_a_control_host_may_come_with_brackets() -> None:
    for host in ("::1", "[::1]"):
        config = make_config("e", "kv_producer", {"control_host": host}, "fail")
        assert config.network.listen == "tcp://[::1]:0"


def test_the_configuration_comes_from_the_extra_config() -> None:
    extra = {"control_port": 5600, "pd_control": {"deadlines": {"hold_s": 7}}}
    config = make_config("e", "kv_producer", extra, "fail")
    assert (config.instance, config.role) == ("e", "prefill")
    assert config.network.listen == "tcp://127.0.0.1:5600"
    assert config.deadlines.hold_s == 7
    assert config.policy.on_load_failure == "fail"


def test_engines_of_a_data_parallel_group_listen_side_by_side() -> None:
    extra = {"control_port": 5600}
    config = make_config("e", "kv_producer", extra, "fail", data_parallel_index=2)
    assert config.network.listen == "tcp://127.0.0.1:5602"
    config = make_config("e", "kv_producer", {"control_host": "::1"}, "fail", data_parallel_index=2)
    assert config.network.listen == "tcp://[::1]:0"


@pytest.mark.parametrize(
    ("role", "extra", "named"),
    [
        ("kv_something", {}, "kv_role"),
        ("kv_both", {"contrl_port": 1}, "contrl_port"),
        ("kv_both", {"pd_control": {"policy": {"on_load_failure": "retry"}}}, "on_load_failure"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(role: str, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        make_config("e", role, extra, "fail")
