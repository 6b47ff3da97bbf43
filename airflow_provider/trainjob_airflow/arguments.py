"""Checks of arguments that are not part of a spec, when the DAG is parsed. Templates pass: their values come later."""

from __future__ import annotations

from datetime import timedelta

from trainjob_airflow.templates import is_open

Seconds = timedelta | float | None


def positive_seconds(name: str, value: Seconds) -> float | None:
    """An argument of type `Seconds` in seconds.

    Raises:
        ValueError: It is neither a duration nor left out.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"{name} is a timedelta or a number of seconds above 0, not {value!r}")
    return seconds


def check_switches(**given: object) -> None:
    """Refuse what is not a bool, by name: the text ``"no"`` would count as True.

    Raises:
        ValueError: One is not.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is True or False, not {value!r}")


def check_texts(*, required: bool = False, **given: object) -> None:
    """Refuse what is not text, by name; None and empty texts are allowed unless `required`.

    Raises:
        ValueError: One is not.
    """
    for name, value in given.items():
        if is_open(value) or (value is None and not required):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{name} is a text, not {value!r}")
        if required and not value.strip():
            raise ValueError(f"{name} is empty")


def check_place(namespace: object, conn_id: object) -> None:
    """Refuse what cannot be the name of a namespace or connection.

    Raises:
        ConfigurationError, ValueError: It cannot.
    """
    from trainjob import names

    check_texts(namespace=namespace, trainjob_conn_id=conn_id)
    if isinstance(namespace, str) and namespace and not is_open(namespace):
        names.namespace(namespace)
