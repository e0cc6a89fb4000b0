"""Benchmarks: each file opens with its claim and the command that shows it."""

from __future__ import annotations

import os
from pathlib import Path

# Commands that are timed start as they do for users: with it, each start takes 1 s longer.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: Where benches keep families and write, unless told otherwise; git ignores it.
FOLDER = Path("bench")
