"""`convert`: pickled weights become safetensors, and nothing of a pickle is run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    IncompleteCheckpointError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.progress import Advance, Silent
from mergepipe_pipeline.verbs.explain import explain
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.verbs.tools import convert
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse


def pickled(family: Path, folder: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """The family's first expert with its weights in pickles."""
    shutil.copytree(family / "expert_00", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, kind = list(tensors), {"_use_new_zipfile_serialization": not legacy}
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **kind)
        return folder
    weight_map = {n: f"pytorch_model-{i % shards:05d}.bin" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, **kind)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a converted folder."""
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in expected.items())


def test_a_snapshot_has_every_bit_config_and_tokenizer_and_is_verified_and_merged(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    source = pickled(family, tmp_path / "old", legacy=True)
    recipe = tmp_path / "r.yml"
    text = "merge_method: linear\nmodels:\n  - model: {}\n    parameters: {{weight: 1}}\n"
    recipe.write_text(text.format(source))
    with pytest.raises(MergePipeError, match="mergepipe convert"):
        merge(home, recipe)
    made = convert(home, str(source))
    expected = load_file(family / "expert_00" / "model.safetensors")
    same(read(made.path), expected)
    assert {"config.json", "tokenizer.json"} <= {p.name for p in Path(made.path).iterdir()}
    assert verify(home, made.snapshot_id).nbytes > made.nbytes
    recipe.write_text(text.format(made.path))
    same(read(merge(home, recipe).outcome.snapshot.path), expected)
    assert verify_all(home).findings == ()
    assert verify_all(home, scopes=["inputs"]).findings == ()
    assert explain(home, made.snapshot_id).provenance["made_by"]["verb"] == "convert"
    with pytest.raises(NotFoundError, match="No recipe made this snapshot"):
        replay(home, made.snapshot_id)


def test_shards_of_shared_tied_and_strided_tensors_become_shards_with_each_as_it_is(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    source = pickled(family, tmp_path / "old", shards=2)
    embedding = torch.randn(8, 4)
    tensors = {
        "model.embed_tokens.weight": torch.nn.Parameter(embedding),
        "lm_head.weight": embedding,
        "x": embedding.T,
        "y": embedding[::2, 1:3],
        "z": embedding,
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4, dtype=torch.float16),
        "flag": torch.tensor([True, False]),
    }
    state = {"state_dict": {**tensors, "step": 7}, "optimizer": {"lr": 1.0}}
    one, two = sorted(source.glob("*.bin"))
    index = source / "pytorch_model.bin.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    kept = {n: f for n, f in weight_map.items() if f == two.name}
    index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, one.name)}))
    torch.save(state, one)
    made = convert(home, str(source), tmp_path / "new")
    expected = {k: v.detach().contiguous() for k, v in tensors.items() if k != "lm_head.weight"}
    same(read(made.path), {**expected, **torch.load(two, weights_only=True)})
    assert len(open_checkpoint(made.path, "new").files) == 2
    assert made.details["tied"] == ("lm_head.weight",)
    assert made.details["shared"] == {"z": "model.embed_tokens.weight"}
    assert made.details["left_out"] == ("step",)
    assert convert(home, str(source), tmp_path / "new") == made
    (tmp_path / "new" / "config.json").write_text("{}")
    with pytest.raises(MergePipeError, match="holds a result already"):
        convert(home, str(source), tmp_path / "new")
    two.unlink()
    with pytest.raises(CheckpointError, match=r"not there.*pytorch_model-00001\.bin"):
        convert(home, str(source))
    index.write_text(json.dumps({"weight_map": {"x": one.name, "lost": one.name}}))
    with pytest.raises(IncompleteCheckpointError, match=r"index names.*tensor lost"):
        convert(home, str(source))


class _Writes:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self._path}",)


def test_a_hostile_pickle_is_refused_by_name_and_nothing_of_it_runs(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    source, written = pickled(family, tmp_path / "old"), tmp_path / "written"
    file = source / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": _Writes(written)}, file)
    with pytest.raises(CheckpointError, match=r"asks for code.*pytorch_model\.bin.*posix\.system"):
        convert(home, str(source), tmp_path / "new")
    assert not written.exists()
    torch.load(file, weights_only=False)
    assert written.exists()  # so that the test would have seen it


def test_a_file_that_unfolds_to_terabytes_is_refused_and_leaves_nothing(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    source = pickled(family, tmp_path / "old")
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="unfold to"):
        convert(home, str(source), tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "warehouse"]


class Replacing(Silent):
    """Puts another file in the place of a pickled one as soon as it was digested."""

    def __init__(self, new: Path, place: Path) -> None:
        self._new, self._place = new, place

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """As `Silent`, then the replacement."""
        yield lambda nbytes: None
        if label.startswith("read "):
            shutil.copy(self._new, self._place)


@pytest.mark.parametrize("to", ["snapshot", "out"])
def test_a_file_that_is_replaced_while_it_is_converted_is_refused(
    family: Path, home: Warehouse, tmp_path: Path, to: str
) -> None:
    folder, other = pickled(family, tmp_path / "p"), tmp_path / "other.bin"
    weights = folder / "pytorch_model.bin"
    torch.save({n: -t for n, t in torch.load(weights).items()}, other)
    out = None if to == "snapshot" else tmp_path / "out"
    with pytest.raises(CheckpointChangedError, match=r"pytorch_model\.bin"):
        convert(home, str(folder), out, Replacing(other, weights))
    assert not list(home.snapshots.glob("*"))
    assert not (tmp_path / "out").exists()
    same(read(convert(home, str(folder), out).path), torch.load(other))
