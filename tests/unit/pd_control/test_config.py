"""Configuration: three sources, one validated object, errors that say expected, got and where."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from pd_control._schema import hints, type_name
from pd_control.config import (
    Config,
    ConfigError,
    Deadlines,
    Network,
    Policy,
    UnknownSettingError,
    load,
)


def test_defaults_are_the_documented_deadlines() -> None:
    d = Config(instance="p0").deadlines
    assert (d.connect_s, d.blocks_s, d.grant_s, d.park_s, d.queue_s) == (3, 60, 5, 10, 60)
    assert (d.progress_s, d.load_s, d.hold_s, d.hold_max_s) == (10, 120, 30, 120)
    assert (d.send_progress_s, d.send_s, d.substep_s) == (30, 120, 5)
    assert d.heartbeat_s == 1


def test_file_then_environment_then_keywords(tmp_path: Path) -> None:
    path = tmp_path / "pd.toml"
    path.write_text(
        'instance = "from-file"\nrole = "decode"\n[deadlines]\nhold_s = 11\nqueue_s = 12\n'
        '[discovery.peers]\np0 = "tcp://127.0.0.1:4000"\n'
    )
    env = {"PD_CONTROL__DEADLINES__QUEUE_S": "13", "PD_CONTROL__TRANSFER__TRANSPORTS": "tcp"}
    config = load(path, environ=env, instance="from-keywords", deadlines={"park_s": 1})
    assert config.instance == "from-keywords"
    assert config.role == "decode"
    assert config.deadlines.hold_s == 11.0
    assert isinstance(config.deadlines.hold_s, float)
    assert (config.deadlines.queue_s, config.deadlines.park_s) == (13.0, 1.0)
    assert config.discovery.peers == {"p0": "tcp://127.0.0.1:4000"}
    assert config.transfer.transports == ("tcp",)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"deadlines": {"hold_ms": 1}}, "hold_s"),
        ({"deadline": {}}, "deadlines"),
        ({"network": {"secrets": "x"}}, "secret"),
        ({"polcy": {}}, "policy"),
    ],
)
def test_unknown_keys_name_the_nearest(given: dict[str, object], nearest: str) -> None:
    with pytest.raises(UnknownSettingError) as e:
        load(environ={}, instance="a", **given)
    assert e.value.nearest == nearest
    assert nearest in str(e.value)


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        ({"role": "router"}, "role", "'prefill' | 'decode' | 'both'"),
        ({"deadlines": {"hold_s": True}}, "deadlines.hold_s", "number"),
        ({"deadlines": {"hold_s": "30"}}, "deadlines.hold_s", "number"),
        ({"deadlines": {"hold_s": float("nan")}}, "deadlines.hold_s", "finite"),
        ({"deadlines": {"hold_s": -1}}, "deadlines.hold_s", "at least 0.01 s"),
        ({"deadlines": {"hold_s": 300}}, "deadlines.hold_max_s", "at least deadlines.hold_s"),
        (
            {"deadlines": {"tombstone_s": 2}},
            "deadlines.tombstone_s",
            "at least deadlines.connect_s",
        ),
        ({"limits": {"max_parked": 2.5}}, "limits.max_parked", "integer"),
        ({"deadlines": 3}, "deadlines", "table"),
        ({"network": {"listen": "127.0.0.1:1"}}, "network.listen", "tcp://HOST:PORT"),
        ({"network": {"tls_cert_file": "x"}}, "network.tls_cert_file", "both"),
        ({"transfer": {"transports": []}}, "transfer.transports", "at least one"),
        ({"transfer": {"transports": [1]}}, "transfer.transports[0]", "text"),
        ({"discovery": {"peers": {"p0": 3}}}, "discovery.peers.p0", "text"),
        ({"instance": ""}, "instance", "1 to 64"),
        ({"instance": "x" * 65}, "instance", "1 to 64"),
    ],
)
def test_errors_say_where_and_what(given: dict[str, object], where: str, expected: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(environ={}, **{"instance": "a", **given})
    assert e.value.where == where
    assert expected in e.value.expected
    assert e.value.got


def test_environment_errors_name_the_variable() -> None:
    for name, text, words in [
        ("PD_CONTROL__DEADLINES__HOLD_S", "soon", "number"),
        ("PD_CONTROL__NETWORK__INSECURE", "maybe", "true or false"),
        ("PD_CONTROL__DEADLINES__HOLT_S", "1", "hold_s"),
        ("PD_CONTROL__DEADLINE__HOLD_S", "1", "deadlines"),
        ("PD_CONTROL__DISCOVERY__PEERS", "p0", "name=value"),
    ]:
        with pytest.raises(ConfigError) as e:
            load(environ={name: text}, instance="a")
        assert name in str(e.value)
        assert words in str(e.value)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pd.toml"
    for text in ("[deadlines]\nhold_ms = 1\n", "not toml at all"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"pd\.toml"):
            load(path, environ={}, instance="a")
    with pytest.raises(ConfigError, match="readable"):
        load(tmp_path / "absent.toml", environ={}, instance="a")


def test_python_objects_are_validated_alike_and_frozen() -> None:
    with pytest.raises(ConfigError, match=r"deadlines\.hold_s"):
        Deadlines(hold_s=-1)
    config = Config(instance="a", deadlines=Deadlines(hold_s=5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.instance = "b"  # type: ignore[misc]


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    config = Config(instance="a", network=Network(secret="hunter2"))
    assert "hunter2" not in repr(config)
    assert "hunter2" not in str(config.to_mapping())
    assert config.to_mapping(show_secrets=True)["network"]["secret"] == "hunter2"
    file = tmp_path / "secret"
    file.write_text("correct horse battery staple\n")
    file.chmod(0o600)
    assert Network(secret_file=file).load_secret() is not None
    with pytest.raises(ConfigError, match="only one of"):
        Network(secret="x", secret_file=file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        Network(secret_file=file).load_secret()
    with pytest.raises(ConfigError, match="16 to"):
        Network(secret="short").load_secret()


def test_the_cores_get_the_same_numbers() -> None:
    config = Config(
        instance="a",
        deadlines=Deadlines(hold_s=7, admit_s=8),
        policy=Policy(on_load_failure="retry", generation="bypass", recompute_tail_tokens=2),
    )
    settings = config.core_settings()
    assert (settings.deadlines.hold_s, settings.deadlines.admit_s) == (7, 8)
    assert (settings.on_failure.name, settings.generation.value) == ("RETRY", "bypass")
    assert settings.recompute_tail_tokens == 2
    assert Config(instance="a").core_settings() == type(settings)(), "the defaults are the same"


def test_every_setting_is_documented_and_has_a_printable_type() -> None:
    def walk(cls: type) -> None:
        for f in dataclasses.fields(cls):
            kind = hints(cls)[f.name]
            assert f.metadata["doc"], f"{cls.__name__}.{f.name} has no documentation"
            if dataclasses.is_dataclass(kind):
                walk(typing.cast(type, kind))
            else:
                assert type_name(kind)

    walk(Config)


def test_every_setting_is_read_by_somebody() -> None:
    """A setting without an effect is worse than none."""
    package = Path(__file__).resolve().parents[3] / "pd_control"
    source = "\n".join(
        path.read_text() for path in package.rglob("*.py") if path.name != "config.py"
    )
    settings = Config(instance="a").core_settings()
    cores = {
        f.name for part in (settings.deadlines, settings.limits) for f in dataclasses.fields(part)
    }
    sections = [cls for cls in hints(Config).values() if dataclasses.is_dataclass(cls)]
    own = (package / "config.py").read_text()
    for cls in sections:
        for f in dataclasses.fields(typing.cast(type, cls)):
            used = f".{f.name}" in source or f.name in cores or f"p.{f.name}" in own
            used = used or f"self.{f.name}" in own or f"discovery.{f.name}" in own
            assert used, f"{cls.__name__}.{f.name} has no effect"
