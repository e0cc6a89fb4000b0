"""Runs all published recipes here and in mergekit: `python -m tests.published [NAME …]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.published.corpus import RECIPES, SLOW, Outcome, outcome_of


def main(names: list[str]) -> None:
    """Print one line per recipe, and the shares at the end."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [name for name in RECIPES if name not in SLOW]:
            found.append(outcome_of(name, Path(folder)))
            print(_line(found[-1]), flush=True)
    ran, peer = [o for o in found if o.ours is None], [o for o in found if o.theirs is None]
    both = [o for o in ran if o.theirs is None]
    equal = [o for o in both if o.equal == 1]
    near = [o for o in both if o.equal is not None and 0.999 <= o.equal < 1]
    print(
        f"{len(found)} recipes: {len(ran)} run here, {len(peer)} in mergekit, {len(both)} in both"
    )
    print(
        f"of these {len(equal)} are equal in every element, {len(near)} in 99.9 % of them or more"
    )
    print(f"{sum(o.lenient for o in ran)} run here with --lenient only")


def _line(o: Outcome) -> str:
    ours = "lenient" if o.lenient and o.ours is None else "runs" if o.ours is None else "refused"
    theirs = "runs" if o.theirs is None else "fails"
    equal = "" if o.equal is None else f"{100 * o.equal:.4f} % equal"
    why = " | ".join(x[:150].replace("\n", " ") for x in (o.ours, o.theirs) if x)
    return f"{o.name:32} {ours:8} mergekit {theirs:6} {equal} {why}".rstrip()


if __name__ == "__main__":
    main(sys.argv[1:])
