"""Builds the cluster's programs from the Go modules pinned under `modules/`, and renders the manifests they ship.

::

    python -m tests.testcluster.build [control-plane|node|metrics|gangs|trainer-2.1|trainer-2.2|kubernetes-1.36] ...

    <cache>/trainjob/cluster/<module>-<hash>/<program>
    <cache>/trainjob/cluster/<module>-<hash>/manifests-<hash of manifests.py>/<owner>/*.json

<cache> is ``XDG_CACHE_HOME`` or ``~/.cache``; <hash> is that of go.mod, go.sum, this project's Go files, the flags and
the version of Go, so only a change of any of them causes a rebuild. Programs appear under their names only when they
are complete: an interrupted build resumes. A running cluster needs neither Go nor the module cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.testcluster import golang, manifests

MODULES = Path(__file__).parent / "modules"

_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")
_STRIP = "-s -w"  # no symbol tables: kube-apiserver 89 instead of 131 MB


class BuildError(Exception):
    """A program cannot be built; the message ends with the compiler's output."""


@dataclass(frozen=True, eq=False)
class Module:
    """One go.mod and what is built from it.

    Attributes:
        name: Directory under `modules/`.
        programs: Name of the program -> Go package.
        ldflags: Flags of the linker, e.g. for the version that a program reports.
        manifests: Owner -> Go module whose YAML `manifests.render` reads.
        types: Owner -> Go package of API types. Its owner ships no definitions, so controller-gen generates them.
        patches: Go package -> texts to replace in its main.go.
    """

    name: str
    programs: Mapping[str, str]
    ldflags: str = _STRIP
    manifests: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The directory of its go.mod."""
        return MODULES / self.name

    def version(self, go_module: str) -> str:
        """The pinned version of a required Go module."""
        found = re.search(
            rf"^\s*(?:require )?{re.escape(go_module)} (v\S+)", (self.path / "go.mod").read_text(), re.MULTILINE
        )
        if found is None:
            raise BuildError(f"{self.path / 'go.mod'} does not require {go_module}")
        return found[1]


def _stamp(version: str) -> str:
    """Flags for the version that Kubernetes' programs report: Kueue refuses an API server of v0.0.0-master."""
    package = "k8s.io/component-base/version"
    major, minor, _ = version.removeprefix("v").split(".")
    return f"{_STRIP} -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"


_KUBERNETES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
}
_NODES = {
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
}
_CONTROLLERS = {
    "trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
    "jobset": "sigs.k8s.io/jobset",
}
_SOURCES = {"trainer": "github.com/kubeflow/trainer/v2", "jobset": "sigs.k8s.io/jobset"}


def _control_plane(name: str, programs: Mapping[str, str], version: str) -> Module:
    flags = f"{_stamp(version)} -X k8s.io/component-base/version.gitTreeState=clean"
    return Module(name, programs, flags, {"kwok": "sigs.k8s.io/kwok"} if "kwok" in programs else {})


def _controllers(name: str, *owners: str) -> Module:
    """A release of Trainer, of JobSet or of both. Trainer 2.3 does not compile against Kubernetes 1.37."""
    sources = {owner: _SOURCES[owner] for owner in owners}
    return Module(name, {owner: _CONTROLLERS[owner] for owner in owners}, manifests=sources)


def _kueue(name: str) -> Module:
    return Module(
        name,
        {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
        # Its visibility server reads its certificate from /visibility, where a test must not write. Relative to the
        # working directory, which is that of the logs (`components.kueue_controller`).
        f"{_STRIP} -X sigs.k8s.io/kueue/pkg/visibility.certDir=../certificates/kueue",
        manifests={"kueue": "sigs.k8s.io/kueue"},
        # Kueue reads the certificate of its metrics from a path below /etc, where a test must not write.
        patches={"sigs.k8s.io/kueue/cmd/kueue": {'"/etc/kueue/metrics/certs"': 'os.Getenv("KUEUE_METRICS_CERTS")'}},
    )


CONTROL_PLANE = _control_plane("control-plane", _KUBERNETES | _NODES, "v1.37.2")
CONTAINERD = Module(
    "containerd",
    {
        program: f"github.com/containerd/containerd/v2/cmd/{program}"
        for program in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
)
METRICS_SERVER = Module("metrics-server", {"metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server"})
COREDNS = Module("coredns", {"coredns": "github.com/coredns/coredns"})
GANGS = Module(
    "gangs",
    {"coscheduler": ".", "controller-gen": "sigs.k8s.io/controller-tools/cmd/controller-gen"},
    _stamp("v1.36.2"),
    manifests={"coscheduling": "sigs.k8s.io/scheduler-plugins"},
    # Volcano is not available as a Go module, and the module with its API types has no definitions.
    types={"volcano": "volcano.sh/apis/pkg/apis/scheduling/v1beta1"},
)
"""A scheduler one minor release older than the API server, as Kubernetes allows: its plugin needs that release."""


GROUPS: Mapping[str, tuple[Module, ...]] = {
    "control-plane": (CONTROL_PLANE, _controllers("trainer-2.3", "trainer", "jobset"), _kueue("kueue")),
    "node": (CONTROL_PLANE, CONTAINERD, COREDNS),
    "metrics": (METRICS_SERVER,),
    "gangs": (GANGS,),
    # Not one module for both: JobSet 0.11 does not compile against the controller-runtime of Trainer 2.2.
    "trainer-2.1": (_controllers("trainer-2.1", "trainer"), _controllers("jobset-0.10", "jobset")),
    "trainer-2.2": (_controllers("trainer-2.2", "trainer"), _controllers("jobset-0.11", "jobset")),
    "kubernetes-1.36": (_control_plane("kubernetes-1.36", _KUBERNETES, "v1.36.2"), _kueue("kueue-0.18")),
}

OLDER = ("trainer-2.1", "trainer-2.2", "kubernetes-1.36")
"""The groups with older releases, which replace programs of the newest; the others of a cluster stay."""

_NEWEST = tuple(dict.fromkeys(module for name, group in GROUPS.items() if name not in OLDER for module in group))


def cache_directory() -> Path:
    """Directory of all build results, outside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainjob" / "cluster"


def program(name: str, older: str = "") -> Path:
    """Path of a program, whether or not it has been built."""
    return _directory(module_of(name, older)) / name


def module_of(name: str, older: str = "") -> Module:
    """The module of a program or of manifests, in a cluster with the older releases of a group."""
    for module in (*GROUPS.get(older, ()), *_NEWEST):
        if name in {**module.programs, **module.manifests, **module.types}:
            return module
    raise BuildError(f"unknown program {name!r}")


def rendered(owner: str, older: str = "") -> Path:
    """Directory of the rendered manifests of jobset, trainer, kueue, kwok, coscheduling or volcano."""
    return _rendered(owner, module_of(owner, older))


def missing(*groups: str) -> list[Module]:
    """Modules of `groups` that are not built yet, or whose manifests are not rendered."""

    def complete(module: Module) -> bool:
        owners = (*module.manifests, *module.types)
        return _is_built(module) and all(_rendered(owner, module).exists() for owner in owners)

    return [module for group in groups for module in GROUPS[group] if not complete(module)]


def ensure(*groups: str) -> None:
    """Build the missing programs of `groups`; wait if another process builds."""
    if not missing(*groups):
        return
    with lock():
        for module in missing(*groups):
            if not _is_built(module):
                _build(module)
            _render(module)


def _is_built(module: Module) -> bool:
    return all((_directory(module) / name).exists() for name in module.programs)


def _build(module: Module) -> None:
    """Build all programs of a module by one command, which compiles each package once and links in parallel."""
    say(f"building {', '.join(module.programs)}")
    started = time.monotonic()
    unfinished = _directory(module) / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    flags = [*_FLAGS, "-ldflags", module.ldflags, "-o", f"{unfinished}/"]
    packages = [package for package in module.programs.values() if package not in module.patches]
    if packages:
        _run(module.path, "go", "build", *flags, *packages)
    for package in module.patches:
        _run(_patched(module, package), "go", "build", *flags, ".")
    for name, package in module.programs.items():
        is_root = package == "." or package in module.patches
        (unfinished / _file_name(module.name if is_root else package)).replace(_directory(module) / name)
    unfinished.rmdir()
    say(f"built {', '.join(module.programs)} in {time.monotonic() - started:.0f} s")


def _file_name(package: str) -> str:
    """The name that Go gives to a program: the last element of the path that is not a version."""
    return re.sub(r"/v\d+$", "", package).rpartition("/")[2]


def _patched(module: Module, package: str) -> Path:
    """A Go module whose main package is `package` with `module.patches`; all other code is unchanged."""
    directory = _directory(module) / "patched"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file in ("go.mod", "go.sum"):
        shutil.copy(module.path / file, directory)
    for source in Path(_run(module.path, "go", "list", "-f", "{{.Dir}}", package).strip()).glob("*.go"):
        if not source.name.endswith("_test.go"):
            (directory / source.name).write_text(source.read_text())
    main_go = directory / "main.go"
    for old, new in module.patches[package].items():
        text = main_go.read_text()
        if text.count(old) != 1:
            raise BuildError(f"{package}: main.go has {text.count(old)} times {old}; the patch in build.py expects 1")
        main_go.write_text(text.replace(old, new))
    return directory


def _render(module: Module) -> None:
    for owner in (*module.manifests, *module.types):
        target = _rendered(owner, module)
        if target.exists():
            continue
        unfinished = target.with_name(f".{owner}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if owner in module.types:
            generator = str(_directory(module) / "controller-gen")
            text = _run(module.path, generator, "crd", f"paths={module.types[owner]}", "output:crd:stdout")
            (unfinished / "crds.json").write_text(json.dumps(manifests.read(text)))
        else:
            source = _run(module.path, "go", "list", "-m", "-f", "{{.Dir}}", module.manifests[owner])
            manifests.render(owner, Path(source.strip()), unfinished)
        unfinished.replace(target)


def _rendered(owner: str, module: Module) -> Path:
    renderer = hashlib.sha256(Path(manifests.__file__).read_bytes()).hexdigest()[:12]
    return _directory(module) / f"manifests-{renderer}" / owner


def _directory(module: Module) -> Path:
    return cache_directory() / f"{module.name}-{_hash(module)}"


@cache
def _hash(module: Module) -> str:
    parts = [(module.path / file).read_text() for file in ("go.mod", "go.sum")]
    parts += [file.read_text() for file in sorted(module.path.glob("*.go"))]
    parts += [*_FLAGS, module.ldflags, json.dumps({package: dict(texts) for package, texts in module.patches.items()})]
    parts.append(golang.version(_go_version()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


# ------------------------------------------------------------------ Go


@cache
def _go_version() -> str:
    """The oldest Go that can build the control plane."""
    found = re.search(r"^go (\S+)", (CONTROL_PLANE.path / "go.mod").read_text(), re.MULTILINE)
    return found[1] if found else "1.26"


def _run(directory: Path, *command: str) -> str:
    """Run a program, such as ``go`` or controller-gen, which runs it; return its output."""
    environment = golang.environment(_go_version(), cache_directory())
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} (in {directory}): {done.stderr[-4000:]}")
    return done.stdout


# ------------------------------------------------------------------ one builder at a time


@contextmanager
def lock() -> Iterator[None]:
    """Lock of the cache, held while a process adds to it."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def cached(target: Path, what: str, make: Callable[[Path], None]) -> Path:
    """Return `target`, a file or directory below the cache; if it is missing, `make` creates it under another name."""
    if target.exists():
        return target
    with lock():
        if not target.exists():
            say(f"building {what}")
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f".{target.name}.unfinished")
            make(unfinished)
            unfinished.replace(target)
    return target


def say(line: str) -> None:
    """Print progress."""
    print(f"cluster: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line."""
    wanted = sys.argv[1:] or list(GROUPS)
    if unknown := set(wanted) - set(GROUPS):
        sys.exit(f"no group {', '.join(unknown)}; usage: python -m tests.testcluster.build [{'|'.join(GROUPS)}] ...")
    try:
        ensure(*wanted)
    except BuildError as error:
        sys.exit(str(error))
    say(f"{', '.join(wanted)} built in {cache_directory()}")


if __name__ == "__main__":
    main()
