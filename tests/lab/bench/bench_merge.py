"""Claim: a merge takes about as long as `cat` of its bytes or less, in less than 0.5 GiB of memory.

    python -m tests.lab.bench.bench_merge [--preset qwen3-0.6b | --family FOLDER] [-k 2 5]
        [--case ties …] [--rounds 3] [--peer] [--work FOLDER] [--json FILE]

The limit is the disk's own time for the bytes that the merge cannot do without: direct reads by
four threads beside a direct write with fsync. `cat` reads them one after the other through the page
cache, then writes. In every round, for every K and case, ours, the limit, cat and (`--peer`)
mergekit run in turn on the same files, which are dropped from the page cache before each and
checked to be gone; memory is full of other pages, as on a machine in use. Ours is the command
`mergepipe merge` in a warehouse that has merged nothing; libraries are warm from a merge of a tiny
family.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from tests.lab.bench.cases import (
    CASES,
    MERGEKIT,
    Case,
    Family,
    learn,
    mergekit,
    ours,
    physical_limit,
    write_recipe,
)
from tests.lab.bench.family import cached_family
from tests.lab.bench.measure import Measurement, run
from tests.lab.bench.options import family_and_work, keep, options
from tests.lab.bench.rows import Needed, Row, Setting, Spent, now

_OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Arena:
    """Where contenders meet: the families, and a folder for what is known and what is written.

    `fills_memory`: with other pages before each run, as on a machine in use.
    """

    family: Path
    tiny: Path
    work: Path
    timeout_s: float
    fills_memory: bool = True

    @property
    def known(self) -> Path:
        """The warehouse in which experts have been analysed; it outlives the run."""
        return self.work / "known"

    @property
    def scratch(self) -> Path:
        """What a contender writes; emptied after each."""
        return self.work / "scratch"

    def prepare(self, case: Case, k: int) -> Needed:
        """Analyse what is not known yet. Bytes that a perfect merge would move."""
        family = Family.at(self.family, k)
        return learn(case, write_recipe(case, family, self.work), self.known)

    def measure(
        self, who: str, case: Case, k: int, needed: Needed
    ) -> tuple[Measurement, Spent | None]:
        """One cold run of one contender, and what ours says of it. Raises as `measure.run`."""
        family = Family.at(self.family, k)
        recipe = write_recipe(case, family, self.work)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        small = write_recipe(case, Family.at(self.tiny, 2), self.scratch)
        out, small_out = self.scratch / "out", self.scratch / "small"
        warm_up: list[str] = []
        try:
            if who == "ours":
                command = ours(case, recipe, self.known, out)
                warm_up = ours(replace(case, known=False), small, self.known, small_out)
            elif who == "mergekit":
                command, warm_up = mergekit(recipe, out), mergekit(small, small_out)
            else:
                command = physical_limit(needed, family, out, direct=who == "limit")
            log = self.scratch / "log"
            cost = run(
                command,
                cold=family.files(based=case.based),
                warm_up=warm_up,
                filler=self.work / "filler" if self.fills_memory else None,
                timeout_s=self.timeout_s if who == "mergekit" else None,
                log=log,
                env=_OFFLINE,
            )
            return cost, Spent.told_by(log) if who == "ours" else None
        finally:
            shutil.rmtree(self.scratch)


def schedule(
    cases: Sequence[Case], ks: Sequence[int], number: int, peer_rounds: int
) -> Iterator[tuple[int, int, Case, str]]:
    """Round, K, case and contender, in turn; who was last in one round is first in the next.

    mergekit runs once for all cases that are one to it.
    """
    for turn, k in product(range(number), ks):
        met: set[str | None] = {None} if turn < peer_rounds else {c.peer_name for c in cases}
        for case in cases:
            peer = [] if case.peer_name in met else ["mergekit"]
            met.add(case.peer_name)
            contenders = ["ours", "limit", "cat", *peer]
            for who in contenders if turn % 2 == 0 else contenders[::-1]:
                yield turn, k, case, who


def rounds(
    arena: Arena, cases: Sequence[Case], ks: Sequence[int], number: int, peer_rounds: int
) -> Iterator[Row]:
    """All measurements, as they are done; a method is not tried again after mergekit's timeout."""
    needed = {(case.name, k): arena.prepare(case, k) for k, case in product(ks, cases)}
    setting = Setting.here(arena.family, arena.work)
    too_slow: set[tuple[str, str]] = set()
    for turn, k, case, who in schedule(cases, ks, number, peer_rounds):
        if (who, case.method) in too_slow:
            continue
        want, load = needed[case.name, k], os.getloadavg()[0]
        cost, spent = arena.measure(who, case, k, want)
        if cost.stopped:
            too_slow.add((who, case.method))
        name = case.method if who == "mergekit" else case.name
        yield Row(name, k, who, turn, want, cost, load, now(), setting, spent)


def main() -> None:
    """Rows as they come, then the tables."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("-k", type=int, nargs="+", default=[2, 5], help="numbers of experts")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--peer", action="store_true", help="run mergekit too")
    parser.add_argument("--peer-timeout", type=float, default=900, help="seconds")
    parser.add_argument("--peer-rounds", type=int, default=1)
    args = parser.parse_args()
    family, work = family_and_work(args, max(args.k))
    tiny = cached_family(args.families, "tiny", 2).resolve()
    arena = Arena(family, tiny, work, args.peer_timeout)
    cases = [CASES[name] for name in args.case]
    peer_rounds = args.peer_rounds if args.peer else 0
    if peer_rounds and not Path(MERGEKIT).exists():
        print("mergekit is not installed (.[peer]): measured without it")
        peer_rounds = 0
    keep(rounds(arena, cases, sorted(args.k), args.rounds, peer_rounds), args.json)


if __name__ == "__main__":
    main()
