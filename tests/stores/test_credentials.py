"""Credentials of S3, on a server that checks every signature: keys, roles, refusals, keys that end during a copy."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.fakes.faults import Fault, Proxy, Seen
from tests.seaweedfs import SeaweedFS
from tests.stores.kinds import MANIFEST
from tests.stores.roles import Issuer, answering
from tests.trees import files, tree

from trainjob.data import copy, read_manifest, transfer
from trainjob.errors import ConfigurationError

ROLE = "arn:aws:iam::role/training"
FILES = {"a.txt": b"one", "sub/b.bin": random.Random(1).randbytes(300_000)}


@dataclass
class Key:
    """An access key of a user with all permissions on the bucket."""

    server: SeaweedFS
    user: str
    id: str
    secret: str

    def revoke(self) -> None:
        """Delete the key, so that the server refuses it."""
        self.server.iam.delete_access_key(UserName=self.user, AccessKeyId=self.id)

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.id, "AWS_SECRET_ACCESS_KEY": self.secret}

    def as_response(self, seconds: float) -> dict[str, str]:
        """The key as a server of role credentials returns it, valid for ``seconds``."""
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        return {
            "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
            "AccessKeyId": self.id, "SecretAccessKey": self.secret, "Token": "", "Expiration": end,
        }  # fmt: skip


@pytest.fixture
def key(seaweedfs: SeaweedFS, name: str) -> Callable[[], Key]:
    """Create keys of one user."""
    iam, bucket = seaweedfs.iam, seaweedfs.bucket
    iam.create_user(UserName=name)
    allowed = {
        "Effect": "Allow",
        "Action": ["s3:*"],
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=policy)

    def make() -> Key:
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return Key(seaweedfs, name, made["AccessKeyId"], made["SecretAccessKey"])

    return make


@pytest.fixture
def proxy(seaweedfs: SeaweedFS, start_proxy: Callable[[str], Proxy], monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """A proxy in front of the server; the environment has all settings but the keys."""
    proxy = start_proxy(seaweedfs.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.host}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return proxy


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)


def there_and_back(uri: str, tmp_path: Path) -> None:
    copied = copy(str(tree(tmp_path / "source", FILES)), uri)
    copy(uri, str(tmp_path / "back"), digest=copied.digest)
    assert files(tmp_path / "back") == FILES


def signed_by(proxy: Proxy) -> set[str]:
    """IDs of the keys that signed the requests."""
    return {_id(each) for each in proxy.requests}


def _id(seen: Seen) -> str:
    return seen.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]


def test_access_keys(
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = key()
    set_environment(monkeypatch, mine.environment)
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {mine.id}


@pytest.mark.parametrize("wrong", ["secret", "id", "revoked"])
def test_wrong_keys_are_reported_without_secrets(
    wrong: str,
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = key()
    secrets = {"secret": "wrong-hunter2hunter2", "id": mine.secret, "revoked": mine.secret}
    ids = {"secret": mine.id, "id": "AKIAHUNTER2HUNTER2", "revoked": mine.id}
    if wrong == "revoked":
        mine.revoke()
    set_environment(monkeypatch, {"AWS_ACCESS_KEY_ID": ids[wrong], "AWS_SECRET_ACCESS_KEY": secrets[wrong]})
    source = tree(tmp_path / "source", FILES)
    uri = seaweedfs.uri(name)
    seaweedfs.client.put_object(Bucket=seaweedfs.bucket, Key=f"{name}/a.txt", Body=b"x")
    target = str(tmp_path / "t")
    acts: list[Callable[[], object]] = [
        lambda: copy(str(source), uri),
        *(functools.partial(copy, at, target) for at in (uri, f"{uri}/a.txt", f"{uri}/")),
        lambda: read_manifest(uri),
    ]
    for act in acts:
        with pytest.raises(ConfigurationError) as caught:
            act()
        message = str(caught.value)
        assert uri in message
        assert "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message
        assert not [each for each in (*secrets.values(), *ids.values()) if each in message]
        assert "\n" not in message
    assert not (tmp_path / "t").exists()
    assert len(proxy.requests) < 20, "no retries"


def test_keys_revoked_during_a_copy(
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In both directions: the copy fails with the reason, its target is incomplete, and new keys complete it."""
    chance = random.Random(4)
    content = {f"{number:04}": chance.randbytes(10_000) for number in range(120)}
    source, uri = tree(tmp_path / "source", content), seaweedfs.uri(name)

    def revoked_after(count: int, method: str) -> None:
        mine = key()
        set_environment(monkeypatch, mine.environment)
        proxy.requests.clear()

        def plan(seen: Seen) -> Fault | None:
            if len(proxy.seen(method, f"/{name}/0")) == count and _id(seen) == mine.id:
                proxy.plan = lambda _: None
                mine.revoke()
            return None

        proxy.plan = plan

    revoked_after(60, "PUT")
    with pytest.raises(ConfigurationError, match="denied; check AWS_ACCESS_KEY_ID"):
        copy(str(source), uri)
    assert len(proxy.requests) < 120, "the copy fails at the first refusal"
    held = {each["Key"] for each in seaweedfs.client.list_objects_v2(Bucket=seaweedfs.bucket, Prefix=name)["Contents"]}
    assert 60 - transfer._FILES_AT_A_TIME < len(held) <= 60 + 1, "the files before the revocation, and the mark"
    assert f"{name}/{MANIFEST}" not in held
    set_environment(monkeypatch, key().environment)
    complete = copy(str(source), uri)
    revoked_after(60, "GET")
    with pytest.raises(ConfigurationError, match="denied; check AWS_ACCESS_KEY_ID"):
        copy(uri, str(tmp_path / "back"))
    assert read_manifest(str(tmp_path / "back")) is None
    set_environment(monkeypatch, key().environment)
    assert copy(uri, str(tmp_path / "back")).digest == complete.digest
    assert files(tmp_path / "back") == content


@dataclass
class KeyServer:
    """Issues the keys of a role, and rotates them as clouds do: before the old ones expire."""

    make: Callable[[], Key]
    keys: list[Key] = field(default_factory=list)
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    seconds: float = 30

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Any:
        self.requests.append((method, path, headers))
        if path == "/latest/api/token":
            return "of-this-instance" if method == "PUT" else None
        if path.endswith("/security-credentials/"):
            return "training"
        if path in ("/role", "/latest/meta-data/iam/security-credentials/training"):
            return self.keys[-1].as_response(self.seconds)
        return None

    def rotate(self) -> None:
        self.keys.append(self.make())


@pytest.fixture
def key_server(key: Callable[[], Key]) -> Iterator[tuple[KeyServer, str]]:
    """The server and its URL."""
    key_server = KeyServer(key)
    key_server.rotate()
    with answering(key_server.answer) as url:
        yield key_server, url


def test_the_role_of_a_pod_or_container(
    key_server: tuple[KeyServer, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, url = key_server
    (tmp_path / "token").write_text("the-token-of-the-pod")
    set_environment(monkeypatch, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/role"})
    set_environment(monkeypatch, {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")})
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {server.keys[0].id}
    assert {headers["authorization"] for _, _, headers in server.requests} == {"the-token-of-the-pod"}


def test_the_role_of_an_instance(
    key_server: tuple[KeyServer, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, url = key_server
    set_environment(monkeypatch, {"AWS_METADATA_ENDPOINT": url})
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {server.keys[0].id}
    assert server.requests[0][:2] == ("PUT", "/latest/api/token"), "version 2 of the service"
    assert server.requests[-1][2]["x-aws-ec2-metadata-token"] == "of-this-instance"


@pytest.mark.full
@pytest.mark.parametrize("down", [False, True])
def test_keys_of_a_role_rotated_during_a_copy(
    down: bool,
    key_server: tuple[KeyServer, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old keys are revoked while the copy continues with the new ones."""
    server, url = key_server
    set_environment(monkeypatch, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/role"})
    (tmp_path / "token").write_text("t")
    set_environment(monkeypatch, {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")})
    content = {f"{number:03}": b"%d" % number for number in range(100)}
    source, target = str(tree(tmp_path / "source", content)), seaweedfs.uri(name)
    if down:
        copy(source, target)
        source, target = target, str(tmp_path / "back")
        proxy.requests.clear()
    old, changed = server.keys[0], 0.0
    revoked: list[int] = []

    def plan(seen: Seen) -> Fault | None:
        nonlocal changed
        time.sleep(0.02)  # so that it takes two seconds
        if not changed and len(proxy.requests) == 30:
            changed = time.monotonic()
            server.rotate()
        # obstore requests keys that expire soon ten times a second.
        under_way = [each for each in proxy.requests if _id(each) == old.id and not each.status]
        if changed and not revoked and time.monotonic() > changed + 0.3 and not under_way:
            old.revoke()
            revoked.append(len(proxy.requests))
        return None

    proxy.plan = plan
    complete = copy(source, target)
    assert revoked
    assert signed_by(proxy) == {key.id for key in server.keys}
    assert {_id(each) for each in proxy.requests[revoked[0] :]} == {server.keys[1].id}
    assert transfer.scan(target).digest == complete.digest
    assert len(complete.files) == 100


# ------------------------------------------------------------------ https, and the tokens of pods


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    with issuer.running():
        yield issuer


@pytest.fixture(scope="module")
def secure(issuer: Issuer, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A server with TLS that issues keys for the tokens of an issuer."""
    folder = tmp_path_factory.mktemp("secure")
    with SeaweedFS(folder, authority=authority, iam=issuer.trusted(ROLE)) as running:
        yield running


@pytest.mark.full
def test_a_private_certificate_authority(
    secure: SeaweedFS, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, secure.environment())
    there_and_back(secure.uri(name), tmp_path)
    other = Authority(tmp_path / "other")
    for trusted in ("", str(other.certificate)):
        monkeypatch.setenv("SSL_CERT_FILE", trusted) if trusted else monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConfigurationError, match=r"is not trusted \(\w+\); set SSL_CERT_FILE"):
            copy(secure.uri(name), str(tmp_path / "untrusted"))


@pytest.fixture
def web_identity(secure: SeaweedFS, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a pod with a role and without keys; returns the file of the pod's token."""
    environment = secure.environment()
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del environment[variable]
    token = tmp_path / "token"
    token.write_text(issuer.token())
    roles = {"AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ENDPOINT_URL_STS": secure.endpoint}
    set_environment(monkeypatch, {**environment, **roles})
    return token


def test_web_identity(web_identity: Path, secure: SeaweedFS, name: str, tmp_path: Path) -> None:
    there_and_back(secure.uri(name), tmp_path)


@pytest.mark.parametrize("wrong", ["another issuer", "expired", "no token", "no such role", "no file"])
def test_a_refused_web_identity(
    wrong: str,
    web_identity: Path,
    secure: SeaweedFS,
    issuer: Issuer,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if wrong == "another issuer":
        other = Issuer()
        other.url = issuer.url
        web_identity.write_text(other.token())
    elif wrong == "expired":
        web_identity.write_text(issuer.token(-60))
    elif wrong == "no token":
        web_identity.write_text("hunter2hunter2")
    elif wrong == "no such role":
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::role/other")
    else:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "none"))
    token = web_identity.read_text()
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="AWS_ROLE_ARN") as caught:
        copy(secure.uri(name), str(tmp_path / "t"))
    assert token not in str(caught.value)
    assert secure.uri(name) in str(caught.value)
    assert time.monotonic() - began < 20


def test_keys_are_not_requested_without_tls(
    web_identity: Path, seaweedfs: SeaweedFS, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, {"AWS_ENDPOINT_URL_STS": seaweedfs.endpoint, "AWS_ALLOW_HTTP": "true"})
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL_STS"):
        copy(seaweedfs.uri(name), str(tmp_path / "t"))
