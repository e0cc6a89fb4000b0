"""What a second merge says of what changed since the first."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model
from tests.support.told import Told


def test_files_that_changed_under_their_name_are_said_and_are_its_next_version(
    tmp_path: Path,
) -> None:
    warehouse = Warehouse.at(tmp_path / "home").ensure()
    for expert, name in ((None, "base"), (1, "math")):
        write_model(tmp_path / name, tensors_of(0, expert))
    recipe = parse(
        f"merge_method: task_arithmetic\nbase_model: {tmp_path}/base\n"
        f"models: [{{model: {tmp_path}/math}}]\nparameters: {{weight: 0.5}}\n",
        name="m",
        where="m.yml",
    )
    told = Told()
    first = merge(warehouse, recipe, progress=told).outcome
    merge(warehouse, recipe, progress=told)
    assert not [w for w in told.warnings if w.startswith("math:")]
    write_model(tmp_path / "math", tensors_of(0, 7))
    second = merge(warehouse, recipe, progress=told).outcome
    assert first.snapshot.snapshot_id != second.snapshot.snapshot_id
    (warning,) = [w for w in told.warnings if w.startswith("math:")]
    assert f"the files in {tmp_path}/math are not those" in warning
    assert "version 2" in warning
