"""What a folder of a training run must be to be read; what is none is refused, and runs nothing."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from mergepipe_pipeline.checkpoints.dcp import METADATA, MOST_RUNS, Chunk, ChunkedTensor
from mergepipe_pipeline.checkpoints.open_checkpoint import is_complete, open_checkpoint
from mergepipe_pipeline.checkpoints.reader import open_reader
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from tests.checkpoints.runs import save_alone
from tests.support.laws import examples

STATE = {"model": {"a.weight": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2)}}
SIZE, NAME = torch.Size([4, 3]), "model.a.weight"


def values(root: Path | str) -> dict[str, bytes]:
    """The bytes of each tensor."""
    checkpoint = open_checkpoint(str(root), "step")
    with open_reader(checkpoint) as reader:
        return {t.name: bytes(reader.read(t, 0, t.numel)) for t in checkpoint.tensors}


def values_or_error(root: Path) -> dict[str, bytes] | str:
    """The same, or the error that refuses it."""
    try:
        return values(root)
    except CheckpointError as error:
        return str(error)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small step that one process saved; read-only."""
    return save_alone(tmp_path_factory.mktemp("saved") / "step", STATE)


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "step")


class Hostile:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def _changed(folder: Path, change: Callable[[Any], object]) -> None:
    """Write `.metadata` anew as `change` leaves or returns it."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))


def _chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        place = m.storage_data[MetadataIndex(NAME, [0, 0])]
        m.state_dict_metadata[NAME].chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes
        ]
        m.storage_data |= {MetadataIndex(NAME, o): place for o, _ in boxes}

    return change


def _place(**parts: object) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        index = MetadataIndex(NAME, [0, 0])
        m.storage_data[index] = replace(m.storage_data[index], **parts)

    return change


def _tensor(**parts: object) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        m.state_dict_metadata[NAME] = replace(m.state_dict_metadata[NAME], **parts)

    return change


class Slow:
    """A key whose state, a nest of tuples, takes for ever to be hashed or written."""

    def __reduce__(self) -> tuple[object, ...]:
        return MetadataIndex, ("a",), {"fqn": NEST}


NEST: tuple[Any, ...] = reduce(lambda inner, _: (inner, inner), range(64), ())


def _set(name: str, value: object) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, value)


def _of_type(dtype: torch.dtype) -> Callable[[Any], None]:
    return _tensor(properties=TensorProperties(dtype))


#: Tables that are not those of the files, or of no files, by what is wrong with them.
TABLES: dict[str, Callable[[Any], object]] = {
    "a hole": _chunks(((0, 0), (1, 3)), ((2, 0), (2, 3))),
    "a hole at the end": _chunks(((0, 0), (3, 3))),
    "a hole at the start": _chunks(((1, 0), (3, 3))),
    "an overlap": _chunks(((0, 0), (3, 3)), ((2, 0), (2, 3))),
    "an overlap that makes up for a hole": _chunks(((0, 0), (2, 3)), ((1, 0), (2, 3))),
    "a chunk twice": _chunks(((0, 0), (4, 3)), ((0, 0), (4, 3))),
    "columns that overlap": _chunks(((0, 0), (4, 2)), ((0, 1), (4, 2))),
    "a chunk beyond": _chunks(((0, 0), (5, 3))),
    "a chunk far beyond": _chunks(((0, 0), (2**62, 3))),
    "a chunk of one dimension": _chunks(((0,), (12,))),
    "a chunk of three": _chunks(((0, 0, 0), (4, 3, 1))),
    "no chunk": _chunks(),
    "chunks in no list": _tensor(chunks="all"),
    "chunks that are numbers": _tensor(chunks=[1, 2]),
    "a larger shape": _tensor(size=torch.Size([5, 3])),
    "a smaller shape": _tensor(size=torch.Size([3, 3])),
    "another shape": _tensor(size=torch.Size([3, 4])),
    "an absurd shape": _tensor(size=torch.Size([2**62, 2**62])),
    "a shape that is a list": _tensor(size=[4, 3]),
    "a shape of texts": _tensor(size=Hostile(torch.Size, ("4", "3"))),
    "a shape of nothing": _tensor(size=Hostile(torch.Size)),
    "no shape": _tensor(size=None),
    "a negative shape": _tensor(size=Hostile(torch.Size, (-4, -3))),
    "a shape of sixty-five": _tensor(size=torch.Size([1] * 65)),
    "no properties": _tensor(properties=None),
    "a type of other width": _of_type(torch.bfloat16),
    "another type of that width": _of_type(torch.int32),
    "a quantised type": _of_type(torch.qint8),
    "a type of many numbers": _of_type(torch.complex128),
    "a type that is a text": _tensor(properties="torch.float32"),
    "an offset beyond": _place(offset=10**6),
    "an offset far beyond": _place(offset=2**80),
    "an offset to the middle": _place(offset=17),
    "an offset before the file": _place(offset=-1),
    "an offset of half a byte": _place(offset=0.5),
    "an offset that is true": _place(offset=True),
    "no offset": _place(offset=None),
    "an absurd length": _place(length=2**61),
    "a short length": _place(length=100),
    "a length of nothing": _place(length=0),
    "a length that is cut": _place(length=1400),
    "a length that is a text": _place(length="1577"),
    "a file above": _place(relative_path="../secret"),
    "a file from the root": _place(relative_path="/etc/passwd"),
    "a file with NUL": _place(relative_path="__0_0.distcp\0"),
    "a file of no name": _place(relative_path=""),
    "a file that is a number": _place(relative_path=0),
    "a file that is the table": _place(relative_path=METADATA),
    "a file that is not there": _place(relative_path="__7_0.distcp"),
    "a compressed place": _place(transform_descriptors=["zstd"]),
    "places in no table": _set("storage_data", [1]),
    "no places": _set("storage_data", {}),
    "places of numbers": _set("storage_data", {1: 2}),
    "tensors in no table": _set("state_dict_metadata", None),
    "tensors of tensors": _set("state_dict_metadata", {NAME: {"a": 1}}),
    "no tensors": _set("state_dict_metadata", {}),
    "bytes alone": _set("state_dict_metadata", {NAME: BytesStorageMetadata()}),
    "a tensor that is a class": _set("state_dict_metadata", {NAME: Metadata}),
    "a name that is a number": lambda m: m.state_dict_metadata.update(
        {7: m.state_dict_metadata[NAME]}
    ),
    "a name that acts on terminals": lambda m: _renamed(m, "model.\x1b[2J"),
    "keys that are tuples": _set("planner_data", {("a",) * 3: 1}),
    "a list": lambda _: [1, 2],
    "a number": lambda _: 3,
    "nothing": lambda _: BytesStorageMetadata(),
    "a call": lambda _: Hostile(print, "run"),
    "a call of a method": lambda _: Hostile(getattr, "a text", "upper"),
    "a call among places": _set("storage_data", Hostile(exec, "1")),
    "an object of another class": _set("planner_data", Path),
    "an object of no list": _set("planner_data", torch.nn.Linear),
    "a file that is a nest of tuples": _place(relative_path=NEST),
    "an offset that is one": _place(offset=NEST),
    "a transform that is one": _place(transform_descriptors=[NEST]),
    "a shape that is one": _tensor(size=Hostile(torch.Size, NEST)),
    "a place of one": _set("storage_data", {Slow(): 1}),
    "a set": _set("planner_data", {1, 2}),
    "a large number": _set("planner_data", 1 << 3000),
}


def _renamed(m: Any, name: str) -> None:
    index = MetadataIndex(NAME, [0, 0])
    m.storage_data[MetadataIndex(name, [0, 0])] = m.storage_data.pop(index)
    m.state_dict_metadata[name] = m.state_dict_metadata.pop(NAME)


@pytest.mark.parametrize("wrong", TABLES)
def test_tables_that_are_not_those_of_the_files_are_refused(step: Path, wrong: str) -> None:
    _changed(step, TABLES[wrong])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(step), "step")
    assert None not in (caught.value.where, caught.value.found, caught.value.next_step)
    assert str(caught.value).isprintable()


def _ran(path: Path) -> list[bytes]:
    """Pickles that make `path` if anything of them is run, by every opcode that calls."""
    made = str(path).encode()
    text = b"X" + len(made).to_bytes(4, "little") + made
    return [
        pickle.dumps(Hostile(open, str(path), "w")),
        pickle.dumps(Hostile(shutil.copy, __file__, str(path))),
        pickle.dumps(Metadata({}, Hostile(open, str(path), "w"))),
        b"cposix\nsystem\n(Vtouch " + made + b"\ntR.",
        b"(Vtouch " + made + b"\niposix\nsystem\n.",
        b"(cposix\nsystem\nVtouch " + made + b"\no.",
        b"\x80\x04cpathlib\nPath\n(" + text + b"t\x81\x94N}b.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        b"\x80\x02\x82\x01" + text + b"\x85R.",
    ]


@pytest.mark.parametrize("number", range(9))
def test_nothing_that_a_pickle_names_is_run(step: Path, tmp_path: Path, number: int) -> None:
    (step / METADATA).write_bytes(_ran(tmp_path / "ran")[number])
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        open_checkpoint(str(step), "step")
    assert not (tmp_path / "ran").exists()


@settings(max_examples=examples(60))
@given(st.data())
def test_damaged_tables_are_refused_or_read_and_nothing_else(
    saved: Path, data: st.DataObject
) -> None:
    raw = bytearray((saved / METADATA).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), data.draw(st.integers(0, len(raw)))]))]
    (saved.parent / "damaged").mkdir(exist_ok=True)
    shutil.copy(saved / "__0_0.distcp", saved.parent / "damaged")
    (saved.parent / "damaged" / METADATA).write_bytes(raw)
    found = values_or_error(saved.parent / "damaged")
    assert isinstance(found, dict) or found.isprintable()


@settings(max_examples=examples(60))
@given(st.data())
def test_damaged_files_are_refused_or_give_as_many_bytes(saved: Path, data: st.DataObject) -> None:
    raw = bytearray((saved / "__0_0.distcp").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (saved.parent / "damaged").mkdir(exist_ok=True)
    shutil.copy(saved / METADATA, saved.parent / "damaged")
    (saved.parent / "damaged" / "__0_0.distcp").write_bytes(raw)
    found = values_or_error(saved.parent / "damaged")
    if isinstance(found, dict):
        assert {n: len(b) for n, b in found.items()} == {"a.weight": 48, "b": 8}
    else:
        assert found.isprintable()


def test_a_zip_that_places_its_files_behind_its_end_is_refused(saved: Path) -> None:
    raw = bytearray((saved / "__0_0.distcp").read_bytes())
    at = raw.index(b"PK\x01\x02") + 42  # where the directory says that the first file begins
    raw[at : at + 4] = (1 << 16).to_bytes(4, "little")
    (saved.parent / "damaged").mkdir(exist_ok=True)
    shutil.copy(saved / METADATA, saved.parent / "damaged")
    (saved.parent / "damaged" / "__0_0.distcp").write_bytes(raw)
    assert "stored" in str(values_or_error(saved.parent / "damaged"))


_Cuts = st.lists(st.integers(0, 7), max_size=2)


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(st.integers(1, 7), _Cuts), max_size=4), st.randoms())
def test_runs_of_any_grid_of_chunks_are_where_numpy_has_their_elements(
    axes: list[tuple[int, list[int]]], random: Any
) -> None:
    shape = tuple(n for n, _ in axes)
    edges = [sorted({0, n, *(c for c in cuts if c < n)}) for n, cuts in axes]
    boxes = list(product(*(pairwise(e) for e in edges)))
    random.shuffle(boxes)
    whole = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    parts = [whole[tuple(slice(a, b) for a, b in box)].ravel() for box in boxes]
    chunks = tuple(
        Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box), "f", 0, 0) for box in boxes
    )
    found = np.full(whole.size, -1)
    for start, n, number, at in ChunkedTensor("t", (), "F32", shape, chunks).runs("here"):
        found[start : start + n] = parts[number][at : at + n]
    assert (found == whole.ravel()).all()


def test_a_tensor_that_is_cut_too_fine_is_refused_and_takes_no_time() -> None:
    halves = tuple(Chunk((0, c), (1 << 40, 1), "f", 0, 0) for c in (0, 1))
    with pytest.raises(CheckpointError, match=f"{MOST_RUNS} runs"):
        ChunkedTensor("t", (), "F32", (1 << 40, 2), halves).runs("here")


def test_a_step_without_all_of_its_files_is_not_whole_yet(step: Path) -> None:
    shutil.move(step / METADATA, step / ".metadata.tmp")
    assert "has not finished to save" in str(is_complete(str(step)))
    with pytest.raises(IncompleteCheckpointError, match="torch writes last"):
        open_checkpoint(str(step), "step")
    shutil.move(step / ".metadata.tmp", step / METADATA)
    with (step / "__0_0.distcp").open("r+b") as file:
        file.truncate(900)
    with pytest.raises(IncompleteCheckpointError, match="too short"):
        open_checkpoint(str(step), "step")
    (step / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match="not there yet"):
        open_checkpoint(str(step), "step")


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py"),
        ("mp_rank_00_model_states.pt", "zero_to_fp32.py"),
        ("mp_rank_00/model_optim_rng.pt", "tools/checkpoint/convert.py"),
        ("mp_rank_01_003/model_rng.pt", "tools/checkpoint/convert.py"),
    ],
)
def test_formats_of_other_trainers_are_refused_with_the_command_that_converts(
    tmp_path: Path, file: str, command: str
) -> None:
    path = tmp_path / "global_step3" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=command):
        open_checkpoint(str(tmp_path / "global_step3"), "step")


def test_what_is_strided_or_in_another_format_is_refused(tmp_path: Path) -> None:
    save_alone(tmp_path / "strided", {"a": torch.arange(12.0).reshape(3, 4).t()})
    with pytest.raises(CheckpointError, match="or a transpose"):
        open_checkpoint(str(tmp_path / "strided"), "step")
    writer = FileSystemWriter(
        tmp_path / "other", serialization_format=SerializationFormat.SAFETENSORS
    )
    save_alone(tmp_path / "other", {"a": torch.ones(3)}, writer)
    with pytest.raises(CheckpointError, match="SerializationFormat"):
        open_checkpoint(str(tmp_path / "other"), "step")


def test_names_begin_where_the_folder_says_and_a_choice_is_the_users(tmp_path: Path) -> None:
    model = STATE["model"]
    optim = {"state": {"a.weight": {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1}]}
    states: dict[str, dict[str, Any]] = {
        "flat": {**model, "state.a.weight.exp_avg": torch.ones(4, 3), "param_groups.lr": 0.1},
        "named": {"model": model, "optimizer": optim, "step": torch.tensor(3)},
        "app": {"app": {"model": model, "optim": optim}, "train_state": {"step": 3}},
        "wrapped": {"model": {f"_orig_mod.{n}": t for n, t in model.items()}},
        "two": {"model": model, "ema": {n: t + 1 for n, t in model.items()}},
        "none": {"optimizer": optim},
    }
    for name, state in states.items():
        save_alone(tmp_path / name, state)
    wanted = {n: t.numpy().tobytes() for n, t in model.items()}
    for name in ("flat", "named", "app", "wrapped"):
        assert values(tmp_path / name) == wanted
    with pytest.raises(CheckpointError, match=r"'ema.', 'model.'.*\?prefix="):
        open_checkpoint(str(tmp_path / "two"), "step")
    with pytest.raises(CheckpointError, match="of no model"):
        open_checkpoint(str(tmp_path / "none"), "step")
    assert values(f"dcp://{tmp_path / 'two'}?prefix=model.") == wanted
    ema = {n: (t + 1).numpy().tobytes() for n, t in model.items()}
    assert values(f"dcp://{tmp_path / 'two'}?prefix=ema.") == ema
    for query, said in (("prefix=nobody.", "'nobody.'"), ("names=ema.", "keys names")):
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(f"dcp://{tmp_path / 'two'}?{query}", "step")


def test_tables_without_paths_have_the_names_as_they_are(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save_alone(tmp_path / "step", STATE["model"], planner=planner)
    assert pickle.loads((tmp_path / "step" / METADATA).read_bytes()).planner_data is None
    assert list(values(tmp_path / "step")) == ["a.weight", "b"]
