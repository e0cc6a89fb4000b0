"""All that checkpoints are read from behaves alike: folders, packs, the hub, buckets, the web."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.storage.source import CheckpointSource, FileRange, open_source
from tests.packs.families import packed_family, write_family


class Place(NamedTuple):
    """Where a checkpoint is read, and the folder whose files it has."""

    root: str
    files: Path

    @property
    def weights(self) -> str:
        """The name of a weight file."""
        return min(p.name for p in self.files.glob("*.safetensors"))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An expert whose files were moved away, and the files as they were."""
    folder = tmp_path_factory.mktemp("packed")
    write_family(folder / "files")
    warehouse = packed_family(folder, folder / "files", away=("e0",))
    return Place(Places(warehouse).locate("e0").root, folder / "files" / "e0")


@pytest.fixture(params=["folder", "packed", "hub", "bucket", "web"])
def place(request: pytest.FixtureRequest, family: Path) -> Place:
    """The same expert in each kind of place."""
    expert, kind = family / "expert_00", request.param
    if kind == "packed":
        found = request.getfixturevalue("packed")
        assert isinstance(found, Place)
        return found
    if kind == "web":
        return Place(f"{request.getfixturevalue('folder').url}/expert_00", expert)
    servers = {"hub": "hub", "bucket": "s3"}
    if kind in servers:
        request.getfixturevalue(servers[kind])
    roots = {"hub": "hf://org/expert_00", "bucket": "s3://models/family/expert_00"}
    return Place(roots.get(kind, str(expert)), expert)


@pytest.fixture
def source(place: Place) -> Iterator[CheckpointSource]:
    with open_source(place.root) as opened:
        yield opened


def test_names_are_those_of_the_files_in_order(place: Place, source: CheckpointSource) -> None:
    names = source.list()
    assert names == sorted(names)
    assert {place.weights, "config.json"} <= set(names) <= {p.name for p in place.files.iterdir()}
    assert source.list("nothing") == []


def test_sizes_are_those_of_the_files(place: Place, source: CheckpointSource) -> None:
    sizes = {name: (place.files / name).stat().st_size for name in (place.weights, "config.json")}
    assert {name: source.size(name) for name in sizes} == sizes


def test_every_range_is_that_of_the_file(place: Place, source: CheckpointSource) -> None:
    data = (place.files / place.weights).read_bytes()
    n = len(data)
    for start, nbytes in (
        (0, 8),
        (0, n),
        (n, 0),
        (n - 1, 1),
        (n // 3, n // 2),
        (5, 1),
        (n // 2, 0),
    ):
        source.will_need(place.weights, start, nbytes)
        assert source.read_range(place.weights, start, nbytes) == data[start : start + nbytes]


def test_what_is_expected_changes_no_byte(place: Place, source: CheckpointSource) -> None:
    data = (place.files / place.weights).read_bytes()
    ranges = [
        FileRange(place.weights, at, min(len(data), at + 999)) for at in range(0, len(data), 4096)
    ]
    source.expect(ranges)
    for _, start, stop in reversed(ranges):
        assert source.read_range(place.weights, start, stop - start) == data[start:stop]


def test_threads_read_the_same_bytes_at_once(place: Place, source: CheckpointSource) -> None:
    data = (place.files / place.weights).read_bytes()
    starts = list(range(0, len(data) - 512, max(1, len(data) // 40)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: source.read_range(place.weights, at, 512), starts))
    assert found == [data[at : at + 512] for at in starts]


def test_a_read_past_the_end_says_that_the_file_changed(
    place: Place, source: CheckpointSource
) -> None:
    nbytes = (place.files / place.weights).stat().st_size
    for start, length in ((nbytes - 4, 8), (nbytes, 1), (nbytes + 100, 1)):
        with pytest.raises(CheckpointChangedError):
            source.read_range(place.weights, start, length)


@pytest.mark.parametrize("name", ["absent.safetensors", "../config.json", "/etc/hostname"])
def test_a_file_that_is_not_there_is_refused(source: CheckpointSource, name: str) -> None:
    for read in (source.size, source.mtime_ns, lambda n: source.read_range(n, 0, 1)):
        with pytest.raises(CheckpointError):
            read(name)


def test_stamps_are_the_same_whenever_it_is_opened(place: Place, source: CheckpointSource) -> None:
    with open_source(place.root, "once") as again:
        assert again.mtime_ns(place.weights) == source.mtime_ns(place.weights)
        assert again.read_range(place.weights, 0, 64) == source.read_range(place.weights, 0, 64)


def test_headers_tell_of_the_same_tensors(place: Place) -> None:
    found, own = (open_checkpoint(str(p), "expert") for p in (place.root, place.files))
    assert found.layout_sha256 == own.layout_sha256
    assert found.config == own.config
    assert [f.nbytes for f in found.files] == [f.nbytes for f in own.files]
    assert open_checkpoint(place.root, "expert").checkpoint_id == found.checkpoint_id


def test_closing_twice_is_fine(place: Place) -> None:
    source = open_source(place.root)
    assert source.read_range(place.weights, 0, 8)
    source.close()
    source.close()
