"""Compiles the kernels of merges, so that no worker of the suite does.

A fresh clone has none; each worker would compile most of them, which takes a core 40 s.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.lab.torture.__main__ import warm_up
from tests.lab.torture.world import make_world

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        warm_up(make_world(Path(folder) / "world"))
