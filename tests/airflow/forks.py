"""Programs of Airflow, forked from a process that has imported Airflow: an import costs each 2 to 6 s of CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from tests.forks import ROOT, Warm

MODULES = (
    "airflow.__main__",
    *(f"airflow.cli.commands.{name}_command" for name in ("api_server", "dag_processor", "scheduler", "triggerer")),
    *("airflow.cli.commands.dag_command", "airflow.cli.commands.provider_command"),
    *("airflow.utils.db", "alembic.runtime.environment"),
    *(
        "airflow.jobs.scheduler_job_runner",
        "airflow.jobs.triggerer_job_runner",
        "airflow.jobs.dag_processor_job_runner",
    ),
    *("airflow.executors.local_executor", "airflow.dag_processing.manager", "airflow.dag_processing.processor"),
    *("airflow.dag_processing.dagbag", "airflow.providers_manager", "airflow.plugins_manager"),
    *("airflow.api_fastapi.app", "airflow.api_fastapi.execution_api.app", "airflow.sdk.execution_time.supervisor"),
    *("airflow.api_fastapi.execution_api.routes", "airflow.api_fastapi.execution_api.versions"),
    *("airflow.sdk.execution_time.task_runner", "airflow.sdk.execution_time.execute_workload"),
    *("airflow.providers.standard.operators.hitl", "airflow.providers.standard.operators.python"),
    *("airflow.serialization.serialized_objects", "airflow.providers.openlineage.utils.selective_enable"),
    *(f"trainjob_airflow.operators.{name}" for name in ("data", "trainjob")),
    *("trainjob_airflow.decorators.trainjob", "trainjob_airflow.sensors.trainjob", "trainjob_airflow.links"),
    *("trainjob_airflow.triggers.trainjob", "trainjob_airflow.triggers.assets", "trainjob_airflow.lineage"),
    *(
        "trainjob",
        "trainjob._jobs.waiting",
        "trainjob._jobs.launching",
        "trainjob._diagnosis",
        "trainjob._backends.local.backend",
    ),
    *("trainjob._backends.kubernetes.backend", "psycopg2", "httpx", "uvicorn", "a2wsgi"),
)
SERVER_MODULES = (
    *("airflow.api_fastapi.core_api.app", "airflow.api_fastapi.auth.managers.simple.simple_auth_manager"),
    *("airflow.api_fastapi.core_api.routes.public", "airflow.api_fastapi.core_api.routes.ui"),
)
"""Modules that the programs import, and those of an API server. No version of Airflow has all of them."""

SERVER = "airflow.api_fastapi.app"
TRIGGERER = "airflow.jobs.triggerer_job_runner"
WORKER = "airflow.sdk.execution_time.supervisor"
"""Modules that serve the execution API: of an API server, inside of a triggerer, and inside of ``dag.test()``."""

_APIS = "TRAINJOB_TESTS_APIS"


def airflow_forks(environment: Mapping[str, str], *apis: str) -> Warm:
    """The process that forks Airflow's programs.

    Args:
        environment: Variables that Airflow reads at its import: its home and settings.
        apis: Modules from which the programs serve Airflow's execution API.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    own = {"PATH": os.environ["PATH"], "HOME": environment["AIRFLOW_HOME"], "PYTHONPATH": path, _APIS: " ".join(apis)}
    return Warm({}, [], {**environment, **own}, prepare="tests.airflow.forks:prepare", inherit=False)


def prepare() -> None:
    """Import the modules, and create what a program creates at the first request.

    That are models and routes of all versions of the API, 4 s of CPU. Airflow itself caches the API of a server; the
    API of other programs is cached here.
    """
    apis = os.environ[_APIS].split()
    for name in (*MODULES, *(SERVER_MODULES if SERVER in apis else ())):
        # Not only ImportError: Airflow raises other classes for a module that a version lacks.
        with suppress(Exception):
            import_module(name)
    for name in apis:
        for app in _apps(import_module(name)):
            if hasattr(app, "_cadwyn_initialize"):  # older versions have created them already
                app._cadwyn_initialize()


def _apps(module: Any) -> list[Any]:
    if module.__name__ == SERVER:
        return [getattr(route, "app", None) for route in module.cached_app(apps="all").routes]
    module.in_process_api_server = cache(module.in_process_api_server)
    return [module.in_process_api_server().app]
