"""Judges random tiny models: `python -m tests.drawn [--seed S] [--n 100] [--only NAME …]`."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.drawn.architectures import NAMES
from tests.drawn.draw import hush
from tests.drawn.judge import Verdict, judged


def main() -> None:
    """Print cases that are not right, and counts; exits with 1 where one is not expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--n", type=int, default=100, help="models, of each architecture by turns")
    parser.add_argument("--only", nargs="*", default=list(NAMES), metavar="NAME")
    parser.add_argument("--all", action="store_true", help="print what is right, too")
    given = parser.parse_args()
    hush()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for verdict in _verdicts(given.only, given.seed, given.n):
        counts[verdict.kind] += 1
        counts["unexpected"] += not verdict.is_expected
        if given.all or verdict.kind != "right":
            print(verdict, "" if verdict.is_expected else " (not expected)", flush=True)
    names = len(given.only[: given.n])
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "wrong"))
    told += f" ({counts['unexpected']} of both not expected)"
    print(f"{given.n} models of {names} architectures: {told}")
    raise SystemExit(1 if counts["unexpected"] else 0)


def _verdicts(names: list[str], seed: int, n: int) -> Iterator[Verdict]:
    for i in range(n):
        with tempfile.TemporaryDirectory() as folder:
            yield from judged(names[i % len(names)], seed + i // len(names), Path(folder))


if __name__ == "__main__":
    main()
