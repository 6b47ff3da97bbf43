"""Merges TrainJob's schemas of several releases of Trainer to `components/trainjob/_spec/trainjob_crd.json`.

    python -m tests.testcluster.crd manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml ...

A field is in the merged schema if any release has it, is required if all of them require it, and has the widest limits.
Descriptions and rules in CEL are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

DATA = Path("components/trainjob/_spec/trainjob_crd.json")
_KEPT = ("type", "format", "pattern", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys")
_LARGEST = ("maximum", "maxLength", "maxItems")
_SMALLEST = ("minimum", "minLength", "minItems")


def schema_of(crd: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a TrainJob's spec in a CustomResourceDefinition."""
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1alpha1")
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of what either of two schemas accepts."""
    result: dict[str, Any] = {name: one.get(name, other.get(name)) for name in _KEPT if name in one or name in other}
    for names, choose in ((_LARGEST, max), (_SMALLEST, min)):
        result |= {name: choose(one[name], other[name]) for name in names if name in one and name in other}
    if required := sorted(set(one.get("required", ())) & set(other.get("required", ()))):
        result["required"] = required
    fields, others = one.get("properties", {}), other.get("properties", {})
    if fields or others:
        pairs = {name: (fields.get(name), others.get(name)) for name in sorted({*fields, *others})}
        result["properties"] = {name: merged(a or b, b or a) for name, (a, b) in pairs.items()}
    for name in ("items", "additionalProperties"):
        if isinstance(part := one.get(name, other.get(name)), Mapping):
            result[name] = merged(part, other.get(name, part))
    return result


def written(schema: Mapping[str, Any]) -> str:
    """A schema as JSON, with a line for each field of a TrainJob's spec."""
    fields = ",\n".join(f"{json.dumps(name)}:{_compact(part)}" for name, part in schema["properties"].items())
    others = _compact({name: part for name, part in schema.items() if name != "properties"})
    return f'{others[:-1]},"properties":{{\n{fields}\n}}}}\n'


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    schemas = [schema_of(yaml.safe_load(Path(name).read_text())) for name in sys.argv[1:]]
    DATA.write_text(written(reduce(merged, schemas, schemas[0])))
