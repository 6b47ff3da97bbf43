"""The examples of dags_examples/airflow: each can be parsed and serialized.

tests/cluster/test_airflow_examples.py, tests/cluster/test_workflows.py, system/test_examples.py and the snippets of the
documentation run them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.airflow.conftest import ROOT
from tests.airflow.versions import dag_bag, dag_serialization, older_than

EXAMPLES = ROOT / "dags_examples" / "airflow"
IDS = {
    "retrain_digits": {"retrain_digits"},
    "retrain_daily": {"retrain_daily"},
    "tune_digits": {"tune_digits"},
    "champion_challenger": {"champion_challenger"},
    "on_new_model": {"release_digits", "evaluate_digits", "deploy_digits"},
    "finetune_llm": {"finetune_llm"},
    "train_gang": {"train_gang"},
    "train_until_good": {"train_until_good"},
    "adopt_training": {"adopt_training"},
}
SINCE = {"champion_challenger": "3.1", "retrain_daily": "3.3", "train_gang": "3.3", "train_until_good": "3.4"}
"""The oldest Airflow that an example supports, as in docs/how-to/airflow.md."""


def test_each_can_be_parsed_and_serialized(airflow_home: Path) -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(IDS)
    bag = dag_bag(EXAMPLES)
    later = {name for name, first in SINCE.items() if older_than(first)}
    assert {Path(file).stem for file in bag.import_errors} == later
    for dag_id, dag in bag.dags.items():
        assert dag_id in IDS[Path(dag.fileloc).stem]
        again = dag_serialization().from_dict(json.loads(json.dumps(dag_serialization().to_dict(dag))))
        assert {task.task_id: task.upstream_task_ids for task in again.tasks} == {
            task.task_id: task.upstream_task_ids for task in dag.tasks
        }


def test_the_documentation_links_all_of_them() -> None:
    linked = re.findall(
        r"\(\.\./\.\./dags_examples/airflow/(\w+)\.py\)", (ROOT / "docs" / "how-to" / "airflow.md").read_text()
    )
    assert set(linked) == set(IDS)


@pytest.mark.skipif(not older_than("3.4"), reason="this Airflow has loops of task groups")
def test_an_example_for_a_later_airflow_says_so() -> None:
    (error,) = dag_bag(EXAMPLES / "train_until_good.py").import_errors.values()
    assert "needs Airflow 3.4 or later: task groups of this one have no loops" in error
