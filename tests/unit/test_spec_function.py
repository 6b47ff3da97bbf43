"""Python functions as trainers: their source must arrive unchanged and be self-contained."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from trainjob import InvalidSpec, TrainJobSpec, progress
from trainjob._backends.local.ranks import expand
from trainjob._manifest.render import _literal, render
from trainjob._spec.checks import secret_texts
from trainjob.progress import Report, message as message_module

LIMIT = 3
SPECIAL_CHARACTERS = "$(HOME) $$(HOME) ${HOME} $HOME $5.00 `echo no` 'one' \"two\" \\n \\\\ %s {x} \x07 é 😀 EOM\nEOM\n"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directory for the functions that a node runs. In a pod it is deleted with the pod; here it would remain."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def parts(func: object, **fields: Any) -> list[str]:
    """The command that the nodes run."""
    spec = TrainJobSpec.parse({"runtime": "a-runtime", "func": func, **fields})
    trainer = render(spec, "key", 1, "ns")["spec"]["trainer"]
    return [expand(word, {"HOME": "/expanded"}) for word in (*trainer["command"], *trainer["args"])]


def node(func: object, environment: Mapping[str, str] | None = None, **fields: Any) -> subprocess.CompletedProcess[str]:
    """A node that has run `func`."""
    command = [sys.executable if word == "python" else word for word in parts(func, **fields)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended


def run(func: object, environment: Mapping[str, str] | None = None, **fields: Any) -> str:
    """Output of a node that runs `func`."""
    return node(func, environment, **fields).stdout


@given(st.text(alphabet=st.one_of(st.sampled_from("$()A\\`'\""), st.characters(exclude_categories=["Cs"]))))
def test_literals_survive_the_expansion_of_variables(text: str) -> None:
    assert expand(_literal(text), {"A": "expanded", "": "empty"}) == text


@given(
    source=st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ).filter(lambda value: not [*secret_texts(value, "x")]),  # hypothesis may generate words from the sources
)
def test_source_and_arguments_arrive_unchanged(source: str, value: object) -> None:
    *_, arrived, options = parts({"name": "f", "source": source}, func_args={"x": value})
    assert arrived == source
    assert json.loads(options)["args"] == {"x": value}


def show(text: str, times: int = 1, *, more: dict[str, Any] | None = None) -> None:
    """Show `echo INJECTED` and "$5.00" and C:\\tmp\\$USER, $(HOME)."""
    import json

    print(json.dumps([text * times, more, "$5.00 `x` \\ $(HOME) $$"]))


def test_special_characters_in_arguments_and_lines_of_strings_arrive_unchanged() -> None:
    output = run(show, func_args={"text": SPECIAL_CHARACTERS, "times": 2, "more": {"a": [1, None, True]}})
    assert json.loads(output) == [SPECIAL_CHARACTERS * 2, {"a": [1, None, True]}, "$5.00 `x` \\ $(HOME) $$"]

    def nested() -> None:
        text = """
left
        right"""
        print(repr(text))

    assert run(nested) == "'\\nleft\\n        right'\n"


# ---------------------------------------------------------------- return values


def give(value: Any, report: bool = False) -> Any:
    if report:
        from trainjob import progress

        progress.report(progress=50, metrics={"loss": 0.5}, outputs={"model": "file:///m"})
    return value


def message(tmp_path: Path, func: object, environment: Mapping[str, str] | None = None, **fields: Any) -> Report | None:
    """Report of a rank that runs `func`."""
    path = tmp_path / "termination-log"
    path.write_text("")
    node(func, {**os.environ, "TRAINJOB_TERMINATION_LOG": str(path), **(environment or {})}, **fields)
    return progress.read(path.read_text())


STRUCTURE = [0, False, "", [], "é\n$(HOME)", 0.1, None, {"a": [1, None, {"b": True}]}]


@pytest.mark.parametrize(("value", "report"), [(0, False), ("", False), (STRUCTURE, False), (STRUCTURE, True)])
def test_the_return_value_is_reported(tmp_path: Path, value: object, report: bool) -> None:
    reported = message(tmp_path, give, func_args={"value": value, "report": report})
    assert reported is not None
    assert json.dumps(reported.returned) == json.dumps(value), "0 is not False"
    expected = (50, {"loss": 0.5}, {"model": "file:///m"}) if report else (None, {}, {})
    assert (reported.progress, reported.metrics, reported.outputs) == expected


def test_none_is_not_reported(tmp_path: Path) -> None:
    assert message(tmp_path, give, func_args={"value": None}) is None


@pytest.mark.parametrize(
    ("environment", "reports"),
    [
        *(({name: "1"}, False) for name in ("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")),
        ({"RANK": "3", "JOB_COMPLETION_INDEX": "0"}, False),  # the index of a node is not that of its processes
        ({"RANK": "0", "JOB_COMPLETION_INDEX": "1"}, True),
    ],
)
def test_only_rank_0_reports(tmp_path: Path, environment: dict[str, str], reports: bool) -> None:
    reported = message(tmp_path, give, environment, func_args={"value": 7})
    assert (reported is not None and reported.returned == 7) == reports


def without_the_package() -> dict[str, str]:
    """Report like a copy of `trainjob.progress` or another program, without the package."""
    import importlib.util
    import json
    import os
    from pathlib import Path

    metrics = [{"name": "m" * 50 + str(i), "value": str(i)} for i in range(40)]
    history = {"m": [[step, 1769860800, 0.5] for step in range(20)]}
    report = json.dumps({"trainjob": 1, "metrics": metrics, "outputs": {"model": "file:///m"}, "history": history})
    Path(os.environ["TRAINJOB_TERMINATION_LOG"]).write_text(report + "}} rest")
    return {"package": str(importlib.util.find_spec("trainjob")), "text": "é" * 300}


def test_the_image_does_not_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make space for the value, the history is dropped, then the oldest metrics."""
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]  # not in typeshed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    monkeypatch.setattr(os, "environ", environment)
    reported = message(tmp_path, without_the_package)
    assert reported is not None
    assert reported.returned == {"package": "None", "text": "é" * 300}
    assert reported.outputs == {"model": "file:///m"}
    assert 0 < len(reported.metrics) < 40
    assert not reported.history
    assert f"{'m' * 50}39" in reported.metrics
    assert f"{'m' * 50}0" not in reported.metrics


def test_the_program_of_a_function_runs_on_older_pythons() -> None:
    ast.parse(inspect.getsource(message_module), feature_version=(3, 8))


def test_a_later_report_of_a_thread_keeps_the_return_value(tmp_path: Path) -> None:
    def train() -> str:
        import atexit

        from trainjob.progress import report

        report(progress=1)
        atexit.register(report, progress=100)
        return "value"

    assert message(tmp_path, train) == Report(100, 0, returned="value", updated=mock.ANY, details={"estimate": "speed"})


def test_scalars_of_libraries_are_numbers(tmp_path: Path) -> None:
    def train() -> object:
        class Scalar:
            ndim = 0

            def item(self) -> float:
                return 0.5

        return {"loss": Scalar()}

    reported = message(tmp_path, train)
    assert reported is not None
    assert reported.returned == {"loss": 0.5}


@pytest.mark.parametrize(
    ("value", "report", "reason"),
    [
        ("float('nan')", False, "ValueError: Out of range float"),
        ("[train]", True, "TypeError: function is not JSON"),
        ("'x' * 5000", False, "ValueError: it has 5002 bytes of JSON; "),
        ("'x' * 5000", True, "ValueError: it has 5002 bytes of JSON; "),
    ],
)
def test_a_value_that_cannot_be_reported_does_not_fail_the_function(
    tmp_path: Path, value: str, report: bool, reason: str
) -> None:
    before = "    from trainjob.progress import report\n    report(progress=5)\n" if report else ""
    path = tmp_path / "termination-log"
    path.touch()
    source = f"def train():\n{before}    return {value}\n"
    ended = node({"name": "train", "source": source}, {**os.environ, "TRAINJOB_TERMINATION_LOG": str(path)})
    assert f"the return value of train() is lost: {reason}" in ended.stderr.splitlines()[-1]
    if "5000" in value:
        assert "of 4096 bytes are free in the termination message of rank 0; write it to a file" in ended.stderr
    assert (reported := progress.read(path.read_text())) is None or reported.returned is None


def test_only_strict_json_is_read() -> None:
    assert progress.read('{"trainjob": 1, "returned": {"a": [NaN]}}') == Report()


def test_the_hash_of_a_spec_does_not_depend_on_the_program_that_runs_the_function() -> None:
    spec = TrainJobSpec.parse({"runtime": "r", "func": {"name": "f", "source": "def f(): return 1\n"}})
    annotations = render(spec, "key", 1, "ns")["metadata"]["annotations"]
    recorded = "d55a2569056732dcfaf28a4b7736148bea162708ca88d7b8f88ffe50a8c6da84"
    assert annotations["trainjob.dev/spec-hash"] == recorded, "otherwise jobs of an earlier version are not found"


def plain() -> None:
    print("plain")


def test_packages_become_options_of_pip() -> None:
    *_, options = parts(
        plain, packages_to_install=["a==1", "b"], pip_index_urls=["https://one/simple", "https://two/simple"]
    )
    assert json.loads(options)["packages"] == [
        "--index-url=https://one/simple", "--extra-index-url=https://two/simple", "a==1", "b",
    ]  # fmt: skip


LAUNCHER = """\
#!/bin/sh
echo "{name}"
export OMPI_COMM_WORLD_RANK=0
case "$1" in *.py) exec "{python}" "$@";; *) exec "$@";; esac
"""


@pytest.mark.parametrize(
    ("variables", "started_by"),
    [
        ({}, []),
        ({"JAX_PROCESS_ID": "0"}, []),
        ({"PET_NNODES": "1"}, ["torchrun"]),
        ({"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}, ["mpirun"]),
    ],
    ids=["plain", "jax", "torch", "mpi"],
)
def test_launcher_depends_on_the_plugin_of_the_runtime(
    variables: dict[str, str], started_by: list[str], tmp_path: Path
) -> None:
    """The plugin's variables select it, not the runtime's name. Fake launchers have the same arguments."""
    for name in ("torchrun", "mpirun"):
        (tmp_path / name).write_text(LAUNCHER.format(name=name, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "TMPDIR": str(tmp_path), **variables}
    assert run(plain, environment).split() == [*started_by, "plain"]


def fine(limit: "int | LIMIT" = 3, path: type = str) -> None:  # type: ignore[valid-type]  # noqa: UP037
    import math

    def inner(n: int) -> int:
        return inner(n - 1) if n else limit

    print(math.floor(sum(inner(x) for x in range(2))), sorted([2, 1]), __name__)


def test_annotations_builtins_imports_and_recursion_are_allowed() -> None:
    assert run(fine) == "6 [1, 2] __main__\n"


async def coroutine() -> None:
    pass


@pytest.mark.parametrize("function", [lambda: 1, print, functools.partial(plain), coroutine, dict])
def test_only_plain_functions_are_accepted(function: object) -> None:
    with pytest.raises(InvalidSpec, match="must be a function defined with def"):
        TrainJobSpec.parse({"runtime": "r", "func": function})


def test_functions_without_a_file_are_rejected() -> None:
    namespace: dict[str, Any] = {}
    exec("def typed():\n    pass\n", namespace)
    with pytest.raises(InvalidSpec, match=r"source of typed\(\) cannot be read.*write the function to a file"):
        TrainJobSpec.parse({"runtime": "r", "func": namespace["typed"]})


def anything(**values: object) -> None:
    print(values)


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"command": ["x"]}, "func"),
        ({"args": ["x"]}, "func"),
        ({"func_args": {"x": object()}}, "func_args"),
        ({"func_args": {"x": float("nan")}}, "func_args"),
        ({"func_args": {"token": "abc", "x": ["https://a:b@c"]}}, "func_args.token func_args.x[0]"),
        ({"pip_index_urls": ["https://x/simple"]}, "pip_index_urls"),
        ({"packages_to_install": ["git+https://me:pw@host/x"], "pip_index_urls": ["https://a:b@c/simple"]},
         "packages_to_install[0] pip_index_urls[0]"),
        ({"func": {"name": "f()", "source": "x" * (96 * 1024 + 1)}}, "func.name func.source"),
    ],
)  # fmt: skip
def test_invalid_fields_are_rejected(fields: dict[str, Any], paths: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse({"runtime": "r", "func": anything, **fields})
    assert [problem.path for problem in caught.value.problems] == paths.split()


def test_a_literal_secret_in_a_function_is_rejected() -> None:
    """`test_masking` has the forms of secrets in code."""
    with pytest.raises(InvalidSpec, match=r"func: contains a secret in its source \(read it from an environment var"):
        TrainJobSpec.parse({"runtime": "r", "func": {"name": "f", "source": "def f():\n    login(token='hunter2')"}})
