"""SIGKILL at random times of the initialize and export programs, which are then run again.

Campaigns (`tests.campaigns`) of 600 kills: each run is derived from the seed, its case and its number.

After a kill a reader finds nothing, the earlier content or the complete new content. The registry has at most one
version of an export, and every version and alias that it shows is of a complete model. The champion of a model that is
evaluated has passed its gate. A second run completes the work.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests import campaigns
from tests.fakes.faults import Proxy
from tests.fakes.hub import Hub
from tests.local.kill_cases import (
    NEW,
    NEW_DIGEST,
    OLD,
    OLD_DIGEST,
    SMALL,
    Case,
    EvaluatedExport,
    Export,
    Happened,
    Initialize,
)
from tests.local.killing import (
    REGISTRIES,
    Images,
    Repositories,
    Server,
    Trap,
    run,
    trapped,
    with_manifest,
)
from tests.oci.registry import registry as container_registry
from tests.seaweedfs import SeaweedFS
from tests.serving import serving
from tests.stores import kinds
from tests.trees import tree

from trainjob.registry import connect

pytestmark = pytest.mark.timeout(900)

INITIALIZE = [("file", "file"), ("s3", "file"), ("oci", "file"), ("hf", "file"), ("file", "s3")]
EXPORT = [(store, registry) for store in ("file", "s3", "oci") for registry in REGISTRIES]
EXPORT += [("hf", "kubeflow")]
RUNS = campaigns.runs(300, 24)
EACH = -(-RUNS // len(INITIALIZE + EXPORT))
EVALUATED = -(-campaigns.runs(300, 10) // len(REGISTRIES))


# ------------------------------------------------------------ servers


@dataclass
class World:
    """All stores, and their servers."""

    folder: Path
    name: str
    record: campaigns.Record
    stores: Mapping[str, kinds.Store]
    servers: Sequence[Server] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[SeaweedFS, Proxy, Hub]]:
    with SeaweedFS() as s3, serving(Hub()) as hub:
        to_s3 = Proxy(s3.endpoint.removeprefix("http://"))
        with to_s3.running():
            yield s3, to_s3, hub


@pytest.fixture(scope="module")
def to_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with container_registry(tmp_path_factory.mktemp("images")) as images:
        proxy = Proxy(images.host)
        with proxy.running():
            yield proxy


@pytest.fixture
def here(tmp_path: Path, request: pytest.FixtureRequest, record_property: campaigns.Record) -> World:
    """Directories of this machine."""
    return World(tmp_path, request.node.callspec.id, record_property, {"file": kinds.Files(tmp_path / "data")})


@pytest.fixture
def world(
    here: World,
    servers: tuple[SeaweedFS, Proxy, Hub],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> World:
    s3, to_s3, hub = servers
    bucket, repositories = kinds.S3(to_s3, s3.client, s3.bucket), Repositories(to_s3, hub)
    here.stores = {**here.stores, "s3": bucket, "hf": repositories}
    here.servers = [to_s3, hub]
    if "oci" in request.node.callspec.params.values():
        to_images = request.getfixturevalue("to_images")
        here.stores, here.servers = {**here.stores, "oci": Images(to_images)}, [*here.servers, to_images]
    here.environment = {
        **s3.environment(),
        "AWS_ENDPOINT_URL": f"http://{to_s3.host}",
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "",
    }
    for name, value in here.environment.items():
        monkeypatch.setenv(name, value)
    return here


# ------------------------------------------------------------ the kills


def _many(world: World, count: int, case: Callable[[int, random.Random], AbstractContextManager[Case]]) -> None:
    """Kill `count` runs of a case: half of them at random times, the others at events and requests."""
    campaigns.begin(world.record, count)
    environment = {**world.environment, "TMPDIR": str(world.folder / "left")}  # killed programs leave temporary files
    (world.folder / "left").mkdir()
    trap, length, requests = Trap(), math.inf, Counter[str]()

    def servers(each: Case) -> list[Server]:
        return [*world.servers, *([each.fake] if each.fake else [])]

    for number in range(2):
        chance = random.Random(number)
        with case(RUNS + number, chance) as each, trapped(trap, servers(each), chance):
            length = min(length, run(each.arguments, environment, trap)[0])
            requests |= trap.requests
            each.finish()
    killed, found = 0, Counter[str]()
    for number in range(count):
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
            with trapped(trap, servers(each), chance):
                took, dead = run(each.arguments, environment, trap, (happened, instant))
            trap.at = None
            killed += dead
            if not dead:
                length = min(length, took)  # the measurement was slowed by other programs
            left = each.found()
            found[left] += 1
            run(each.arguments, environment, trap)
            each.finish()
            how = f"at {way if isinstance(way, str) else 'an event'}" if way else f"after {instant:.3f} s"
            campaigns.done(f"{world.name}/{number}: {'killed' if dead else 'not killed'} {how}; left: {left}")
    many = sum(requests.values())
    print(f"{world.name}: {killed} of {count} runs ({length:.3f} s, {many} requests) were killed; left: {dict(found)}")
    # With fewer runs, most can end before the kill by chance.
    assert killed >= count // 2 or count < 10, "most runs ended before the kill"
    assert len(found) > 1 or count < 10, "the kills hit one state only"


@pytest.mark.parametrize(("source", "target"), INITIALIZE)
def test_initialize(world: World, source: str, target: str) -> None:
    name = f"{world.name}-source" + (":1" if source == "oci" else "")
    uri = world.stores[source].put(name, with_manifest(NEW))

    @contextmanager
    def case(number: int, chance: random.Random) -> Iterator[Case]:
        yield Initialize(world.stores[target], uri, f"{world.name}-{number}", chance)

    _many(world, EACH, case)


@pytest.mark.full
@pytest.mark.parametrize(("target", "registry"), EXPORT)
def test_export(world: World, target: str, registry: str) -> None:
    source = world.stores["file"].put("trained", with_manifest(NEW))
    old = world.stores["file"].put("champion", with_manifest(OLD))

    def register_champion(uri: str) -> None:
        registry = connect(uri)
        registry.register("m", old, export_id="old", digest=OLD_DIGEST, metrics={"acc": 0.5})
        assert registry.promote("m", "1", alias="champion", metric="acc").promoted

    registries = REGISTRIES[registry](world.folder / "mlflow", register_champion)

    @contextmanager
    def case(number: int, chance: random.Random) -> Iterator[Case]:
        has = chance.random() < 0.5
        with registries.opened(champion=has) as records:
            yield Export(world.stores[target], source, f"{world.name}-{number}", chance, records, champion=has)

    _many(world, EACH, case)


@pytest.mark.full
@pytest.mark.parametrize("registry", REGISTRIES)
def test_no_kill_promotes_a_model_that_has_not_passed(here: World, registry: str) -> None:
    """The champion stays the old one, or is the new version if its gate has passed against the old one."""
    source = here.stores["file"].put("trained", with_manifest(SMALL))

    def register_champion(uri: str) -> None:
        registry, tags = connect(uri), {"trainjob.evaluation.passed": "true"}
        registry.register("m", "file:///old", export_id="old", digest=OLD_DIGEST, metrics={"acc": 0.5}, tags=tags)
        assert registry.promote("m", "1", alias="champion").promoted

    registries = REGISTRIES[registry](here.folder / "mlflow", register_champion)

    @contextmanager
    def case(number: int, chance: random.Random) -> Iterator[Case]:
        with registries.opened(champion=True) as records:
            yield EvaluatedExport(here.folder / f"models-{number}", source, chance, records)

    _many(here, EVALUATED, case)


# ------------------------------------------------------------ other cases


@pytest.mark.parametrize("number", range(max(1, RUNS // 100)))
def test_export_that_creates_the_registry(tmp_path: Path, number: int, record_property: campaigns.Record) -> None:
    """MLflow creates its schema in many steps, none of which may stay incomplete."""
    chance = random.Random(f"{campaigns.SEED}/creates/{number}")
    campaigns.begin(record_property, 1)
    source = str(tree(tmp_path / "model", with_manifest(NEW)))
    folder, registry = tmp_path / "models", f"mlflow+sqlite:///{tmp_path}/models/registry.db"
    words = ["export", "--source", source, "--target", str(folder), "--name", "m", "--export-id", "a"]
    arguments = [*words, "--registry", registry]
    run(arguments, {}, Trap(), (lambda: True, chance.uniform(0, 3)))
    run(arguments, {}, Trap())
    assert [version.digest for version in connect(registry).list("m")] == [NEW_DIGEST]
    assert {path.name for path in folder.iterdir()} == {"m", "registry.db", "registry.db.lock"}
