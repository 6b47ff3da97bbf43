"""Options that a command would ignore beside others are refused before anything is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program

RUN = ("run", "--runtime", "trainjob-step", "--detach")
EXPORT = ("export", "job", "--name", "digits")
PROMOTE = ("registry", "promote", "digits", "1", "--alias", "champion")
DIGEST = f"@sha256:{'0' * 64}"
RULE = [("--metric", "loss"), ("--mode", "max"), ("--min-improvement", "0")]
WAITING = [
    *(("--queue-timeout", "1m"), ("--start-timeout", "1m"), ("--run-timeout", "1m"), ("--fail-fast",)),
    *(("--fail-on-first-crash",), ("--on-crash-action", "suspend"), ("--no-logs",)),
]

IGNORED: list[tuple[tuple[str, ...], str]] = [
    *(((*RUN, *option, "--", "true"), "has no effect with --detach, which does not wait") for option in WAITING),
    (("wait", "a", "b", "--no-logs"), "--no-logs cannot be combined with several jobs: give the NAME of one"),
    (("wait", "a", "b", "--on-crash-action", "keep"), "--on-crash-action cannot be combined with several jobs"),
    (("wait", "a", "b", "--fail-on-first-crash"), "--fail-on-first-crash cannot be combined with several jobs"),
    (("logs", "a", "--json", "--timestamps"), "--timestamps has no effect with --json"),
    *(((*PROMOTE, *option), "has no effect without --metric: name the metric") for option in RULE[1:]),
    *(((*EXPORT, "--alias", "a", *option), "has no effect without --metric: name the metric") for option in RULE[1:]),
    *(((*EXPORT, *option), "has no effect without --alias: name an alias") for option in RULE),
    *(
        ((*EXPORT, "--alias", "a", "--evaluation", "s3://b/e", *option), "has no effect with --evaluation, whose gate")
        for option in RULE
    ),
    (("install", "--only", "runtimes", "-n", "ns"), "--namespace has no effect with --only runtimes: leave it out, or"),
    *(
        (("install", "-n", "ns", "--only", part, "--service-account", "a:b"), "or use --only rbac")
        for part in ("reaper", "kfp", "policy")
    ),
    *(
        (("install", "-n", "ns", "--only", part, "--image", "a"), "or use --only runtimes or --only reaper")
        for part in ("rbac", "kfp", "policy")
    ),
    *(
        (("install", "-n", "ns", "--only", part, "--pin", f"a:1{DIGEST}"), "--pin has no effect with --only")
        for part in ("rbac", "kfp", "policy")
    ),
    *(
        (("install", "-n", "ns", "--only", part, *option), f"{option[0]} has no effect with --only {part}")
        for part in ("rbac", "reaper", "kfp", "policy")
        for option in (("--trainer", "2.3"), ("--storage-secret", "s"))
    ),
    *(
        (("install", "-n", "ns", "--only", part, "--keep-for", "P30D"), "or use --only reaper")
        for part in ("rbac", "kfp", "policy")
    ),
    (("install", "--keep-for", "P30D"), "--keep-for has no effect without the reaper"),
    (("-n", "ns", "data", "copy", "a", "b"), "trainjob data copy does not use --namespace: leave it out"),
    (("--backend", "local", "registry", "list", "m"), "trainjob registry list does not use --backend: leave it out"),
    (("--backend", "local", "install"), "trainjob install does not use --backend: leave it out"),
    (("-n", "ns", "check", "."), "trainjob check does not use --namespace: leave it out"),
    (("-n", "ns", "exec", "--", "true"), "trainjob exec does not use --namespace: leave it out"),
]
HAVE_EFFECT: list[tuple[str, ...]] = [
    (*RUN, "--stall-timeout", "15m", "--on-interrupt", "keep", "--", "true"),
    ("install", "-n", "ns", "--keep-for", "P30D", "--image", "a", "--storage-secret", "s", "--trainer", "2.1"),
    ("install", "--only", "runtimes", "--image", "a", "--storage-secret", "s", "--trainer", "2.1"),
    ("install", "-n", "ns", "--only", "reaper", "--image", "a", "--keep-for", "P30D"),
    ("-n", "ns", "install", "--only", "rbac", "--service-account", "a:b"),
    ("install", "--only", "kfp", "-n", "ns"),
]


@pytest.fixture(autouse=True)
def registry(backend: DirectBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{tmp_path}/registry.db")


@pytest.mark.parametrize(
    ("words", "message"), IGNORED, ids=lambda each: " ".join(each) if isinstance(each, tuple) else ""
)
def test_an_ignored_option_is_refused(
    backend: DirectBackend,
    program: Program,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = program(*words)
    assert (code, out.strip()) == (2, "") or json.loads(out)["error"]["type"] == "UsageError"
    assert message in " ".join(err.split())
    assert {request.split()[0] for request in backend.requests} <= {"GET", "LIST"}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("words", HAVE_EFFECT, ids=" ".join)
def test_an_option_with_an_effect_is_accepted(program: Program, words: tuple[str, ...]) -> None:
    assert program(*words)[0] == 0


def test_defaults_are_no_given_options(program: Program) -> None:
    """promote and export get as far as the registry and the job."""
    assert "no effect" not in program(*PROMOTE)[2]
    assert "no effect" not in program(*EXPORT, "--alias", "a")[2]
