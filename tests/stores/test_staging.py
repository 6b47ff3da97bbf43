"""`trainjob exec`: downloads the inputs of a command and uploads its outputs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.seaweedfs import SeaweedFS

from trainjob.data import read_manifest
from trainjob.progress import read

PROGRAM = [str(Path(sys.executable).parent / "trainjob"), "exec", "--"]


@pytest.fixture
def root(seaweedfs: SeaweedFS, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test, with two data sets."""
    for variable, value in seaweedfs.environment().items():
        monkeypatch.setenv(variable, value)
    put(seaweedfs, name, {"digits/a.csv": b"1,2", "digits-more/b.csv": b"3"})
    return seaweedfs.uri(name)


def put(server: SeaweedFS, prefix: str, objects: dict[str, bytes]) -> None:
    for key, body in objects.items():
        server.client.put_object(Bucket=server.bucket, Key=f"{prefix}/{key}", Body=body)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_inputs_are_downloaded_and_outputs_uploaded(root: str, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from trainjob.progress import report
data, more, output = (Path(each.partition("=")[2] or each) for each in sys.argv[1:])
print(sorted(each.name for each in data.iterdir()), more.read_text(), data == Path(os.environ["TRAINJOB_INPUT_DATA"]))
(output / "model.txt").write_text("trained")
report(step=7, metrics={"accuracy": 0.5})
report(progress=100, outputs={"model": (output / "model.txt").as_uri(), "note": "good"})
"""
    message, space = tmp_path / "message", tmp_path / "space"
    space.mkdir()
    done = run(
        *python(code, f"--data={root}/digits", f"{root}/digits-more/b.csv", f"--output={root}/run/model"),
        TRAINJOB_INPUT_DATA=f"{root}/digits",
        TRAINJOB_INPUT_MORE=f"{root}/digits-more/b.csv",
        TRAINJOB_OUTPUT_MODEL=f"{root}/run/model",
        TRAINJOB_TERMINATION_LOG=str(message),
        TMPDIR=str(space),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['MANIFEST.json', 'a.csv'] 3 True" in done.stdout
    manifest = read_manifest(f"{root}/run/model")
    assert manifest is not None
    assert [file.path for file in manifest.files] == ["model.txt"]
    written = read(message.read_text())
    assert written is not None
    assert written.outputs == {"model": f"{root}/run/model/model.txt", "note": "good"}
    assert (written.progress, written.metrics) == (100, {"accuracy": 0.5})
    assert [step for step, _, _ in written.history["accuracy"]] == [7]
    assert list(space.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("set", "['MANIFEST.json', 'more', 'set']"),  # a directory with a file of the same name
        ("only/", "['MANIFEST.json', 'only']"),  # and with no other
        ("only/only", "one"),
        ("http", "two"),
    ],
)
def test_an_input_is_a_file_if_its_source_is_one(
    root: str, seaweedfs: SeaweedFS, name: str, source: str, expected: str
) -> None:
    put(seaweedfs, name, {"set/set": b"1", "set/more": b"2", "only/only": b"one", "my set.csv": b"two"})
    code = """
import os, sys
from pathlib import Path
path = Path(os.environ["TRAINJOB_INPUT_DATA"])
assert path == Path(sys.argv[1]), sys.argv
print(path.read_text() if path.is_file() else sorted(each.name for each in path.iterdir()))
"""
    web = f"{seaweedfs.filer}/buckets/{seaweedfs.bucket}/{name}/my%20set.csv?versionId=null"
    uri = web if source == "http" else f"{root}/{source}"
    done = run(*python(code, uri), TRAINJOB_INPUT_DATA=uri)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(("index", "code"), [("1", 0), ("0", 3)])
def test_only_node_0_uploads_outputs_and_only_after_success(root: str, index: str, code: int) -> None:
    script = f"import sys; open(sys.argv[1] + '/model', 'w').write('half'); sys.exit({code})"
    environment = {"TRAINJOB_OUTPUT_MODEL": f"{root}/out", "JOB_COMPLETION_INDEX": index}
    assert run(*python(script, f"{root}/out"), **environment).returncode == code
    assert read_manifest(f"{root}/out") is None


def test_a_missing_output_is_an_error(root: str) -> None:
    done = run("true", TRAINJOB_OUTPUT_MODEL=f"{root}/out")
    assert done.returncode != 0
    assert "error:" in done.stderr


def test_a_missing_input_is_an_error_before_the_command_runs(root: str) -> None:
    done = run("echo", "ran", TRAINJOB_INPUT_DATA=f"{root}/nosuch")
    assert (done.returncode, "ran" in done.stdout) == (2, False)
    assert f"{root}/nosuch" in done.stderr


def test_a_signal_is_passed_on(root: str) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); signal.pause()"
    environment = {**os.environ, "TRAINJOB_OUTPUT_MODEL": f"{root}/out"}
    with subprocess.Popen([*PROGRAM, *python(code)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 9
