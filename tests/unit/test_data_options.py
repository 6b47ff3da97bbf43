"""Options of a step: what is refused before its job is launched, and the command that has them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob.data.options import STEPS, Step, StepOptions, from_words
from trainjob.errors import TrainJobError

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
        ("copy", {"source": "models:/m@a"}, "use a location in a store"),
        ("copy", {"target": "https://host/d"}, "can only be read"),
        ("copy", {"digest": "sha1:abc"}, "is not a digest"),
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
        STEPS[step].known((EXPORT | RULE if step == "export" else INITIALIZE) | options).check()


PROMOTED = {"metrics": {"accuracy": 0.9}, "alias": "champion", "metric": "accuracy"}


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("export", {"alias": "champion", "metric": "accuracy"}),
        ("export", {"metrics": {"a": 1}, "metric": "a"}),
        ("export", {"metrics": {"a": 1}, "min_improvement": 0.1}),
        ("export", EXPORT | RULE | PROMOTED),
        ("initialize-model", {"if_missing": "fresh", "digest": None, "registry": ""}),
        ("initialize-model", {"source": "models:/m@champion", "target": "/w", "if_missing": "fresh"}),
    ],
)
def test_missing_options_are_not_checked(step: Step, options: dict[str, Any]) -> None:
    STEPS[step].known(options).check()


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "PATTERN": st.lists(TEXTS, max_size=3),
    "JSON": st.none() | st.dictionaries(TEXTS, st.integers() | TEXTS, min_size=1, max_size=3),
}


def options_of(step: Step) -> st.SearchStrategy[StepOptions]:
    """Options of a program, as an author may give them."""
    drawn: dict[str, st.SearchStrategy[Any]] = {}
    for each in fields(STEPS[step]):
        choices = each.metadata.get("choices")
        if each.name == "command":
            drawn[each.name] = st.lists(TEXTS, max_size=3)
        elif choices:
            drawn[each.name] = st.sampled_from(choices)
        elif each.metadata.get("type") is float:
            drawn[each.name] = st.floats(0, 10)
        elif each.metadata.get("action") == "store_true":
            drawn[each.name] = st.booleans()
        else:
            optional = each.default is None
            known = VALUES.get(each.metadata.get("metavar", ""), TEXTS)
            drawn[each.name] = st.none() | known if optional else known
    return st.builds(STEPS[step], **drawn)


@pytest.mark.parametrize("step", STEPS)
@given(data=st.data())
def test_the_program_reads_what_the_command_says(step: Step, data: st.DataObject) -> None:
    """Kubernetes replaces each ``$$`` of a command by ``$``."""
    options = data.draw(options_of(step))
    python, _, module, *words = options.to_command()
    assert (python, module) == ("python", "trainjob.data")
    read = from_words([word.replace("$$", "$") for word in words])
    assert type(read) is type(options)
    for each in fields(options):
        given_, got = getattr(options, each.name), getattr(read, each.name)
        assert got == given_ or (not got and not given_), each.name


@pytest.mark.parametrize("words", [["export"], ["initialize-dataset", "--sauce=x"], ["bake"]])
def test_the_program_refuses_other_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_words(words)
    assert ended.value.code == 2
    assert "usage: python -m trainjob.data" in capsys.readouterr().err
