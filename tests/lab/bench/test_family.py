"""The benchmark families: the same for ever, extendable, whole, and models to everyone."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file

from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import family
from tests.lab.bench.family import deviation, make_family, make_model
from tests.lab.bench.layouts import PRESETS, Preset, layout, small_files

TINY = PRESETS["tiny"]
#: One large tensor and a norm, as `one-tensor`, but small.
FLAT = Preset("llama", 0, 64, 64, 4, 4, 16, 65536)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("made") / "tiny", TINY, 2)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of all files of models, by path."""
    files = (p for p in folder.rglob("*") if p.parent != folder and p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def test_an_extended_family_equals_one_made_at_once(tmp_path: Path) -> None:
    make_family(tmp_path / "grown", FLAT, 1)
    first = (tmp_path / "grown" / "expert_00").stat()
    make_family(tmp_path / "grown", FLAT, 3)
    make_family(tmp_path / "whole", FLAT, 3)
    again = (tmp_path / "grown" / "expert_00").stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert digests(tmp_path / "grown") == digests(tmp_path / "whole")
    assert len(set(digests(tmp_path / "whole").values())) > 3


def test_a_killed_generation_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(handle: int) -> None:
        raise KeyboardInterrupt("in the middle")

    make_family(tmp_path, FLAT, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt, match="in the middle"):
            make_model(tmp_path, FLAT, 0, 0)
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["base", "family.json"]
    assert len(list(tmp_path.glob(".making-*"))) == 1
    make_family(tmp_path, FLAT, 1)
    assert (tmp_path / "expert_00").exists()
    assert list(tmp_path.glob(".making-*")) == []


def test_a_folder_with_another_family_is_refused(tmp_path: Path) -> None:
    make_family(tmp_path, FLAT, 0)
    with pytest.raises(SystemExit, match="holds another family"):
        make_family(tmp_path, FLAT, 0, seed=1)


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty and holds no family"):
        make_family(tmp_path, FLAT, 0)


def test_memory_is_bounded_by_the_chunk_which_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family(tmp_path / "large", FLAT, 0)
    make_model(tmp_path / "large", FLAT, 0, 0)
    monkeypatch.setattr(family, "_CHUNK_ELEMS", 1 << 14)
    make_family(tmp_path / "small", FLAT, 0)
    tracemalloc.start()
    make_model(tmp_path / "small", FLAT, 0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert digests(tmp_path / "small") == digests(tmp_path / "large")
    # The tensor has 8 MiB; the order of its rows alone takes 8 bytes for each, twice.
    assert peak < 2 << 20


@given(arrays(np.float32, st.integers(1, 64), elements=st.floats(-4, 4, width=32)))
def test_rounding_is_that_of_torch(values: np.ndarray) -> None:
    ours = family._bfloat16(values.copy()).astype(np.int32)
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(ours, theirs.astype(np.int32) & 0xFFFF)


def test_deviations_are_as_large_as_announced(tiny: Path) -> None:
    base = weights(tiny / "base")
    for expert in (0, 1):
        tensors = weights(tiny / family.expert_name(expert))
        for number, tensor in enumerate(layout(TINY)):
            delta = tensors[tensor.name].double() - base[tensor.name].double()
            std = deviation(TINY, 0, expert, number)
            if tensor.is_embedding:
                changed = delta.any(dim=1)
                assert int(changed.sum()) == TINY.vocab // 2
                delta = delta[changed]
            if tensor.is_norm:
                assert float(delta.abs().max()) < 6 * std + 2**-8
            else:
                # Rounding to bfloat16 adds its own error, of half a step of 2⁻¹³ at most.
                assert float(delta.std()) == pytest.approx(std, rel=0.05, abs=4e-5)


def test_each_expert_leaves_other_rows_of_the_embedding_alone(tiny: Path) -> None:
    name = layout(TINY)[0].name
    base, *experts = (weights(tiny / n)[name] for n in ("base", "expert_00", "expert_01"))
    kept = [(expert == base).all(dim=1) for expert in experts]
    assert 0.2 < float((kept[0] & kept[1]).float().mean()) < 0.3


def test_one_expert_in_four_is_in_two_files_of_like_size(tiny: Path) -> None:
    sizes = [p.stat().st_size for p in sorted((tiny / "expert_01").glob("*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)
    assert len(list((tiny / "expert_00").glob("*.safetensors"))) == 1


def test_a_family_registers(tiny: Path, home: Warehouse) -> None:
    for name in ("base", "expert_00", "expert_01"):
        assert len(register(home, tiny / name).checkpoint.by_name) == len(layout(TINY))


@pytest.mark.parametrize("name", PRESETS)
def test_a_layout_is_that_of_the_transformers_model(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = json.loads(small_files(PRESETS[name])["config.json"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in layout(PRESETS[name])} == expected


@pytest.mark.peer
@pytest.mark.parametrize("preset", [TINY, FLAT], ids=["tiny", "one-tensor"])
def test_mergekit_merges_a_family(preset: Preset, tmp_path: Path) -> None:
    pytest.importorskip("mergekit")
    from tests.parity.peer import run_mergekit

    folder = make_family(tmp_path, preset, 2)
    rows = [f"- {{model: {folder}/expert_0{e}, parameters: {{weight: 1.0}}}}" for e in (0, 1)]
    merged = run_mergekit("\n".join(["merge_method: linear", "models:", *rows]))
    assert merged.keys() == {tensor.name for tensor in layout(preset)}
