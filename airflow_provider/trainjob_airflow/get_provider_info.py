"""What Airflow shows and looks up of this provider. Every Airflow process imports it, so it imports nothing."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Kubeflow TrainJob"


def get_provider_info() -> dict[str, Any]:
    """Provider metadata (``provider_info.schema.json`` of Airflow)."""
    return {
        "package-name": "trainjob",
        "name": "Kubeflow TrainJob",
        "description": "Kubeflow TrainJobs as dependable steps of Airflow workflows.",
        "integrations": [
            {
                "integration-name": _INTEGRATION,
                "external-doc-url": "https://www.kubeflow.org/docs/components/trainer/",
                "tags": ["ml"],
            }
        ],
        "operators": [
            {
                "integration-name": _INTEGRATION,
                "python-modules": ["trainjob_airflow.operators.trainjob", "trainjob_airflow.operators.data"],
            }
        ],
        "sensors": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.sensors.trainjob"]}],
        "triggers": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.triggers.trainjob"]}],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.hooks.trainjob"]}],
        "connection-types": [
            {
                "connection-type": "trainjob",
                "hook-class-name": "trainjob_airflow.hooks.trainjob.TrainJobHook",
                "hook-name": "Kubeflow TrainJob",
                # Here, and not as form widgets of the hook: the form then needs neither flask nor the hook itself.
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "login", "password", "schema", "extra"],
                    "relabeling": {},
                    "placeholders": {},
                },
                "conn-fields": {
                    "backend": {
                        "label": "Backend",
                        "description": "Where TrainJobs run; TRAINJOB_BACKEND if left empty.",
                        "schema": {"type": ["string", "null"], "enum": ["kubernetes", "local", None], "default": None},
                    },
                    "namespace": {
                        "label": "Namespace",
                        "description": "Namespace of the TrainJobs; TRAINJOB_NAMESPACE if left empty.",
                        "schema": {"type": ["string", "null"], "maxLength": 63, "default": None},
                    },
                },
            }
        ],
        "config": {
            "trainjob": {
                "description": "Kubeflow TrainJobs.",
                "options": {
                    "deployment": {
                        "description": (
                            "Name of this Airflow deployment, part of the identity of every TrainJob. Needed only "
                            "where two deployments share a namespace and have the same [api] base_url."
                        ),
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "research",
                        "default": "",
                    }
                },
            }
        },
    }
