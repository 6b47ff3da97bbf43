"""What Airflow shows and looks up of this provider. Every Airflow process imports it, so it imports nothing."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Kubeflow TrainJob"


def _text(label: str, description: str, **schema: Any) -> dict[str, Any]:
    """A text field of the connection form, which may be left empty."""
    return {
        "label": label,
        "description": description,
        "schema": {"type": ["string", "null"], "default": None, **schema},
    }


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
                "python-modules": [
                    "trainjob_airflow.operators.trainjob",
                    "trainjob_airflow.operators.data",
                    "trainjob_airflow.operators.cancel",
                ],
            }
        ],
        "sensors": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.sensors.trainjob"]}],
        "triggers": [
            {
                "integration-name": _INTEGRATION,
                "python-modules": ["trainjob_airflow.triggers.trainjob", "trainjob_airflow.triggers.assets"],
            }
        ],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.hooks.trainjob"]}],
        "connection-types": [
            {
                "connection-type": "trainjob",
                "hook-class-name": "trainjob_airflow.hooks.trainjob.TrainJobHook",
                "hook-name": "Kubeflow TrainJob",
                # Here, and not as form widgets of the hook: the form then needs neither flask nor the hook itself.
                "ui-field-behaviour": {
                    "hidden-fields": ["port", "login", "schema", "extra"],
                    "relabeling": {"host": "API server", "password": "Bearer token"},
                    "placeholders": {"host": "https://cluster.example:6443, instead of a kubeconfig"},
                },
                # What kubernetes connections have as well is called as it is there.
                "conn-fields": {
                    "backend": {
                        "label": "Backend",
                        "description": "Where TrainJobs run. Left empty: as TRAINJOB_BACKEND says.",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["kubernetes", "local"],
                            "values_display": {"kubernetes": "Kubernetes", "local": "Local: the worker's own machine"},
                            "default": None,
                        },
                    },
                    "namespace": _text(
                        "Namespace",
                        "Where the TrainJobs are. Left empty: as TRAINJOB_NAMESPACE or the kubeconfig says.",
                        maxLength=63,
                    ),
                    "in_cluster": {
                        "label": "In cluster",
                        "description": "Take the service account of the pod that the task or the triggerer runs in.",
                        "schema": {"type": ["boolean", "null"], "default": None},
                    },
                    "kube_config_path": _text("Kubeconfig (path)", "A file on every worker and triggerer."),
                    # Airflow masks a field by its name, and by nothing else; that of kubernetes connections,
                    # kube_config, it shows to everyone who may read connections. It is taken as well.
                    "secret_kube_config": _text(
                        "Kubeconfig (text)",
                        "The kubeconfig itself, YAML or JSON. Stored encrypted, and not shown again.",
                        format="multiline",
                    ),
                    "cluster_context": _text("Context", "Of the kubeconfig. Left empty: its current one."),
                    "ca_file": _text("CA certificates (path)", "A file to verify the API server's certificate with."),
                    "disable_verify_ssl": {
                        "label": "Do not verify the certificate",
                        "description": "Trust whoever answers in the API server's place. For tests only.",
                        "schema": {"type": ["boolean", "null"], "default": None},
                    },
                    "job_url": _text(
                        "Link to a job",
                        "Address in a dashboard: https://dashboard.example/{namespace}/{name}; also {uid}.",
                    ),
                    "logs_url": _text(
                        "Link to its logs",
                        "Address in a log store: https://logs.example/{namespace}/{name}?from={started}; also {uid}.",
                    ),
                    "model_url": _text(
                        "Link to a model's version",
                        "Address in the model registry: https://models.example/{model}/{version}.",
                    ),
                },
            }
        ],
        "extra-links": [
            "trainjob_airflow.links.TrainJobLink",
            "trainjob_airflow.links.TrainJobLogsLink",
            "trainjob_airflow.links.ModelVersionLink",
        ],
        "task-decorators": [
            {"name": "trainjob", "class-name": "trainjob_airflow.decorators.trainjob.trainjob_task"},
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
