"""File permissions: jobs that other users could have written are refused, and others cannot read a job's files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.processes import supervisors
from tests.local.conftest import Jobs

from trainjob import Phase, TrainJobClient, TrainJobSpec
from trainjob._backends.base import Snapshot
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.store import JobFiles, now
from trainjob._manifest.render import render
from trainjob.errors import BackendUnavailable, ConfigurationError
from trainjob.job import JobRef

KEY = "key"
ANOTHER = 12345  # a user id


def stored(home: Path, script: str) -> JobRef:
    """A job whose launcher was killed before it started the supervisor."""
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["sh", "-c", script]})
    job = render(spec, KEY, 1, "default")
    job["metadata"] |= {"uid": "a-uid", "creationTimestamp": now()}
    start = {"cwd": str(home.parent), "path": os.environ["PATH"], "home": str(home)}
    JobFiles.create(home / "jobs" / "default" / job["metadata"]["name"], job, start)
    return JobRef.of(job)


async def first(backend: LocalBackend, ref: JobRef) -> Snapshot:
    async for snapshot in backend.watch(ref):
        return snapshot
    raise AssertionError("the watch ended")


READS: dict[str, Callable[[TrainJobClient, JobRef], object]] = {
    "list": lambda client, _: client.list(),
    "find": lambda client, ref: client.find(ref.name),
    "status": lambda client, ref: client.diagnose(ref.name),
    "logs": lambda client, ref: list(client.logs(ref)),
    "wait": lambda client, ref: client.call(lambda: first(client.backend, ref)),  # type: ignore[arg-type]
}
CHANGES: dict[str, Callable[[TrainJobClient, JobRef], object]] = {
    "launch": lambda client, _: client.launch({"runtime": "trainjob-step", "command": ["true"]}, KEY),
    "cancel": lambda client, ref: client.cancel(ref),
    "suspend": lambda client, ref: client.cancel(ref, "suspend"),
    "delete": lambda client, ref: client.call(lambda: client.backend.delete(ref)),
}


def content(home: Path) -> dict[str, tuple[int, str]]:
    """All files, except for the lock of changes."""
    paths = [path for path in (home, *home.rglob("*")) if path.name != "edit.lock"]
    return {str(path): (path.lstat().st_mode, path.read_text("latin-1") if path.is_file() else "") for path in paths}


# ---------------------------------------------------------------- jobs that another user could have written


def given(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    for each in (path, *path.rglob("*")):
        os.chown(each, ANOTHER, ANOTHER)


def opened(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        pytest.param(given, "belongs to another user", marks=pytest.mark.full),
        *((opened(mode), "is writable by other users") for mode in (0o777, 0o1777, 0o770, 0o757)),
    ],
)
def test_a_home_that_another_user_can_have_written_is_refused(
    home: Path, tmp_path: Path, plant: Callable[[Path], None], message: str
) -> None:
    ref = stored(home, f"touch {tmp_path}/ran")
    plant(home)
    before = content(home)
    advice = f"chmod -R go-rwx {home};" if "writable" in message else ""
    with TrainJobClient("local") as client:
        for name, action in (READS | CHANGES).items():
            with pytest.raises(ConfigurationError) as caught:
                action(client, ref)
            found = str(caught.value)
            assert found.startswith(f"{home} {message}"), name
            assert f"uid {home.lstat().st_uid}" in found
            assert advice in found
            assert "TRAINJOB_HOME" in found
    assert content(home) == before
    assert supervisors(tmp_path) == {}
    assert not (tmp_path / "ran").exists()


def test_the_advice_makes_a_home_usable(home: Path, tmp_path: Path) -> None:
    stored(home, f"touch {tmp_path}/ran")
    home.chmod(0o777)
    with TrainJobClient("local") as client:
        with pytest.raises(ConfigurationError, match=r"run: chmod -R go-rwx [^;]*;") as caught:
            client.list()
        subprocess.run(["sh", "-c", str(caught.value).partition("run: ")[2].partition(";")[0]], check=True)
        assert len(client.list()) == 1


def modes(*paths: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize("linked_home", [False, True])
def test_a_home_that_others_can_only_read_is_closed(home: Path, tmp_path: Path, linked_home: bool) -> None:
    """As `mkdir` creates it. It may be a link of its user."""
    if linked_home:
        (tmp_path / "disk").mkdir(mode=0o755)
        home.symlink_to(tmp_path / "disk")
    ref = stored(home, "true")
    home.chmod(0o755)
    with TrainJobClient("local") as client:
        assert [found["metadata"]["name"] for found in client.list()] == [ref.name]
    assert modes(home) == {0o700}


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link to another user needs root")
def test_a_home_linked_by_another_user_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "disk")
    os.chown(home, ANOTHER, ANOTHER, follow_symlinks=False)
    with TrainJobClient("local") as client, pytest.raises(ConfigurationError, match="is a link"):
        CHANGES["launch"](client, JobRef("default", "x-1", ""))
    assert list((tmp_path / "disk").iterdir()) == []


# ---------------------------------------------------------------- reading starts nothing


@pytest.mark.parametrize("read", READS)
def test_reading_does_not_start_a_job(jobs: Jobs, home: Path, tmp_path: Path, read: str) -> None:
    ref = stored(home, f"echo run >> {tmp_path}/runs")
    READS[read](jobs.client, ref)
    assert not (jobs.directory(ref) / "supervisor.log").exists(), "no supervisor was started"
    assert jobs.phase(ref) is Phase.NOT_STARTED
    assert jobs.launch(f"echo run >> {tmp_path}/runs", KEY) == ref
    jobs.client.wait(ref)
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_job_without_a_supervisor_is_reported(jobs: Jobs, home: Path) -> None:
    ref = stored(home, "true")
    assert not jobs.client.diagnose(ref.name).observation.stuck, "its launcher may be about to start it"
    os.utime(jobs.directory(ref) / "object.json", (0, 0))
    report = jobs.client.diagnose(ref.name)
    assert (report.observation.phase, report.observation.stuck) == (Phase.NOT_STARTED, True)
    assert "ended before the job began" in report.observation.message
    assert "launch the same key again" in report.diagnosis.advice
    snapshot = jobs.client.call(lambda: first(jobs.client.backend, ref))  # type: ignore[arg-type]
    assert snapshot.blocker is not None
    assert snapshot.blocker.reason == "LauncherLost"
    assert jobs.client.cancel(ref)
    assert jobs.launch("true", KEY).attempt == 2


def test_a_supervisor_that_cannot_start(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        with pytest.raises(BackendUnavailable, match=r"its supervisor ended 3 times .*supervisor\.log"):
            jobs.launch("echo on", KEY)
    (job,) = jobs.client.list()
    ref = jobs.launch("echo on", KEY)
    assert ref == JobRef.of(job)
    jobs.client.wait(ref)
    assert jobs.lines(ref) == ["on"]


def test_a_supervisor_runs_no_module_of_the_working_directory(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory can be /tmp, where any user can write modules."""
    (tmp_path / "there").mkdir()
    for module in ("trainjob", "json", "selectors"):
        (tmp_path / "there" / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "there")
    jobs.run("true", KEY)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- files that others can read


def test_nothing_of_a_job_can_be_read_by_others(jobs: Jobs, home: Path, tmp_path: Path) -> None:
    """With any umask. The ranks keep the launcher's umask, since others may have to read their files."""
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    script = f"touch {tmp_path}/model; echo on; echo done > $TRAINJOB_TERMINATION_LOG; {wait}"
    before = os.umask(0)
    try:
        ref = jobs.launch(script, KEY)
        jobs.starts(ref)
        jobs.client.backend.attend(ref)
        jobs.client.cancel(ref, "suspend")
        jobs.launch(script, KEY)
        (tmp_path / "go").touch()
        jobs.client.wait(ref)
        gone = jobs.launch("true", "another")
        jobs.client.wait(gone)
        jobs.delete(gone)
    finally:
        os.umask(before)
    names = {path.name for path in jobs.directory(ref).rglob("*")}
    kept = {"object.json", "start.json", "status.json", "supervisor.log", "waiters.lock", f"{ref.name}-node-0-0.log"}
    assert kept <= names
    paths = [home, *home.rglob("*")]
    assert (home / "jobs" / "default" / ".deleted" / gone.name) in paths
    assert [path for path in paths if modes(path) != {0o700 if path.is_dir() else 0o600}] == []
    assert modes(tmp_path / "model") == {0o666}


def test_directories_above_a_new_home_follow_the_umask(tmp_path: Path) -> None:
    with TrainJobClient(LocalBackend(tmp_path / "a" / "b" / "home")) as client:
        ref = CHANGES["launch"](client, JobRef("default", "x-1", ""))
        assert isinstance(ref, JobRef)
        client.wait(ref)
    assert [modes(tmp_path / path) for path in ("a/b/home", "a/b")] == [{0o700}, {0o755}]
