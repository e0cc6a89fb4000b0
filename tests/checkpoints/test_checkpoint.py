"""Checkpoints are opened from headers, and whatever is not whole is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import is_complete, open_checkpoint
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from tests.storage.files import described, raw_file, sharded, write_index

ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"
ADAPTER = "adapter_model.safetensors"


def test_a_sharded_checkpoint_is_opened_with_all_tensors_and_its_config(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "x"}')
    found = open_checkpoint(str(folder), "m")
    assert {t.name: (t.file, t.shape) for t in found.tensors} == {
        "a": (ONE, (2, 3)),
        "b": (ONE, (6,)),
        "c": (TWO, (6,)),
    }
    assert [(f.path, f.nbytes) for f in found.files] == [
        (n, (folder / n).stat().st_size) for n in (ONE, TWO)
    ]
    assert found.config == '{"model_type": "x"}'
    assert is_complete(str(folder)) is None


def test_a_single_file_is_a_checkpoint_by_its_own_path_and_by_its_folder(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    by_file = open_checkpoint(str(tmp_path / "model.safetensors"), "m")
    by_folder = open_checkpoint(f"file://{tmp_path}", "m")
    assert by_file.checkpoint_id == by_folder.checkpoint_id
    assert by_file.tensors == by_folder.tensors


def test_touching_a_file_changes_the_checkpoint_s_id(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    before = open_checkpoint(str(folder), "m").checkpoint_id
    os.utime(folder / TWO, ns=(1, 1))
    assert open_checkpoint(str(folder), "m").checkpoint_id != before


def test_a_missing_shard_means_incomplete_and_names_the_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / TWO).unlink()
    message = rf"index\.json\. Expected 2 files.*index says, found 1 of them.*missing is {TWO}"
    with pytest.raises(IncompleteCheckpointError, match=message):
        open_checkpoint(str(folder), "m")
    assert TWO in (is_complete(str(folder)) or "")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=f"names of some say, found 1.*{TWO}"):
        open_checkpoint(str(folder), "m")


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"nothing in this checkpoint.*found 0 tensors"):
        open_checkpoint(str(tmp_path), "m")


@pytest.mark.parametrize("name", ["a\0", "a\nb", "\x1b[31m", "a\x9b"])
def test_a_tensor_whose_name_holds_control_characters_is_refused(tmp_path: Path, name: str) -> None:
    header = {"b": described(offsets=[8, 16]), name: described()}
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, bytes(16)))
    with pytest.raises(CheckpointError, match="control characters") as refused:
        open_checkpoint(str(tmp_path), "m")
    assert repr(name) in str(refused.value)


def test_a_truncated_shard_is_refused_with_its_file_and_size(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    nbytes = (folder / TWO).stat().st_size
    os.truncate(folder / TWO, nbytes - 1)
    with pytest.raises(
        IncompleteCheckpointError, match=rf"{TWO}.*{nbytes} bytes.*found {nbytes - 1} bytes"
    ):
        open_checkpoint(str(folder), "m")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": ONE, "b": ONE, "c": ONE}, "tensor c.*index says, found in no file"),
        ({"a": ONE, "b": TWO, "c": TWO}, "tensor b.*index says, found in"),
        ({"a": ONE, "c": TWO}, "tensor b.*no file as the index says"),
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, "tensor d.*found in no file"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    folder = sharded(tmp_path / "m")
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder), "m")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
)
def test_an_unreadable_index_means_incomplete(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(IncompleteCheckpointError, match="shard index cannot be read"):
        open_checkpoint(str(folder), "m")


@pytest.mark.parametrize("hostile", ["../secret.safetensors", "/etc/passwd", "a/../../x", "a\0b"])
def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path, hostile: str) -> None:
    folder = sharded(tmp_path / "m")
    save_file({"c": np.ones(6, np.float32)}, tmp_path / "secret.safetensors")
    write_index(folder, {"a": ONE, "b": ONE, "c": hostile})
    with pytest.raises(CheckpointError, match=r"leaves its checkpoint|not there"):
        open_checkpoint(str(folder), "m")


def test_a_tensor_in_two_files_is_refused_with_both_names(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"w": np.ones(3, np.float32)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"tensor w.*x\.safetensors and y\.safetensors"):
        open_checkpoint(str(tmp_path), "m")


def saved(folder: Path, **files: dict[str, int]) -> Path:
    """A file of vectors per keyword (its stem), each tensor filled with its number."""
    folder.mkdir(exist_ok=True)
    for stem, tensors in files.items():
        values = {n: np.full(3, number, np.float32) for n, number in tensors.items()}
        save_file(values, folder / f"{stem}.safetensors")
    return folder


def values_of(folder: Path) -> dict[str, float]:
    """The first number of every tensor that the checkpoint has, as its entries say where."""
    found = open_checkpoint(str(folder), "m")
    data = {f.path: (folder / f.path).read_bytes() for f in found.files}
    return {
        t.name: float(np.frombuffer(data[t.file], "<f4", 1, t.start_byte)[0]) for t in found.tensors
    }


CONSOLIDATED = {"consolidated": {"layers.0.w1": 1}}


@pytest.mark.parametrize(
    ("beside", "ignored"),
    [
        (CONSOLIDATED, "consolidated"),
        ({"model.fp16": {"w": 9}}, "model.fp16"),
        ({"value_head": {"v": 9}, "optimizer": {"m": 9}}, "optimizer value_head"),
        ({"model-00001-of-00002": {"w": 9}}, "model-00001-of-00002"),
    ],
)
def test_model_safetensors_is_the_model_and_what_lies_beside_it_is_named(
    tmp_path: Path, beside: dict[str, dict[str, int]], ignored: str
) -> None:
    alone = open_checkpoint(str(saved(tmp_path / "m", model={"w": 1, "b": 2})), "m")
    saved(tmp_path / "m", **beside)
    found = open_checkpoint(str(tmp_path / "m"), "m")
    assert values_of(tmp_path / "m") == {"w": 1, "b": 2}
    assert found.ignored_files == tuple(f"{n}.safetensors" for n in ignored.split())
    assert (found == alone, found.checkpoint_id) == (True, alone.checkpoint_id)


def test_the_files_of_an_index_are_the_model_and_others_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    shutil.copy(folder / ONE, folder / "consolidated.safetensors")
    saved(folder, **{"model-00001-of-00001": {"a": 9}})
    found = open_checkpoint(str(folder), "m")
    assert [f.path for f in found.files] == [ONE, TWO]
    assert found.ignored_files == (
        "consolidated.safetensors",
        "model-00001-of-00001.safetensors",
    )


def test_the_names_of_mistral_are_read_where_no_other_file_holds_the_model(tmp_path: Path) -> None:
    alone = saved(tmp_path / "m", **CONSOLIDATED)
    assert values_of(alone) == {"layers.0.w1": 1}
    parts = {f"consolidated-0000{i}-of-00002": {f"layers.{i}.w1": i} for i in (1, 2)}
    assert values_of(saved(tmp_path / "parts", **parts)) == {"layers.1.w1": 1, "layers.2.w1": 2}
    both = saved(tmp_path / "both", **parts, **{"model-00001-of-00001": {"v": 2, "w": 1}})
    assert values_of(both) == {"v": 2, "w": 1}
    assert len(open_checkpoint(str(both), "m").ignored_files) == 2


@pytest.mark.parametrize("is_sharded", [False, True])
def test_another_model_in_the_names_of_mistral_beside_the_model_is_refused(
    tmp_path: Path, is_sharded: bool
) -> None:
    folder = tmp_path / "m"
    first = "model-00001-of-00002" if is_sharded else "model"
    saved(folder, **{first: {"a": 1}}, consolidated={"layers.0.w1": 1, "layers.0.w2": 7})
    if is_sharded:
        write_index(
            saved(folder, **{TWO.removesuffix(".safetensors"): {"b": 2}}), {"a": ONE, "b": TWO}
        )
    with pytest.raises(CheckpointError, match=r"two models.*layers\.0\.w2.*remove consolidated"):
        open_checkpoint(str(folder), "m", probes=False)
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert open_checkpoint(str(folder), "m").ignored_files == ("consolidated.safetensors",)


def test_a_model_that_lies_in_one_file_and_in_shards_with_an_index_is_refused(
    tmp_path: Path,
) -> None:
    folder = saved(sharded(tmp_path / "m"), model={"a": 1, "b": 1, "c": 1})
    with pytest.raises(
        CheckpointError, match=rf"model twice.*{ONE}.*remove model\.safetensors, or"
    ):
        open_checkpoint(str(folder), "m")
    for shard in (ONE, TWO):
        (folder / shard).unlink()
    assert values_of(folder) == {"a": 1, "b": 1, "c": 1}  # an index of an earlier save is left


def test_pickled_weights_are_never_read_and_the_error_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*mergepipe convert"):
        open_checkpoint(str(tmp_path), "m")


def test_an_empty_folder_holds_no_weights(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="an empty folder"):
        open_checkpoint(str(tmp_path), "m")


def adapter(folder: Path, config: str = '{"peft_type": "LORA"}') -> Path:
    """A config and one tensor, named as peft names its files."""
    folder.mkdir(exist_ok=True)
    save_file({"q.lora_A.weight": np.ones(3, np.float32)}, folder / ADAPTER)
    (folder / "adapter_config.json").write_text(config)
    return folder


def test_an_adapter_is_opened_as_such_with_its_config(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    (folder / "training_args.bin").write_bytes(b"\x80\x04")
    found = open_checkpoint(str(folder), "a")
    assert (found.kind, found.adapter_config) == ("adapter", '{"peft_type": "LORA"}')
    assert [(t.name, t.file) for t in found.tensors] == [("q.lora_A.weight", ADAPTER)]
    assert is_complete(str(folder)) is None
    assert open_checkpoint(str(sharded(tmp_path / "m")), "m").kind == "full"


def test_another_adapter_config_is_another_checkpoint(tmp_path: Path) -> None:
    one = open_checkpoint(str(adapter(tmp_path / "a")), "a")
    os.utime(tmp_path / "a" / ADAPTER, ns=(one.files[0].mtime_ns, one.files[0].mtime_ns))
    (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    two = open_checkpoint(str(tmp_path / "a"), "a")
    assert one.files == two.files
    assert one.checkpoint_id != two.checkpoint_id


def test_the_id_of_a_full_checkpoint_is_over_its_files_alone(tmp_path: Path) -> None:
    found = open_checkpoint(str(sharded(tmp_path / "m")), "m")
    files = [[f.path, f.nbytes, f.mtime_ns, f.header_sha256] for f in found.files]
    assert found.stamp == short_digest(files)
    probes = [f.probe_sha256 for f in found.files]
    assert found.checkpoint_id == short_digest([[found.stamp, *probes]])


def short_digest(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def test_files_of_equal_times_and_headers_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    found = []
    for n in range(2):
        folder = tmp_path / str(n)
        folder.mkdir()
        values = {"a": np.zeros(1000, np.float32), "b": np.full(1000, n, np.float32)}
        save_file(values, folder / "model.safetensors")
        os.utime(folder / "model.safetensors", ns=(0, 0))
        found.append(open_checkpoint(str(folder), "m"))
    assert found[0].stamp == found[1].stamp
    assert found[0].checkpoint_id != found[1].checkpoint_id
    bare = open_checkpoint(str(tmp_path / "0"), "m", probes=False)
    assert bare.stamp == found[0].stamp


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_of_an_adapter_means_incomplete_and_names_the_other_half(
    tmp_path: Path, missing: str
) -> None:
    folder = adapter(tmp_path / "a")
    (folder / missing).unlink()
    with pytest.raises(IncompleteCheckpointError, match=f"{missing}.*found no such file"):
        open_checkpoint(str(folder), "a")
    assert missing in (is_complete(str(folder)) or "")


@pytest.mark.parametrize("text", ["", '{"r": 8', "[]", "null"])
def test_an_unreadable_adapter_config_means_incomplete(tmp_path: Path, text: str) -> None:
    with pytest.raises(IncompleteCheckpointError, match="adapter's config cannot be read"):
        open_checkpoint(str(adapter(tmp_path / "a", text)), "a")


def test_a_truncated_adapter_means_incomplete(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    os.truncate(folder / ADAPTER, (folder / ADAPTER).stat().st_size - 1)
    with pytest.raises(
        IncompleteCheckpointError, match=rf"{ADAPTER}.*truncated|truncated.*{ADAPTER}"
    ):
        open_checkpoint(str(folder), "a")


def test_a_pickled_adapter_is_never_read(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    assert open_checkpoint(str(folder), "a").kind == "adapter"
    (folder / ADAPTER).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin.*mergepipe convert"):
        open_checkpoint(str(folder), "a")


def test_an_adapter_beside_full_weights_is_refused(tmp_path: Path) -> None:
    folder = adapter(sharded(tmp_path / "m"))
    with pytest.raises(CheckpointError, match=f"an adapter and other weights.*{ONE}, {TWO}"):
        open_checkpoint(str(folder), "m")


def test_a_model_with_the_config_of_an_adapter_that_is_not_there_is_told_to_remove_it(
    tmp_path: Path,
) -> None:
    folder = saved(adapter(tmp_path / "m"), model={"w": 1})
    with pytest.raises(CheckpointError, match="folder of its own"):
        open_checkpoint(str(folder), "m")
    (folder / ADAPTER).unlink()
    with pytest.raises(CheckpointError, match=r"remove adapter_config\.json"):
        open_checkpoint(str(folder), "m")
    (folder / "adapter_config.json").unlink()
    assert values_of(folder) == {"w": 1}


def test_an_adapter_of_mlx_is_refused_with_how_to_fuse_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", adapters={"model.layers.0.self_attn.q_proj.lora_a": 1})
    saved(folder, **{"0000100_adapters": {"model.layers.0.self_attn.q_proj.lora_a": 1}})
    config: dict[str, object] = {"fine_tune_type": "lora", "model": "org/m-4bit", "num_layers": 16}
    config["lora_parameters"] = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"MLX.*mlx_lm\.fuse --model org/m-4bit .*dequantize"):
        open_checkpoint(str(folder), "a")


@pytest.mark.parametrize("file", ["model.safetensors", ADAPTER])
def test_weights_that_zero_3_left_empty_are_refused(tmp_path: Path, file: str) -> None:
    if file == ADAPTER:
        adapter(tmp_path)
    empty, whole = np.ones(0, np.float32), np.ones(3, np.float32)
    save_file({"q.weight": empty, "k.weight": empty, "q.bias": whole}, tmp_path / file)
    with pytest.raises(CheckpointError, match=r"not gathered.*2 of 3 tensors.*zero_to_fp32\.py"):
        open_checkpoint(str(tmp_path), "m")


def test_a_mark_in_every_header_makes_a_delta_checkpoint(tmp_path: Path) -> None:
    x = {"w": np.ones(3, np.float32)}, {"v": np.ones(3, np.float32)}
    save_file(x[0], tmp_path / ONE, {"mergepipe": "delta", "format": "pt"})
    save_file(x[1], tmp_path / TWO, {"mergepipe": "delta"})
    delta = open_checkpoint(str(tmp_path), "d")
    assert (delta.kind, delta.adapter_config, len(delta.tensors)) == ("delta", None, 2)


@pytest.mark.parametrize(
    ("mark", "message"),
    [(None, f"{TWO}.*found no mergepipe"), ({"mergepipe": "sum"}, f'{TWO}.*"mergepipe": "sum"')],
)
def test_files_that_disagree_on_what_they_hold_are_refused(
    tmp_path: Path, mark: dict[str, str] | None, message: str
) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / ONE, {"mergepipe": "delta"})
    save_file({"v": np.ones(3, np.float32)}, tmp_path / TWO, mark)
    with pytest.raises(CheckpointError, match=f"disagree on what they hold.*{message}"):
        open_checkpoint(str(tmp_path), "d")


def test_a_path_that_is_not_there_and_a_scheme_nobody_serves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing at this path that may be read"):
        open_checkpoint(str(tmp_path / "no"), "m")
    with pytest.raises(CheckpointError, match="found ftp://"):
        open_checkpoint("ftp://bucket/model", "m")


def test_a_config_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(folder), "m")
