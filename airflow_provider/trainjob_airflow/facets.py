"""Custom facets of OpenLineage. Imported only where the provider of OpenLineage is installed.

A facet follows the rules of https://openlineage.io/docs/spec/facets/custom-facets: the prefix ``trainjob``, a schema
with a version in its URL, and a producer.
"""

from __future__ import annotations

import attr
from airflow.providers.common.compat.openlineage.facet import RunFacet

_SCHEMA = "https://trainjob.dev/docs/reference/openlineage/1-0-0/TrainJobGoodputRunFacet.json"


@attr.define
class TrainJobGoodputRunFacet(RunFacet):
    """How the time of a TrainJob was spent; ``trainjob_goodput`` among the facets of a run.

    Attributes:
        ratio: Training that counted, divided by the time from the creation to the end.
        seconds: Time by activity.
        gpuHours: GPU-hours by activity; None if the number of GPUs is unknown.
    """

    ratio: float
    seconds: dict[str, float]
    gpuHours: dict[str, float] | None = None  # noqa: N815 - names of facets are in camel case

    @staticmethod
    def _get_schema() -> str:
        return f"{_SCHEMA}#/$defs/TrainJobGoodputRunFacet"
