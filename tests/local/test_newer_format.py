"""A newer trainjob has changed a job of this machine: the job runs on, and other jobs are not concerned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.processes import wait_until

from trainjob import JobRef, Phase, TrainJobClient, observe
from trainjob._backends.local.store import OtherFormat


def phase(client: TrainJobClient, ref: JobRef) -> Phase:
    return observe(client.get(ref)).phase


SLEEP = {"runtime": "trainjob-step", "command": ["sleep", "60"]}


def newer(path: Path) -> None:
    """Raise the number of the format, as a write of another process does."""
    draft = path.with_name(".newer")
    draft.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    draft.chmod(0o600)
    draft.replace(path)


def test_a_job_that_a_newer_trainjob_has_changed_runs_on(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TrainJobClient("local") as client:
        first = client.launch(SLEEP, "first")
        wait_until("it runs", lambda: phase(client, first) is Phase.RUNNING, 60)
        directory = home / "jobs" / "default" / first.name
        kept = (directory / "object.json").read_bytes()
        newer(directory / "object.json")
        log = directory / "supervisor.log"
        wait_until("its supervisor has seen it", lambda: "newer trainjob" in log.read_text(), 30)
        with pytest.raises(OtherFormat, match=r"object\.json was written by a newer trainjob"):
            client.get(first)
        other = client.launch(SLEEP, "other")
        assert [job["metadata"]["name"] for job in client.list()] == [other.name]
        assert "left out: " in caplog.text
        assert client.cancel_key("other").ended
        (directory / "object.json").write_bytes(kept)
        assert phase(client, first) is Phase.RUNNING, "its supervisor lives"
        assert client.cancel(first)
