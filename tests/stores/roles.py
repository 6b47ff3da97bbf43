"""Servers that issue the keys of roles to instances and pods, as clouds have them, and an issuer of pods' tokens."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.fakes import scripted
from tests.serving import serving

Answer = Callable[[str, str, Mapping[str, str]], Any]
"""From method, path and headers (names in lower case): the response as JSON value or text; None: HTTP 404."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Run a server with these answers; yield its URL."""

    def reply(asked: scripted.Asked) -> scripted.Answer:
        found = answer(asked.method, asked.path, {name.lower(): value for name, value in asked.headers.items()})
        body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        return scripted.Answer(404 if found is None else 200, body)

    with serving(scripted.ScriptedServer(reply)) as server:
        yield server.url


class Issuer:
    """Signs tokens as a cluster does for its pods, and publishes the key."""

    audience = "sts.amazonaws.com"

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        keys = {"keys": [{**public, "kid": "1", "use": "sig", "alg": "RS256"}]}
        with answering(lambda method, path, headers: keys) as self.url:
            yield

    def token(self, seconds: int = 600) -> str:
        """A token of a service account, valid for ``seconds``."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": self.audience, "sub": "system:serviceaccount:team:training"}
        times = {"iat": min(now, now + seconds - 1), "exp": now + seconds}
        return jwt.encode({**claims, **times}, self._key, "RS256", headers={"kid": "1"})

    def trusted(self, role: str) -> dict[str, Any]:
        """Configuration of a server that grants a role with all permissions on S3 to the tokens of this issuer."""
        allowed = {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}
        assumed = {"Effect": "Allow", "Principal": {"Federated": "*"}, "Action": ["sts:AssumeRoleWithWebIdentity"]}
        key = base64.b64encode(b"0123456789abcdef" * 2).decode()
        config = {"issuer": self.url, "clientId": self.audience, "jwksUri": f"{self.url}/keys"}
        return {
            "sts": {"tokenDuration": "1h", "maxSessionLength": "12h", "issuer": "tests", "signingKey": key},
            "providers": [{"name": "pods", "type": "oidc", "enabled": True, "config": config}],
            "policy": {"defaultEffect": "Deny", "storeType": "memory"},
            "policies": [{"name": "all", "document": {"Version": "2012-10-17", "Statement": [allowed]}}],
            "roles": [
                {
                    "roleName": role.rpartition("/")[2],
                    "roleArn": role,
                    "trustPolicy": {"Version": "2012-10-17", "Statement": [assumed]},
                    "attachedPolicies": ["all"],
                }
            ],
        }
