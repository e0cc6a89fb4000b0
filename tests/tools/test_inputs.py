"""What the verbs without a recipe read is compared with what was known of it, as in a merge."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.tools import extract_lora, moe, transplant_tokenizer
from mergepipe_pipeline.warehouse import Warehouse
from tests.facts.test_input_segments import flip
from tests.tools.mixtures import make_family, write_config
from tests.tools.vocabularies import pair

#: Makes a result in a folder; which inputs it reads, and a part of a name of what it reads of each.
Tool = tuple[Callable[[Path], object], dict[Path, str]]


def _extract_lora(home: Warehouse, folder: Path) -> Tool:
    make_family(folder, "mistral")
    base, tuned = folder / "base", folder / "expert_00"
    read = {base: "q_proj", tuned: "q_proj"}
    return lambda out: extract_lora(home, str(tuned), str(base), out, rank=2), read


def _moe(home: Warehouse, folder: Path) -> Tool:
    make_family(folder / "f", "mistral")
    config = write_config(folder / "f", "mistral", "random")
    read = {folder / "f/base": "embed", folder / "f/expert_01": "mlp"}
    return lambda out: moe(home, config, out), read


def _transplant(home: Warehouse, folder: Path) -> Tool:
    recipient, donor = pair(folder, tied=True)
    read = {recipient: "mlp", donor: "embed"}
    return lambda out: transplant_tokenizer(home, str(recipient), str(donor), out), read


@pytest.mark.parametrize("verb", [_extract_lora, _moe, _transplant])
def test_a_bit_that_turned_in_a_known_input_gets_into_no_result(
    verb: Callable[[Warehouse, Path], Tool], home: Warehouse, tmp_path: Path
) -> None:
    make, inputs = verb(home, tmp_path)
    make(tmp_path / "before")
    for number, (folder, part) in enumerate(inputs.items()):
        tensors = load_file(next(folder.glob("*.safetensors")))
        name = next(name for name in tensors if part in name)
        flip(folder, name, 0.1)
        with pytest.raises(CorruptionError, match="not those that were analysed") as error:
            make(tmp_path / f"after-{number}")
        assert name in str(error.value)
        assert not (tmp_path / f"after-{number}").exists()
        flip(folder, name, 0.1)


def test_a_tokenizer_that_is_not_what_was_registered_gets_into_no_result(
    home: Warehouse, tmp_path: Path
) -> None:
    recipient, donor = pair(tmp_path, tied=True)
    register(home, donor)
    file = donor / "tokenizer.json"
    stat = file.stat()
    file.write_text(file.read_text().replace("w47", "w74"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptionError, match="not those that were registered"):
        transplant_tokenizer(home, str(recipient), str(donor), tmp_path / "out")
    assert not (tmp_path / "out").exists()
