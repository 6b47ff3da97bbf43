"""Parts of specs: runtime, environment, resources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from trainjob import names
from trainjob._spec.base import Fault, Part, refuse
from trainjob._spec.validation import ENV_ENTRY

_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)([EPTGMk]i?|Ki|m|u|n|[eE][+-]?\d+)?")
_LONGEST = 40  # characters of a quantity: the largest is 2^63 - 1, with nine decimals

# The Kubeflow SDK's short names, and the names that it accepts in any case.
_SHORT_NAMES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
_IN_ANY_CASE = {"cpu", "memory", "ephemeral-storage", *_SHORT_NAMES}


def _is_count(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a bool")
    return value


Count = Annotated[int, BeforeValidator(_is_count), Field(ge=1)]
"""A whole number from 1. A bool, which is an int in Python, is refused."""


def _is_object_name(value: str) -> str:
    if not names.JOB.fullmatch(value):
        raise ValueError(f"{value!r} is not a valid name: use lower-case letters, digits, '-' and '.', such as team-1")
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


class KeyRef(Part):
    """A key of a Secret or ConfigMap in the job's namespace."""

    camel_case: ClassVar[bool] = True

    name: ObjectName
    key: Annotated[str, Field(min_length=1)]
    optional: bool | None = None


class FieldRef(Part):
    """A field of the pod (``metadata.name``, ``status.podIP``, …)."""

    camel_case: ClassVar[bool] = True

    field_path: Annotated[str, Field(min_length=1)]
    api_version: str | None = None


class ResourceFieldRef(Part):
    """A resource of a container (``limits.memory``, …)."""

    camel_case: ClassVar[bool] = True

    resource: Annotated[str, Field(min_length=1)]
    container_name: str | None = None
    divisor: str | None = None


class EnvVarSource(Part):
    """Source of an environment variable's value; exactly one of the four."""

    camel_case: ClassVar[bool] = True

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None
    resource_field_ref: ResourceFieldRef | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("must have exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef")
        return self


def unwrap_value_from(value: object) -> object:
    """The content of ``{"valueFrom": …}``; other values unchanged."""
    if isinstance(value, Mapping) and set(value) in ({"valueFrom"}, {"value_from"}):
        return next(iter(value.values()))
    return value


_VALUES = ("valueFrom", "value_from", "value")


def _normalize_env(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept Kubernetes' list of ``{name, value | valueFrom}`` and ``{"NAME": {"valueFrom": …}}``."""
    faults: list[Fault] = []
    if isinstance(value, Sequence) and not isinstance(value, str):
        pairs: dict[str, object] = {}
        for i, item in enumerate(value):
            if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
                faults.append(Fault((i,), "needs a name and a value or a valueFrom", item, ENV_ENTRY))
                continue
            given = [field for field in _VALUES if field in item]
            unknown = [field for field in item if field not in ("name", *_VALUES)]
            faults += [Fault((i, str(field)), "no such field", item, ENV_ENTRY) for field in unknown]
            if len(given) > 1:
                faults.append(Fault((i,), f"has {' and '.join(given)}; remove one of them", item, ENV_ENTRY))
            if item["name"] in pairs:
                faults.append(Fault((i,), f"{item['name']} is given twice", item, ENV_ENTRY))
            pairs.setdefault(item["name"], item[given[0]] if given else "")
        value = pairs
    if isinstance(value, Mapping):
        value = {name: unwrap_value_from(source) for name, source in value.items()}
    try:
        valid = validate(value)
    except ValidationError as error:
        refuse([*faults, *(Fault(each["loc"], each["msg"], each["input"], each["type"]) for each in error.errors())])
    refuse(faults)
    return valid


Env = Annotated[dict[str, str | EnvVarSource], WrapValidator(_normalize_env)]


def env_api(env: Mapping[str, str | EnvVarSource]) -> list[dict[str, Any]]:
    """`env` as the API's list, in the author's order (``$(NAME)`` may refer to earlier variables).

    Written as the API itself writes it, like everything in ``spec.trainer``: to start a job, Kueue writes back all that
    it has read. An empty value would be left out then, and be refused as a change.
    """
    return [
        {"name": name, **({"value": value} if value else {})}
        if isinstance(value, str)
        else {"name": name, "valueFrom": value.api()}
        for name, value in env.items()
    ]


class Resources(Part):
    """Resources of each node, as Kubernetes quantities (``4``, ``500m``, ``16Gi``)."""

    unknown_field: ClassVar[str] = "write it into requests or limits"

    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """Accept the SDK's flat form with its short names; it becomes requests and limits alike."""
        if not isinstance(value, Mapping) or set(value) & {"requests", "limits"}:
            return value
        if any(isinstance(amount, Mapping) for amount in value.values()):
            return value  # misspelled requests or limits
        flat = {_resource_name(name): amount for name, amount in _quantities(value).items()}
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


def _quantities(amounts: Mapping[Any, object]) -> dict[Any, str]:
    texts = {name: str(amount) for name, amount in amounts.items()}
    wrong = {name: text for name, text in texts.items() if len(text) > _LONGEST or not _QUANTITY.fullmatch(text)}
    message = "{!r} is not a Kubernetes quantity such as 4, 500m or 16Gi"
    refuse([Fault((name,), message.format(text), amounts[name]) for name, text in wrong.items()])
    return texts


def _resource_name(name: object) -> object:
    lower = str(name).lower()
    if lower.startswith("mig-"):
        return f"nvidia.com/{lower}"
    return _SHORT_NAMES.get(lower, lower) if lower in _IN_ANY_CASE else name


def quantity_value(amount: str) -> Fraction | None:
    """The number that a quantity stands for: ``500m`` is 1/2, ``1Ki`` is 1024; None for one with an exponent."""
    match = re.fullmatch(r"([\d.]+)([A-Za-z]*)", amount)
    if match is None:
        return None
    number, suffix = match.groups()
    suffixes, base = (_BINARY, 1024) if suffix.endswith("i") else (_DECIMAL, 1000)
    return Fraction(number) * Fraction(base) ** suffixes[suffix]


def canonical_quantity(amount: str) -> str:
    """A quantity as the API writes it: a whole number with the largest suffix, ``500m`` for ``0.5``.

    (``resource.Quantity`` of k8s.io/apimachinery. Exponents are rare and stay unchanged.)
    """
    value = quantity_value(amount)
    if value is None:
        return amount
    binary = amount.endswith("i")
    suffixes, base = (_BINARY, 1024) if binary else (_DECIMAL, 1000)
    if binary and value < base:
        suffixes, base = _DECIMAL, 1000
    for name, power in sorted(suffixes.items(), key=lambda pair: -pair[1]):
        scaled = value / Fraction(base) ** power
        if value and scaled.denominator == 1:
            return f"{scaled}{name}"
    return "0" if not value else amount


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
