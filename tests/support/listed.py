"""Tells which folders are listed, whoever lists them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def folders_listed() -> Iterator[list[Path]]:
    """The folders that are listed meanwhile, each time they are."""
    found: list[Path] = []

    def telling(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def list_folder(folder: Any = ".") -> Any:
            if not isinstance(folder, int):
                found.append(Path(os.fsdecode(folder)))
            return real(folder)

        return list_folder

    with (
        mock.patch.object(os, "listdir", telling(os.listdir)),
        mock.patch.object(os, "scandir", telling(os.scandir)),
    ):
        yield found
