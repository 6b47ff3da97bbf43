"""The manifests that JobSet, Trainer, Kueue, kwok and scheduler-plugins ship, as JSON.

`render` runs when the programs are built, and does by hand what the projects' kustomizations do: YAML takes seconds to
parse (Trainer's definitions alone are 1.7 MB), JSON milliseconds. `load` reads the result, `point` aims webhooks at a
port of this machine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

KUEUE_FRAMEWORKS = ("batch/job", "jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob")
"""The kinds of job that Kueue manages here; its manifests have webhooks for 15 more that this cluster has not."""


def load(directory: Path, name: str) -> list[Object]:
    """The rendered objects `name` of one owner: crds, webhooks, runtimes or stages."""
    objects: list[Object] = json.loads((directory / f"{name}.json").read_text())
    return objects


def render(owner: str, source: Path, target: Path) -> None:
    """Write what the cluster needs of `owner` from its Go module in `source` into `target`."""
    for name, objects in _RENDERERS[owner](source).items():
        (target / f"{name}.json").write_text(json.dumps(objects))


def point(objects: Iterable[Object], port: int, authority: str) -> list[Object]:
    """Copies of webhook configurations and definitions that call 127.0.0.1:`port` in place of a Service.

    Args:
        objects: What `load` returned.
        port: Where the webhooks are served.
        authority: Certificate of the authority that signed the server's, base64 of PEM.
    """
    pointed = []
    for original in objects:
        each = copy.deepcopy(original)
        for client in _clients(each):
            path = client.pop("service")["path"]
            client |= {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
        pointed.append(each)
    return pointed


def _clients(each: Object) -> list[Object]:
    if each["kind"] == "CustomResourceDefinition":
        webhook = each["spec"].get("conversion", {}).get("webhook")
        return [webhook["clientConfig"]] if webhook else []
    return [webhook["clientConfig"] for webhook in each["webhooks"]]


def read(text: str) -> list[Object]:
    """The documents of a YAML text."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def _read(*paths: Path) -> list[Object]:
    return [document for path in paths for document in read(path.read_text())]


def _jobset(source: Path) -> dict[str, list[Object]]:
    components = source / "config" / "components"
    patches = components / "webhook" / "patches"
    webhooks = _read(components / "webhook" / "manifests.yaml")
    return {
        "crds": _read(*sorted((components / "crd" / "bases").glob("*.yaml"))),
        # The patches limit the pod webhooks to pods of a JobSet; without them no pod at all could be created while
        # JobSet is down.
        "webhooks": _own_names(
            "jobset",
            webhooks,
            {
                "MutatingWebhookConfiguration": _read(patches / "mutating-patch.yaml")[0],
                "ValidatingWebhookConfiguration": _read(patches / "validating-patch.yaml")[0],
            },
        ),
    }


def _trainer(source: Path) -> dict[str, list[Object]]:
    base = source / "manifests" / "base"
    webhook = base / "webhook"
    return {
        "crds": _read(*sorted((base / "crds").glob("trainer.kubeflow.org_*.yaml"))),
        "webhooks": _own_names(
            "trainer",
            _read(webhook / "manifests.yaml"),
            {  # 2.1 has none that matter here
                f"{kind.capitalize()}WebhookConfiguration": patch
                for kind in ("mutating", "validating")
                for patch in _read(*webhook.glob(f"patch_{kind}.yaml"))
            },
        ),
        "runtimes": [
            each
            for each in _read(*sorted((base / "runtimes").rglob("*.yaml")))
            if each["kind"] == "ClusterTrainingRuntime"
        ],
    }


def _kueue(source: Path) -> dict[str, list[Object]]:
    components = source / "config" / "components"
    kustomization = _read(components / "crd" / "kustomization.yaml")[0]
    conversions = {
        patch["metadata"]["name"]: patch["spec"]
        for each in kustomization["patches"]
        for patch in _read(components / "crd" / each["path"])
    }
    definitions = _read(*sorted((components / "crd" / "bases").glob("*.yaml")))
    for each in definitions:
        each["spec"] |= conversions.get(each["metadata"]["name"], {})
    webhooks = _own_names("kueue", _read(components / "webhook" / "manifests.yaml"), {})
    for each in webhooks:
        each["webhooks"] = [webhook for webhook in each["webhooks"] if _is_served(webhook)]
    return {"crds": definitions, "webhooks": webhooks}


def _is_served(webhook: Mapping[str, Any]) -> bool:
    path: str = webhook["clientConfig"]["service"]["path"]
    if "-kueue-x-k8s-io-" in path:
        return True
    kinds = [framework.rpartition("/")[2] for framework in KUEUE_FRAMEWORKS]
    return path.rpartition("-")[2] in kinds


def _kwok(source: Path) -> dict[str, list[Object]]:
    node = source / "kustomize" / "stage" / "node"
    return {
        "stages": _read(
            node / "fast" / "node-initialize.yaml", node / "heartbeat-with-lease" / "node-heartbeat-with-lease.yaml"
        )
    }


def _coscheduling(source: Path) -> dict[str, list[Object]]:
    return {"crds": _read(source / "config" / "crd" / "bases" / "scheduling.x-k8s.io_podgroups.yaml")}


def _own_names(owner: str, configurations: list[Object], patches: Mapping[str, Any]) -> list[Object]:
    """Patched configurations under names of their own.

    All three projects call theirs mutating- and validating-webhook-configuration: the second replaces the first.
    """
    for each in configurations:
        for operation in patches.get(each["kind"], ()):
            if "service" not in operation["path"]:
                _patch(each, operation)
        each["metadata"]["name"] = f"{owner}-{each['kind'].removesuffix('WebhookConfiguration').lower()}"
    return configurations


def _patch(target: Any, operation: Mapping[str, Any]) -> None:
    """One `add` or `replace` of a JSON patch (RFC 6902); the projects use no others here."""
    *parents, last = operation["path"].strip("/").split("/")
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        target[int(last)] = operation["value"]
    else:
        target[last] = operation["value"]


_RENDERERS: Mapping[str, Callable[[Path], dict[str, list[Object]]]] = {
    "jobset": _jobset,
    "trainer": _trainer,
    "kueue": _kueue,
    "kwok": _kwok,
    "coscheduling": _coscheduling,
}
