"""A Kubeflow Model Registry (Kubeflow Hub).

Registering a version takes four requests: the model, the version, its model artifact as ``PENDING``, the artifact as
``LIVE``. If a process is killed between two of them, the next call for the same export continues, and readers do not
see the incomplete version: `list` and `resolve` return only versions with an artifact.

* ``externalId`` of version and artifact: a hash of model and ``export_id``; the server accepts each only once.
* Name of a version: the next free number, as in MLflow. KServe finds it by ``model-registry://name/version``.
* The model artifact is the only artifact: KServe uses the newest artifact of a version as the model.
* Custom properties of the version: ``trainjob.export_id``, ``trainjob.digest``, ``trainjob.metric.<name>`` as doubles
  and the caller's tags as text, also numbers (integers of the registry end at 999,999,999).
* An alias is the custom property ``alias.<name>`` of each version that ever got it. The holder is elected from all of
  them, see `trainjob.registry.alias_claims`. The claim of an archived version does not count.

Names are compared here: the server looks names up with SQL's ``LIKE``, where ``a_b`` also matches ``axb`` and, on
MySQL, ``A`` matches ``a``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import sleep

from trainjob._support.numbers import count_of
from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict, RegistryUnavailable
from trainjob.registry import moves, records
from trainjob.registry.alias_claims import Claim
from trainjob.registry.base import (
    History,
    Mode,
    ModelVersion,
    Promotion,
    check_alias,
    check_export_id,
    check_metrics,
    check_name,
    check_rule,
    compare,
)
from trainjob.registry.provenance import author, model_source
from trainjob.registry.records import Found, Json
from trainjob.registry.rest import Endpoint, NotThere, Session, Taken

_ROUNDS = 40  # tries to get a free number, or to settle the holder of an alias


class KubeflowRegistry:
    """A `trainjob.registry.base.Registry`. Makes no request before the first call; safe for several threads.

    Args:
        url: ``http(s)://host[:port][/prefix]``.
    """

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url)

    def check(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ModelVersion | None:
        """Find problems before an upload. The server accepts any location and texts of any length."""
        del uri
        key = records.external_id(check_name(name), check_export_id(export_id))
        records.properties(export_id, "", check_metrics(metrics or {}), tags or {})
        with Session(self._endpoint) as server:
            raw = _by_external_id(server, key)
            artifact = _artifact(server, raw) if raw else None
        return replace(records.parse(name, raw).version, uri=(artifact or {}).get("uri") or "") if raw else None

    def register(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        digest: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        history: History | None = None,
    ) -> ModelVersion:
        """Register a version, once per ``export_id``; completes an incomplete registration."""
        del history  # for MLflow's runs
        check_name(name)
        check_export_id(export_id)
        properties = records.properties(export_id, digest, check_metrics(metrics or {}), tags or {})
        source = model_source(tags or {})
        key = records.external_id(name, export_id)
        body = {"externalId": key, "author": author(source), "state": "LIVE", "customProperties": properties}
        with Session(self._endpoint) as server:
            raw = _by_external_id(server, key) or _create_version(server, name, key, body)
            found = records.parse(name, raw)
            if found.version.digest == digest:
                artifact = _complete(server, raw, {**source, "name": name, "uri": uri, "externalId": key})
            else:
                artifact = _artifact(server, raw) or {}
            version = replace(found.version, uri=artifact.get("uri") or "")
            if (version.digest, version.uri) != (digest, uri):
                raise RegistryConflict(
                    f"export_id {export_id!r} has already registered version {version.version} of {name!r} with other"
                    f" content: {version.uri} {version.digest}, now {uri} {digest}; use a new export_id for a new model"
                )
            held = records.holders(_versions(server, name)) if found.claims else {}
        return replace(version, aliases=records.aliases(held, version))

    def resolve(self, name: str, version: str) -> ModelVersion:
        """Find a version by its name, by ``latest`` for the one registered last, or by an alias."""
        check_name(name)
        with Session(self._endpoint) as server:
            every = _versions(server, name)
            held = records.holders(every)
            candidates = [found for found in every if found.version.version == version]
            if not candidates and version == "latest":
                candidates = [found for found in reversed(every) if not found.archived]
            elif not candidates:
                candidates = [found for found in every if held.get(version) is found.version]
            for found in candidates:
                if artifact := _artifact(server, found.raw):
                    aliases = records.aliases(held, found.version)
                    return replace(found.version, uri=artifact.get("uri") or "", aliases=aliases)
        why = (
            "its registration is incomplete; run the export again"
            if candidates
            else "no version has that name or alias"
        )
        raise ModelNotFound(f"version {version!r} of {name!r} not found in {self._endpoint.url}: {why}")

    def promote(
        self,
        name: str,
        version: str,
        *,
        alias: str,
        metric: str | None = None,
        mode: Mode = "max",
        min_improvement: float = 0.0,
        dry_run: bool = False,
        once: bool = False,
    ) -> Promotion:
        """Move ``alias`` to ``version`` if it is better. Of simultaneous promotions the best by ``metric`` wins.

        One request writes the claim, which moves the alias. So a version with a claim has moved it before.

        If one version gets two aliases at the same instant, one of them can be lost: the server replaces all properties
        of a version at once.
        """
        check_alias(alias)
        check_rule(metric, mode, min_improvement)
        number = self.resolve(name, version).version
        first: Promotion | None = None  # the verdict that was acted on, which is returned
        written = 0
        with Session(self._endpoint) as server:
            for _ in range(_ROUNDS):
                every = _versions(server, name)
                candidate = _promotable(every, name, number, alias)
                holder = records.holders(every).get(alias)
                claim = candidate.claims.get(alias)
                lost = claim is not None and claim.order >= written and holder is not candidate.version
                if first is not None and metric is None and lost:
                    return _lost(first, alias, holder, "")
                verdict = compare(
                    candidate.version, holder, alias=alias, metric=metric, mode=mode, min_improvement=min_improvement
                )
                if first is not None and not verdict.promoted:
                    return _lost(first, alias, holder, verdict.reason)
                if not verdict.promoted:
                    return verdict
                if holder is candidate.version:
                    return first or verdict
                if once and claim is not None:
                    return _lost(first, alias, holder, "") if first else moves.repeated(alias, holder)
                if dry_run:
                    return verdict
                first = first or verdict
                written = 1 + max((found.claims[alias].order for found in every if alias in found.claims), default=0)
                _write_claim(server, candidate, alias, Claim(written, metric, mode))
        raise RegistryUnavailable(f"other clients keep changing version {number} of {name!r}; try again")

    def list(self, name: str) -> Sequence[ModelVersion]:
        """List all versions except archived and incomplete ones, oldest first."""
        check_name(name)
        with Session(self._endpoint) as server:
            every = [found for found in _versions(server, name) if not found.archived]
            held = records.holders(every)
            # List the artifacts of all exports at once: hundreds of requests, one per version, take long.
            ours = {each["externalId"]: each for each in _artifacts_of_model(server, name)} if every else {}
            listed = []
            for found in every:
                artifact = ours.get(found.raw.get("externalId") or "") or _artifact(server, found.raw)
                if artifact:
                    aliases = records.aliases(held, found.version)
                    listed.append(replace(found.version, uri=artifact.get("uri") or "", aliases=aliases))
        return listed


def _model(server: Session, name: str) -> Json | None:
    """The registered model with exactly this name."""
    # Older servers ignore the filter, and no server accepts non-ASCII characters in it.
    query = {"filterQuery": f'name = "{name}"'} if name.isascii() else {}
    return next((each for each in server.pages("registered_models", **query) if each["name"] == name), None)


def _raw_versions(server: Session, model: Json) -> Iterator[Json]:
    return server.pages(f"registered_models/{model['id']}/versions")


def _versions(server: Session, name: str) -> Sequence[Found]:
    """All versions of a model in registration order; empty if the model does not exist."""
    model = _model(server, name)
    raw = _raw_versions(server, model) if model else ()
    return [records.parse(name, each) for each in sorted(raw, key=lambda each: int(each["id"]))]


def _by_external_id(server: Session, key: str) -> Json | None:
    try:
        return server.get("model_version", externalId=key)
    except NotThere:
        return None


def _create_version(server: Session, name: str, key: str, body: Json) -> Json:
    """Create a version with the next free number, or return the one that another try of this export created."""
    model = _model(server, name)
    if model is None:
        try:
            model = server.post("registered_models", {"name": name, "state": "LIVE"})
        except Taken as error:
            model = _model(server, name)
            if model is None:
                raise RegistryConflict(
                    f"the registry rejected {name!r}, since its database considers another model's name equal to it"
                    f" ({error})"
                ) from None
    for _ in range(_ROUNDS):
        names = [each["name"] for each in _raw_versions(server, model)]
        number = str(1 + max((count_of(text) or 0 for text in names), default=0))
        try:
            return server.post("model_versions", {**body, "name": number, "registeredModelId": model["id"]})
        except Taken as error:
            if found := _by_external_id(server, key):
                return found
            if not any(each["name"] == number for each in _raw_versions(server, model)):
                # Perhaps two properties that the database considers equal ("acc" and "ACC" on MySQL).
                raise RegistryConflict(f"the registry rejected the version of {name!r}: {error}") from None
            _pause()
    raise RegistryUnavailable(f"other clients took {_ROUNDS} version numbers of {name!r} in a row; try again")


def _complete(server: Session, version: Json, body: Json) -> Json:
    """Return the version's model artifact; creates it and makes it LIVE if needed."""
    for _ in range(5):
        mine = next(
            (each for each in _artifacts(server, version) if each.get("externalId") == body["externalId"]), None
        )
        try:
            if mine is None:
                made = {**body, "artifactType": "model-artifact", "state": "PENDING"}
                mine = server.post(f"model_versions/{version['id']}/artifacts", made)
            if mine.get("uri") != body["uri"] or mine.get("state") == "LIVE":
                return mine
            live = {"artifactType": "model-artifact", "state": "LIVE"}
            return server.patch(f"model_artifacts/{mine['id']}", live)
        except Taken:  # by another try of this export, meanwhile
            _pause()
    raise RegistryConflict(
        f"the registry rejected the artifact of version {version['name']} of {body['name']!r}: another artifact has its"
        " name or external ID"
    )


def _artifacts(server: Session, version: Json) -> Iterator[Json]:
    """Model artifacts of a version, newest first."""
    query = {"artifactType": "model-artifact", "orderBy": "ID", "sortOrder": "DESC"}
    for each in server.pages(f"model_versions/{version['id']}/artifacts", **query):
        if each.get("artifactType") == "model-artifact":
            yield each


def _artifacts_of_model(server: Session, name: str) -> Iterator[Json]:
    """Usable model artifacts of a model that trainjob registered."""
    query = {"artifactType": "model-artifact", "filterQuery": f'externalId LIKE "{records.prefix(name)}%"'}
    for each in server.pages("artifacts", **query):
        if each.get("artifactType") == "model-artifact" and each.get("externalId") and records.usable(each):
            yield each


def _artifact(server: Session, version: Json) -> Json | None:
    """The model artifact of a version: the one that trainjob registered, else the newest one, as in KServe."""
    found = [each for each in _artifacts(server, version) if records.usable(each)]
    key = version.get("externalId")
    ours = [each for each in found if key and each.get("externalId") == key]
    return next(iter(ours or found), None)


def _promotable(every: Sequence[Found], name: str, number: str, alias: str) -> Found:
    candidate = next((found for found in every if found.version.version == number), None)
    if candidate is None:
        raise ModelNotFound(f"version {number} of {name!r} no longer exists")
    if candidate.archived:
        raise ConfigurationError(f"version {number} of {name!r} is archived; restore it before promoting it")
    if any(found.version.version == alias for found in every):
        raise ConfigurationError(f"{alias!r} is the name of a version of {name!r}, and cannot be an alias")
    return candidate


def _write_claim(server: Session, candidate: Found, alias: str, claim: Claim) -> None:
    """Add a claim to a version, and keep its other properties."""
    given = candidate.raw.get("customProperties") or {}
    changed = {**given, f"{records.ALIAS}{alias}": records.text(str(claim))}
    try:
        server.patch(f"model_versions/{candidate.raw['id']}", {"customProperties": changed})
    except Taken:
        _pause()  # another promotion of this version, at this instant


def _lost(first: Promotion, alias: str, holder: ModelVersion | None, reason: str) -> Promotion:
    """The result of a promotion that lost to a simultaneous one."""
    who = f"version {holder.version}" if holder else "no version"
    text = f"{alias!r} moved to {who} at the same time" + (f": {reason}" if reason else ", and stays there")
    return Promotion(False, text, first.previous)


def _pause() -> None:
    sleep(random.uniform(0.02, 0.2))
