"""A Kubeflow Model Registry (Kubeflow Hub).

A version is four requests: the model, the version, its model artifact as ``PENDING``, the artifact as ``LIVE``. Whoever
dies between two of them leaves something that the next call for the same export goes on from, and that nobody else is
shown: `list` and `resolve` know versions whose artifact is there only.

* ``externalId`` of version and artifact: a hash of model and ``export_id``; the server takes each once.
* Name of a version: the next free number, as in MLflow. KServe's ``model-registry://name/version`` finds it.
* The model artifact is the only artifact, since KServe takes the newest one of a version and wants it to be that.
* Custom properties of the version: ``trainjob.export_id``, ``trainjob.digest``, ``trainjob.metric.<name>`` as doubles
  and the caller's tags as text, whatever their size (integers of the registry end at 999,999,999).
* An alias is the custom property ``alias.<name>`` of each version that ever got it. Who holds it follows from all of
  them, see `trainjob.registry.alias_claims`; a version that is archived takes its claim with it.

Names are compared here: the server's look-up by name is SQL's ``LIKE``, in which ``a_b`` is ``axb`` as well, and which
does not tell ``A`` from ``a`` on MySQL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import sleep

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict, RegistryUnavailable
from trainjob.registry import records
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

_ROUNDS = 40  # tries to get a free number, or to settle who holds an alias


class KubeflowRegistry:
    """See `trainjob.registry.base.Registry`. Nothing is sent before the first question; safe in threads.

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
        """See `Registry.check`. The server takes any location and any length of text."""
        del uri
        key = records.external_id(check_name(name), check_export_id(export_id))
        records.properties(export_id, "", check_metrics(metrics or {}), tags or {})
        with Session(self._endpoint) as server:
            raw = _by_external_id(server, key)
            artifact = _artifact(server, raw) if raw else None
        return replace(records.read(name, raw).version, uri=(artifact or {}).get("uri") or "") if raw else None

    def register(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        digest: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        history: History | None = None,  # noqa: ARG002 - for MLflow's runs
    ) -> ModelVersion:
        """See `Registry.register`. What another call left half done is finished."""
        check_name(name)
        check_export_id(export_id)
        properties = records.properties(export_id, digest, check_metrics(metrics or {}), tags or {})
        source = model_source(tags or {})
        key = records.external_id(name, export_id)
        body = {"externalId": key, "author": author(source), "state": "LIVE", "customProperties": properties}
        with Session(self._endpoint) as server:
            raw = _by_external_id(server, key) or _create_version(server, name, key, body)
            found = records.read(name, raw)
            if found.version.digest == digest:
                artifact = _complete(server, raw, {**source, "name": name, "uri": uri, "externalId": key})
            else:
                artifact = _artifact(server, raw) or {}
            version = replace(found.version, uri=artifact.get("uri") or "")
            if (version.digest, version.uri) != (digest, uri):
                raise RegistryConflict(
                    f"version {version.version} of {name!r} was registered by this same export with other content:"
                    f" {version.uri} {version.digest}, now {uri} {digest}; use a new export_id for a new model"
                )
            held = records.holders(_versions(server, name)) if found.claims else {}
        return replace(version, aliases=records.aliases(held, version))

    def resolve(self, name: str, version: str) -> ModelVersion:
        """See `Registry.resolve`. The name of a version, ``latest`` for the one registered last, or an alias."""
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
        why = "it is half registered, its export did not finish" if candidates else "no version has that name or alias"
        raise ModelNotFound(f"there is no {version!r} of {name!r} in {self._endpoint.url}: {why}")

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
    ) -> Promotion:
        """See `Registry.promote`. Of promotions at the same instant the best by ``metric`` wins, and the others tell.

        Not kept apart are two aliases that one version gets at the same instant: the server replaces all properties of
        a version at once.
        """
        check_alias(alias)
        check_rule(metric, mode, min_improvement)
        number = self.resolve(name, version).version
        first: Promotion | None = None  # the verdict that was acted on, which is told in the end
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
                if not verdict.promoted or dry_run:
                    return verdict
                if holder is candidate.version:
                    return first or verdict
                first = first or verdict
                written = 1 + max((found.claims[alias].order for found in every if alias in found.claims), default=0)
                _write_claim(server, candidate, alias, Claim(written, metric, mode))
        raise RegistryUnavailable(f"others keep changing version {number} of {name!r}; try again")

    def list(self, name: str) -> Sequence[ModelVersion]:
        """See `Registry.list`. Without those that are archived or half registered."""
        check_name(name)
        with Session(self._endpoint) as server:
            every = [found for found in _versions(server, name) if not found.archived]
            held = records.holders(every)
            # One list for all of ours, since a request for each takes long where there are hundreds.
            ours = {each["externalId"]: each for each in _artifacts_of_model(server, name)} if every else {}
            listed = []
            for found in every:
                artifact = ours.get(found.raw.get("externalId") or "") or _artifact(server, found.raw)
                if artifact:
                    aliases = records.aliases(held, found.version)
                    listed.append(replace(found.version, uri=artifact.get("uri") or "", aliases=aliases))
        return listed


def _model(server: Session, name: str) -> Json | None:
    """The registered model of exactly this name."""
    # An older server leaves the filter out of account, and none takes other than ASCII in it.
    query = {"filterQuery": f'name = "{name}"'} if name.isascii() else {}
    return next((each for each in server.pages("registered_models", **query) if each["name"] == name), None)


def _raw_versions(server: Session, model: Json) -> Iterator[Json]:
    return server.pages(f"registered_models/{model['id']}/versions")


def _versions(server: Session, name: str) -> Sequence[Found]:
    """All versions of a model, in the order of registration; none if there is no such model."""
    model = _model(server, name)
    raw = _raw_versions(server, model) if model else ()
    return [records.read(name, each) for each in sorted(raw, key=lambda each: int(each["id"]))]


def _by_external_id(server: Session, key: str) -> Json | None:
    try:
        return server.get("model_version", externalId=key)
    except NotThere:
        return None


def _create_version(server: Session, name: str, key: str, body: Json) -> Json:
    """A new version under the next free number, or the one that another try of this export has made."""
    model = _model(server, name)
    if model is None:
        try:
            model = server.post("registered_models", {"name": name, "state": "LIVE"})
        except Taken as error:
            model = _model(server, name)
            if model is None:
                raise RegistryConflict(
                    f"the registry does not take {name!r} beside a name that its database takes for the same ({error})"
                ) from None
    for _ in range(_ROUNDS):
        names = [each["name"] for each in _raw_versions(server, model)]
        number = str(1 + max((int(text) for text in names if text.isascii() and text.isdigit()), default=0))
        try:
            return server.post("model_versions", {**body, "name": number, "registeredModelId": model["id"]})
        except Taken as error:
            if found := _by_external_id(server, key):
                return found
            if not any(each["name"] == number for each in _raw_versions(server, model)):
                # Two properties, perhaps, that the database takes for the same ("acc" and "ACC" on MySQL).
                raise RegistryConflict(f"the registry does not take the version of {name!r}: {error}") from None
            _pause()
    raise RegistryUnavailable(f"others took {_ROUNDS} numbers of versions of {name!r} in a row; try again")


def _complete(server: Session, version: Json, body: Json) -> Json:
    """The version's model artifact, made LIVE if that is still to be done."""
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
        except Taken:  # by another try, a moment ago
            _pause()
    raise RegistryConflict(
        f"the registry does not take the artifact of version {version['name']} of {body['name']!r}: another one has its"
        " name or external id"
    )


def _artifacts(server: Session, version: Json) -> Iterator[Json]:
    """Model artifacts of a version, the newest first."""
    query = {"artifactType": "model-artifact", "orderBy": "ID", "sortOrder": "DESC"}
    for each in server.pages(f"model_versions/{version['id']}/artifacts", **query):
        if each.get("artifactType") == "model-artifact":
            yield each


def _artifacts_of_model(server: Session, name: str) -> Iterator[Json]:
    """Model artifacts that were registered here for a model, as far as they can be used."""
    query = {"artifactType": "model-artifact", "filterQuery": f'externalId LIKE "{records.prefix(name)}%"'}
    for each in server.pages("artifacts", **query):
        if each.get("artifactType") == "model-artifact" and each.get("externalId") and records.usable(each):
            yield each


def _artifact(server: Session, version: Json) -> Json | None:
    """What a version stands for: what was registered with it here, else the newest as KServe has it."""
    found = [each for each in _artifacts(server, version) if records.usable(each)]
    key = version.get("externalId")
    ours = [each for each in found if key and each.get("externalId") == key]
    return next(iter(ours or found), None)


def _promotable(every: Sequence[Found], name: str, number: str, alias: str) -> Found:
    candidate = next((found for found in every if found.version.version == number), None)
    if candidate is None:
        raise ModelNotFound(f"version {number} of {name!r} is gone")
    if candidate.archived:
        raise ConfigurationError(f"version {number} of {name!r} is archived; restore it before it is promoted")
    if any(found.version.version == alias for found in every):
        raise ConfigurationError(f"{alias!r} is the name of a version of {name!r}, and cannot be an alias")
    return candidate


def _write_claim(server: Session, candidate: Found, alias: str, claim: Claim) -> None:
    """Add a claim to a version, and keep what else it has."""
    given = candidate.raw.get("customProperties") or {}
    changed = {**given, f"{records.ALIAS}{alias}": records.text(str(claim))}
    try:
        server.patch(f"model_versions/{candidate.raw['id']}", {"customProperties": changed})
    except Taken:
        _pause()  # another promotion of this version, at this instant


def _lost(first: Promotion, alias: str, holder: ModelVersion | None, reason: str) -> Promotion:
    """What to say where another promotion came in between."""
    who = f"version {holder.version}" if holder else "nobody"
    told = f"{alias!r} went to {who} at the same moment" + (f": {reason}" if reason else ", and stays there")
    return Promotion(False, told, first.previous)


def _pause() -> None:
    sleep(random.uniform(0.02, 0.2))  # noqa: S311 - jitter
