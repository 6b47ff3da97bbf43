"""Credentials, challenges and tokens."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob._support import retrying
from trainjob._support.retrying import Backoff
from trainjob.data.stores.oci import challenges
from trainjob.data.stores.oci.access import Access
from trainjob.data.stores.oci.challenges import Challenge
from trainjob.data.stores.oci.client import Interrupted, pause
from trainjob.data.stores.oci.credentials import Credential, find
from trainjob.errors import ConfigurationError, StoreUnavailable

HOST = "registry.example:5000"


def _auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def _auths(entries: dict[str, Any]) -> bytes:
    return json.dumps({"auths": entries}).encode()


def _write(path: Path, **value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_credential_files_are_searched_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(HOST) is None
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    for path in ("run/containers/auth.json", ".dockerconfigjson", "config.json", "other.json"):
        if path == "other.json":
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(folder / path))
        _write(folder / path, auths={HOST: _auth(path, "1:2")})
        assert find(HOST) == Credential(path, "1:2"), "before the earlier ones"
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG"):
        monkeypatch.delenv(name)
    _write(folder / "home/.docker/config.json", auths={HOST: _auth("home", "1")})
    assert find(HOST) == Credential("home", "1")


@pytest.mark.parametrize(
    ("auths", "repository", "expected"),
    [
        *(
            ({key: _auth("u", "p")}, f"{HOST} a/b", Credential("u", "p"))
            for key in (HOST, f"https://{HOST}", f"http://{HOST}/v1/", f"https://{HOST}/v2/")
        ),
        ({HOST: _auth("u", "p")}, "other.example a/b", None),
        *(
            (
                {HOST: _auth("host", "1"), f"{HOST}/team": _auth("team", "1"), f"{HOST}/te": _auth("te", "1")},
                name,
                found,
            )
            for name, found in (
                (f"{HOST} team/model", Credential("team", "1")),
                (f"{HOST} other/model", Credential("host", "1")),
            )
        ),
        ({"https://index.docker.io/v1/": _auth("u", "p")}, "docker.io library/x", Credential("u", "p")),
        ({HOST: {"identitytoken": "t", "auth": ""}}, f"{HOST} a", Credential("", "", "t")),
        ({HOST: {"username": "u", "password": "p"}}, f"{HOST} a", Credential("u", "p")),
        ({HOST: {}}, f"{HOST} a", None),
    ],
)
def test_the_entry_of_the_longest_matching_key_is_used(
    folder: Path, auths: dict[str, Any], repository: str, expected: Credential | None
) -> None:
    _write(folder / "config.json", auths=auths)
    assert find(*repository.split()) == expected


BASE64 = base64.b64encode(b"hunter2").decode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((data, "is not a JSON object") for data in (b"", b"[]", b'{"auths"', b"hunter2")),
        (b"\xff", "not text"),
        *((_auths({HOST: {"auth": each}}), "base64 of user:password") for each in ("hunter2", BASE64, "!!!")),
    ],
)
def test_invalid_credential_files_are_rejected_without_their_content(folder: Path, data: bytes, words: str) -> None:
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ConfigurationError, match=words) as caught:
        find(HOST)
    for secret in ("hunter2", BASE64, "!!!"):
        assert secret not in str(caught.value)


def _helper(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str = "test") -> None:
    path = folder / "bin" / f"docker-credential-{name}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


HOST_AS_USER = """read host; echo "{\\"Username\\":\\"$host\\",\\"Secret\\":\\"s\\"}" """


@pytest.mark.parametrize(
    ("config", "script", "expected"),
    [
        ({"credHelpers": {HOST: "test"}}, HOST_AS_USER, Credential(HOST, "s")),
        ({"credsStore": "test"}, HOST_AS_USER, Credential(HOST, "s")),
        ({"credsStore": "test"}, """cat >/dev/null; echo '{"Username":"<token>","Secret":"s"}' """,
         Credential("", "", "s")),
        ({"credsStore": "test"}, "cat >/dev/null; echo credentials not found in native keychain; exit 1", None),
    ],
)  # fmt: skip
def test_credential_helpers_are_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], script: str, expected: Credential | None
) -> None:
    _helper(folder, monkeypatch, script)
    _write(folder / "config.json", **config)
    assert find(HOST) == expected


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [
        ("test", "echo hunter2; exit 3", "exit code 3"),
        ("test", 'echo \'{"Secret": "hunter2"}\'', "no Username"),
        ("test", "echo hunter2", "no Username"),
        *((name, "true", "is not on the PATH") for name in ("missing", "../test", "a/b")),
    ],
)
def test_credential_helpers_that_fail_or_are_missing_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, words: str
) -> None:
    _helper(folder, monkeypatch, f"cat >/dev/null; {script}")
    _write(folder / "config.json", credHelpers={HOST: name})
    with pytest.raises(ConfigurationError, match=words) as caught:
        find(HOST)
    assert "hunter2" not in str(caught.value)


def test_repr_contains_no_secrets() -> None:
    assert "hunter2" not in repr(Credential("u", "hunter2", "hunter2"))


# ---------------------------------------------------------------- challenges


TOKEN = {"realm": "https://auth.example/token", "service": "registry", "scope": "repository:a/b:pull,push"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer " + ",".join(f'{name}="{value}"' for name, value in TOKEN.items()), [Challenge("bearer", TOKEN)]),
        ('Basic realm="a, \\"b\\""', [Challenge("basic", {"realm": 'a, "b"'})]),
        (
            'Basic realm=x, BEARER Realm = "y" , service=z',
            [Challenge("basic", {"realm": "x"}), Challenge("bearer", {"realm": "y", "service": "z"})],
        ),
        ("Negotiate", [Challenge("negotiate")]),
        ("Negotiate abc==, Basic realm=x", [Challenge("negotiate"), Challenge("basic", {"realm": "x"})]),
        ("", []),
        ('Bearer realm="unfinished', [Challenge("bearer")]),
    ],
)
def test_challenges_are_parsed(header: str, expected: list[Challenge]) -> None:
    assert challenges.parse(header)[: len(expected)] == expected


@given(st.text())
def test_any_header_can_be_parsed(header: str) -> None:
    challenges.parse(header)


# ---------------------------------------------------------------- tokens

SCOPES = ("repository:team/model:pull,push",)
BEARER = 'Bearer realm="https://auth.example/token",service="reg"'


class Server:
    """A token server that records its requests."""

    def __init__(self, **answer: Any) -> None:
        self.answer: Any = answer or {"token": "t0"}
        self.asked: list[dict[str, Any]] = []

    def __call__(
        self, url: str, *, query: Sequence[tuple[str, str]], form: dict[str, str] | None, authorization: str | None
    ) -> Any:
        self.asked.append({"url": url, "query": list(query), "form": form, "authorization": authorization})
        return self.answer


def _access(server: Server) -> Access:
    return Access(HOST, server, lambda url: url.startswith("https://"))


def test_basic_credentials_are_sent_after_a_challenge(folder: Path) -> None:
    _write(folder / "config.json", auths={HOST: _auth("u", "hunter2")})
    access = _access(Server())
    assert access.header(SCOPES) is None
    access.challenged('Basic realm="x"', SCOPES, None)
    header = access.header(SCOPES)
    assert header == "Basic " + _auth("u", "hunter2")["auth"]
    with pytest.raises(ConfigurationError, match="check the permissions"):
        access.challenged('Basic realm="x"', SCOPES, header)
    assert access.scrub(f"{header} hunter2") == "Basic *** ***"


def test_each_scope_gets_a_token(folder: Path) -> None:
    _write(folder / "config.json", auths={HOST: _auth("u", "p")})
    server = Server(token="t1", expires_in=300)
    access = _access(server)
    access.challenged(BEARER, SCOPES, None)
    for _ in range(2):
        assert access.header(SCOPES) == "Bearer t1"
    assert access.header(("repository:other:pull", *SCOPES)) == "Bearer t1"
    asked = {"url": "https://auth.example/token", "form": None, "authorization": "Basic " + _auth("u", "p")["auth"]}
    scopes = [("scope", "repository:other:pull"), ("scope", SCOPES[0])]
    assert server.asked == [{**asked, "query": [("service", "reg"), *each]} for each in (scopes[1:], scopes)]
    assert access.scrub("token=t1;") == "token=***;"


def test_an_identity_token_is_exchanged(folder: Path) -> None:
    _write(folder / "config.json", auths={HOST: {"identitytoken": "refresh"}})
    server = Server(access_token="t")
    access = _access(server)
    access.challenged(BEARER, SCOPES, None)
    assert access.header(SCOPES) == "Bearer t"
    assert server.asked[0]["form"] == {
        "grant_type": "refresh_token",
        "client_id": "trainjob",
        "refresh_token": "refresh",
        "scope": SCOPES[0],
        "service": "reg",
    }
    assert (server.asked[0]["query"], server.asked[0]["authorization"]) == ([], None)


def test_expired_tokens_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(token="t", expires_in=100)
    access = _access(server)
    access.challenged(BEARER, SCOPES, None)
    assert access.header(SCOPES) == "Bearer t"
    assert server.asked[0]["authorization"] is None, "an anonymous client"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 80)
    access.header(SCOPES)
    assert len(server.asked) == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 90)
    sent = access.header(SCOPES)
    assert len(server.asked) == 2
    access.challenged(BEARER, SCOPES, sent)
    access.header(SCOPES)
    assert len(server.asked) == 3


def test_unusable_challenges_are_rejected(folder: Path) -> None:
    access = _access(server := Server())
    with pytest.raises(ConfigurationError, match="unsupported authentication scheme"):
        access.challenged("Negotiate", SCOPES, None)
    access.challenged('Bearer realm="http://auth.example/token"', SCOPES, None)
    with pytest.raises(ConfigurationError, match="has no https URL"):
        access.header(SCOPES)
    assert server.asked == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "denied access"), ([], "no token"), ({"token": 5}, "no token"), ({"token": "a\r\nb"}, "no token")],
)
def test_unusable_tokens_are_rejected(folder: Path, answer: Any, words: str) -> None:
    _write(folder / "config.json", auths={HOST: _auth("u", "hunter2")})
    access = _access(server := Server())
    access.challenged(BEARER, SCOPES, None)
    server.answer = answer
    with pytest.raises(ConfigurationError, match=words) as caught:
        access.header(SCOPES)
    assert "hunter2" not in str(caught.value)


# ---------------------------------------------------------------- retries


def _cut(backoff: Backoff, *, progress: bool) -> None:
    for _ in range(100):
        if progress:
            backoff.success()
        pause(backoff, "it", Interrupted("cut"))


@pytest.mark.parametrize(("total", "progress"), [(math.inf, False), (30, True)])
def test_retries_are_limited_and_obey_retry_after(
    monkeypatch: pytest.MonkeyPatch, total: float, progress: bool
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    backoff = retrying.TRANSFER(total=total)
    for asked in (9, 10_000):
        pause(backoff, "it", Interrupted("busy", asked))
    assert 9 <= waits[0] <= 10
    assert 3600 <= waits[1] <= 3602
    most = total if progress else backoff.failures
    with pytest.raises(StoreUnavailable, match=r"it: cut \(\d+ failures\)"):
        _cut(backoff, progress=progress)
    assert len(waits) == most - 1
    assert max(waits[2:]) <= backoff.longest_pause
