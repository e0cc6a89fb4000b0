"""Benchmarks: each file opens with its claim and the command that shows it."""

from __future__ import annotations

from pathlib import Path

#: Where benches keep families and write, unless told otherwise; git ignores it.
FOLDER = Path("bench")
