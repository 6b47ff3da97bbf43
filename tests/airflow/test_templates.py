"""Secrets that templates put into a spec."""

from __future__ import annotations

import pytest

from trainjob import TrainJobSpec
from trainjob_airflow.templates import secrets_in

JOB = {"runtime": "trainjob-step", "command": ["train"]}


SECRET, WORD = "templates-5ecret-7", "dev-1"  # no other test masks a part of them


@pytest.fixture(autouse=True)
def masked(airflow_home: object) -> None:
    """Two secrets that Airflow masks, a long one and a word."""
    from airflow.sdk.log import mask_secret

    mask_secret(SECRET)
    mask_secret(WORD)


def paths(**fields: object) -> list[str]:
    return [problem.path for problem in secrets_in(TrainJobSpec.parse({**JOB, **fields}))]


def test_secrets_that_airflow_knows_are_found() -> None:
    assert paths(env={"A": "x", "B": f"--{SECRET}--"}) == ["env.B"]
    assert paths(command=["echo", SECRET], args=[SECRET]) == ["command[1]", "args[0]"]
    trainer = {"command": ["echo"], "env": [{"name": "A", "value": SECRET}]}
    manifest = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "x"}}
    job = TrainJobSpec.parse({**manifest, "spec": {"runtimeRef": {"name": "r"}, "trainer": trainer}})
    assert [problem.path for problem in secrets_in(job)] == ["manifest.spec.trainer.env[0].value"]


def test_a_word_is_not_a_secret() -> None:
    """Passwords of development setups are words that a spec must be able to contain."""
    assert paths(command=["echo", f"{WORD} is not ***", WORD], env={"USER_NAME": WORD}) == []
