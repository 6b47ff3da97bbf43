"""Requests to S3, and locations and settings that are rejected before them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serving import serving
from tests.unit.fake_clouds import Clouds

from trainjob.data import copy, transfer
from trainjob.errors import ConfigurationError, StoreUnavailable, UnsafePath


@pytest.fixture(autouse=True)
def s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a server that does not run."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("key", ["evil/../../etc/x", "evil//x", "evil/a\\b", "evil/./x"])
def test_unsafe_keys_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    with serving(Clouds()) as server:
        server.buckets["models"][key] = b"x"
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(UnsafePath):
            copy("s3://models/evil/", str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


def test_plain_http_requires_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ConfigurationError, match="AWS_ALLOW_HTTP"):
        copy("s3://models/x", str(tmp_path / "t"))


def test_missing_certificates_are_distinguished_from_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(ConfigurationError, match="ca-certificates"):
        transfer.scan("s3://models/x")


def test_errors_contain_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1/hunter2hunter2")
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    with pytest.raises(StoreUnavailable) as caught:
        copy("s3://models/x", str(tmp_path / "t"))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_obstore_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[storage\]"):
        copy("s3://models/x", str(tmp_path / "t"))
