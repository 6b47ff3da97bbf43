"""Exports at once, killed at any call: the real `trainjob.data.export` on real files, with a registry in memory.

Two or three exports, each by up to two processes at once (a retry that starts while the first try is alive), and a
person who moves the alias by hand. The registries are `MlflowRegistry`, with the lock of its SQLite file or as on a
server, and `KubeflowRegistry`, whose clients send their requests to the fakes of tests/registry; those are held to the
contract of all registries.

Properties, from the registry and the files alone:

* ``versions``: each export has one version, and no version has files that are missing, incomplete or wrong.
* ``twice``: an export moves the alias once. On an MLflow server, which cannot compare and set, a try that was frozen
  right before it moves the alias moves it again, and gives it back.
* ``back``: the alias is not at a version that somebody has moved it away from.
* ``result``: an export that reports that it moved the alias has done so, and only documented errors occur.
* ``incomplete``: when all have ended and were retried, each export is complete, and the best one holds the alias.
"""

from __future__ import annotations

import fcntl
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.exceptions import MlflowException
from tests.fakes.mlflow import MemoryMlflow
from tests.fakes.model_registry_store import Refused, Store
from tests.simulation.export_clients import Losing, connected
from tests.simulation.export_inputs import OLD_DIGEST, Inputs, Settings
from tests.simulation.local_processes import Machine, Process, World

from trainjob.data import export, read_manifest, transfer
from trainjob.errors import ModelNotFound, RegistryUnavailable
from trainjob.registry import ModelVersion, Registry, moves
from trainjob.registry.kubeflow import KubeflowRegistry
from trainjob.registry.mlflow import MlflowRegistry

NAME, ALIAS = "digits", "champion"
_MOST_STEPS = 5000  # of one export; it has about 100


class Exports(World):
    """A registry, a directory of models, and the processes that export to them.

    Actions: ``start DAY``; ``step PROCESS [NUMBER]``; ``reach PROCESS``: its next change of the registry;
    ``promote PROCESS``: its next tag or alias; ``alias PROCESS``: its next alias in MLflow; ``end PROCESS``; ``kill
    PROCESS``; ``tear PROCESS``: kill it in the middle of a write; ``lose PROCESS`` and ``refuse PROCESS``: the reply or
    the request is lost, if it is at a request; ``person DAY``: a person moves the alias to that version by hand;
    ``command DAY``: by ``trainjob registry promote``; ``pass SECONDS``.
    """

    def __init__(
        self, settings: Settings, seed: int, directory: Path, inputs: Inputs, patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__()
        self.settings, self.inputs, self.target = settings, inputs, directory / "models"
        self.machine = Machine(seed)
        self.tries: dict[Process, str] = {}
        self.moves: list[tuple[str, str | None]] = []  # who moved the alias, and to which version
        self.fault = ""  # of the next request
        self.lost = False  # whether the reply of the present request to MLflow is lost
        self._lock_file = directory / "registry.db"
        self._kubeflow, self._mlflow = Store(), MemoryMlflow()
        self._mlflow.request = lambda method, _: self._requested(method)
        self._mlflow.clock = lambda: self.machine.now
        self.versions: Sequence[ModelVersion] = ()
        self._seen = -1
        self._changes = 0
        self._judged = -1
        self._checked: set[str] = set()
        self.by_hand: str | None = None  # the version to which a person has moved the alias last
        self.excepted: set[str] = set()  # versions for which a person's move by hand was a documented exception
        patch.setattr("trainjob.registry.rest.Session.__enter__", self._entering())
        patch.setattr("trainjob.registry.rest.Session.__exit__", lambda *_: None)
        patch.setattr("trainjob.registry.rest.sleep", self.machine.sleep)
        patch.setattr("trainjob.registry.kubeflow.sleep", self.machine.sleep)
        for day in settings.accuracy:
            inputs.evaluation(day, settings.accuracy[day], champion=settings.champion)
        self.registry = self._connected()
        if settings.champion:
            self.registry.register(NAME, "s3://b/old", export_id="old", digest=OLD_DIGEST, metrics={"acc": 0.5})
            self.registry.promote(NAME, "1", alias=ALIAS)
        self._look("begin")

    # --- the registry

    def _connected(self) -> Registry:
        """A registry as a process has it."""
        if self.settings.registry == "kubeflow":
            return KubeflowRegistry("http://registry")
        registry = MlflowRegistry.__new__(MlflowRegistry)
        registry._lock_timeout = 30.0
        registry._database = self._lock_file if self.settings.registry == "sqlite" else None
        registry._uri = "http://registry"
        registry._client = Losing(self, self._mlflow.client())
        return registry

    def _requested(self, method: str) -> None:
        self.machine.stop(f"registry {method}")
        fault, self.fault = self.fault, ""
        self.lost = fault == "lose"
        if fault == "refuse":
            raise MlflowException("the server cannot be reached")

    def _entering(self) -> Callable[[Any], Any]:
        """``__enter__`` of a session of `KubeflowRegistry`."""

        def enter(session: Any) -> Any:
            session._http = connected(self)
            session._endpoint.version = "v1"
            return session

        return enter

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any) -> httpx.Response:
        """The reply of the Kubeflow Model Registry."""
        self.machine.stop(f"registry {method} {path}")
        fault, self.fault = self.fault, ""
        if fault == "refuse":
            return httpx.Response(503, json={"message": "not now"})
        self._changes += method != "GET"
        try:
            status, value = self._kubeflow.handle(method, path, query, body)
        except Refused as error:
            status, value = error.status, error.body()
        if fault == "lose":
            raise httpx.ReadError("the connection was cut")
        return httpx.Response(status, json=value)

    @property
    def changes(self) -> int:
        return self._changes + self._mlflow.changes

    def holder(self) -> str | None:
        try:
            return self.registry.resolve(NAME, ALIAS).version
        except ModelNotFound:
            return None

    def version_of(self, day: str) -> ModelVersion | None:
        return next((each for each in self.versions if each.tags["trainjob.export_id"] == day), None)

    # --- actions

    def choose(self, chance: random.Random) -> str:
        alive = [process.name for process in self.machine.alive]
        startable = [day for day in self.settings.accuracy if len(self._alive(day)) < 2]
        if startable and (not alive or chance.random() < 0.12):
            return f"start {chance.choice(startable)}"
        if not alive:
            return "pass 1"
        if self.settings.person and chance.random() < 0.07:
            return f"{chance.choice(('person', 'command'))} {chance.choice(['old', *self.settings.accuracy])}"
        if chance.random() < 0.02:
            return f"pass {chance.choice((5, 40))}"
        who = chance.choice(alive)
        kind = chance.choices(
            ("step", "reach", "promote", "end", "kill", "tear", "lose", "refuse"), (12, 6, 8, 3, 4, 0.5, 0.7, 0.7)
        )[0]
        return f"{kind} {who} {chance.choice((1, 1, 2, 3, 8, 40))}" if kind == "step" else f"{kind} {who}"

    def act(self, action: str) -> bool:
        kind, what, *rest = action.split()
        match kind:
            case "start":
                return what in self.settings.accuracy and len(self._alive(what)) < 2 and bool(self._start(what))
            case "pass":
                self.machine.now += float(what)
                return True
            case "person" | "command":
                return self._person(what, by_hand=kind == "person")
        process = next((each for each in self.machine.alive if each.name == what), None)
        return process is not None and self._act(kind, process, int(rest[0]) if rest else _MOST_STEPS)

    def _act(self, kind: str, process: Process, most: int) -> bool:
        """What a process does, or what is done to it."""
        if kind in ("kill", "tear"):
            process.kill(torn=kind == "tear")
            self._ended(process)
        elif kind in ("lose", "refuse"):
            self.fault = kind
            done = process.at.startswith("registry") and self._step(process)
            self.fault = ""
            return done
        else:
            for _ in range(most):
                if process.done or not self._step(process):
                    break
                if kind in _UNTIL and _UNTIL[kind](process.at):
                    break
        return True

    def _alive(self, day: str) -> list[Process]:
        return [process for process in self.machine.alive if self.tries[process] == day]

    def _start(self, day: str) -> Process:
        number = sum(each == day for each in self.tries.values())
        process = self.machine.start(f"{day}{number}", lambda: self._export(day))
        self.tries[process] = day
        return process

    def _export(self, day: str) -> Any:
        accuracy = self.settings.accuracy[day]
        options: dict[str, Any] = {"metrics": {"acc": accuracy}}
        if self.settings.rule == "metric":
            options |= {"metric": "acc"}
        elif self.settings.rule == "gate":
            options = {"evaluation": self.inputs.evaluation(day, accuracy, champion=self.settings.champion)}
        return export(
            self.inputs.model(day),
            str(self.target),
            name=NAME,
            export_id=day,
            registry=self._connected(),
            alias=ALIAS,
            **options,
        )

    def _step(self, process: Process) -> bool:
        """One step; False if the process has to wait for others."""
        if not process.ready:
            self.machine.now = max(self.machine.now, process.wake)  # a pause is short
            if not process.ready:
                return False
        if process.steps > _MOST_STEPS:
            self.found("stuck", f"{process} does not end")
            process.kill()
        else:
            process.step()
        self._look(process.name)
        if process.done:
            self._ended(process)
        return True

    def _person(self, day: str, *, by_hand: bool) -> bool:
        version = ModelVersion(NAME, "1", "") if day == "old" and self.settings.champion else self.version_of(day)
        if version is None:
            return False
        if not by_hand and self.settings.registry == "sqlite" and self._is_locked():
            return False
        self.excepted |= self._exceptions(version.version, by_hand=by_hand)
        self.by_hand = version.version if by_hand else None
        if not by_hand or self.settings.registry == "kubeflow":
            self.registry.promote(NAME, version.version, alias=ALIAS)
        else:
            self._mlflow.client().set_registered_model_alias(NAME, ALIAS, version.version)
        self._look("person")
        return True

    def _is_locked(self) -> bool:
        """Whether an export holds the lock of the SQLite file: a command would wait for it."""
        with open(f"{self._lock_file}.lock", "ab") as file:  # noqa: PTH123 - as `fcntl` takes it
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _exceptions(self, target: str, *, by_hand: bool) -> set[str]:
        """The versions to which the alias may move back after a person has moved it to the target, as documented.

        * With a metric, unless a SQLite file has a lock: those that were exported before, of which a promotion that is
          on its way elects the best; with a Kubeflow registry only one of the target, whose claim it overwrites.
        * With MLflow: a version whose promotion was killed right after it had moved the alias from the target, if
          nothing records that, as a command does for the version that it takes the alias from.
        * By hand, with MLflow: a version that the alias was moved to by hand, and is moved away from by hand.
        * By hand, with MLflow: versions that are being promoted. One of another version can overwrite the move without
          a record of it: if nothing else records that the alias was at the target, its export may move it there once.
        """
        registry, found = self.settings.registry, set[str]()
        running = [self.version_of(self.tries[each]) for each in self.machine.alive if each.at.startswith("registry")]
        promoted = {each.version for each in running if each is not None}
        elects = target in promoted if registry == "kubeflow" else promoted and registry == "server"
        if self.settings.rule == "metric" and elects:
            found |= {each.version for each in self.versions}
        if registry == "kubeflow":
            return found
        unrecorded = {each.version: each for each in self.versions if f"{moves.MOVED}{ALIAS}" not in each.tags}
        for each in unrecorded.values():
            if (by_hand or ALIAS not in each.aliases) and each.tags.get(f"{moves.MOVING}{ALIAS}") == f"from {target}":
                found.add(each.version)
        if by_hand and self.by_hand in unrecorded and self.by_hand == self.holder():
            found.add(str(self.by_hand))
        if by_hand and promoted - {target} and target in unrecorded:
            found.add(target)
        return found | promoted if by_hand else found

    # --- properties

    def _look(self, who: str) -> None:
        """See what a step has changed in the registry."""
        if self.changes == self._seen:
            return
        self._seen = self.changes
        holder = self.holder()
        self.versions = self.registry.list(NAME)
        if not self.moves or self.moves[-1][1] != holder:
            self._moved(who, holder)
        for version in self.versions:
            if version.version not in self._checked and version.digest != OLD_DIGEST:
                self._checked.add(version.version)
                self._check_files(version)

    def _moved(self, who: str, holder: str | None) -> None:
        """Record a move of the alias.

        On a server a try may move it again if it takes it from a promotion that had looked before the alias was moved
        to the version that it took it from: those two are simultaneous, and nothing shows in which order they came.
        """
        if self.settings.registry == "server" and len(self.moves) > 1:
            (_, before), (other, taken) = self.moves[-2:]
            tags = next((each.tags for each in self.versions if each.version == taken), {})
            promotes = any(process.name == other for process in self.tries)
            if promotes and tags.get(f"{moves.MOVING}{ALIAS}") != f"from {before or 'nothing'}":
                self.excepted.add(str(holder))
        self.moves.append((who, holder))

    def _check_files(self, version: ModelVersion) -> None:
        held = read_manifest(version.uri)
        if held is None or held.digest != version.digest:
            self.found("versions", f"version {version.version} is visible, and its files are not complete")
            return
        wrong = [file.path for file in transfer.scan(version.uri).files if file not in held.files]
        if wrong:
            self.found("versions", f"files of version {version.version} are wrong: {wrong}")

    def _ended(self, process: Process) -> None:
        error, day = process.error, self.tries[process]
        if process.result is None and self.settings.registry == "server" and self.moves[-1][0] == process.name:
            # It has just moved the alias. If another try had moved it before, this one did not give it back.
            again = [holder for _, holder in self.moves].count(self.moves[-1][1]) > 1
            self.excepted |= {str(self.moves[-1][1])} if again else set()
        if error is not None and not isinstance(error, RegistryUnavailable):
            self.found("result", f"{process.name} failed: {type(error).__name__}: {error}")
        if process.result is not None and process.result.promoted:
            version = self.version_of(day)
            if version is None or version.version not in [holder for _, holder in self.moves]:
                self.found("result", f"{process.name} reports that it moved the alias: {process.result.reason}")

    def check(self) -> None:
        if self.settings.registry == "server" or self._judged == self._seen:
            return
        self._judged = self._seen
        for day in self.settings.accuracy:
            version = self.version_of(day)
            tries = {process.name for process, of in self.tries.items() if of == day}
            mine = [holder for who, holder in self.moves if version and holder == version.version and who in tries]
            if len(mine) > 1 and mine[0] not in self.excepted:
                self.found("twice", f"the export of {day} moved the alias {len(mine)} times: {self.moves}")

    def drain(self) -> None:
        """End all processes, then try each export again that has not succeeded, and each one once more."""
        self._run_all()
        for _ in range(6):
            due = [day for day in self.settings.accuracy if not self._succeeded(day)]
            if not due:
                break
            for day in due:
                self._start(day)
            self._run_all()
        before = len(self.moves)
        for day in self.settings.accuracy:
            self._start(day)
            self._run_all()
        self.check()
        earlier = [holder for who, holder in self.moves[: before - 1] if who != "person"]
        if back := [move for move in self.moves[before:] if move[1] in earlier and move[1] not in self.excepted]:
            self.found("back", f"retries moved the alias back, {back}: {self.moves}")
        versions = self.versions
        exported = sorted(version.tags["trainjob.export_id"] for version in versions if version.digest != OLD_DIGEST)
        if exported != sorted(self.settings.accuracy):
            self.found("incomplete", f"the exports {sorted(self.settings.accuracy)} have the versions {exported}")
        for version in versions:
            if version.digest != OLD_DIGEST:
                self._check_files(version)
        left = [path for path in self.target.rglob(".trainjob/*") if path.name != "lock"]
        if left:
            self.found("incomplete", f"files are left: {left}")
        self._check_holder(versions)

    def _check_holder(self, versions: Any) -> None:
        by_person = [number for number, (who, _) in enumerate(self.moves) if who == "person"]
        if by_person and self.moves[by_person[-1]][1] != self.holder() and self.holder() not in self.excepted:
            back = [holder for who, holder in self.moves[: by_person[-1]] if who != "person"]
            if self.holder() in back:
                self.found("back", f"after a person's move, the alias is at an earlier version again: {self.moves}")
        owners = {process.name: self.version_of(day) for process, day in self.tries.items()}
        who, holder = self.moves[-1]
        own = (of := owners.get(who)) is not None and of.version == holder
        # Another promotion may have moved it there because this one had begun: that is no earlier move of this one.
        counted = [each for mover, each in self.moves if (by := owners.get(mover)) is None or by.version == each]
        again = counted.count(holder) > 1 and holder not in self.excepted
        if again and own and self.settings.rule != "metric":
            self.found("back", f"the alias is at version {holder} again: {self.moves}")
        if self.settings.rule == "metric" and not by_person and not any("pass 40" in each for each in self.trace):
            best = max(versions, key=lambda version: version.metrics["acc"])
            if self.holder() != best.version:
                self.found("incomplete", f"version {self.holder()} holds the alias, not the best, {best.version}")
        if self.holder() is None:
            self.found("incomplete", "no version holds the alias")

    def _run_all(self) -> None:
        while ready := self.machine.ready():
            process = ready[0]
            while not process.done and self._step(process):
                pass

    def _succeeded(self, day: str) -> bool:
        return any(of == day and process.result is not None for process, of in self.tries.items())


def _writes(at: str) -> bool:
    reads = ("registry get_", "registry search_", "registry GET")
    return at.startswith("registry ") and not at.startswith(reads)


_UNTIL: Mapping[str, Callable[[str], bool]] = {
    "reach": _writes,
    "promote": lambda at: at.startswith(("registry set_", "registry PATCH model_versions")),
    "alias": lambda at: at.startswith("registry set_registered_model_alias"),
}
"""Action -> whether a process stops before this call."""


@contextmanager
def world(seed: int, directory: Path, inputs: Inputs, settings: Settings | None = None) -> Iterator[Exports]:
    """The world of a seed, or with other settings."""
    folder = directory / f"world-{seed}"
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("trainjob.registry.mlflow.without_warnings", nullcontext)
        patch.setattr("trainjob.registry.sqlite.probe", lambda *_: None)
        for module in ("transfer", "stores.files", "formats.allowed"):
            patch.setattr(f"trainjob.data.{module}.for_each", _one_after_another)
        folder.mkdir()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        made = Exports(settings or Settings.drawn(seed), seed, folder, inputs, patch)
        stack.enter_context(made.machine.installed(patch))
        yield made


def _one_after_another(work: Any, items: Any, *_: Any) -> None:
    for item in items:
        work(item)
