"""What an evaluation means for the export of its model: metrics, files beside the model, tags, and the alias."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainjob._support.foreign import LARGE, json_of
from trainjob._support.formats import wrong_format
from trainjob.data import file_manifest
from trainjob.data.file_manifest import ContentManifest
from trainjob.data.locations import join, parse_store
from trainjob.data.stores.base import read_small
from trainjob.data.stores.opening import opened
from trainjob.errors import ConfigurationError, CorruptData, ModelNotFound
from trainjob.evaluation import Decision, EvaluationReport
from trainjob.evaluation.comparison import VERSION
from trainjob.registry.base import ModelVersion, Registry

GATE_DECIDES = (
    "metric and min_improvement cannot be combined with evaluation: the gate of the evaluation decides; leave them out"
)
_TAG = "trainjob.evaluation."
_LONGEST = 1000  # characters of a reason in a tag


@dataclass(frozen=True)
class Evaluation:
    """An evaluation report and the decision of its gate.

    Attributes:
        uri: Location of its directory.
        report: The report.
        decision: The decision; None without a gate.
    """

    uri: str
    report: EvaluationReport
    decision: Decision | None

    @classmethod
    def read(cls, uri: str) -> Evaluation:
        """Read the report in a directory, or at the location of its file, which ends with ``.json``.

        Raises:
            SourceNotFound: There is no evaluation.
            CorruptData: The file is not an evaluation report, or a newer trainjob wrote it.
        """
        folder, name = parse_store(uri), file_manifest.EVALUATION
        if folder.name.endswith(".json") and not folder.directory:
            folder, name = replace(folder, path=folder.path.rpartition("/")[0]), folder.name
            uri = folder.uri
        where = join(uri, name)
        with opened(folder) as store:
            data = read_small(store, name)
        try:
            value = json_of(data, where, LARGE)
            if problem := wrong_format(where, value["report"]["version"], VERSION):
                raise CorruptData(problem)
            decision = value["decision"]
            report = EvaluationReport.of(value["report"])
            return cls(uri, report, Decision.of(decision) if decision is not None else None)
        except (ConfigurationError, ValueError, KeyError, TypeError) as error:
            raise CorruptData(f"{where} is not an evaluation report: {error}") from None

    def as_json(self) -> bytes:
        """The content of ``evaluation.json``."""
        decision = self.decision.as_dict() if self.decision is not None else None
        value = {"report": self.report.as_dict(), "decision": decision}
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    def stands_in(self, beside: Mapping[str, Iterable[bytes]]) -> bool:
        """Whether this evaluation is among the files beside a model, with all versions that the store has."""
        return self.as_json() in beside.get(file_manifest.EVALUATION, ())

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the candidate."""
        return {name: each.candidate for name, each in self.report.metrics.items()}

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the registered version, also of one that did not pass."""
        found = {"report": self.uri, "digest": self.report.digest}
        if self.report.champion is not None:
            found["champion"] = self.report.champion.get("version") or self.report.champion["digest"]
        if self.decision is not None:
            passed = str(self.decision.passed).lower()
            found |= {"passed": passed, "rule": self.decision.rule, "reason": self.decision.reason[:_LONGEST]}
        return {f"{_TAG}{name}": value for name, value in found.items()}

    def check_model(self, source: str, digest: str) -> None:
        """Refuse to export another model than the evaluated one.

        Raises:
            ConfigurationError: The digests differ.
        """
        evaluated = self.report.candidate.get("digest")
        if evaluated != digest:
            raise ConfigurationError(
                f"{self.uri} is the evaluation of another model: {source} has digest {digest}, the evaluated model"
                f" {evaluated}; evaluate {source}, or export {self.report.candidate.get('uri')}"
            )

    def sidecars(self, uri: str, manifest: ContentManifest) -> dict[str, bytes]:
        """The files beside the model: the report, and an in-toto statement about it."""
        return {file_manifest.EVALUATION: self.as_json(), file_manifest.TEST_RESULT: self.statement(uri, manifest)}

    def statement(self, uri: str, manifest: ContentManifest) -> bytes:
        """The decision as an in-toto statement (https://in-toto.io/attestation/test-result/v0.1)."""
        checks = self.decision.checks if self.decision is not None else ()
        result = "PASSED" if self.decision is None or self.decision.passed else "FAILED"
        parts = [("dataset", self.report.dataset), ("champion", self.report.champion), ("code", self.report.code)]
        configuration = [_resource(name, part) for name, part in parts if part]
        report = {"name": file_manifest.EVALUATION, "digest": {"sha256": self.report.digest.removeprefix("sha256:")}}
        predicate = {
            "result": result,
            "configuration": [*configuration, report],
            "passedTests": [each.rule for each in checks if each.passed],
            "failedTests": [each.rule for each in checks if not each.passed],
        }
        value = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": uri, "digest": {"sha256": manifest.digest.removeprefix("sha256:")}}],
            "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
            "predicate": predicate,
        }
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"

    def refusal(self, registry: Registry, version: ModelVersion, alias: str) -> str:
        """Why the alias must not move to the version; empty if it may.

        The alias moves only if the gate has passed, and if the champion is still the one of the evaluation.
        """
        if self.decision is None:
            return f"{alias!r} stays: the evaluation has no gate"
        if not self.decision.passed:
            return f"{alias!r} stays: {self.decision.rule}: {self.decision.reason}"
        try:
            holder = registry.resolve(version.name, alias)
        except ModelNotFound:
            return ""
        evaluated = self.report.champion or {"digest": "no champion"}
        if holder.version == version.version or (holder.digest and holder.digest == evaluated.get("digest")):
            return ""
        before = registry.promote(version.name, version.version, alias=alias, once=True, dry_run=True)
        if not before.promoted:  # the champion differs since this export has replaced it
            return before.reason
        against = (
            f"version {evaluated['version']}" if evaluated.get("version") else evaluated.get("digest", "no champion")
        )
        return (
            f"{alias!r} stays: the model was evaluated against {against}, and version {holder.version} holds the alias"
            " now; evaluate it again"
        )

    def moved(
        self, registry: Registry, version: ModelVersion, alias: str, previous: str | None, decision: Decision
    ) -> tuple[bool, str]:
        """Whether the version holds the alias after it was moved, and why: another export may have moved it, too.

        Args:
            registry: The registry.
            version: The version that the alias was moved to.
            alias: The alias.
            previous: The version that held the alias before.
            decision: The decision of the gate.
        """
        holder = registry.resolve(version.name, alias).version
        if holder != version.version:
            return False, f"{alias!r} points to version {holder}: another export has moved it at the same time"
        reason = f"{alias!r} points to version {holder}: {decision.rule}: {decision.reason}"
        known = self.report.champion is None or bool(self.report.champion.get("version"))
        evaluated = (self.report.champion or {}).get("version")
        if known and previous not in (None, holder, evaluated):
            reason += f"; another export has moved it to version {previous} at the same time, which was not evaluated"
        return True, reason


def _resource(name: str, part: Mapping[str, str]) -> dict[str, Any]:
    """An in-toto ResourceDescriptor."""
    algorithm, _, value = part.get("digest", "").partition(":")
    return {
        "name": name,
        **({"uri": part["uri"]} if part.get("uri") else {}),
        **({"digest": {algorithm: value}} if value else {}),
    }
