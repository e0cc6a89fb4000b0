"""What the benchmarks over families share: their options, and keeping rows as they come."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from tests.lab.bench import FOLDER
from tests.lab.bench.family import cached_family
from tests.lab.bench.layouts import PRESETS
from tests.lab.bench.report import line, report
from tests.lab.bench.rows import Row, append


def options(claim: str) -> argparse.ArgumentParser:
    """A parser with the options that say on what, where and how often to measure."""
    parser = argparse.ArgumentParser(description=claim)
    parser.add_argument("--family", type=Path, help="a folder with base and expert_*")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("--families", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, help="default: in FAMILIES, named after the family")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append rows to this file")
    return parser


def family_and_work(args: argparse.Namespace, k: int) -> tuple[Path, Path]:
    """The family's folder with at least `k` experts, and an existing folder to work in."""
    family: Path = args.family or cached_family(args.families, args.preset, k)
    work: Path = args.work or args.families / f"work-{family.name}"
    work.mkdir(parents=True, exist_ok=True)
    return family.resolve(), work.resolve()


def keep(rows: Iterable[Row], file: Path | None) -> None:
    """Print rows as they are measured and add them to `file`, then print their tables."""
    found = []
    for row in rows:
        found.append(row)
        if file:
            append(file, row)
        print(line(row), flush=True)
    print(report(found))
