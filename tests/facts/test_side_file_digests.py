"""What stands beside weights is compared with what was registered before it goes into a result."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run


def flip(path: Path, *, keep_time: bool = True) -> None:
    """Turn a bit of the last letter or digit, so that JSON stays JSON."""
    data, was = bytearray(path.read_bytes()), path.stat()
    at = max(i for i, byte in enumerate(data) if chr(byte).isalnum())
    data[at] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize(
    ("extra", "file"),
    [
        ("", "base/tokenizer.json"),
        ("", "base/config.json"),
        ("tokenizer_source: union", "expert_00/tokenizer.json"),
        ("chat_template: auto", "base/tokenizer_config.json"),
    ],
)
def test_a_side_file_that_changed_since_it_was_registered_goes_into_no_result(
    home: Warehouse, family: Path, tmp_path: Path, extra: str, file: str
) -> None:
    inputs = shutil.copytree(family, tmp_path / "models")
    path = inputs / file
    if not path.exists():
        path.write_text('{"chat_template": "x", "pad_token": "a"}')
    for name in ("base", "expert_00"):
        register(home, inputs / name)
    models = "".join(f"- {{model: {inputs}/{n}}}\n" for n in ("base", "expert_00"))
    text = f"merge_method: linear\nmodels:\n{models}parameters: {{weight: 0.5}}\n{extra}\n"
    flip(path)
    with pytest.raises(MergePipeError) as error:
        run(home, text)
    assert "not those that were registered" in str(error.value)
    assert str(path.parent) in str(error.value)
    assert path.name in str(error.value)
    assert list_snapshots(home.snapshots) == []
    flip(path)
    run(home, text)


def test_a_side_file_that_was_replaced_is_another_one(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(family / "base", tmp_path / "base")
    register(home, model)
    text = f"merge_method: passthrough\nmodels: [{{model: {model}}}]\n"
    flip(model / "tokenizer.json", keep_time=False)
    run(home, text)
    flip(model / "tokenizer.json")
    with pytest.raises(CorruptionError, match="not those that were registered"):
        run(home, text)
