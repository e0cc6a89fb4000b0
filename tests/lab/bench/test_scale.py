"""The arithmetic of many workers obeys what holds of any of them, and the page has its figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.bench.scale import LAYER_ELEMS, Rates, figures, main

PAGE = Path(__file__).parents[3] / "docs" / "platform.md"
speeds = st.floats(0.1, 50)
rates = st.builds(Rates, speeds, st.floats(1, 64), speeds, st.just(0.0) | speeds)


@given(rates, st.integers(1, 200), st.integers(2, 100))
def test_more_workers_are_never_slower_nor_faster_than_layers_and_storage_allow(
    rates: Rates, workers: int, experts: int
) -> None:
    here, more = (figures(rates, n, experts) for n in (workers, workers + 1))
    assert more.merge_s <= here.merge_s
    nbytes = 2 * (experts + 1) * sum(LAYER_ELEMS)
    assert here.merge_s >= nbytes / workers / rates.worker_nbytes_s
    assert here.merge_s >= 2 * (experts + 1) * max(LAYER_ELEMS) / rates.worker_nbytes_s
    assert not rates.storage or here.merge_s >= nbytes / rates.storage / 1e9
    assert nbytes / workers <= here.read_nbytes <= nbytes
    assert here.written_nbytes == here.read_nbytes // (experts + 1)


def test_the_layers_are_those_of_70_6_billion_elements() -> None:
    assert sum(LAYER_ELEMS) == 70_553_706_496


def test_the_tables_of_the_platform_page_are_what_the_commands_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = PAGE.read_text()
    commands = re.findall(r"`python -m tests\.lab\.bench\.scale([^`]*)`:\n\n((?:\|.*\n)+)", page)
    assert commands
    for arguments, table in commands:
        main(arguments.split())
        assert capsys.readouterr().out == table
