"""Cold merges from packs and from originals, each beside what the disk takes for the same bytes.

Every contender starts with its inputs out of the page cache, which is full of other pages. "limit"
reads as many bytes of the same files past the page cache with four threads while it writes the
output; "cat" reads them one after the other and then writes. The first lines are analysis alone and
packing what is analysed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import limit
from tests.lab.bench.cases import CASES, MERGEPIPE, Family, write_recipe
from tests.lab.bench.measure import Measurement, run, weight_files

#: A recipe's case and the options of `merge`. The originals do not fit 60 %, exact levels do.
_ASKED = (
    ("originals", ("--no-packs",)),
    ("packs, exact", ("--budget", "60%")),
    ("packs, 25%", ("--budget", "25%")),
    ("packs, 10%", ("--budget", "10%")),
    ("packs, 1%", ("--budget", "1%")),
    ("blocks, 10%", ("--budget", "10%", "--no-packs")),
)
METHODS = ("task_arithmetic", "ties")


@dataclass(frozen=True, slots=True)
class _Arena:
    """The family, the warehouse that knows and has packed it, and a log for what commands say."""

    home: Warehouse
    family: Family
    log: Path

    @property
    def originals(self) -> list[Path]:
        return self.family.files(based=True)

    @property
    def frames(self) -> list[Path]:
        return sorted(self.home.packs_dir.rglob("*.frames"))

    def command(self, *words: str) -> list[str]:
        return [MERGEPIPE, "--home", str(self.home.root), *words]

    def cold(self, command: Sequence[str]) -> Measurement:
        """One cold run."""
        filler = self.log.with_name("filler")
        return run(command, cold=[*self.originals, *self.frames], filler=filler, log=self.log)

    def forget(self) -> None:
        """Leave the catalog and the packs alone."""
        for folder in (self.home.objects_dir, self.home.actions_dir, self.home.root / "snapshots"):
            shutil.rmtree(folder)
        self.home.ensure()


def times(folder: Path, family: Path, k: int, rounds: int) -> None:
    """Analyse, pack, then merge in rounds; print every measurement, then medians."""
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / "timed"
    shutil.rmtree(home, ignore_errors=True)
    arena = _Arena(Warehouse.at(home).ensure(), Family.at(family, k), folder / "log")
    _prepare(arena)
    recipes = [write_recipe(CASES[m], arena.family, folder) for m in METHODS]
    run(arena.command("merge", str(recipes[0]), "--budget", "3%"))  # compiles, warms libraries
    arena.forget()
    found: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(rounds):
        for method, recipe in zip(METHODS, recipes, strict=True):
            for name, options in _ASKED[:: 1 if turn % 2 == 0 else -1]:
                for who, cost in _round(arena, recipe, options):
                    print(_line(f"{method}, {name}, {who}", cost), flush=True)
                    found.setdefault((method, name, who), []).append(cost.wall_s)
    print(f"\n| K = {k} | ours | limit | cat | ours over limit |\n|---|---|---|---|---|")
    for method in METHODS:
        for name, _ in _ASKED:
            ours, bare, cat = (median(found[method, name, w]) for w in ("ours", "limit", "cat"))
            line = f"{ours:.1f} | {bare:.1f} | {cat:.1f} | {ours / bare:.2f}"
            print(f"| {method}, {name} | {line} |")
    shutil.rmtree(home)


def _prepare(arena: _Arena) -> None:
    """Analysis alone, then packing alone, each cold, in the warehouse that merges use."""
    base, experts = arena.family.base, arena.family.experts
    register(arena.home, base, base.name)
    words = [register(arena.home, e, e.name, base.name).name for e in experts]
    print(_line("analyse", arena.cold(arena.command("analyze", *words))), flush=True)
    print(_line("pack what is analysed", arena.cold(arena.command("pack", *words))), flush=True)
    stored = sum(f.stat().st_size for f in weight_files(experts))
    packed = sum(f.stat().st_size for f in arena.frames)
    print(f"packs: {packed / 1e9:.2f} GB, {packed / stored:.1%} of the experts", flush=True)


def _round(
    arena: _Arena, recipe: Path, options: Sequence[str]
) -> Iterator[tuple[str, Measurement]]:
    """Ours, then the limit and cat for the bytes that ours said it had read."""
    yield "ours", arena.cold(arena.command("merge", str(recipe), *options, "--json"))
    told = json.loads(arena.log.read_text())
    arena.forget()
    of_packs = "--no-packs" not in options
    sources = arena.frames if of_packs else weight_files(arena.family.experts)
    out = arena.home.root / "bare"
    base = weight_files([arena.family.base])
    size = sum(f.stat().st_size for f in base)
    files = [*_parts(sources, told["expert_bytes_read"]), *_parts(base, size)]
    for who, first in (("limit", ["--direct"]), ("cat", [])):
        words = [*first, "--read", *files, "--write", f"{out}:{size}"]
        yield who, arena.cold([sys.executable, limit.__file__, *words])
        out.unlink()


def _parts(files: Sequence[Path], nbytes: int) -> list[str]:
    """The first bytes of every file, in proportion, `nbytes` together but for rounding."""
    sizes = [f.stat().st_size for f in files]
    share = min(1.0, nbytes / sum(sizes))
    return [f"{f}:{int(s * share)}" for f, s in zip(files, sizes, strict=True) if int(s * share)]


def _line(name: str, cost: Measurement) -> str:
    return (
        f"{name}: {cost.wall_s:.1f} s, {cost.cpu_s:.1f} s of cores, "
        f"{cost.anon_nbytes >> 20} MiB anonymous"
    )
