"""What a cluster must have: ``trainjob install``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from trainjob import __version__
from trainjob import install as package
from trainjob.cli import texts
from trainjob.cli.options import Target
from trainjob.settings import Settings


async def install(
    target: Target,
    only: package.Part | None,
    service_accounts: Sequence[tuple[str, str]],
    names: Mapping[str, str | None],
) -> int:
    """Print the objects: YAML documents, or with ``--json`` one List."""
    namespace = target.namespace or Settings().namespace
    accounts = [(where or namespace or "", name) for where, name in service_accounts]
    if unplaced := [name for where, name in accounts if not where]:
        raise click.UsageError(f"say the namespace of service account {unplaced[0]}: NAMESPACE:{unplaced[0]}")
    given = {field: name for field, name in names.items() if name}
    found = package.objects(only, namespace=namespace, service_accounts=accounts, **given)
    if target.as_json:
        click.echo(texts.as_json({"apiVersion": "v1", "kind": "List", "items": found}))
        return 0
    click.echo(f"# What trainjob {__version__} needs on a cluster: kubectl apply --server-side -f -")
    for each in found:
        click.echo(f"---\n{texts.as_yaml(each)}")
    return 0
