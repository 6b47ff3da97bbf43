"""A small client of the Kubernetes API, for the setup of clusters and tests.

The client under test is `trainjob._backends.kubernetes`; they share the reading of kubeconfigs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from trainjob._backends.credentials import Credentials

Object = dict[str, Any]

_MANAGER = "trainjob-tests"


class ApiError(Exception):
    """The API server refused a request.

    Attributes:
        status: HTTP status.
        reason: `reason` of the Status object, e.g. ``NotFound``.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Api:
    """The API server of a kubeconfig's current context."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        access = Credentials(kubeconfig=str(kubeconfig)).load()
        self.server = access.host
        headers = {"Authorization": access.authorization} if access.authorization else {}
        self._client = httpx.Client(base_url=access.host, verify=access.verify, headers=headers, timeout=30)
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}

    @property
    def authority(self) -> bytes:
        """The certificate of the authority that signed the server's, in the first cluster of the kubeconfig."""
        cluster = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]
        return base64.b64decode(cluster["certificate-authority-data"])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """Send a request; return the decoded JSON, or the text of an answer that is not JSON, such as a watch.

        Raises:
            ApiError: the status is not 2xx.
            httpx.TransportError: no answer.
        """
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if content else {}
        answer = self._client.request(method, path, content=content, params=params, headers=headers)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if not answer.is_success:
            status = answer.json() if is_json else {}
            raise ApiError(answer.status_code, status.get("reason", ""), status.get("message", answer.text[:500]))
        is_watch = (params or {}).get("watch") == "true"
        return answer.json() if is_json and not is_watch else answer.text

    def path(self, api_version: str, kind: str, namespace: str = "", name: str = "") -> str:
        """The path of an object, or of its collection if `name` is empty."""
        base = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        if (api_version, kind) not in self._plurals:
            for each in self.request("GET", base)["resources"]:
                if "/" not in each["name"]:
                    self._plurals[api_version, each["kind"]] = (each["name"], each["namespaced"])
        if (api_version, kind) not in self._plurals:
            raise ApiError(404, "NotFound", f"the server does not serve {api_version} {kind}")
        plural, namespaced = self._plurals[api_version, kind]
        middle = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{base}{middle}/{plural}" + (f"/{name}" if name else "")

    def create(self, each: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """POST an object; with `dry_run` it only passes admission."""
        metadata = each["metadata"]
        path = self.path(each["apiVersion"], each["kind"], metadata.get("namespace", ""))
        return dict(self.request("POST", path, each, params={"dryRun": "All"} if dry_run else None))

    def apply(self, each: Mapping[str, Any]) -> Object:
        """Server-side apply: without the 256 KiB limit of kubectl's client-side apply, and idempotent."""
        metadata = each["metadata"]
        path = self.path(each["apiVersion"], each["kind"], metadata.get("namespace", ""), metadata["name"])
        params = {"fieldManager": _MANAGER, "force": "true"}
        return dict(self.request("PATCH", path, each, params=params, content_type="application/apply-patch+yaml"))

    def patch(self, api_version: str, kind: str, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        """JSON merge patch."""
        path = self.path(api_version, kind, namespace, name)
        return dict(self.request("PATCH", path, body, content_type="application/merge-patch+json"))

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """An object; None if it does not exist."""
        try:
            return dict(self.request("GET", self.path(api_version, kind, namespace, name)))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def find(
        self, api_version: str, kind: str, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """All objects of a kind that the selectors match."""
        params = {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
        return list(self.request("GET", self.path(api_version, kind, namespace), params=params)["items"])

    def delete(self, api_version: str, kind: str, namespace: str, name: str, *, grace: int | None = None) -> None:
        """Delete an object, and its dependents in the background; the object need not exist."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", self.path(api_version, kind, namespace, name), options)
        except ApiError as error:
            if error.status != 404:
                raise


def write_kubeconfig(
    target: Path, server: str, authority: bytes, user: Mapping[str, str], namespace: str = "default"
) -> Path:
    """A kubeconfig with one context; everything is inline, so the file can be copied anywhere."""
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
    context = {"cluster": "test", "user": "test", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": dict(user)}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    target.touch(mode=0o600)
    target.write_text(yaml.safe_dump(config))
    return target


def client_user(certificate: Path, key: Path) -> dict[str, str]:
    """The `user` of a kubeconfig that has a client certificate."""
    return {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
