"""Jobs that fail or make no progress, each in a different way: how to produce each, and the expected diagnosis.

`tests/cluster/test_diagnosis.py` produces all of them on real controllers and a real kubelet; `corpus` records their
evidence for the unit tests and for the table of docs/reference/failures.md. Each is a row of failures.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from tests.cluster import changes, failing as make
from tests.testcluster import images, kueue
from tests.testcluster.access import Access
from tests.testcluster.nodes import simulate

from trainjob.errors import Category, RetryVerdict
from trainjob.job import JobRef

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """One way to fail.

    Without `restarts`, a job with a script or with fields of its pods has a separate runtime that restarts nothing.

    Attributes:
        name: Name, also of its file in the corpus.
        how: How it is produced, for the table in the documentation.
        category: Expected category.
        retry: Expected retry verdict.
        summary: A regular expression that the summary must match.
        rank: Expected rank.
        exit_code: Expected exit code.
        failed: Whether the job must have failed before the diagnosis; the shipped runtimes restart ranks for minutes.
        shown_log: A regular expression that the shown log lines must match.
        victim: A rank that fails because it loses `rank`. It must have ended when the diagnosis is made.
        node: ``real`` if pods have to run, ``jax`` or ``torch`` if the pods need that package. On the real node the
            default image has Python.
        script: What runs, in Python.
        shell: What runs, for a shell.
        train: Text of the file /tmp/train.py of the script.
        of: Number of nodes, if only rank 1 runs the script and the others sleep.
        restarts: Whether the runtime is a shipped one, which restarts ranks.
        gpus: GPUs of each node.
        endless: Whether the simulated pods do not end.
        fields: More fields of the spec.
        stages: Replicated jobs of the runtime, which run one after the other.
        job: More fields of the spec of each Job.
        pod: More fields of the spec of each pod.
        container: More fields of the training container.
        beside: More containers of each pod.
        mount: A volume of the training container: its source and options of the mount.
        patch: The patch of the spec to its pods.
        place: Creates the node on which the job is to run, in `changes` or `failing`.
        queue: More fields of the ClusterQueue in which the job is.
        objects: Objects that exist in its namespace.
        before: Creates other prerequisites, and removes them at the end: a name in `changes`.
        after: Applied to the job once it runs, to a suspended job at once: a name in `changes` or `failing`.
        alone: Whether to run it after the others, because it disturbs them.
        slow: Whether it takes long and is started first.
        manifest: Part of the TrainJob -> what differs, if another program than trainjob creates the job.
    """

    name: str
    how: str
    category: Category
    retry: RetryVerdict
    summary: str
    rank: str = ""
    exit_code: int | None = None
    failed: bool = False
    shown_log: str = ""
    victim: str = ""
    node: Literal["simulated", "real", "jax", "torch"] = "simulated"
    script: str | None = None
    shell: str = ""
    train: str = ""
    of: int = 1
    restarts: bool = False
    gpus: int = 0
    endless: bool = False
    fields: Fields = field(default_factory=dict)
    stages: Sequence[str] = ("node",)
    job: Fields = field(default_factory=dict)
    pod: Fields = field(default_factory=dict)
    container: Fields = field(default_factory=dict)
    beside: Sequence[make.Object] = ()
    mount: Fields | None = None
    patch: Fields | None = None
    place: str = ""
    queue: Fields | None = None
    objects: Sequence[make.Object] = ()
    before: str = ""
    after: str = ""
    alone: bool = False
    slow: bool = False
    manifest: Mapping[str, Fields] = field(default_factory=dict)

    @property
    def blocks(self) -> bool:
        """Whether it blocks the job for good, so that a wait with `fail_fast` ends."""
        return self.retry is RetryVerdict.CONFIGURATION and self.exit_code is None and not self.failed

    @property
    def spec(self) -> make.Object:
        """Spec of the job. ``$NAMESPACE`` is its namespace, ``$API_SERVER`` that address for the real node."""
        spec = make.simulated(self.of, self.gpus)
        if self.endless:
            spec["env"] = simulate(run="never")
        if self.script is not None:
            start = f"open('/tmp/train.py', 'w').write({self.train!r})\n" if self.train else ""
            spec |= make.python(start + self.script) if self.of == 1 else make.one_of(self.of, self.script)
        elif self.shell:
            spec["command"] = ["sh", "-c", self.shell]
        if self.node == "jax":
            spec["runtime"] = "jax-distributed"
        if self.queue is not None:
            spec["labels"] = {kueue.QUEUE_LABEL: "small"}
        spec |= make.ON_OWN_NODE if self.place else {}
        spec |= make.patched(self.patch) if self.patch else {}
        return {**spec, **(make.OWN if self._has_own_runtime else {}), **self.fields}

    @property
    def _has_own_runtime(self) -> bool:
        changed = (self.job, self.pod, self.container, self.beside, self.mount, self.stages[1:])
        runs = (self.script is not None or self.shell) and self.node == "real"
        return any(changed) or (bool(runs) and not self.restarts)

    @property
    def _runtime(self) -> make.Object:
        pod, container = dict(self.pod), dict(self.container)
        if self.mount:
            source = {name: value for name, value in self.mount.items() if name not in _OF_MOUNTS}
            options = {_OF_MOUNTS[name]: value for name, value in self.mount.items() if name in _OF_MOUNTS}
            pod["volumes"] = [{"name": "volume", **source}]
            container["volumeMounts"] = [{"name": "volume", "mountPath": "/mnt", **options}]
        return make.stages(*self.stages, job=self.job, pod=pod, node=container, beside=self.beside)

    @contextmanager
    def prepared(self, cluster: Access, where: str) -> Iterator[None]:
        """Create what the job needs in its namespace, and remove at the end what is outside of it."""
        with ExitStack() as stack:
            stack.enter_context(make.applied(*self.objects)(cluster, where))
            if self._has_own_runtime:
                stack.enter_context(make.own(self._runtime)(cluster, where))
            if self.queue is not None:
                stack.enter_context(make.queue(cluster, where, fields=self.queue))
            for name in filter(None, (self.place, self.before)):
                stack.enter_context(_named(name)(cluster, where))
            yield

    def change(self, cluster: Access, ref: JobRef) -> None:
        """Do to the job what lets it fail."""
        _named(self.after)(cluster, ref)


_OF_MOUNTS = {"path": "mountPath", "readOnly": "readOnly", "subPath": "subPath"}


def _named(name: str) -> Callable[..., Any]:
    return getattr(changes, name, None) or getattr(make, name)  # type: ignore[no-any-return]  # by the name in the YAML


def _read() -> Iterator[Failure]:
    text = (Path(__file__).parent / "failures.yaml").read_text()
    for name, row in yaml.safe_load(text.replace("$PYTHON", images.PYTHON).replace("$REGISTRY", make.REGISTRY)).items():
        expected = row.pop("expected")
        verdict: dict[str, Any] = {
            "category": Category(expected.pop("category")),
            "retry": RetryVerdict(expected.pop("retry")),
        }
        node = {"node": "real"} if row.keys() & {"script", "shell"} else {}
        yield Failure(name, **{**node, **row}, **verdict, **expected)


FAILURES = tuple(_read())
