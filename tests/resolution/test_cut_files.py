"""A tokenizer or config whose copy ended early goes into no result."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import IncompleteCheckpointError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def models(tmp_path: Path, family: Path) -> Path:
    """A copy of the family."""
    return Path(shutil.copytree(family, tmp_path / "models"))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kept", [0, 1, 0.5])
def test_a_file_of_the_base_that_ends_early_is_named_before_anything_is_read(
    home: Warehouse,
    family: Path,
    models: Path,
    recipe_text: Callable[..., str],
    name: str,
    kept: float,
) -> None:
    file = models / "base" / name
    if not file.exists():
        file.write_text('{"eos_token_id": 2, "pad_token_id": 0}')
    file.write_bytes(file.read_bytes()[: int(kept if kept == 1 else kept * file.stat().st_size)])
    text = recipe_text().replace(str(family), str(models))
    for verb in (check, merge):
        with pytest.raises(IncompleteCheckpointError, match=rf"ends early.*{name}.*copy the file"):
            verb(home, parse(text, name="r", where="r.yml"))
    assert not list(home.snapshots.iterdir())


def test_a_cut_file_of_an_expert_alone_is_not_used_and_stops_nothing(
    home: Warehouse, family: Path, models: Path, recipe_text: Callable[..., str]
) -> None:
    (models / "expert_00" / "tokenizer.json").write_text("{")
    text = recipe_text().replace(str(family), str(models))
    assert merge(home, parse(text, name="r", where="r.yml")).outcome.snapshot


def test_a_base_without_a_tokenizer_that_an_expert_has_is_warned_of(
    home: Warehouse, family: Path, models: Path, recipe_text: Callable[..., str]
) -> None:
    text = recipe_text().replace(str(family), str(models))
    told = "'base' has no tokenizer, so the result has none; 'expert_00' has one"

    def warned() -> bool:
        stages = check(home, parse(text, name="r", where="r.yml")).stages
        return any(told in w for w in stages[-1].recipe.warnings)

    assert (models / "base" / "tokenizer.json").exists()
    assert not warned()
    (models / "base" / "tokenizer.json").unlink()
    assert warned()


def test_a_tokenizer_that_is_not_copied_may_end_early(
    home: Warehouse, family: Path, models: Path, recipe_text: Callable[..., str]
) -> None:
    (models / "base" / "tokenizer.json").write_text("{")
    parsed = parse(recipe_text().replace(str(family), str(models)), name="r", where="r.yml")
    assert merge(home, parsed, copies_tokenizer=False).outcome.snapshot
