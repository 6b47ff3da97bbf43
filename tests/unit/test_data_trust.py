"""Trusted certificates are loaded once, and again if the settings or the file change."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import certifi
import pytest

from trainjob.data.stores import trust

END = "-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("load", [trust.by_httpx, trust.by_system])
def test_certificates_are_loaded_again_when_they_change(
    load: Callable[[], ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    default = load()
    assert load() is default
    one, two, *_ = (each + END for each in Path(certifi.where()).read_text().split(END))
    file = tmp_path / "ca.pem"
    file.write_text(one)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    only = load()
    assert load() is only
    assert only.cert_store_stats()["x509_ca"] == 1
    before = file.stat().st_mtime_ns
    file.write_text(one + two)
    os.utime(file, ns=(before + 1, before + 1))
    assert load().cert_store_stats()["x509_ca"] == 2
    monkeypatch.delenv("SSL_CERT_FILE")
    assert load() is default


def test_a_file_without_certificates_is_an_error_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            trust.by_httpx()
