"""docs/how-to/cluster.md shows the output of `trainjob doctor` if a permission is missing and Trainer does not answer.

With ``TRAINJOB_RECORD`` in the environment (``make record-doctor``) the test writes the output to that page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.cluster.commands import by_command
from tests.testcluster.access import RULES
from tests.testcluster.api import write_kubeconfig
from tests.testcluster.control_plane import Cluster
from tests.testcluster.step_image import runtime

from trainjob._install import objects

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "cluster.md"
DIGITS = ROOT / "dags_examples" / "cluster" / "digits-jax.yaml"
COMMAND = "$ trainjob doctor -n training --runtime digits-jax --queue gpus\n"
SHOWN = re.compile(rf"(?<=^```console\n){re.escape(COMMAND)}.*?(?=^```)", re.MULTILINE | re.DOTALL)
CHANGING = re.compile(r"\d+(?= ms)|(?<=127\.0\.0\.1:)\d+")


def test_the_page_shows_the_output_of_doctor(own_cluster: Cluster, tmp_path: Path) -> None:
    own_cluster.add_runtime(runtime(DIGITS, "registry.example/digits:1"))
    with own_cluster.namespace("training") as training, own_cluster.namespace("airflow") as airflow:
        token = {"token": own_cluster.token_for("airflow-worker", airflow)}
        for each in objects("rbac", namespace=training, service_accounts=[(airflow, "airflow-worker")]):
            # The permissions of Trainer's role for users, which do not include workloads.
            own_cluster.api.apply({**each, "rules": list(RULES)} if each["kind"] == "Role" else each)
        server, authority = own_cluster.api.server, own_cluster.api.authority
        kubeconfig = write_kubeconfig(tmp_path / "airflow-worker.kubeconfig", server, authority, token, training)
        own_cluster.kill("trainer")
        try:
            code, text = by_command(kubeconfig, training, "--runtime", "digits-jax", "--queue", "gpus")
        finally:
            own_cluster.start_component("trainer")
    assert code == 3, text
    output = COMMAND + re.sub(r"\b(training|airflow)-[0-9a-f]{8}\b", r"\1", text.replace(f"{tmp_path}{os.sep}", ""))
    page = PAGE.read_text()
    (shown,) = SHOWN.findall(page)
    if "TRAINJOB_RECORD" in os.environ:
        PAGE.write_text(page.replace(shown, output))
    else:
        assert CHANGING.sub("…", shown) == CHANGING.sub("…", output), "run make record-doctor"
