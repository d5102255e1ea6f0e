"""Certificates and keys that cannot be used: which file it is, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Authority
from telegrad.rpc import RpcOptions, TlsOptions


@pytest.fixture
def tls(tmp_path: Path) -> TlsOptions:
    return Authority(tmp_path).worker("worker")


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_that_cannot_be_read_is_named(tls, tmp_path, name):
    missing = str(tmp_path / "missing.pem")
    for path, error in ((missing, FileNotFoundError), (str(tmp_path), IsADirectoryError)):
        options = dataclasses.replace(tls, **{name: path})
        for context in (options.server_context, options.client_context):
            with pytest.raises(error, match=f"the {name} cannot be read") as caught:
                context()
            assert caught.value.filename == path


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_that_holds_something_else_is_named(tls, tmp_path, name):
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with pytest.raises(ValueError, match=r"garbage\.pem"):
        dataclasses.replace(tls, **{name: str(garbage)}).client_context()


def test_a_key_of_another_certificate_is_refused(tls, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").worker("other")
    with pytest.raises(ValueError, match=r"other\.key.*KEY_VALUES_MISMATCH"):
        dataclasses.replace(tls, key=other.key).server_context()


def test_nobody_is_asked_for_the_passphrase_of_a_key(tls, tmp_path):
    key = serialization.load_pem_private_key(Path(tls.key).read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"open sesame"),
        )
    )
    with pytest.raises(ValueError, match=r"encrypted\.key' is encrypted"):
        dataclasses.replace(tls, key=str(encrypted)).server_context()


def test_tls_is_asked_for_by_its_options():
    with pytest.raises(TypeError, match="tls must be a TlsOptions, got True"):
        RpcOptions(tls=True)
