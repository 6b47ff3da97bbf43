"""Checks of arguments that are not part of a spec, when the DAG is parsed. Templates are not checked."""

from __future__ import annotations

from datetime import timedelta

from trainjob_airflow.templates import is_open

Seconds = timedelta | float | None


def is_mapped_element(operator: object) -> bool:
    """Whether Airflow makes an operator for an element of a mapped task, whose arguments may be values of a run.

    Airflow takes its argument ``_airflow_from_mapped`` away before the constructor (`BaseOperatorMeta`, 3.3.2).
    """
    return bool(getattr(operator, "_BaseOperator__from_mapped", False))


def positive_seconds(name: str, value: Seconds) -> float | None:
    """Convert an argument to seconds.

    Raises:
        ValueError: The value is not a duration above 0.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"{name} must be a timedelta or a number of seconds above 0, not {value!r}")
    return seconds


def check_switches(**given: object) -> None:
    """Refuse arguments that are not bool: the string ``"no"`` would count as True.

    Raises:
        ValueError: An argument is not True or False.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")


def check_texts(*, required: bool = False, **given: object) -> None:
    """Refuse arguments that are not strings; None and empty strings are allowed unless `required`.

    Raises:
        ValueError: An argument is not a string, or is required and empty.
    """
    for name, value in given.items():
        if is_open(value) or (value is None and not required):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {value!r}")
        if required and not value.strip():
            raise ValueError(f"{name} must not be empty")


def check_place(namespace: object, conn_id: object) -> None:
    """Refuse invalid names of namespaces and connections.

    Raises:
        ConfigurationError: The namespace is not a valid name.
        ValueError: An argument is not a string.
    """
    from trainjob import names

    check_texts(namespace=namespace, trainjob_conn_id=conn_id)
    if isinstance(namespace, str) and namespace and not is_open(namespace):
        names.namespace(namespace)
