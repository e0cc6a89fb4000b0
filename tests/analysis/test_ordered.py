"""A digest that several threads feed: in order of elements whoever comes first."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.ordered import OrderedHash
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.storage.source import LocalSource
from tests.analysis.pairs import analyze_one, windows_of
from tests.kinds import make_kinds


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), data=st.data())
def test_windows_are_taken_in_order_of_elements(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(256)) * 2
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    windows = data.draw(st.permutations(list(zip(starts, sizes, strict=True))))
    hashed = OrderedHash()
    with ThreadPoolExecutor(len(sizes)) as pool:
        for start, n in windows:
            pool.submit(hashed.update, start, n, memoryview(whole)[start : start + n])
    assert hashed.hexdigest() == blake3(whole[: sum(sizes)]).hexdigest()


def test_nobody_waits_for_what_will_not_come() -> None:
    hashed = OrderedHash()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hashed.update, 10, 10, memoryview(bytes(10)))
        hashed.abandon()
        with pytest.raises(CancelledError):
            waiting.result(timeout=60)


def test_a_read_that_fails_in_the_middle_of_a_pass_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, reads = make_kinds(tmp_path), []
    real = LocalSource.read_into

    def broken(self: LocalSource, path: str, start_byte: int, buffer: memoryview) -> None:
        reads.append(start_byte)
        if len(reads) == 3:
            raise CheckpointError("gone", where=path, next_step="")
        real(self, path, start_byte, buffer)

    monkeypatch.setattr(LocalSource, "read_into", broken)
    with windows_of(4096), pytest.raises(CheckpointError, match="gone"):
        analyze_one(kinds.experts["full"].model, kinds.base, [("w", "w")], BlockGrid(4096))
