"""Options of a step that are rejected before its job is launched."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob.data.checks import check_options
from trainjob.data.program import Step
from trainjob.errors import ConfigurationError, TrainJobError

INITIALIZE = {"source": "s3://b/d/", "target": "file:///w"}
EXPORT = {"source": "file:///m", "target": "s3://models", "name": "digits", "alias": None, "metric": None}
RULE = {"mode": "max", "min_improvement": 0.0}


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        ("initialize-dataset", {"source": "ftp://host/d"}, "ftp:// is not a supported scheme"),
        ("initialize-dataset", {"target": "ftp://host/d"}, "ftp:// is not a supported scheme"),
        ("initialize-dataset", {"target": "models:/m@champion"}, "use a location in a store"),
        ("initialize-dataset", {"source": "s3://b/../c"}, "unsafe path"),
        ("initialize-dataset", {"digest": "sha1:abc"}, "is not a digest"),
        ("initialize-dataset", {"registry": "postgresql://db"}, "is not a supported scheme of a registry"),
        ("initialize-model", {"source": "s3://b/m", "if_missing": "fresh"}, "is for registered models"),
        ("initialize-model", {"source": "models:/m@a", "if_missing": "maybe"}, "if_missing must be 'fail' or 'fresh'"),
        ("initialize-model", {"source": "models:/m"}, "models:/"),
        ("initialize-model", {"registry": "mlflow+https://u:p@host"}, "contains credentials"),
        ("export", {"source": "models:/m@a"}, "use a location in a store"),
        ("export", {"name": "a/b"}, "is not a valid model name"),
        ("export", {"alias": "latest", "metrics": {}}, "is not a valid alias"),
        ("export", {"metrics": {}, "alias": "champion", "metric": "accuracy"}, "the metrics given are: none"),
        ("export", {"metrics": {"loss": 1}, "alias": "champion", "metric": "accuracy"}, "the metrics given are: loss"),
        ("export", {"metrics": {"loss": "low"}}, "metrics must be numbers"),
        ("export", {"metrics": {"a": 1}, "metric": "a"}, "requires an alias; set alias"),
        ("export", {"mode": "best"}, "mode must be 'max' or 'min'"),
        ("export", {"metric": "a", "min_improvement": -1}, "min_improvement must be a number of at least 0"),
    ],
)
def test_invalid_step_options_are_rejected(step: Step, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainJobError, match=words):
        check_options(step, (EXPORT | RULE if step == "export" else INITIALIZE) | options)


def test_missing_options_are_not_checked() -> None:
    check_options("export", {"alias": "champion", "metric": "accuracy"})
    check_options("export", {"metrics": {"a": 1}, "metric": "a"})
    check_options("export", {"metrics": {"a": 1}, "min_improvement": 0.1})
    check_options("initialize-model", {"if_missing": "fresh", "digest": None, "registry": ""})
    check_options("export", EXPORT | RULE | {"metrics": {"accuracy": 0.9}, "alias": "champion", "metric": "accuracy"})
    check_options("initialize-model", {"source": "models:/m@champion", "target": "/w", "if_missing": "fresh"})


def test_errors_do_not_contain_secrets_of_a_location() -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_options("initialize-dataset", {"source": "https://user:hunter2@host/d"})
    assert "hunter2" not in str(raised.value)
