"""What is known of a checkpoint is believed of files alone that were read for it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.facts import passes
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.reads import of, tensor_reads

OTHER = "not those that were analysed"


def twin_of(root: Path, place: Path, seed: int = 0) -> Path:
    """Another model with equal names, sizes, times, headers and samples."""
    shutil.copytree(root, place)
    spoil(place, seed)
    return place


def spoil(root: Path, seed: int = 0) -> None:
    """Change bytes that are in no sample, in place; sizes and times stay."""
    draw, before = random.Random(seed), open_checkpoint(str(root), "x")
    for entry in (t for t in before.tensors if t.nbytes > 1024):
        path = root / entry.file
        stat = path.stat()
        with path.open("r+b") as file:
            at = entry.start_byte + draw.randrange(0, entry.nbytes // 4, 2)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x40]))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_checkpoint(str(root), "x").checkpoint_id == before.checkpoint_id


def merged(home: Warehouse, base: Path, *experts: Path, budget: str | None = None) -> Snapshot:
    lines = ["merge_method: ties", f"base_model: {base}", "models:"]
    lines += [f"- {{model: {e}, parameters: {{weight: 0.5, density: 0.3}}}}" for e in experts]
    text = "\n".join([*lines, ""])
    plan = make_plan(home, parse(text, name="r", where="r"), budget=budget, block_elems=4096)
    return run_plan(home, plan).snapshot


def weights(snapshot: Snapshot) -> list[str]:
    """What was merged, under whatever name."""
    return [shard.sha256 for shard in snapshot.manifest.shards]


@pytest.fixture
def inputs(tmp_path: Path, family: Path) -> Path:
    """A copy of base and experts, and twins of two of them."""
    for name in ("base", "expert_00", "expert_01"):
        shutil.copytree(family / name, tmp_path / name)
    twin_of(tmp_path / "expert_00", tmp_path / "other" / "expert_00")
    twin_of(tmp_path / "base", tmp_path / "other" / "base", 1)
    return tmp_path


def learn(home: Warehouse, inputs: Path, history: str) -> None:
    for name in ("base", "expert_00"):
        register(home, inputs / name, base=None if name == "base" else "base")
    if history == "analysed":
        analyze(home, ["expert_00"])
    if history == "merged":
        merged(home, inputs / "base", inputs / "expert_00", inputs / "expert_01")
    if history == "packed":
        pack(home, ["expert_00"])


@pytest.mark.parametrize(
    ("history", "model"),
    [
        ("registered", "base"),
        ("analysed", "expert_00"),
        ("merged", "base"),
        ("packed", "expert_00"),
    ],
)
def test_a_twin_of_a_known_model_gives_its_own_result_or_is_refused_with_a_step(
    home: Warehouse, inputs: Path, history: str, model: str
) -> None:
    learn(home, inputs, history)
    roots = {name: inputs / name for name in ("base", "expert_00", "expert_01")}
    roots[model] = inputs / "other" / model
    clean = Warehouse.at(inputs / "clean").ensure()
    expected = weights(merged(clean, *roots.values()))
    if history == "registered":
        assert weights(merged(home, *roots.values())) == expected
        return
    before = sorted(p.name for p in home.snapshots.iterdir())
    with pytest.raises(CorruptionError, match=OTHER) as refused:
        merged(home, *roots.values())
    assert str(roots[model]) in str(refused.value)
    assert "elements" in str(refused.value)
    assert f"as it was read at {inputs / model}" in str(refused.value)
    assert "`cp -r`" in str(refused.value)
    assert sorted(p.name for p in home.snapshots.iterdir()) == before
    copy = inputs / "copy" / model
    shutil.copytree(roots[model], copy, copy_function=shutil.copyfile)  # as `cp -r` does
    roots[model] = copy
    assert weights(merged(home, *roots.values())) == expected


def test_of_two_models_with_one_id_in_one_recipe_the_second_is_refused(
    home: Warehouse, inputs: Path
) -> None:
    with pytest.raises(CorruptionError, match=OTHER) as refused:
        merged(home, inputs / "base", inputs / "expert_00", inputs / "other" / "expert_00")
    assert str(inputs / "other") in str(refused.value)


def test_an_analysis_that_was_killed_is_not_gone_on_with_from_another_model(
    home: Warehouse, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(home, inputs, "registered")
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(passes._Findings, "wait", killed)
        with pytest.raises(KeyboardInterrupt):
            analyze(home, ["expert_00"])
    roots = inputs / "base", inputs / "other" / "expert_00"
    with pytest.raises(CorruptionError, match=OTHER):
        merged(home, *roots)
    shutil.rmtree(inputs / "expert_00")  # nothing is left to compare with but what was learned
    with pytest.raises(CorruptionError, match=OTHER):
        merged(home, *roots)


@pytest.mark.parametrize("way", ["rewritten", "renamed"])
def test_a_twin_that_takes_a_models_place_is_refused_whatever_a_plan_reads(
    home: Warehouse, inputs: Path, way: str
) -> None:
    roots = inputs / "base", inputs / "expert_00"
    expected = merged(home, *roots, budget="20%").snapshot_id
    if way == "rewritten":
        spoil(inputs / "expert_00")
    else:
        shutil.rmtree(inputs / "expert_00")
        (inputs / "other" / "expert_00").rename(inputs / "expert_00")
    with pytest.raises(CorruptionError, match=OTHER):
        merged(home, *roots, budget="20%")
    if way == "rewritten":
        spoil(inputs / "expert_00")
        assert merged(home, *roots, budget="20%").snapshot_id == expected


def test_files_are_read_once_at_a_place_and_again_when_the_system_says_that_they_changed(
    home: Warehouse, inputs: Path
) -> None:
    base, expert = inputs / "base", inputs / "expert_00"
    with tensor_reads() as first:
        merged(home, base, expert)
    with tensor_reads() as again:
        merged(home, base, expert)
    assert not again
    moved = shutil.copytree(expert, inputs / "moved" / "expert_00")
    for change in (lambda: None, lambda: (moved / "model.safetensors").chmod(0o600)):
        change()
        with tensor_reads() as once:
            merged(home, base, moved)
        assert once.keys() == {k for k in first if k[0] == "expert_00"}
        assert of(once, "expert_00") == open_checkpoint(str(moved), "x").nbytes
        with tensor_reads() as again:
            merged(home, base, moved)
        assert not again


def test_links_that_share_a_results_layers_do_not_make_it_read_again(
    home: Warehouse, inputs: Path
) -> None:
    result = Path(merged(home, inputs / "base", inputs / "expert_00").path)
    merged(home, inputs / "base", result)
    shard = next(result.glob("*.safetensors"))
    links, changed_ns = shard.stat().st_nlink, shard.stat().st_ctime_ns
    os.link(shard, inputs / "link.safetensors")
    assert (shard.stat().st_nlink, shard.stat().st_ctime_ns) > (links, changed_ns)
    with tensor_reads() as reads:
        merged(home, inputs / "base", result)
    assert not reads


def test_revisions_of_the_hubs_cache_share_the_place_of_their_blob(
    home: Warehouse, inputs: Path
) -> None:
    cache = inputs / "models--org--model"
    shutil.copytree(inputs / "expert_00", cache / "blobs")
    roots = [cache / "snapshots" / revision for revision in ("a" * 40, "b" * 40)]
    for root in roots:
        root.mkdir(parents=True)
        for file in (cache / "blobs").iterdir():
            (root / file.name).symlink_to(f"../../blobs/{file.name}")
    checkpoints = [open_checkpoint(str(root), "x") for root in roots]
    places = [Contents(home, c).places.place_of(c) for c in checkpoints]
    assert places[0] == places[1] is not None


def test_a_place_that_cannot_be_written_down_is_verified_once_by_each_process(
    home: Warehouse, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(home, inputs / "base", inputs / "expert_00")
    moved = shutil.copytree(inputs / "expert_00", inputs / "moved" / "expert_00")
    checkpoint = open_checkpoint(str(moved), "expert_00")

    def refused(step: str) -> None:
        raise PermissionError(13, step)

    monkeypatch.setattr(atomic, "crash_hook", refused)
    for expected in (checkpoint.nbytes, 0):
        with tensor_reads() as reads:
            Contents(home, checkpoint).verify()
        assert of(reads, "expert_00") == expected
    monkeypatch.undo()
    places = Contents(home, checkpoint).places
    place = places.place_of(checkpoint)
    assert place is not None
    assert not list(home.catalog_dir.rglob(f"{place}.json"))
    with pytest.raises(CorruptionError, match=OTHER):
        Contents(home, open_checkpoint(str(inputs / "other" / "expert_00"), "expert_00")).verify()
    assert place in places
