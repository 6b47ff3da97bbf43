"""Secrets that templates put into a spec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainjob import TrainJobSpec
from trainjob_airflow.templates import secrets_in

JOB = {"runtime": "trainjob-step", "command": ["train"]}


@pytest.fixture(autouse=True)
def masked(airflow_home: object) -> Iterator[None]:
    """Two secrets that Airflow masks, a long one and a word."""
    from airflow.sdk._shared.secrets_masker import _secrets_masker, mask_secret

    masker = _secrets_masker()
    patterns, replacer = masker.patterns, masker.replacer
    # Remove secrets of other tests: they are a set without order, and a part of these could be masked first.
    masker.patterns, masker.replacer = set(), None
    mask_secret("hunter2-hunter2")
    mask_secret("admin1")
    yield
    masker.patterns, masker.replacer = patterns, replacer


def paths(**fields: object) -> list[str]:
    return [problem.path for problem in secrets_in(TrainJobSpec.parse({**JOB, **fields}))]


def test_secrets_that_airflow_knows_are_found() -> None:
    assert paths(env={"A": "x", "B": "--hunter2-hunter2--"}) == ["env.B"]
    assert paths(command=["echo", "hunter2-hunter2"], args=["hunter2-hunter2"]) == ["command[1]", "args[0]"]
    trainer = {"command": ["echo"], "env": [{"name": "A", "value": "hunter2-hunter2"}]}
    manifest = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "x"}}
    job = TrainJobSpec.parse({**manifest, "spec": {"runtimeRef": {"name": "r"}, "trainer": trainer}})
    assert [problem.path for problem in secrets_in(job)] == ["manifest.spec.trainer.env[0].value"]


def test_a_word_is_not_a_secret() -> None:
    """Passwords of development setups are words that a spec must be able to contain."""
    assert paths(command=["echo", "admin1 is not ***", "admin1"], env={"USER_NAME": "admin1"}) == []
