"""Turns: one holder at a time, whoever comes and goes, and nothing left behind."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mergepipe_pipeline.storage.atomic import turn


def test_one_of_many_has_its_turn_at_a_time_and_the_last_leaves_no_file(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "turn", 0, 0
    counting = threading.Lock()

    def take(number: int) -> None:
        nonlocal inside, most
        with turn(path, str(number).encode()):
            with counting:
                inside += 1
                most = max(most, inside)
            assert path.read_bytes() == str(number).encode()
            with counting:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(400)))
    assert most == 1
    assert os.listdir(tmp_path) == []


def test_a_full_disk_inside_a_turn_is_not_said_of_the_turn(tmp_path: Path) -> None:
    def fill() -> None:
        with turn(tmp_path / "turn", b""):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert os.listdir(tmp_path) == []
