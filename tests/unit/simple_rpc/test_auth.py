"""The secret: where it comes from, who may read it, and that it shows nowhere."""

from __future__ import annotations

import os
import pickle

import pytest

from simple_rpc import Secret
from simple_rpc.auth import proofs_match

VALUE = b"0123456789abcdef-secret"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(VALUE + b"\n")
    path.chmod(0o600)
    return path


def test_file_and_environment_agree(secret_file, monkeypatch):
    monkeypatch.setenv("PD_TEST_SECRET", VALUE.decode())
    one = Secret.from_file(str(secret_file))
    two = Secret.from_env("PD_TEST_SECRET")
    assert one.server_proof(b"a", b"b") == two.server_proof(b"a", b"b")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777, 0o610])
def test_a_file_that_others_may_touch_is_refused(secret_file, mode):
    secret_file.chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:04o} lets others in"):
        Secret.from_file(str(secret_file))


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_taken(secret_file, mode):
    secret_file.chmod(mode)
    Secret.from_file(str(secret_file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_file_is_refused(secret_file):
    os.chown(secret_file, 12345, 12345)
    with pytest.raises(PermissionError, match="owned by uid 12345"):
        Secret.from_file(str(secret_file))


def test_only_a_regular_file(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        Secret.from_file(str(fifo))  # and does not wait for a writer


@pytest.mark.parametrize("value", [b"", b"short", b" " * 100, b"x" * 5000])
def test_a_guessable_or_absurd_secret_is_refused(value):
    with pytest.raises(ValueError, match="16 to 4096 bytes"):
        Secret(value)


def test_a_variable_that_is_not_set():
    with pytest.raises(KeyError):
        Secret.from_env("PD_TEST_NO_SUCH_VARIABLE")


def test_it_shows_nowhere():
    secret = Secret(VALUE)
    assert "0123" not in repr(secret) + str(secret) + repr(vars(type(secret)))
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_a_proof_depends_on_everything():
    secret = Secret(VALUE)
    proofs = {
        secret.server_proof(b"hello", b"answer"),
        secret.client_proof(b"hello", b"answer"),
        secret.server_proof(b"hellO", b"answer"),
        secret.server_proof(b"hello", b"answeR"),
        secret.server_proof(b"helloa", b"nswer"),
        Secret(VALUE + b"x").server_proof(b"hello", b"answer"),
    }
    assert len(proofs) == 6
    assert {len(proof) for proof in proofs} == {32}
    assert proofs_match(secret.server_proof(b"a", b"b"), secret.server_proof(b"a", b"b"))
    assert not proofs_match(secret.server_proof(b"a", b"b"), b"")
