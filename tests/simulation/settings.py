"""What stays the same during one schedule: the keys, and how their processes are configured."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from tests.fakes.kube.cluster import RUNTIME
from tests.fakes.kube.objects import QUEUE

from trainjob import TrainJobSpec
from trainjob.job import job_name

MIXES = ("calm", "airflow", "kfp", "queue", "all", "outages", "edits", "variations")
"""Kinds of schedules: which processes run, and what happens to them; see docs/development/simulation.md."""

LAUNCHERS = {
    "calm": ("cli",),
    "airflow": ("airflow",),
    "kfp": ("kfp",),
    "queue": ("cli", "airflow", "kfp"),
    "all": ("cli", "airflow", "kfp", "tune"),
    "outages": ("cli", "airflow", "kfp", "tune"),
    "edits": ("cli", "airflow", "kfp", "tune"),
    "variations": ("cli", "airflow", "kfp", "tune"),
}

DEFAULT_KEY = "nightly/a"


@dataclass(frozen=True)
class Settings:
    """The settings of one schedule. A script begins with those that differ from the defaults.

    Attributes:
        seed: Seed of the random numbers of the product, such as pauses.
        keys: Keys of the works.
        queue: Whether the jobs are in a queue of Kueue.
        ranks: Ranks of each job.
        shared: Whether the waiters of a process share one watch.
        on_retry: Whether the spec changes retries.
        first_crash: Whether steps fail at the first crash of a rank.
        on_crash: What a step does with a job that crashed.
        deferrable: Whether tasks of Airflow wait for ranks of earlier attempts outside the launch.
        leases: What the account of the processes may do with Leases; that of the reaper may write them.
        edited: Number of the first process that has another spec, which an author has changed; 0 for none.
    """

    seed: int = 0
    keys: tuple[str, ...] = (DEFAULT_KEY,)
    queue: bool = False
    ranks: int = 1
    shared: bool = False
    on_retry: bool = False
    first_crash: bool = True
    on_crash: Literal["suspend", "cancel", "keep"] = "suspend"
    deferrable: bool = False
    leases: Literal["write", "read", "none"] = "write"
    edited: int = 0

    @classmethod
    def draw(cls, seed: int, mix: str, numbers: random.Random) -> Settings:
        """Settings for a random schedule."""
        return cls(
            seed=seed,
            keys=(DEFAULT_KEY, "nightly/b") if numbers.random() < 0.3 else (DEFAULT_KEY,),
            queue=mix == "queue" or (mix in ("all", "outages", "edits") and numbers.random() < 0.3),
            ranks=2 if numbers.random() < 0.2 else 1,
            shared=numbers.random() < 0.3,
            on_retry=numbers.random() < 0.4,
            first_crash=numbers.random() < 0.6,
            on_crash=numbers.choice(("suspend", "suspend", "cancel")),
            deferrable=numbers.random() < 0.2,
            leases=numbers.choices(("write", "read", "none"), (94, 4, 2))[0] if mix in ("all", "outages") else "write",
            edited=numbers.randint(2, 5) if mix == "edits" else 0,
        )

    @classmethod
    def parse(cls, words: list[str]) -> Settings:
        """Read what `__str__` wrote."""
        values: dict[str, Any] = {}
        for word in words:
            name, _, text = word.partition("=")
            default = {each.name: each.default for each in fields(cls)}[name]
            if isinstance(default, bool):
                values[name] = text == "True"
            elif isinstance(default, int):
                values[name] = int(text)
            else:
                values[name] = tuple(text.split(",")) if isinstance(default, tuple) else text
        return cls(**values)

    def __str__(self) -> str:
        """The settings that differ from the defaults, as words of a script."""
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                words.append(f"{each.name}={','.join(value) if isinstance(value, tuple) else value}")
        return " ".join(words)

    def with_default(self, name: str) -> Settings:
        """The same with the default of one setting."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name != name}
        return Settings(**values)

    def spec(self, key: str, number: int) -> TrainJobSpec:
        """The spec of a work for the process of that number, parsed once."""
        edited = 0 < self.edited <= number
        return _spec(key, self.queue, self.ranks, self.on_retry, edited)


@lru_cache
def _spec(key: str, queue: bool, ranks: int, on_retry: bool, edited: bool) -> TrainJobSpec:
    command = ["train", key, *(["--edited"] if edited else [])]
    asked: dict[str, Any] = {"runtime": RUNTIME, "command": command, "num_nodes": ranks}
    if queue:
        asked["labels"] = {QUEUE: "main"}
    if on_retry:
        rules = {"out_of_memory": {"max_memory": "64Gi"}, "quota": {"queue": "spot"}}
        asked |= {"resources_per_node": {"memory": "16Gi"}, "on_retry": rules}
    return TrainJobSpec.parse(asked)


@lru_cache(maxsize=10_000)
def short_name(name: str, keys: tuple[str, ...]) -> str:
    """The name of a job as schedules write it: ``nightly/a#2`` is the second attempt of that key."""
    stem, _, number = name.rpartition("-")
    key = next((each for each in keys if job_name(each, 1).rpartition("-")[0] == stem), "")
    return f"{key}#{number}" if key else name


def full_name(text: str) -> str:
    """The name of the job that `short_name` wrote."""
    key, hash_sign, number = text.rpartition("#")
    return job_name(key, int(number)) if hash_sign else text
