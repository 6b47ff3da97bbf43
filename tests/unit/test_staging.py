"""`trainjob exec`: what a command reads and writes when its job's inputs and outputs are elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer

from trainjob.data import read_manifest
from trainjob.progress import read

PROGRAM = [str(Path(sys.executable).parent / "trainjob"), "exec", "--"]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="data")
    s3.put_object(Bucket="data", Key="digits/a.csv", Body=b"1,2")
    s3.put_object(Bucket="data", Key="digits-more/b.csv", Body=b"3")
    yield "data"
    moto.stop()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_inputs_come_and_outputs_go(bucket: str, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from trainjob.progress import report
data, more, output = (Path(each.partition("=")[2] or each) for each in sys.argv[1:])
print(sorted(each.name for each in data.iterdir()), more.read_text(), data == Path(os.environ["TRAINJOB_INPUT_DATA"]))
(output / "model.txt").write_text("trained")
report(progress=100, metrics={"accuracy": 0.5}, outputs={"model": (output / "model.txt").as_uri(), "note": "good"})
"""
    message, space = tmp_path / "message", tmp_path / "space"
    space.mkdir()
    done = run(
        *python(code, "--data=s3://data/digits", "s3://data/digits-more/b.csv", "--output=s3://data/run/model"),
        TRAINJOB_INPUT_DATA="s3://data/digits",
        TRAINJOB_INPUT_MORE="s3://data/digits-more/b.csv",
        TRAINJOB_OUTPUT_MODEL="s3://data/run/model",
        TRAINJOB_TERMINATION_LOG=str(message),
        TMPDIR=str(space),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['MANIFEST.json', 'a.csv'] 3 True" in done.stdout
    manifest = read_manifest("s3://data/run/model")
    assert manifest is not None
    assert [file.path for file in manifest.files] == ["model.txt"]
    said = read(message.read_text())
    assert said is not None
    assert said.outputs == {"model": "s3://data/run/model/model.txt", "note": "good"}
    assert (said.progress, said.metrics) == (100, {"accuracy": "0.5"})
    assert list(space.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://data/set", "['MANIFEST.json', 'more', 'set']"),  # a directory with a file of its own name
        ("s3://data/only/", "['MANIFEST.json', 'only']"),  # and with no other
        ("s3://data/only/only", "one"),
        ("{server}/data/my%20set.csv?versionId=null", "two"),
    ],
)
def test_an_input_is_a_file_where_the_source_is_one(bucket: str, uri: str, expected: str) -> None:
    s3 = boto3.client("s3", region_name="us-east-1")
    for key, body in {"set/set": b"1", "set/more": b"2", "only/only": b"one", "my set.csv": b"two"}.items():
        s3.put_object(Bucket="data", Key=key, Body=body, ACL="public-read")
    code = """
import os, sys
from pathlib import Path
path = Path(os.environ["TRAINJOB_INPUT_DATA"])
assert path == Path(sys.argv[1]), sys.argv
print(path.read_text() if path.is_file() else sorted(each.name for each in path.iterdir()))
"""
    uri = uri.format(server=os.environ["AWS_ENDPOINT_URL"])
    done = run(*python(code, uri), TRAINJOB_INPUT_DATA=uri)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(("index", "code"), [("1", 0), ("0", 3)])
def test_only_node_0_takes_outputs_and_only_after_success(bucket: str, index: str, code: int) -> None:
    script = f"import sys; open(sys.argv[1] + '/model', 'w').write('half'); sys.exit({code})"
    environment = {"TRAINJOB_OUTPUT_MODEL": "s3://data/out", "JOB_COMPLETION_INDEX": index}
    assert run(*python(script, "s3://data/out"), **environment).returncode == code
    assert read_manifest("s3://data/out") is None


def test_an_output_that_was_not_written_is_an_error(bucket: str) -> None:
    done = run("true", TRAINJOB_OUTPUT_MODEL="s3://data/out")
    assert done.returncode != 0
    assert "error:" in done.stderr


def test_an_input_that_is_not_there_is_an_error_before_the_command_runs(bucket: str) -> None:
    done = run("echo", "ran", TRAINJOB_INPUT_DATA="s3://data/nosuch")
    assert (done.returncode, "ran" in done.stdout) == (2, False)
    assert "s3://data/nosuch" in done.stderr


def test_local_places_are_left_alone_and_the_command_takes_over(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.argv[1], os.environ['TRAINJOB_INPUT_DATA'])"
    uri = tmp_path.as_uri()
    done = run(*python(code, f"--data={uri}"), TRAINJOB_INPUT_DATA=uri, TRAINJOB_INPUT_MODEL="")
    assert done.stdout.split() == [str(os.getpid()), f"--data={uri}", uri]


def test_what_cannot_be_started() -> None:
    done = run("nosuch-program")
    assert (done.returncode, "nosuch-program" in done.stderr) == (127, True)
    assert run().returncode == 2


def test_a_signal_is_passed_on(bucket: str) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); signal.pause()"
    environment = {**os.environ, "TRAINJOB_OUTPUT_MODEL": "s3://data/out"}
    with subprocess.Popen([*PROGRAM, *python(code)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 9
