"""``trainjob registry``: the model registry by hand. And ``trainjob export``: models that jobs wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import click

from trainjob._jobs.named import find_written
from trainjob._support.display import iso
from trainjob._support.signals import exiting, handled
from trainjob.cli import completion
from trainjob.cli.command import command
from trainjob.cli.data import lines
from trainjob.cli.ignored import refuse_ignored
from trainjob.cli.options import all_of, global_options, job_name, json_option, pair
from trainjob.cli.output import aligned, columns
from trainjob.cli.session import Session
from trainjob.cli.texts import joined
from trainjob.client import TrainJobClient
from trainjob.data import file_manifest, transfer
from trainjob.data.locations import SUPPORTED, parse_store
from trainjob.data.options import json_object
from trainjob.errors import ConfigurationError
from trainjob.job import JobRef
from trainjob.registry import ModelVersion, connect
from trainjob.registry.base import check_metrics


@click.group()
def registry() -> None:
    """List, show, promote and register model versions by hand, as the steps after a training do.

    The registry is that of --registry or TRAINJOB_REGISTRY.
    """


_shared = all_of(
    click.option(
        "--registry",
        "uri",
        metavar="URI",
        help="Use this registry instead of TRAINJOB_REGISTRY: mlflow+sqlite:////abs.db, mlflow+https://host or "
        "kubeflow+https://host.",
    ),
    json_option,
)

_NAME = click.argument("name")

# What decides whether an alias moves, as in the export steps.
_rule = all_of(
    click.option("--metric", help="Move the alias only if this metric is better than in its current version."),
    click.option(
        "--mode",
        type=click.Choice(["max", "min"]),
        default="max",
        show_default=True,
        help="Choose which value is better.",
    ),
    click.option(
        "--min-improvement", type=float, default=0.0, help="Require this improvement, in units of the metric."
    ),
)


@command(_NAME, shared=_shared, name="list", short_help="List the versions of a model, oldest first.")
def list_(session: Session, *, name: str, uri: str | None) -> int:
    """List the versions of model NAME, oldest first; none if there is no such model.

    The column GATE shows the verdicts of evaluations: `passed`, `failed`, or `none` for an evaluation without a gate.
    """
    versions = connect(uri).list(name)
    if not versions:
        session.say(f"no versions of a model {name} in this registry")
    # The column is there only if a version was exported with an evaluation.
    gates = [_gate(each)[0] for each in versions]
    rows = [["VERSION", "ALIASES", *(["GATE"] if any(gates) else []), "METRICS", "CREATED", "URI"]]
    rows += [
        [
            *(each.version, ", ".join(each.aliases), *([gate] if any(gates) else [])),
            *(joined(each.metrics), _created(each), each.uri),
        ]
        for each, gate in zip(versions, gates, strict=True)
    ]
    session.answer({"versions": [_fields(version) for version in versions]}, "\n".join(columns(rows)))
    return 0


@command(_NAME, click.argument("version"), shared=_shared)
def show(session: Session, *, name: str, version: str, uri: str | None) -> int:
    """Show one version of model NAME. VERSION is a number, an alias or `latest`."""
    return _show(session, connect(uri).resolve(name, version))


@command(
    _NAME,
    click.argument("version"),
    click.option("--alias", required=True, help="Give the version this alias, e.g. champion."),
    _rule,
    click.option("--dry-run", is_flag=True, help="Change nothing; print what would happen."),
    shared=_shared,
)
def promote(
    session: Session,
    *,
    name: str,
    version: str,
    alias: str,
    metric: str | None,
    mode: Literal["max", "min"],
    min_improvement: float,
    dry_run: bool,
    uri: str | None,
) -> int:
    """Move an alias of model NAME to VERSION: always, or with --metric only if that is better.

    VERSION is a number, an alias or `latest`. Prints whether the alias moved, and exits with 0 in both cases.
    """
    _check_rule(metric)
    verdict = connect(uri).promote(
        name, version, alias=alias, metric=metric, mode=mode, min_improvement=min_improvement, dry_run=dry_run
    )
    session.answer(
        {"name": name, "alias": alias, **vars(verdict), "dry_run": dry_run},
        f"{'dry run: ' if dry_run else ''}{verdict.reason}",
    )
    return 0


@command(
    _NAME,
    click.argument("location"),
    click.option("--digest", help="Set the digest, sha256:<root digest>; that in its MANIFEST.json if left out."),
    click.option("--export-id", help="Identify the export: the same id is the same version. The location if left out."),
    click.option(
        "--metric", "metrics", type=pair, multiple=True, metavar="NAME=NUMBER", help="Add a metric; may be repeated."
    ),
    click.option("--tag", "tags", type=pair, multiple=True, metavar="NAME=VALUE", help="Add a tag; may be repeated."),
    shared=_shared,
)
def register(
    session: Session,
    *,
    name: str,
    location: str,
    digest: str | None,
    export_id: str | None,
    metrics: Sequence[tuple[str, str]],
    tags: Sequence[tuple[str, str]],
    uri: str | None,
) -> int:
    """Register the files at LOCATION as a version of model NAME, without a copy.

    Idempotent: the same command again shows the same version.
    """
    place = _place(location)
    known = file_manifest.check_digest(digest)
    if known is None:
        manifest = transfer.read_manifest(place)
        if manifest is None:
            raise ConfigurationError(
                f"{place} has no MANIFEST.json with its digest; give --digest sha256:<root digest>"
            )
        known = manifest.digest
    measured = check_metrics(dict(metrics))
    known = f"sha256:{known.removeprefix('sha256:')}"
    made = connect(uri).register(
        name, place, export_id=export_id or place, digest=known, metrics=measured, tags=dict(tags)
    )
    return _show(session, made)


for _each in (list_, show, promote, register):
    registry.add_command(_each)


@command(
    click.argument("job", type=job_name, shell_complete=completion.jobs),
    click.option("--name", required=True, help="Register the model under this name."),
    click.option(
        "--target",
        help="Write below this directory of models, e.g. s3://bucket/models; for jobs of this machine, the default is "
        "TRAINJOB_HOME/models.",
    ),
    click.option("--output", default="model", show_default=True, metavar="NAME", help="Export this output of the job."),
    click.option("--source", help="Read the model here, if the output is a path in the pods of a cluster."),
    click.option(
        "--export-id", help="Give another id to export the same output again; the default id is that of job and output."
    ),
    click.option("--alias", help="Give the version this alias, e.g. champion."),
    _rule,
    click.option(
        "--evaluation",
        metavar="URI",
        help="Export with this evaluation report of the model: its metrics replace those of the job, and its gate"
        " decides about --alias.",
    ),
    click.option(
        "--provenance",
        metavar="JSON",
        help="Add provenance that the job does not record, as JSON or @FILE, e.g. its code.",
    ),
    click.option("--allow-pickle", is_flag=True, help="Accept weights that can run code when they are loaded."),
    click.option("--sign", metavar="PATH", help="Sign the model with this private key (OpenSSF Model Signing)."),
    click.option("--quiet", "-q", is_flag=True, help="Print nothing before the end."),
    shared=all_of(global_options, _shared),
    short_help="Export a model that a job wrote, and register it.",
)
def export(
    session: Session,
    *,
    job: tuple[str, str],
    target: str | None,
    provenance: str | None,
    quiet: bool,
    uri: str | None,
    **options: Any,
) -> int:
    """Export a model that JOB wrote, and register it as a version.

    Uses the job's metrics, outputs, inputs, image and identity. The job must be Complete. This machine copies the
    model, so it must be able to read the output. Idempotent: the same command again shows the same version.
    """
    if options["evaluation"] is not None:
        refuse_ignored(
            *("metric", "mode", "min_improvement"),
            because="has no effect with --evaluation, whose gate decides about --alias: leave it out",
        )
    if options["alias"] is None:
        refuse_ignored("metric", "mode", "min_improvement", because="has no effect without --alias: name an alias, too")
    _check_rule(options["metric"])
    more = json_object("--provenance", provenance) if provenance else None
    with TrainJobClient(session.given_backend, session.given_namespace) as client, handled(exiting):
        found = JobRef.of(client.call(lambda: find_written(client.backend, client.namespace, *job)))
        done = client.export(found, target, provenance=more, registry=uri, progress=lines(quiet), **options)
    title = click.style(f"{done.name} {done.version}", bold=True)
    shown = {"uri": done.uri, "digest": done.digest, "alias": done.reason}
    session.answer(vars(done), "\n".join([title, *_lines(shown)]))
    return 0


def _check_rule(metric: str | None) -> None:
    if metric is None:
        refuse_ignored("mode", "min_improvement", because="has no effect without --metric: name the metric, too")


def _place(location: str) -> str:
    """``location`` as the steps register it. A location of an unsupported scheme is not changed."""
    scheme, colon, _ = location.partition("://")
    if not colon or scheme.lower() in SUPPORTED:
        return parse_store(location).uri
    if "@" in urlsplit(location).netloc:
        raise ConfigurationError(
            f"the {scheme}:// location contains credentials, which the registry would show; remove them"
        )
    return location


def _show(session: Session, version: ModelVersion) -> int:
    gate, reason = _gate(version)
    tags = {name: text for name, text in sorted(version.tags.items()) if name not in _VERDICT}
    shown = {
        "uri": version.uri,
        "digest": version.digest,
        "aliases": ", ".join(version.aliases),
        "metrics": joined(version.metrics),
        "created": _created(version),
        "gate": f"{gate}: {reason}" if reason else gate,
        **tags,
    }
    title = click.style(f"{version.name} {version.version}", bold=True)
    session.answer(_fields(version), "\n".join([title, *_lines(shown)]))
    return 0


def _lines(shown: dict[str, str]) -> list[str]:
    """The values that a registry returned, each on one line."""
    return aligned({name: " ".join(text.split()) for name, text in shown.items()}, 0)


_VERDICT = [f"trainjob.evaluation.{name}" for name in ("passed", "rule", "reason")]


def _gate(version: ModelVersion) -> tuple[str, str]:
    """``passed``, ``failed``, ``none`` or, without an evaluation, an empty text; and the rule with its reason."""
    passed, rule, reason = (version.tags.get(name, "") for name in _VERDICT)
    if not passed:
        return "none" if "trainjob.evaluation.digest" in version.tags else "", ""
    return "passed" if passed == "true" else "failed", f"{rule}: {reason}"


def _fields(version: ModelVersion) -> dict[str, Any]:
    return vars(version) | {"aliases": [*version.aliases]}


def _created(version: ModelVersion) -> str:
    return iso(version.created, "seconds") if version.created else ""
