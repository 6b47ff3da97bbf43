"""The evidence of the jobs of `failures`: produces the failures, records their evidence, and reads the records.

The evidence comes from `Backend.evidence` and `Backend.crashes`. ``make record-diagnosis`` produces all failures and
rewrites tests/unit/corpus/ and the table of docs/reference/failures.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from tests.cluster.backends import backend_of
from tests.cluster.failing import REGISTRY, mounted
from tests.cluster.failures import FAILURES, Failure
from tests.processes import Component, wait_until
from tests.recordings import by_line
from tests.testcluster import images, step_image as steps
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import RealNode

from trainjob import JobRef, Phase, TrainJobSpec, WaitOptions
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.cluster import terminations_in
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RetryVerdict, Stuck, TrainJobError
from trainjob.status import observe

_ROOT = Path(__file__).parents[2]
DIRECTORY = _ROOT / "tests" / "unit" / "corpus"
PAGE = _ROOT / "docs" / "reference" / "failures.md"

RECORD = "TRAINJOB_RECORD" in os.environ
_SECONDS = 600  # for a job to fail as expected: on a busy machine, PyTorch on two nodes takes minutes to start
_POLL_SECONDS = 1.0
_AT_ONCE = 10
_CRASHES = 32  # crashes that are kept, as in `waiting`

Object = dict[str, Any]


# ---------------------------------------------------------------- expectations


def differences(failure: Failure, found: Diagnosis, evidence: Evidence) -> list[str]:
    """Differences of a diagnosis from the expected one, and missing evidence, one a line."""
    compared = {
        "category": (found.category, failure.category),
        "retry": (found.retry, failure.retry),
        "rank": (found.rank, failure.rank),
        "exit code": (found.exit_code, found.exit_code if failure.exit_code is None else failure.exit_code),
        "failed": (found.failed, failure.failed or found.failed),
    }
    different = [
        f"{name}: {actual!r}, not {expected!r}" for name, (actual, expected) in compared.items() if actual != expected
    ]
    if not re.search(failure.summary, found.summary):
        different.append(f"summary: {found.summary!r} does not match {failure.summary!r}")
    failed = {ended.rank for ended in terminations_in(evidence.pods) if ended.failed}
    if failure.victim and failure.victim not in failed:
        different.append(f"evidence: {failure.victim} has not ended")
    if failure.shown_log and not any(re.search(failure.shown_log, line) for line in found.log):
        different.append(f"log: {found.log!r} does not match {failure.shown_log!r}")
    return different


# ---------------------------------------------------------------- producing failures


@dataclass
class Made:
    """A job that has failed, the diagnosis of its evidence, and the error of a wait with `fail_fast`."""

    failure: Failure
    evidence: Evidence
    diagnosis: Diagnosis
    stuck: str = ""


def make_all(wanted: list[Failure], cluster: Cluster) -> dict[str, Made | Exception]:
    """Produce many failures in parallel, since most of the time is waiting; with `RECORD` write them to the corpus."""
    assert cluster.real_node
    # Start those that take longest first.
    wanted.sort(key=lambda failure: (not failure.slow, failure.node == "simulated"))
    found: dict[str, Made | Exception] = {}

    async def one(failure: Failure, limit: anyio.CapacityLimiter) -> None:
        async with limit:
            try:
                found[failure.name] = made = await make(failure, cluster)
            except Exception as error:  # noqa: BLE001 - the test of this failure raises it
                found[failure.name] = error
                return
        if RECORD and not differences(failure, made.diagnosis, made.evidence):
            write(made, cluster)

    async def every() -> None:
        limit = anyio.CapacityLimiter(_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for failure in wanted:
                if failure.node != "torch" or images.torch_packages():
                    tasks.start_soon(one, failure, limit)

    with registry(cluster.real_node):
        anyio.run(every)
    if RECORD:
        write_page()
    return found


async def make(failure: Failure, cluster: Access) -> Made:
    """Let a job fail, and diagnose it until the diagnosis is right or the time limit of the failure expires."""
    backend = backend_of(cluster.kubeconfig)
    run = anyio.to_thread.run_sync
    room = cluster.namespace(f"fails-{failure.name[:30]}", real=failure.node != "simulated")
    where = await run(room.__enter__)
    prepared = failure.prepared(cluster, where)
    try:
        await run(prepared.__enter__)
        ref = await _launched(failure, backend, cluster, where)
        crashes: list[Evidence] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_collect, backend, ref, crashes)
            if failure.after:
                await _ready(backend, ref)
                await run(failure.change, cluster, ref)
            made = await _look(failure, backend, ref, crashes)
            tasks.cancel_scope.cancel()
        if failure.blocks and not differences(failure, made.diagnosis, made.evidence):
            with anyio.fail_after(_SECONDS):
                made.stuck = await error_of_wait(backend, ref)
        await backend.delete(ref)
        return made
    finally:
        with anyio.CancelScope(shield=True):
            await run(prepared.__exit__, None, None, None)
            await run(room.__exit__, None, None, None)
            await backend.aclose()


async def _launched(failure: Failure, backend: KubernetesBackend, cluster: Access, where: str) -> JobRef:
    text = json.dumps(failure.spec).replace("$NAMESPACE", where)
    if isinstance(cluster, Cluster):
        text = text.replace("$API_SERVER", f"{cluster.layout.gateway}:{cluster.layout.ports['api']}")
    fields = json.loads(text)
    if failure.node in ("real", "torch", "jax") and "image" not in fields:
        fields["image"] = steps.IMAGE if failure.node == "jax" else images.PYTHON
    if failure.node == "torch":
        fields |= mounted({"name": "torch", "hostPath": {"path": images.torch_packages()}}, "/opt/torch", readOnly=True)
    spec = TrainJobSpec.parse(fields)
    if not failure.manifest:
        return await launch(backend, spec, failure.name, namespace=where)
    trainjob = render(spec, failure.name, 1, where)
    trainjob |= {part: {**trainjob[part], **fields} for part, fields in failure.manifest.items()}
    return JobRef.of(await anyio.to_thread.run_sync(cluster.api.create, trainjob))


async def _collect(backend: KubernetesBackend, ref: JobRef, crashes: list[Evidence]) -> None:
    with suppress(TrainJobError):
        async with aclosing(backend.crashes(ref)) as found:
            async for evidence in found:
                if len(crashes) < _CRASHES:
                    crashes.append(evidence)


async def error_of_wait(backend: KubernetesBackend, ref: JobRef) -> str:
    """The error with which a wait with `fail_fast` ends because of a permanent blocker."""
    found: Stuck | None = None
    try:
        await wait(backend, ref, WaitOptions(fail_fast=True))
    except Stuck as error:
        found = error
    assert found is not None, f"the wait for {ref} has found no blocker"
    assert (found.retry, str(ref) in str(found)) == (RetryVerdict.CONFIGURATION, True), found
    assert await backend.get(ref.namespace, ref.name), "the job is not changed"
    return str(found)


async def _ready(backend: KubernetesBackend, ref: JobRef) -> None:
    with anyio.fail_after(_SECONDS):
        async with aclosing(backend.watch(ref)) as snapshots:
            async for snapshot in snapshots:
                if observe(snapshot.trainjob).phase in (Phase.RUNNING, Phase.SUSPENDED):
                    return


async def _look(failure: Failure, backend: KubernetesBackend, ref: JobRef, crashes: list[Evidence]) -> Made:
    with anyio.move_on_after(_SECONDS):
        while True:
            evidence = (await backend.evidence(ref)).with_earlier(*crashes)
            diagnosis = diagnosis_of(evidence)
            if not differences(failure, diagnosis, evidence):
                break
            if diagnosis.category is failure.category and diagnosis.rank not in ("", failure.rank):
                break  # another rank must never be reported as the root cause
            await anyio.sleep(_POLL_SECONDS)
    return Made(failure, evidence, diagnosis)


@contextmanager
def registry(node: RealNode) -> Iterator[None]:
    """A registry on the real node without images; requests for the image ``/slow`` are never answered completely."""
    host = node.directory / "registries" / REGISTRY
    host.mkdir()
    (host / "hosts.toml").write_text(f'server = "http://{REGISTRY}"\n')  # otherwise containerd requires TLS
    port = REGISTRY.rpartition(":")[2]
    component = Component("registry", node.inside(sys.executable, "-c", _REGISTRY, port), node.directory, {})
    component.start()
    try:
        wait_until("the registry listens", lambda: "listening" in component.tail(), 20, among=[component])
        yield
    finally:
        component.kill()
        shutil.rmtree(host)


_REGISTRY = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        slow = "/slow/" in self.path
        found = slow or self.path == "/v2/"
        body = b"{}" if found else b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
        self.send_response(200 if found else 404)
        # containerd waits 30 s for headers, and five minutes for the body.
        kind = "vnd.oci.image.manifest.v1+json" if slow else "json"
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(500 if slow else len(body)))
        self.send_header("Docker-Content-Digest", "sha256:" + "0" * 64)
        self.end_headers()
        if slow and self.command == "GET":
            time.sleep(600)
        if self.command == "GET":
            self.wfile.write(body)
    do_HEAD = do_GET
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
"""


# ---------------------------------------------------------------- the corpus


def write(made: Made, cluster: Access) -> None:
    """Record the evidence of a failure, without fields that no diagnosis reads and without paths of this machine."""
    evidence = made.evidence
    kept = {
        "trainjob": _without_managed_fields(evidence.trainjob),
        "pods": [_without_managed_fields(pod) for pod in evidence.pods],
        "logs": {pod: [line[:_LINE] for line in lines[-_LINES:]] for pod, lines in evidence.logs.items()},
        "events": [_without_managed_fields(event) for event in evidence.events],
        "workload": _without_managed_fields(evidence.workload),
        "unseen": list(evidence.unseen),
        "missing": list(evidence.missing),
    }
    text = by_line(kept)
    for path in (str(cluster.directory), images.torch_packages(), str(_ROOT)):
        text = text.replace(path, "/opt/elsewhere") if path else text
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{made.failure.name}.json").write_text(text)


_LINES = 120  # of each log
_LINE = 300  # characters of each line


def _without_managed_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_managed_fields(part) for name, part in value.items() if name != "managedFields"}
    return [_without_managed_fields(part) for part in value] if isinstance(value, list) else value


def read(name: str) -> Evidence:
    """The recorded evidence of a failure."""
    kept = json.loads((DIRECTORY / f"{name}.json").read_text())
    return Evidence(**kept)


def recorded() -> list[str]:
    """Names of the recorded failures."""
    return sorted(file.stem for file in DIRECTORY.glob("*.json"))


# ---------------------------------------------------------------- the table

BEGIN, END = "<!-- failures -->\n", "<!-- end -->"


def table() -> str:
    """The table of docs/reference/failures.md, from the corpus."""
    rows = ["| failure | how it is produced | diagnosis | category | retry |", "|---|---|---|---|---|"]
    for failure in FAILURES:
        if not (DIRECTORY / f"{failure.name}.json").exists():
            continue
        found = diagnosis_of(read(failure.name))
        retry = "" if found.category is Category.NONE else str(found.retry)
        cells = [failure.name.replace("-", " "), failure.how, f"`{_cell(found.summary)}`", str(found.category), retry]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """A summary for the table: names and times of a single run replaced, at most 160 characters."""
    named = re.sub(r"\b[a-z][a-z-]*-[a-z0-9]{10}-1\b", "train", re.sub(r"\bfails-[a-z0-9-]+", "ns", text))
    plain = re.sub(r"\d{4}-\d\d-\d\dT[0-9:]+Z", "…", named).replace("|", "¦").replace("`", "'")
    return plain if len(plain) <= 160 else plain[:159] + "…"


def write_page() -> None:
    """Write the table to the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
