"""Parts of specs: runtime, environment, resources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from trainjob import names
from trainjob._spec.base import Part, refuse
from trainjob._spec.quantities import A_QUANTITY, canonical_quantity, quantity_to_write, quantity_value
from trainjob._spec.schema import env_value, read, schema
from trainjob._spec.wording import text_problem
from trainjob._support.kube_objects import mapping
from trainjob.errors import Problem

# The Kubeflow SDK's short names, and the names that it accepts in any case.
_SHORT_NAMES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
_OFTEN_MEANT = {
    "storage": "ephemeral-storage",
    "tpu": "google.com/tpu",
    "rocm": "amd.com/gpu",
    "npu": "huawei.com/Ascend910",
    "neuron": "aws.amazon.com/neuron",
}
_DIVISIBLE = ("cpu", "memory", "ephemeral-storage")
"""Resources that pods share in parts, and whose requests may be less than their limits."""
_SMALLEST_BYTES = 1 << 20
_IN_ANY_CASE = {"cpu", "memory", "ephemeral-storage", *_SHORT_NAMES}


def _is_count(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a bool")
    return value


Count = Annotated[int, BeforeValidator(_is_count), Field(ge=1)]
"""A whole number from 1. A bool, which is an int in Python, is refused."""


_NOT_A_NAME = "is not a valid name: use lower-case letters, digits, '-' and '.', such as team-1"


def _is_object_name(value: str) -> str:
    if not names.JOB.fullmatch(value):
        raise ValueError(f"{value!r} {_NOT_A_NAME}")
    return value


ObjectName = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_is_object_name)]
"""Name of a Kubernetes object: an RFC 1123 subdomain."""


class RuntimeRef(Part):
    """The runtime of the job (``spec.runtimeRef``)."""

    name: ObjectName
    api_group: str = "trainer.kubeflow.org"
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


def _read_env(value: object) -> object:
    """Names with values or sources; also read from Kubernetes' list of ``{name, value | valueFrom}``."""
    found: list[Problem] = []
    if isinstance(value, list | tuple):
        value = dict(_named(value, found))
    if isinstance(value, Mapping):
        if "name" in value and {*value} <= _OF_A_VARIABLE:
            found.append(Problem("", "is one variable", "write a list of variables, or {NAME: value}"))
        value = {name: _read_value(each, str(name), found) for name, each in value.items()}
    refuse(found)
    return value


_OF_A_VARIABLE = {"name", "value", "valueFrom", "value_from"}
_OF_A_KEY = {"name", "key", "optional"}


def _named(entries: Sequence[object], found: list[Problem]) -> Iterator[tuple[str, object]]:
    names: set[str] = set()
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            found.append(Problem(f"[{i}]", "needs a name and a value or a valueFrom"))
            continue
        name = entry["name"]
        given = [field for field in ("valueFrom", "value_from", "value") if field in entry]
        found += [Problem(f"[{i}].{field}", "no such field") for field in entry if field not in ("name", *given)]
        if len(given) > 1:
            found.append(Problem(f"[{i}]", f"has {' and '.join(given)}; remove one of them"))
        elif name in names:
            found.append(Problem(f"[{i}]", f"{name} is given twice"))
        else:
            yield name, {given[0]: entry[given[0]]} if given and given[0] != "value" else entry.get("value", "")
        names.add(name)


def _read_value(value: object, where: str, found: list[Problem]) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        found.append(text_problem(where, value))
        return ""
    if "key" in value and {*value} <= _OF_A_KEY:
        found.append(Problem(where, "does not say what has the key", "write {secretKeyRef: {name: …, key: …}}"))
        return {}
    sources = schema("trainer", "env", "valueFrom")
    before = len(found)
    source: dict[str, Any] = read(env_value(value)["valueFrom"], sources, where, found) or {}
    if len(source) != 1 and len(found) == before:
        *others, last = mapping(sources, "properties")
        found.append(Problem(where, f"must have exactly one of {', '.join(others)} and {last}"))
    for kind in ("secretKeyRef", "configMapKeyRef"):
        if kind in source and len(found) == before and not names.JOB.fullmatch(source[kind].get("name") or ""):
            wrong = f"{source[kind]['name']!r} {_NOT_A_NAME}" if source[kind].get("name") else "is missing"
            found.append(Problem(f"{where}.{kind}.name", wrong))
    return source


def _reference(value: object) -> object:
    found: list[Problem] = []
    value = _read_value(value, "", found)
    refuse(found)
    return value


Env = Annotated[dict[str, str | dict[str, Any]], BeforeValidator(_read_env)]
"""Environment variables: a text, or a source as the API has it, such as ``{"secretKeyRef": {"name": …, "key": …}}``."""

TextOrSource = Annotated[str | dict[str, Any], BeforeValidator(_reference)]
"""A text, or a reference to a Secret's key or to another source of an environment variable."""


def env_api(env: Mapping[str, str | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`env` as the API's list, in the author's order (``$(NAME)`` may refer to earlier variables).

    Written as the API itself writes it, like everything in ``spec.trainer``: to start a job, Kueue writes back all that
    it has read. An empty value would be left out then, and be refused as a change.
    """
    return [{"name": name, **(env_value(value) if value else {})} for name, value in env.items()]


class Resources(Part):
    """Resources of each node, as Kubernetes quantities (``4``, ``500m``, ``16Gi``)."""

    unknown_field: ClassVar[str] = "write it into requests or limits"
    written_as: ClassVar[Mapping[str, str]] = {"claims": "claims of pods belong to a training runtime"}

    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """Accept the SDK's flat form; it becomes requests and limits alike."""
        if not isinstance(value, Mapping) or set(value) & {"requests", "limits"}:
            return value
        if any(isinstance(amount, Mapping) for amount in value.values()):
            return value  # misspelled requests or limits
        flat = _quantities(value)
        return {"requests": flat, "limits": flat}

    @field_validator("requests", "limits", mode="before")
    @classmethod
    def _each_is_a_quantity(cls, value: object) -> object:
        return _quantities(value) if isinstance(value, Mapping) else value

    def api(self) -> dict[str, Any]:
        """The part as the API itself writes it; see `env_api`."""
        kinds = {"requests": self.requests, "limits": self.limits}
        return {
            kind: {name: canonical_quantity(amount) for name, amount in amounts.items()}
            for kind, amounts in kinds.items()
            if amounts
        }


def _quantities(amounts: Mapping[Any, object]) -> dict[str, str]:
    """Amounts as texts, under the full names of the resources."""
    texts = {str(name): str(amount) for name, amount in amounts.items()}
    wrong = {name: text for name, text in texts.items() if quantity_value(text) is None}
    refuse([Problem(name, f"{text!r} is not {A_QUANTITY}", quantity_to_write(text)) for name, text in wrong.items()])
    return {_resource_name(name): text for name, text in texts.items()}


def _resource_name(name: str) -> str:
    lower = name.lower()
    if lower.startswith("mig-"):
        return f"nvidia.com/{lower}"
    return _SHORT_NAMES.get(lower, lower) if lower in _IN_ANY_CASE else name


def resource_problems(resources: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Resources that no pod can have, by the API server's rules for pods (``ValidateContainerResourceRequirements``).

    Args:
        resources: ``requests`` and ``limits`` with Kubernetes quantities; anything else in them is not checked.
        where: Path of the resources.
    """
    requests, limits = mapping(resources, "requests"), mapping(resources, "limits")
    for kind, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            yield from _amount_problems(str(name), str(amount), kind, f"{where}.{kind}.{name}")
    for name, amount in requests.items():
        asked, most = quantity_value(str(amount)), quantity_value(str(limits.get(name, "")))
        path = f"{where}.requests.{name}"
        if not _is_resource(str(name)) or asked is None:
            continue
        if name not in _DIVISIBLE and name not in limits:
            yield Problem(path, "is only in requests, and a pod has it by its limit", f"write it into limits: {amount}")
        elif name not in _DIVISIBLE and asked != most:
            yield Problem(path, f"is {amount}, and the limit is {limits[name]}", "write the same number in both")
        elif most is not None and asked > most:
            units = f"a suffix with i counts in 1024, without it in 1000: write {amount} in both"  # 16Gi and 16G
            same = str(amount).rstrip("i") == str(limits[name])
            write = units if same else "raise the limit, or leave it out"
            yield Problem(path, f"{amount} is more than the limit, {limits[name]}", write)


def _is_resource(name: str) -> bool:
    return name in _DIVISIBLE or "/" in name or name.startswith("hugepages-")


def _amount_problems(name: str, amount: str, kind: str, where: str) -> Iterator[Problem]:
    value = quantity_value(amount)
    if not _is_resource(name):
        full = _OFTEN_MEANT.get(name.lower(), "such as nvidia.com/gpu")
        yield Problem(where, "is not a resource of Kubernetes", f"write its full name: {full}")
    elif value is None:
        return
    elif name == "cpu" and (value * 1000).denominator != 1:
        yield Problem(where, f"{amount} is finer than 1m, a thousandth of a CPU")
    elif name == "memory" and kind == "limits" and 0 < value < _SMALLEST_BYTES:
        number = re.sub(r"[A-Za-z]+$", "", amount)
        write = f"write {number}{'Mi' if amount.endswith('m') else 'Gi'}" if amount in (number, f"{number}m") else ""
        yield Problem(where, f"{amount} is {float(value):g} bytes, with which nothing starts", write)
    elif "/" in name and value.denominator != 1:
        yield Problem(where, f"{amount!r} is not a whole number, and {name} cannot be divided")


class OwnerReference(Part):
    """An object of the job's namespace that owns the job (``metadata.ownerReferences``)."""

    api_version: Annotated[str, Field(min_length=1)]
    kind: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    uid: Annotated[str, Field(min_length=1)]


class SecretRef(Part):
    """A Secret in the job's namespace."""

    name: ObjectName

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value
