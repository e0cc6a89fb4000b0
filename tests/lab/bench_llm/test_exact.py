"""Every codec that is installed gives an expert back, or the table has no row."""

from __future__ import annotations

from pathlib import Path

from tests.lab.bench_llm.exact import rows
from tests.support.family import make_family


def test_every_codec_gives_the_bytes_of_an_expert_back(tmp_path: Path) -> None:
    family = make_family(tmp_path, k=1)
    found = {row.codec: row for row in rows(family / "base", family / "expert_00")}
    assert found.keys() >= {"pack, exact levels", "zstd of XOR, bytes apart"}
    assert all(0 < row.share < 2 for row in found.values())
