"""Claim: a first analysis takes at most 1.3 times as long as reading the same bytes once, cold.

    python -m tests.lab.bench.bench_analysis FAMILY [--experts 5] [--rounds 3]

FAMILY is a folder with `base` and experts beside it. In every round the page cache is dropped for
all files, they are read through once in 4 MiB pieces, dropped again, and analysed from nothing in
a process of its own, base included. Memory is the process's peak, resident and anonymous.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.bench import FOLDER

_ANALYSE = """
import sys
from pathlib import Path
from mergepipe_pipeline.warehouse import Warehouse
home = Warehouse.at(sys.argv[1]).ensure()
base, *experts = map(Path, sys.argv[2:])
register(home, base, "base")
for path in experts:
    register(home, path, path.name, "base")
analyze(home, [path.name for path in experts])
status = Path("/proc/self/status").read_text()
found = dict(line.split(":", 1) for line in status.splitlines())
print(found["VmHWM"].split()[0], found["RssAnon"].split()[0])
"""


def weight_files(folders: list[Path]) -> list[Path]:
    """All safetensors files."""
    return [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]


def drop(files: list[Path]) -> None:
    """Take files out of the page cache."""
    os.sync()
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_through(files: list[Path]) -> float:
    """Seconds to read files once."""
    started = time.monotonic()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(4 << 20):
                pass
    return time.monotonic() - started


def analysed(home: Path, folders: list[Path]) -> tuple[float, str]:
    """Seconds of an analysis from nothing, and its memory."""
    shutil.rmtree(home, ignore_errors=True)
    command = [sys.executable, "-c", _ANALYSE, str(home), *map(str, folders)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    peak, anonymous = (int(kib) / 1024 for kib in done.stdout.split())
    return seconds, f"peak {peak:.0f} MiB resident, {anonymous:.0f} MiB anonymous at the end"


def main() -> None:
    """Rounds in turn, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", type=Path)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=FOLDER / "analysis")
    args = parser.parse_args()
    base = args.family.resolve() / "base"
    experts = sorted(p for p in base.parent.iterdir() if p.is_dir() and p != base)
    folders = [base, *experts[: args.experts]]
    files = weight_files(folders)
    nbytes = sum(file.stat().st_size for file in files)
    ratios = []
    for number in range(args.rounds):
        drop(files)
        read_s = read_through(files)
        drop(files)
        analysis_s, memory = analysed(args.home, folders)
        ratios.append(analysis_s / read_s)
        print(
            f"round {number + 1}: read {read_s:.1f} s ({nbytes / read_s / 1e9:.2f} GB/s), "
            f"analysis {analysis_s:.1f} s, ratio {ratios[-1]:.2f}; {memory}",
            flush=True,
        )
    shutil.rmtree(args.home)
    print(f"ratio min {min(ratios):.2f} median {statistics.median(ratios):.2f}", end="")
    print(f" max {max(ratios):.2f} over {nbytes / 1e9:.2f} GB of {len(folders)} models")


if __name__ == "__main__":
    main()
