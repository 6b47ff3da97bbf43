"""Provider metadata for Airflow. Every Airflow process imports this module, so it imports nothing."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Kubeflow TrainJob"


def _text(label: str, description: str, **schema: Any) -> dict[str, Any]:
    """An optional text field of the connection form."""
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
                    "trainjob_airflow.operators.evaluation",
                    "trainjob_airflow.operators.tuning",
                    "trainjob_airflow.operators.cancel",
                ],
            }
        ],
        "sensors": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.sensors.trainjob"]}],
        "triggers": [
            {
                "integration-name": _INTEGRATION,
                "python-modules": [
                    "trainjob_airflow.triggers.trainjob",
                    "trainjob_airflow.triggers.state",
                    "trainjob_airflow.triggers.pause",
                    "trainjob_airflow.triggers.tuning",
                    "trainjob_airflow.triggers.assets",
                ],
            }
        ],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": ["trainjob_airflow.hooks.trainjob"]}],
        "connection-types": [
            {
                "connection-type": "trainjob",
                "hook-class-name": "trainjob_airflow.hooks.trainjob.TrainJobHook",
                "hook-name": "Kubeflow TrainJob",
                # Metadata instead of form widgets of the hook: the form then needs neither flask nor the hook.
                "ui-field-behaviour": {
                    "hidden-fields": ["port", "login", "schema", "extra"],
                    "relabeling": {"host": "API server", "password": "Bearer token"},
                    "placeholders": {"host": "https://cluster.example:6443 (instead of a kubeconfig)"},
                },
                # Fields that kubernetes connections have as well have the names of those.
                "conn-fields": {
                    "backend": {
                        "label": "Backend",
                        "description": "Where TrainJobs run. Default: TRAINJOB_BACKEND.",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["kubernetes", "local"],
                            "values_display": {"kubernetes": "Kubernetes", "local": "Local: the machine of the worker"},
                            "default": None,
                        },
                    },
                    "namespace": _text(
                        "Namespace",
                        "Namespace of the TrainJobs. Default: TRAINJOB_NAMESPACE, or the namespace of the kubeconfig.",
                        maxLength=63,
                    ),
                    "in_cluster": {
                        "label": "In cluster",
                        "description": "Use the service account of the pod in which the task or the triggerer runs.",
                        "schema": {"type": ["boolean", "null"], "default": None},
                    },
                    "kube_config_path": _text(
                        "Kubeconfig (path)", "Path of a kubeconfig on every worker and triggerer."
                    ),
                    # Airflow masks a field by its name alone, and does not mask kube_config, the name in kubernetes
                    # connections: everyone who may read connections sees it. The hook accepts both names.
                    "secret_kube_config": _text(
                        "Kubeconfig (text)",
                        "Content of a kubeconfig, YAML or JSON. Stored encrypted and not shown again.",
                        format="multiline",
                    ),
                    "cluster_context": _text("Context", "Context of the kubeconfig. Default: its current context."),
                    "ca_file": _text(
                        "CA certificates (path)", "CA file that verifies the certificate of the API server."
                    ),
                    "disable_verify_ssl": {
                        "label": "Do not verify the certificate",
                        "description": "Accept any certificate of the API server. For tests only.",
                        "schema": {"type": ["boolean", "null"], "default": None},
                    },
                    "job_url": _text(
                        "Link to a job",
                        "URL of a job in a dashboard: https://dashboard.example/{namespace}/{name}; also {uid}.",
                    ),
                    "logs_url": _text(
                        "Link to the logs of a job",
                        "URL in a log store: https://logs.example/{namespace}/{name}?from={started}; also {uid}.",
                    ),
                    "model_url": _text(
                        "Link to a model version",
                        "URL in the model registry: https://models.example/{model}/{version}.",
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
                            "if two deployments with the same [api] base_url share a namespace."
                        ),
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "research",
                        "default": "",
                    },
                    "xcom_backend_in_api_server": {
                        "description": (
                            "Whether the API server may call the XCom backend to show trainings. Needed only for a "
                            "backend that stores values outside of the database. It then deserializes values that DAG "
                            "authors chose."
                        ),
                        "version_added": "0.3.0",
                        "type": "boolean",
                        "example": "True",
                        "default": "False",
                    },
                },
            }
        },
    }
