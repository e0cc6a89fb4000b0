"""Names of folders that are not of plain letters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.bounds import NAME
from mergepipe_pipeline.resolution.locate import free_name
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("expert_ü", "expert_u"),
        ("e\N{COMBINING ACUTE ACCENT}tude", "etude"),
        ("Ünï code", "Uni-code"),
    ],
)
def test_letters_of_a_name_lose_their_accents(home: Warehouse, folder: str, name: str) -> None:
    assert free_name(home.catalog, Path(folder), {}) == name


def test_folders_without_a_plain_letter_get_names_that_do_not_depend_on_their_order(
    home: Warehouse, tmp_path: Path
) -> None:
    folders = [tmp_path / "数学", tmp_path / "代码"]
    wanted = [free_name(home.catalog, folder, {}) for folder in folders]
    assert len(set(wanted)) == 2
    for n, folder in enumerate(folders):
        write_model(folder, tensors_of(0, n))
    assert [register(home, folder).name for folder in folders[::-1]] == wanted[::-1]


@given(
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60
    )
)
def test_every_folder_gets_a_name_that_the_catalog_takes(
    home_catalog: Warehouse, folder: str
) -> None:
    assert NAME.fullmatch(free_name(home_catalog.catalog, Path("/models") / f"{folder}x", {}))


@pytest.fixture(scope="module")
def home_catalog(tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """An empty warehouse for many examples."""
    return Warehouse.at(tmp_path_factory.mktemp("names")).ensure()
