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


@dataclass
class Location:
    """A location on a server behind a proxy; the environment has all settings but the keys."""

    uri: str
    proxy: Proxy
    folder: Path
    set: Callable[..., None]

    def there_and_back(self) -> None:
        copied = copy(str(tree(self.folder / "source", FILES)), self.uri)
        copy(self.uri, str(self.folder / "back"), digest=copied.digest)
        assert files(self.folder / "back") == FILES


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_all(**environment: str) -> None:
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)

    return set_all


@pytest.fixture
def at(
    seaweedfs: SeaweedFS,
    start_proxy: Callable[[str], Proxy],
    name: str,
    tmp_path: Path,
    set_environment: Callable[..., None],
) -> Location:
    proxy = start_proxy(seaweedfs.endpoint)
    set_environment(AWS_ENDPOINT_URL=f"http://{proxy.host}", AWS_ALLOW_HTTP="true", AWS_REGION="us-east-1")
    return Location(seaweedfs.uri(name), proxy, tmp_path, set_environment)


def signed_by(proxy: Proxy) -> set[str]:
    """IDs of the keys that signed the requests."""
    return {_id(each) for each in proxy.requests}


def _id(seen: Seen) -> str:
    return seen.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]


@pytest.mark.parametrize("wrong", ["secret", "id", "revoked"])
def test_wrong_keys_are_reported_without_secrets(
    wrong: str, at: Location, seaweedfs: SeaweedFS, key: Callable[[], Key], name: str
) -> None:
    mine = key()
    used = {"AWS_ACCESS_KEY_ID": mine.id, "AWS_SECRET_ACCESS_KEY": mine.secret}
    if wrong == "revoked":
        mine.revoke()
    else:
        used |= {"secret": {"AWS_SECRET_ACCESS_KEY": "wrong-hunter2"}, "id": {"AWS_ACCESS_KEY_ID": "AKIAHUNTER2"}}[
            wrong
        ]
    at.set(**used)
    source, target = tree(at.folder / "source", FILES), str(at.folder / "t")
    seaweedfs.client.put_object(Bucket=seaweedfs.bucket, Key=f"{name}/a.txt", Body=b"x")
    acts: list[Callable[[], object]] = [
        lambda: copy(str(source), at.uri),
        *(functools.partial(copy, uri, target) for uri in (at.uri, f"{at.uri}/a.txt", f"{at.uri}/")),
        lambda: read_manifest(at.uri),
    ]
    for act in acts:
        with pytest.raises(ConfigurationError, match="check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
            act()
        assert at.uri in str(caught.value)
        assert not [each for each in (*used.values(), mine.secret, "\n") if each in str(caught.value)]
    assert not (at.folder / "t").exists()
    assert len(at.proxy.requests) < 20, "no retries"


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


@pytest.fixture
def role(key_server: tuple[KeyServer, str], at: Location) -> KeyServer:
    """Issues the keys of a pod's or container's role."""
    (at.folder / "token").write_text("the-token-of-the-pod")
    at.set(AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{key_server[1]}/role")
    at.set(AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(at.folder / "token"))
    return key_server[0]


def test_the_role_of_a_pod_or_container(role: KeyServer, at: Location) -> None:
    at.there_and_back()
    assert signed_by(at.proxy) == {role.keys[0].id}
    assert {headers["authorization"] for _, _, headers in role.requests} == {"the-token-of-the-pod"}


def test_the_role_of_an_instance(key_server: tuple[KeyServer, str], at: Location) -> None:
    server, url = key_server
    at.set(AWS_METADATA_ENDPOINT=url)
    at.there_and_back()
    assert signed_by(at.proxy) == {server.keys[0].id}
    assert server.requests[0][:2] == ("PUT", "/latest/api/token"), "version 2 of the service"
    assert server.requests[-1][2]["x-aws-ec2-metadata-token"] == "of-this-instance"


@pytest.mark.full
@pytest.mark.parametrize("down", [False, True])
def test_keys_of_a_role_rotated_during_a_copy(down: bool, role: KeyServer, at: Location) -> None:
    """The old keys are revoked while the copy continues with the new ones."""
    source, target = str(tree(at.folder / "source", {f"{number:03}": b"%d" % number for number in range(100)})), at.uri
    if down:
        copy(source, target)
        source, target = target, str(at.folder / "back")
        at.proxy.requests.clear()
    old, changed = role.keys[0], 0.0
    revoked: list[int] = []

    def plan(seen: Seen) -> Fault | None:
        nonlocal changed
        time.sleep(0.02)  # so that it takes two seconds
        if not changed and len(at.proxy.requests) == 30:
            changed = time.monotonic()
            role.rotate()
        # obstore requests keys that expire soon ten times a second.
        under_way = [each for each in at.proxy.requests if _id(each) == old.id and not each.status]
        if changed and not revoked and time.monotonic() > changed + 0.3 and not under_way:
            old.revoke()
            revoked.append(len(at.proxy.requests))
        return None

    at.proxy.plan = plan
    complete = copy(source, target)
    assert revoked
    assert signed_by(at.proxy) == {key.id for key in role.keys}
    assert {_id(each) for each in at.proxy.requests[revoked[0] :]} == {role.keys[1].id}
    assert (transfer.scan(target).digest, len(complete.files)) == (complete.digest, 100)


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


@pytest.fixture
def within(secure: SeaweedFS, name: str, tmp_path: Path, set_environment: Callable[..., None]) -> Location:
    """A location on the server with TLS, without a proxy."""
    set_environment(**secure.environment())
    return Location(secure.uri(name), Proxy(""), tmp_path, set_environment)


@pytest.mark.full
def test_a_private_certificate_authority(within: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    within.there_and_back()
    other = Authority(within.folder / "other")
    for trusted in ("", str(other.certificate)):
        monkeypatch.setenv("SSL_CERT_FILE", trusted) if trusted else monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConfigurationError, match=r"is not trusted \(\w+\); set SSL_CERT_FILE"):
            copy(within.uri, str(within.folder / "untrusted"))


@pytest.fixture
def token(within: Location, secure: SeaweedFS, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a pod's token; its environment has a role and no keys."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    token = within.folder / "token"
    token.write_text(issuer.token())
    within.set(AWS_ROLE_ARN=ROLE, AWS_WEB_IDENTITY_TOKEN_FILE=str(token), AWS_ENDPOINT_URL_STS=secure.endpoint)
    return token


@pytest.mark.usefixtures("token")
def test_web_identity(within: Location) -> None:
    within.there_and_back()


def of_another_issuer(issuer: Issuer) -> str:
    other = Issuer()
    other.url = issuer.url
    return other.token()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "environment"),
    [
        pytest.param(of_another_issuer, {}, id="another issuer"),
        pytest.param(lambda issuer: issuer.token(-60), {}, id="expired"),
        pytest.param(lambda issuer: "hunter2hunter2", {}, id="no token"),
        pytest.param(Issuer.token, {"AWS_ROLE_ARN": "arn:aws:iam::role/other"}, id="no such role"),
        pytest.param(Issuer.token, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/nonexistent"}, id="no file"),
    ],
)
def test_a_refused_web_identity(
    text: Callable[[Issuer], str], environment: dict[str, str], token: Path, issuer: Issuer, within: Location
) -> None:
    token.write_text(text(issuer))
    within.set(**environment)
    with pytest.raises(ConfigurationError, match="AWS_ROLE_ARN") as caught:
        copy(within.uri, str(within.folder / "t"))
    assert token.read_text() not in str(caught.value)
    assert within.uri in str(caught.value)


@pytest.mark.usefixtures("token")
def test_keys_are_not_requested_without_tls(within: Location, seaweedfs: SeaweedFS, name: str) -> None:
    within.set(AWS_ENDPOINT_URL_STS=seaweedfs.endpoint, AWS_ALLOW_HTTP="true")
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL_STS"):
        copy(seaweedfs.uri(name), str(within.folder / "t"))
