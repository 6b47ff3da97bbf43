"""OpenLineage facets of a task: the data that its job read and wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit


def facets(read: Iterable[str], written: Iterable[str], job: Mapping[str, Any]) -> Any:
    """Build an ``OperatorLineage``.

    Args:
        read: URIs of datasets and models that the job read.
        written: URIs that the job wrote.
        job: What the task returned; the TrainJob and its goodput become run facets.
    """
    from airflow.providers.common.compat.openlineage.facet import ExternalQueryRunFacet
    from airflow.providers.openlineage.extractors import OperatorLineage

    run: dict[str, Any] = {}
    if job:
        where = f"{job['namespace']}/{job['name']}"
        run["externalQuery"] = ExternalQueryRunFacet(externalQueryId=job["uid"], source=f"kubeflow-trainjob://{where}")
    if spent := job.get("goodput"):
        from trainjob import __version__
        from trainjob_airflow.facets import TrainJobGoodputRunFacet

        known = (spent["ratio"], spent["seconds"], spent.get("gpu_hours"))
        run["trainjob_goodput"] = TrainJobGoodputRunFacet(*known, producer=f"https://trainjob.dev/#{__version__}")
    return OperatorLineage(inputs=_datasets(read), outputs=_datasets(written), run_facets=run)


def _datasets(uris: Iterable[str]) -> list[Any]:
    from airflow.providers.common.compat.openlineage.facet import Dataset

    return [Dataset(*name_of(uri)) for uri in dict.fromkeys(uris) if uri]


def name_of(uri: str) -> tuple[str, str]:
    """Namespace and name of a dataset by OpenLineage's rules: ``s3://bucket`` and the key, ``file`` and the path."""
    parts = urlsplit(uri)
    if not parts.netloc:
        return parts.scheme or "file", parts.path or "/"
    host = parts.hostname or parts.netloc  # without a user and password before the @
    port = f":{parts.port}" if parts.port else ""
    path = parts.path if parts.scheme in ("http", "https") else parts.path.lstrip("/")
    return f"{parts.scheme}://{host}{port}", path or "/"
