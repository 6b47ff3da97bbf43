"""What an export of the simulation reads: its settings, models and evaluations."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainjob.data import file_manifest, transfer
from trainjob.data.export_evaluation import Evaluation
from trainjob.evaluation import Gate, Scores, compare

DAYS = ("monday", "tuesday", "wednesday")
OLD_DIGEST = "sha256:" + "0" * 64
"""Digest of the version that holds the alias at the begin."""


@dataclass(frozen=True)
class Settings:
    """What stays the same in a schedule.

    Attributes:
        registry: ``sqlite``, ``server`` or ``kubeflow``.
        rule: What decides about the alias: ``always``, ``metric`` or ``gate``.
        accuracy: Of each export's model.
        champion: Whether a version holds the alias at the begin, with an accuracy of 0.5.
        person: Whether a person moves the alias.
    """

    registry: str
    rule: str
    accuracy: Mapping[str, float]
    champion: bool
    person: bool

    @classmethod
    def drawn(cls, seed: int) -> Settings:
        """The settings of a seed."""
        chance = random.Random(f"export {seed}")
        days = DAYS[: chance.choice((2, 2, 3))]
        accuracies = chance.sample((0.4, 0.6, 0.7, 0.8, 0.9), len(days))
        return cls(
            registry=chance.choice(("sqlite", "server", "kubeflow")),
            rule=chance.choice(("always", "always", "metric", "gate")),
            accuracy=dict(zip(days, accuracies, strict=True)),
            champion=chance.random() < 0.5,
            person=chance.random() < 0.5,
        )


class Inputs:
    """Models and evaluations, which all schedules read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def model(self, day: str) -> str:
        folder = self._directory / day
        if not folder.exists():
            folder.mkdir()
            header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
            weights = struct.pack("<Q", len(header)) + header + bytes([DAYS.index(day)] * 4)
            (folder / "model.safetensors").write_bytes(weights)
            (folder / "config.json").write_text("{}")
        return str(folder)

    def evaluation(self, day: str, accuracy: float, *, champion: bool) -> str:
        """The evaluation of a model, which has passed its gate, against the version of the begin or none."""
        folder = self._directory / f"{day}-{accuracy}-{champion}"
        if not folder.exists():
            folder.mkdir()
            candidate, old = (Scores.parse({"metrics": {"acc": each}}, "model") for each in (accuracy, 0.5))
            source = self.model(day)
            of_candidate = {"uri": source, "digest": transfer.scan(source).digest}
            of_champion = {"uri": "s3://b/old", "digest": OLD_DIGEST, "version": "1"}
            report = compare(
                candidate,
                old if champion else None,
                models=(of_candidate, of_champion if champion else None),
                dataset={"uri": "s3://b/test", "digest": OLD_DIGEST},
            )
            decision = Gate.read({"metrics": {"acc": {"min": 0.1}}}).decide(report)
            (folder / file_manifest.EVALUATION).write_bytes(Evaluation(str(folder), report, decision).as_json())
        return str(folder)
