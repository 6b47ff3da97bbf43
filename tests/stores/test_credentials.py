"""Who is let in to an S3 that checks every signature: keys, roles, what is said to others, and keys that end midway."""

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
from tests.oci.proxy import Fault, Proxy, Seen
from tests.seaweedfs import SeaweedFS
from tests.stores.places import MANIFEST
from tests.stores.roles import Issuer, answering
from tests.trees import files, tree

from trainjob.data import copy, read_manifest, transfer
from trainjob.errors import ConfigurationError

ROLE = "arn:aws:iam::role/training"
FILES = {"a.txt": b"one", "sub/b.bin": random.Random(1).randbytes(300_000)}


@dataclass
class Key:
    """Of a user who may do everything with the bucket."""

    server: SeaweedFS
    user: str
    id: str
    secret: str

    def end(self) -> None:
        """From now on it is refused."""
        self.server.iam.delete_access_key(UserName=self.user, AccessKeyId=self.id)

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.id, "AWS_SECRET_ACCESS_KEY": self.secret}

    def handed_out(self, seconds: float) -> dict[str, str]:
        """As those who hand out keys of roles do, for so long."""
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        return {
            "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
            "AccessKeyId": self.id, "SecretAccessKey": self.secret, "Token": "", "Expiration": end,
        }  # fmt: skip


@pytest.fixture
def key(seaweedfs: SeaweedFS, name: str) -> Callable[[], Key]:
    """Makes keys of one user."""
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
def proxy(seaweedfs: SeaweedFS, through: Callable[[str], Proxy], monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """In front of the server; the environment has all but the keys."""
    proxy = through(seaweedfs.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.host}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return proxy


def given(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)


def there_and_back(uri: str, tmp_path: Path) -> None:
    copied = copy(str(tree(tmp_path / "source", FILES)), uri)
    copy(uri, str(tmp_path / "back"), digest=copied.digest)
    assert files(tmp_path / "back") == FILES


def signed_by(proxy: Proxy) -> set[str]:
    """The ids of the keys that were used."""
    return {_id(each) for each in proxy.requests}


def _id(seen: Seen) -> str:
    return seen.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]


def test_keys(
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = key()
    given(monkeypatch, mine.environment)
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {mine.id}


@pytest.mark.parametrize("wrong", ["secret", "id", "ended"])
def test_wrong_keys(
    wrong: str,
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = key()
    secrets = {"secret": "wrong-hunter2hunter2", "id": mine.secret, "ended": mine.secret}
    ids = {"secret": mine.id, "id": "AKIAHUNTER2HUNTER2", "ended": mine.id}
    if wrong == "ended":
        mine.end()
    given(monkeypatch, {"AWS_ACCESS_KEY_ID": ids[wrong], "AWS_SECRET_ACCESS_KEY": secrets[wrong]})
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
        said = str(caught.value)
        assert uri in said
        assert "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in said
        assert not [each for each in (*secrets.values(), *ids.values()) if each in said]
        assert "\n" not in said
    assert not (tmp_path / "t").exists()
    assert len(proxy.requests) < 20, "it is not tried again"


def test_keys_that_end_midway(
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    key: Callable[[], Key],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways: it ends, says why, and what is there is not taken for all; with new keys it goes on."""
    chance = random.Random(4)
    content = {f"{number:04}": chance.randbytes(10_000) for number in range(120)}
    source, uri = tree(tmp_path / "source", content), seaweedfs.uri(name)

    def ended_after(count: int, method: str) -> None:
        mine = key()
        given(monkeypatch, mine.environment)
        proxy.requests.clear()

        def plan(seen: Seen) -> Fault | None:
            if len(proxy.seen(method, f"/{name}/0")) == count and _id(seen) == mine.id:
                proxy.plan = lambda _: None
                mine.end()
            return None

        proxy.plan = plan

    ended_after(60, "PUT")
    with pytest.raises(ConfigurationError, match="denied; check AWS_ACCESS_KEY_ID"):
        copy(str(source), uri)
    assert len(proxy.requests) < 120, "it ends at the first refusal"
    held = {each["Key"] for each in seaweedfs.client.list_objects_v2(Bucket=seaweedfs.bucket, Prefix=name)["Contents"]}
    assert 60 - transfer._FILES_AT_A_TIME < len(held) <= 60 + 1, "those answered before the key ended, and the mark"
    assert f"{name}/{MANIFEST}" not in held
    given(monkeypatch, key().environment)
    whole = copy(str(source), uri)
    ended_after(60, "GET")
    with pytest.raises(ConfigurationError, match="denied; check AWS_ACCESS_KEY_ID"):
        copy(uri, str(tmp_path / "back"))
    assert read_manifest(str(tmp_path / "back")) is None
    given(monkeypatch, key().environment)
    assert copy(uri, str(tmp_path / "back")).digest == whole.digest
    assert files(tmp_path / "back") == content


@dataclass
class Vault:
    """Hands out the keys of a role, and changes them as clouds do: before the old ones end."""

    make: Callable[[], Key]
    keys: list[Key] = field(default_factory=list)
    asked: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    seconds: float = 30

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Any:
        self.asked.append((method, path, headers))
        if path == "/latest/api/token":
            return "of-this-instance" if method == "PUT" else None
        if path.endswith("/security-credentials/"):
            return "training"
        if path in ("/role", "/latest/meta-data/iam/security-credentials/training"):
            return self.keys[-1].handed_out(self.seconds)
        return None

    def rotate(self) -> None:
        self.keys.append(self.make())


@pytest.fixture
def vault(key: Callable[[], Key]) -> Iterator[tuple[Vault, str]]:
    """It, and where it answers."""
    vault = Vault(key)
    vault.rotate()
    with answering(vault.answer) as url:
        yield vault, url


def test_the_role_of_a_pod_or_container(
    vault: tuple[Vault, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper, url = vault
    (tmp_path / "token").write_text("the-token-of-the-pod")
    given(monkeypatch, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/role"})
    given(monkeypatch, {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")})
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {keeper.keys[0].id}
    assert {headers["authorization"] for _, _, headers in keeper.asked} == {"the-token-of-the-pod"}


def test_the_role_of_an_instance(
    vault: tuple[Vault, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper, url = vault
    given(monkeypatch, {"AWS_METADATA_ENDPOINT": url})
    there_and_back(seaweedfs.uri(name), tmp_path)
    assert signed_by(proxy) == {keeper.keys[0].id}
    assert keeper.asked[0][:2] == ("PUT", "/latest/api/token"), "version 2 of the service"
    assert keeper.asked[-1][2]["x-aws-ec2-metadata-token"] == "of-this-instance"


@pytest.mark.parametrize("down", [False, True])
def test_keys_of_a_role_that_change_midway(
    down: bool,
    vault: tuple[Vault, str],
    seaweedfs: SeaweedFS,
    proxy: Proxy,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old keys end while the copy goes on with the new ones."""
    keeper, url = vault
    given(monkeypatch, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/role"})
    (tmp_path / "token").write_text("t")
    given(monkeypatch, {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")})
    content = {f"{number:03}": b"%d" % number for number in range(100)}
    source, target = str(tree(tmp_path / "source", content)), seaweedfs.uri(name)
    if down:
        copy(source, target)
        source, target = target, str(tmp_path / "back")
        proxy.requests.clear()
    old, changed = keeper.keys[0], 0.0
    ended: list[int] = []

    def plan(seen: Seen) -> Fault | None:
        nonlocal changed
        time.sleep(0.02)  # so that it takes two seconds
        if not changed and len(proxy.requests) == 30:
            changed = time.monotonic()
            keeper.rotate()
        # obstore asks for keys that are to end soon ten times a second.
        under_way = [each for each in proxy.requests if _id(each) == old.id and not each.status]
        if changed and not ended and time.monotonic() > changed + 0.3 and not under_way:
            old.end()
            ended.append(len(proxy.requests))
        return None

    proxy.plan = plan
    whole = copy(source, target)
    assert ended
    assert signed_by(proxy) == {key.id for key in keeper.keys}
    assert {_id(each) for each in proxy.requests[ended[0] :]} == {keeper.keys[1].id}
    assert transfer.scan(target).digest == whole.digest
    assert len(whole.files) == 100


# ------------------------------------------------------------------ https, and the tokens of pods


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    with issuer.running():
        yield issuer


@pytest.fixture(scope="module")
def secure(issuer: Issuer, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Behind TLS, and gives keys for the tokens of an issuer."""
    folder = tmp_path_factory.mktemp("secure")
    with SeaweedFS(folder, authority=authority, iam=issuer.trusted(ROLE)) as running:
        yield running


def test_a_certificate_of_an_authority_of_ones_own(
    secure: SeaweedFS, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, secure.environment())
    there_and_back(secure.uri(name), tmp_path)
    other = Authority(tmp_path / "other")
    for trusted in ("", str(other.certificate)):
        monkeypatch.setenv("SSL_CERT_FILE", trusted) if trusted else monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConfigurationError, match=r"is not trusted \(\w+\); set SSL_CERT_FILE"):
            copy(secure.uri(name), str(tmp_path / "untrusted"))


@pytest.fixture
def web_identity(secure: SeaweedFS, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod with a role and without keys; returns the file of its token."""
    environment = secure.environment()
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del environment[variable]
    token = tmp_path / "token"
    token.write_text(issuer.token())
    roles = {"AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ENDPOINT_URL_STS": secure.endpoint}
    given(monkeypatch, {**environment, **roles})
    return token


def test_web_identity(web_identity: Path, secure: SeaweedFS, name: str, tmp_path: Path) -> None:
    there_and_back(secure.uri(name), tmp_path)


@pytest.mark.parametrize("wrong", ["another issuer", "expired", "no token", "no such role", "no file"])
def test_web_identity_that_is_refused(
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


def test_keys_are_not_asked_for_without_tls(
    web_identity: Path, seaweedfs: SeaweedFS, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, {"AWS_ENDPOINT_URL_STS": seaweedfs.endpoint, "AWS_ALLOW_HTTP": "true"})
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL_STS"):
        copy(seaweedfs.uri(name), str(tmp_path / "t"))
