"""SIGKILL at random times of the initialize and export programs, which are then run again.

A campaign (`tests.campaigns`) of 300 kills: each run is derived from the seed, its case and its number.

After a kill a reader finds nothing, the earlier content or the complete new content. The registry has at most one
version of an export, and every version and alias that it shows is of a complete model. A second run completes the work.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import pytest
from tests import campaigns
from tests.fakes.faults import Proxy
from tests.fakes.hub import Hub
from tests.fakes.model_registry import FakeRegistry
from tests.local.forks import FORKS
from tests.local.killing import (
    Bucket,
    Content,
    Folder,
    Images,
    Kubeflow,
    Mlflow,
    Place,
    Records,
    Repositories,
    Trap,
    manifest_of,
    program,
    run,
    trapped,
)
from tests.oci.registry import needs_registry, registry as container_registry
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

from trainjob.data import file_manifest
from trainjob.data.transfer import scan
from trainjob.errors import CorruptData, ModelNotFound, SourceNotFound
from trainjob.registry import connect

pytestmark = pytest.mark.timeout(900)

RUNS = campaigns.runs(300, 24)
INITIALIZE = [("file", "file"), ("s3", "file"), ("oci", "file"), ("hf", "file"), ("file", "s3")]
EXPORT = [(place, registry) for place in ("file", "s3", "oci") for registry in ("mlflow", "kubeflow")]
EXPORT += [("hf", "kubeflow")]
EACH = -(-RUNS // len(INITIALIZE + EXPORT))


def _weights(number: int, size: int) -> bytes:
    header = json.dumps({f"w{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(number).randbytes(size)


# The largest file is uploaded to S3 in two parts.
NEW: Content = {
    "model-1.safetensors": _weights(1, 5_500_000),
    "model-2.safetensors": _weights(2, 600_000),
    "sub/model-3.safetensors": _weights(3, 90_000),
    **{f"sub/{number}/config.json": b"%d" % number for number in range(5)},
    "empty": b"",
}
OLD: Content = {
    "model-1.safetensors": NEW["model-1.safetensors"],
    "model-2.safetensors": _weights(4, 600_000),
    "sub/0/config.json": b"0",
    "sub/1/config.json": b"one",
    "gone": b"x",
}
NEW_DIGEST, OLD_DIGEST = (file_manifest.parse(manifest_of(files), "").digest for files in (NEW, OLD))


# ------------------------------------------------------------ servers


@dataclass
class World:
    """All stores, and their servers."""

    folder: Path
    name: str
    record: campaigns.Record
    places: Mapping[str, Place]
    proxies: Sequence[Proxy]
    hub: Hub


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SeaweedFS, Proxy, str, Proxy, Hub]]:
    with ExitStack() as stack:
        images = stack.enter_context(container_registry(tmp_path_factory.mktemp("images")))
        s3 = stack.enter_context(SeaweedFS())
        to_s3, to_images = Proxy(s3.endpoint.removeprefix("http://")), Proxy(images.host)
        stack.enter_context(to_s3.running())
        stack.enter_context(to_images.running())
        yield s3, to_s3, images.host, to_images, stack.enter_context(serving(Hub()))


@pytest.fixture
def world(
    servers: tuple[SeaweedFS, Proxy, str, Proxy, Hub],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    record_property: campaigns.Record,
) -> World:
    s3, to_s3, upstream, to_images, hub = servers
    places: dict[str, Place] = {
        "file": Folder(tmp_path / "data"),
        "s3": Bucket(s3, to_s3),
        "oci": Images(upstream, to_images, tmp_path / "scratch"),
        "hf": Repositories(hub),
    }
    for place in places.values():
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
    return World(tmp_path, request.node.callspec.id, record_property, places, (to_s3, to_images), hub)


# ------------------------------------------------------------ programs


Happened = Callable[[], bool]


class Case(Protocol):
    """A program for one run, and the checks after a kill.

    Attributes:
        arguments: Arguments of the program.
        events: Events at which it can be killed, besides times and requests.
    """

    arguments: list[str]
    events: list[Happened]

    @property
    def fake(self) -> FakeRegistry | None:
        """A fake server whose requests are counted."""
        ...

    def found(self) -> str:
        """Check the state after a kill; return its name."""
        ...

    def finish(self) -> None:
        """Check the final state."""
        ...


def _left_or_nothing(place: Place, uri: str) -> str:
    """Check that no reader accepts an incomplete target."""
    with pytest.raises((CorruptData, SourceNotFound)):
        scan(uri)
    return "half a target" if place.left(uri) else "nothing"


def _appear(place: Place, uri: str, chance: random.Random) -> list[Happened]:
    """The event that some number of files was written to a directory, including parts and files of trainjob."""
    if not isinstance(place, Folder):
        return []
    before, count = place.inodes(uri), chance.randint(1, len(NEW) + 2)
    return [lambda: len(place.inodes(uri) - before) >= count]


def _written(state: Callable[[], object], chance: random.Random) -> Happened:
    """The event that a registry was written some number of times."""
    seen, count = {state()}, chance.randint(1, 3)

    def happened() -> bool:
        seen.add(state())
        return len(seen) > count

    return happened


class Initialize:
    """An initializer, in half of the runs with an older target; see `Case`."""

    fake = None

    def __init__(self, place: Place, source: str, target: str, chance: random.Random) -> None:
        self._place, self._target = place, place.uri(target)
        self._before: Content | None = None
        if chance.random() < 0.5:
            self._before = OLD
            place.put(self._target, OLD)
        self.arguments = ["initialize-model", "--source", source, "--target", self._target]
        self.events = _appear(place, self._target, chance)

    def found(self) -> str:
        held = self._place.held(self._target)
        if held is None:
            return _left_or_nothing(self._place, self._target)
        assert held in (NEW, self._before)
        return "everything" if held == NEW else "nothing"

    def finish(self) -> None:
        assert self._place.held(self._target) == NEW
        assert self._place.left(self._target) == {*NEW, file_manifest.NAME}


class Export:
    """An export of a model; `champion` says whether an older version has the alias. See `Case`."""

    def __init__(
        self, place: Place, source: str, target: str, chance: random.Random, records: Records, *, champion: bool
    ) -> None:
        self._place, self._records, self._champion = place, records, champion
        target = place.uri(target)
        key = sha256(b"a").hexdigest()[:16]
        self._target = f"{target}/m:{key}" if target.startswith("oci:") else f"{target}/m/{key}"
        self.arguments = [
            "export", "--source", source, "--target", target, "--name", "m", "--export-id", "a",
            "--metrics", '{"acc": 0.9}', "--alias", "champion", "--metric", "acc", "--registry", records.uri,
        ]  # fmt: skip
        self.events = _appear(place, self._target, chance)
        if records.state is not None:
            self.events.append(_written(records.state, chance))
        self.fake = records.fake

    def found(self) -> str:
        held = self._place.held(self._target)
        assert held in (NEW, None)
        rows = self._records.rows() - self._champion
        assert rows <= 1, "two versions of one export"
        registry = connect(self._records.uri)
        listed = registry.list("m")
        assert len(listed) <= rows + self._champion
        for version in listed:
            assert version.digest == (NEW_DIGEST if version.metrics["acc"] == 0.9 else OLD_DIGEST)
        finished = len(listed) > self._champion
        assert held == NEW or not finished, "a version of an unfinished model"
        try:
            holder = registry.resolve("m", "champion").version
        except ModelNotFound:
            assert not self._champion
            holder = ""
        if holder == str(1 + self._champion):
            assert finished, "an alias of an unfinished version"
            return "everything"
        assert holder == ("1" if self._champion else "")
        if rows:
            return "a version" if finished else "half a version"
        return "a target" if held == NEW else _left_or_nothing(self._place, self._target)

    def finish(self) -> None:
        assert self._records.rows() == 1 + self._champion
        assert self.found() == "everything"
        left = self._place.left(self._target)
        assert left >= {*NEW, file_manifest.NAME}
        assert not any(path.startswith(file_manifest.WORK) for path in left)


# ------------------------------------------------------------ the kills


def _many(world: World, case: Callable[[int, random.Random], AbstractContextManager[Case]]) -> None:
    """Kill `EACH` runs of a case: half of them at random times, the others at events and requests."""
    campaigns.begin(world.record, EACH)
    environment = {name: value for place in world.places.values() for name, value in place.environment.items()}
    environment["TMPDIR"] = str(world.folder / "left")  # killed programs leave temporary files
    (world.folder / "left").mkdir()
    trap, length, requests = Trap(), math.inf, Counter[str]()
    for number in range(3 if campaigns.FULL else 1):
        chance = random.Random(number)
        with case(RUNS + number, chance) as each, trapped(trap, world.proxies, world.hub, each.fake, chance):
            length = min(length, run(each.arguments, environment, trap)[0])
            requests = trap.requests
            each.finish()
    killed, found = 0, Counter[str]()
    for number in range(EACH):
        chance = random.Random(f"{campaigns.SEED}/{world.name}/{number}")
        with case(number, chance) as each:
            happened: Happened = lambda: True  # noqa: E731 - the time counts from the start
            ways: list[Happened | str] = [*each.events, *requests]
            way = chance.choice(ways) if number % 2 else None
            instant = 0.0 if way else chance.uniform(0, length)
            if isinstance(way, str):
                trap.at, happened = (way, chance.randint(1, requests[way])), lambda: False
            elif way is not None:
                happened = way
            with trapped(trap, world.proxies, world.hub, each.fake, chance):
                took, dead = run(each.arguments, environment, trap, (happened, instant))
            trap.at = None
            killed += dead
            if not dead:
                length = min(length, took)  # the measurement was slowed by other programs
            left = each.found()
            found[left] += 1
            run(each.arguments, environment, trap)
            each.finish()
            how = f"at {way[0] if isinstance(way, tuple) else 'an event'}" if way else f"after {instant:.3f} s"
            campaigns.done(f"{world.name}/{number}: {'killed' if dead else 'not killed'} {how}; left: {left}")
    many = sum(requests.values())
    print(f"{world.name}: {killed} of {EACH} runs ({length:.3f} s, {many} requests) were killed; left: {dict(found)}")
    if EACH >= 10:  # with fewer runs, most can end before the kill by chance
        assert killed >= EACH // 2, "most runs ended before the kill"
        assert len(found) > 1, "the kills hit one state only"


@needs_registry
@pytest.mark.parametrize(("source", "target"), INITIALIZE)
def test_initialize(world: World, source: str, target: str) -> None:
    uri = world.places[source].uri(f"{world.name}-source") + (":1" if source == "oci" else "")
    world.places[source].put(uri, NEW)

    @contextmanager
    def case(number: int, chance: random.Random) -> Iterator[Case]:
        yield Initialize(world.places[target], uri, f"{world.name}-{number}", chance)

    _many(world, case)


@pytest.mark.full
@needs_registry
@pytest.mark.parametrize(("target", "registry"), EXPORT)
def test_export(world: World, target: str, registry: str) -> None:
    files = world.places["file"]
    source, champion = files.uri("trained"), files.uri("champion")
    files.put(source, NEW)
    files.put(champion, OLD)

    def register_champion(uri: str) -> None:
        registry = connect(uri)
        registry.register("m", f"file://{champion}", export_id="old", digest=OLD_DIGEST, metrics={"acc": 0.5})
        assert registry.promote("m", "1", alias="champion", metric="acc").promoted

    mlflow = registry == "mlflow"
    registries = Mlflow(world.folder / "mlflow", register_champion) if mlflow else Kubeflow(register_champion)

    @contextmanager
    def case(number: int, chance: random.Random) -> Iterator[Case]:
        has = chance.random() < 0.5
        with registries.opened(champion=has) as records:
            yield Export(world.places[target], source, f"{world.name}-{number}", chance, records, champion=has)

    _many(world, case)


# ------------------------------------------------------------ other cases


@pytest.mark.parametrize("number", range(max(1, RUNS // 100)))
def test_export_that_creates_the_registry(tmp_path: Path, number: int, record_property: campaigns.Record) -> None:
    """MLflow creates its schema in many steps, none of which may stay incomplete."""
    chance = random.Random(f"{campaigns.SEED}/creates/{number}")
    campaigns.begin(record_property, 1)
    Folder(tmp_path).put(str(tmp_path / "model"), NEW)
    folder = tmp_path / "models"
    arguments = [
        "export", "--source", str(tmp_path / "model"), "--target", str(folder), "--name", "m", "--export-id", "a",
        "--registry", f"mlflow+sqlite:///{folder}/registry.db",
    ]  # fmt: skip
    run(arguments, {}, Trap(), (lambda: True, chance.uniform(0, 3)))
    run(arguments, {}, Trap())
    assert [version.digest for version in connect(f"mlflow+sqlite:///{folder}/registry.db").list("m")] == [NEW_DIGEST]
    assert {path.name for path in folder.iterdir()} == {"m", "registry.db", "registry.db.lock"}


def test_four_exports_at_once(tmp_path: Path) -> None:
    Folder(tmp_path).put(str(tmp_path / "model"), NEW)
    registry = connect(f"mlflow+sqlite:///{tmp_path}/registry.db")
    arguments = [
        "export", "--source", str(tmp_path / "model"), "--target", str(tmp_path / "models"), "--name", "m",
        "--export-id", "a", "--metrics", '{"acc": 0.5}', "--alias", "champion", "--metric", "acc",
        "--registry", f"mlflow+sqlite:///{tmp_path}/registry.db",
    ]  # fmt: skip
    running = [FORKS.Process(target=program, args=(arguments, {})) for _ in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join()
        assert process.exitcode == 0
        process.close()
    assert [version.digest for version in registry.list("m")] == [NEW_DIGEST]
    assert registry.resolve("m", "champion").version == "1"
    (place,) = (tmp_path / "models/m").iterdir()
    assert Folder(tmp_path).held(str(place)) == NEW
