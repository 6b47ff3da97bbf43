"""The programs that `tests.local.test_kills` kills, and the checks of what they left."""

from __future__ import annotations

import json
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.local.killing import Content, Images, Records, complete, digest, with_manifest
from tests.stores import kinds
from tests.trees import tree

from trainjob.data import file_manifest
from trainjob.data.export_evaluation import Evaluation
from trainjob.data.transfer import scan
from trainjob.errors import CorruptData, ModelNotFound, SourceNotFound
from trainjob.evaluation import Gate, Scores, compare
from trainjob.registry import connect


def weights_of(number: int, size: int) -> bytes:
    header = json.dumps({f"w{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(number).randbytes(size)


# The largest file is uploaded to S3 in two parts.
NEW: Content = {
    "model-1.safetensors": weights_of(1, 5_500_000),
    "model-2.safetensors": weights_of(2, 600_000),
    "sub/model-3.safetensors": weights_of(3, 90_000),
    **{f"sub/{number}/config.json": b"%d" % number for number in range(5)},
    "empty": b"",
}
OLD: Content = {
    "model-1.safetensors": NEW["model-1.safetensors"],
    "model-2.safetensors": weights_of(4, 600_000),
    "sub/0/config.json": b"0",
    "sub/1/config.json": b"one",
    "gone": b"x",
}
SMALL: Content = {"model.safetensors": weights_of(1, 90_000), "config.json": b"{}"}
NEW_DIGEST, OLD_DIGEST, SMALL_DIGEST = map(digest, (NEW, OLD, SMALL))


Happened = Callable[[], bool]


class Case(ABC):
    """A program for one run, and the checks after a kill.

    Attributes:
        arguments: Arguments of the program.
        events: Events at which it can be killed, besides times and requests.
        fake: A fake server whose requests are counted.
    """

    arguments: list[str]
    events: list[Happened]
    fake: FakeRegistry | None = None

    @abstractmethod
    def found(self) -> str:
        """Check the state after a kill; return its name."""

    @abstractmethod
    def finish(self) -> None:
        """Check the final state."""


def _left_or_nothing(store: kinds.Store, name: str) -> str:
    """Check that no reader accepts an incomplete target."""
    with pytest.raises((CorruptData, SourceNotFound)):
        scan(store.uri(name))
    return "half a target" if store.held(name) else "nothing"


def _appear(store: kinds.Store, name: str, chance: random.Random) -> list[Happened]:
    """The event that some number of files was written to a directory, including parts and files of trainjob."""
    if not isinstance(store, kinds.Files):
        return []
    folder, count = Path(store.uri(name).removeprefix("file://")), chance.randint(1, len(NEW) + 2)

    def inodes() -> set[tuple[str, int]]:
        """Names and inodes, which distinguish rewritten files from earlier ones."""
        found = set()
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found

    before = inodes()
    return [lambda: len(inodes() - before) >= count]


def _written(records: Records, chance: random.Random) -> list[Happened]:
    """The event that a registry was written some number of times."""
    if (state := records.state) is None:
        return []
    seen, count = {state()}, chance.randint(1, 3)

    def happened() -> bool:
        seen.add(state())
        return len(seen) > count

    return [happened]


class Initialize(Case):
    """An initializer, in half of the runs with an older target."""

    def __init__(self, store: kinds.Store, source: str, name: str, chance: random.Random) -> None:
        self._store, self._name = store, name
        self._before: Content | None = None
        if chance.random() < 0.5:
            self._before = OLD
            store.put(name, with_manifest(OLD))
        self.arguments = ["initialize-model", "--source", source, "--target", store.uri(name)]
        self.events = _appear(store, name, chance)

    def found(self) -> str:
        held = complete(self._store, self._name)
        if held is None:
            return _left_or_nothing(self._store, self._name)
        assert held in (NEW, self._before)
        return "everything" if held == NEW else "nothing"

    def finish(self) -> None:
        assert complete(self._store, self._name) == NEW
        assert self._store.held(self._name).keys() == with_manifest(NEW).keys()


def export_words(source: str, target: str, records: Records) -> list[str]:
    words = ["export", "--source", source, "--target", target, "--name", "m", "--export-id", "a"]
    return [*words, "--alias", "champion", "--registry", records.uri]


class Export(Case):
    """An export of a model; `champion` says whether an older version has the alias."""

    def __init__(
        self, store: kinds.Store, source: str, name: str, chance: random.Random, records: Records, *, champion: bool
    ) -> None:
        self._store, self._records, self._champion = store, records, champion
        key = sha256(b"a").hexdigest()[:16]
        self._name = f"{name}/m:{key}" if isinstance(store, Images) else f"{name}/m/{key}"
        words = ["--metrics", '{"acc": 0.9}', "--metric", "acc"]
        self.arguments = [*export_words(source, store.uri(name), records), *words]
        self.events = _appear(store, self._name, chance) + _written(records, chance)
        self.fake = records.fake

    def found(self) -> str:
        held = complete(self._store, self._name)
        assert held in (NEW, None)
        rows = self._records.rows() - self._champion
        assert rows <= 1, "two versions of one export"
        registry = connect(self._records.uri)
        listed = registry.list("m")
        assert len(listed) <= rows + self._champion
        for version in listed:
            assert version.digest == (NEW_DIGEST if version.metrics["acc"] == 0.9 else OLD_DIGEST)
        finished = len(listed) > self._champion
        assert held == NEW or not finished, "a version of an unfinished model"
        try:
            holder = registry.resolve("m", "champion").version
        except ModelNotFound:
            assert not self._champion
            holder = ""
        if holder == str(1 + self._champion):
            assert finished, "an alias of an unfinished version"
            return "everything"
        assert holder == ("1" if self._champion else "")
        if rows:
            return "a version" if finished else "half a version"
        return "a target" if held == NEW else _left_or_nothing(self._store, self._name)

    def finish(self) -> None:
        assert self._records.rows() == 1 + self._champion
        assert self.found() == "everything"
        left = self._store.held(self._name).keys()
        assert left >= with_manifest(NEW).keys()
        assert not any(path.startswith(file_manifest.WORK) for path in left)


@dataclass(frozen=True)
class Decision:
    """What the evaluation of a candidate says.

    Attributes:
        accuracy: Of the candidate; the old champion has 0.5.
        against: Digest of the champion that it was evaluated against.
        gate: Whether it has a gate.
        promoted: Whether its export may move the alias.
    """

    accuracy: float
    against: str = OLD_DIGEST
    gate: bool = True
    promoted: bool = False

    def write(self, folder: Path) -> str:
        """Write the report; return the location of its directory."""
        uri = f"file://{folder}"
        scores = [Scores.parse({"metrics": {"acc": each}}, "model") for each in (self.accuracy, 0.5)]
        models = {"uri": "file:///new", "digest": SMALL_DIGEST}, {"uri": "file:///old", "digest": self.against}
        report = compare(*scores, models=models, dataset={"uri": "file:///test", "digest": "sha256:" + "d" * 64})
        decision = Gate.read({"metrics": {"acc": {"min_improvement": 0}}}).decide(report) if self.gate else None
        tree(folder, {file_manifest.EVALUATION: Evaluation(uri, report, decision).as_json()})
        return uri


DECISIONS = {
    "better": Decision(0.9, promoted=True),
    "worse": Decision(0.4),
    "without a gate": Decision(0.9, gate=False),
    "against another champion": Decision(0.9, against="sha256:" + "0" * 64),
}


class EvaluatedExport(Case):
    """An export of a model with an evaluation, while an older version is the champion."""

    def __init__(self, folder: Path, source: str, chance: random.Random, records: Records) -> None:
        self._records, self._folder = records, folder
        self._decision = DECISIONS[chance.choice([*DECISIONS])]
        evaluation = self._decision.write(folder / "evaluation")
        self.arguments = [*export_words(source, str(folder), records), "--evaluation", evaluation]
        self.events = _written(records, chance)
        self.fake = records.fake

    def found(self) -> str:
        registry = connect(self._records.uri)
        champion = registry.resolve("m", "champion")
        assert champion.tags["trainjob.evaluation.passed"] == "true"
        versions = registry.list("m")
        assert len(versions) <= self._records.rows() <= 2, "two versions of one export"
        model = next((self._folder / "m").glob("*"), None)
        for version in versions[1:]:
            assert version.digest == SMALL_DIGEST
            assert version.metrics == {"acc": self._decision.accuracy}, "not that of the evaluation"
            assert model is not None
            report = json.loads((model / file_manifest.EVALUATION).read_text())
            passed = report["decision"] and str(report["decision"]["passed"]).lower()
            assert version.tags.get("trainjob.evaluation.passed") == passed, "the tag contradicts the report"
        if champion.version == "1":
            stored = model is not None and (model / file_manifest.NAME).exists()
            return f"{self._records.rows() - 1} version, not promoted" if stored else "no model"
        assert self._decision.promoted
        assert champion.digest == SMALL_DIGEST
        return "promoted"

    def finish(self) -> None:
        assert self.found() == ("promoted" if self._decision.promoted else "1 version, not promoted")
