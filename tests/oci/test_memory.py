"""Memory does not grow with the model: it stays below 200 MB."""

from __future__ import annotations

from pathlib import Path

from tests import campaigns
from tests.oci.registry import Server
from tests.unit.measured import COPY, peak

from trainjob.data import read_manifest

LIMIT = 200_000_000
SIZE = (768 if campaigns.FULL else 480) << 20  # a third of it in memory would be beyond the limit, too


def test_large_layers(server: Server, name: str, tmp_path: Path) -> None:
    """Three at a time, to the registry, to another repository of it in one pass, and back."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        with (source / f"{number}.safetensors").open("wb") as file:
            file.truncate(SIZE // 3 - number)
    there, other, back = (
        server.uri(f"{name}:1"),
        f"oci://localhost:{server.host.partition(':')[2]}/{name}/b:1",
        tmp_path,
    )
    for here, to in ((str(source), there), (there, other), (there, str(back / "back"))):
        used = peak(COPY, here, to)
        print(f"{SIZE >> 20} MiB from {here.partition(':')[0]} to {to.partition(':')[0]}: {used / 1e6:.0f} MB")
        assert used < LIMIT
        manifest = read_manifest(to)
        assert manifest is not None
        assert manifest.size == SIZE - 3


def test_ten_thousand_small_files(server: Server, name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(10_000):
        (source / str(number % 101)).mkdir(parents=True, exist_ok=True)
        (source / str(number % 101) / str(number)).write_bytes(b"%d" % number)
    for here, to in ((str(source), server.uri(f"{name}:1")), (server.uri(f"{name}:1"), str(tmp_path / "back"))):
        used = peak(COPY, here, to)
        print(f"10 000 files from {here.partition(':')[0]} to {to.partition(':')[0]}: {used / 1e6:.0f} MB")
        assert used < LIMIT
    manifest = read_manifest(str(tmp_path / "back"))
    assert manifest is not None
    assert len(manifest.files) == 10_000
    assert all(
        (tmp_path / "back" / each.path).read_bytes() == (source / each.path).read_bytes() for each in manifest.files
    )
