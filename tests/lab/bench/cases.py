"""The merges that are measured: their recipes, and what each contender is asked to do.

Not a runner: it gives recipe texts and command lines, and takes from `mergepipe plan --json` how
many bytes a perfect merge would move. `bench_merge` runs them in turn.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.lab.bench import limit
from tests.lab.bench.measure import weight_files
from tests.lab.bench.rows import Needed

_BIN = Path(sys.executable).parent
MERGEPIPE = str(_BIN / "mergepipe")
MERGEKIT = str(_BIN / "mergekit-yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of merge. known: the experts have been analysed before, which is not measured."""

    name: str
    method: str
    parameters: str
    budget: str | None = None
    known: bool = True
    based: bool = True

    @property
    def peer_name(self) -> str | None:
        """The case whose measurement of mergekit, which knows no catalog, is this one's too."""
        return None if self.budget else self.method


_TIES = "{weight: 1.0, density: 0.2}"
CASES = {
    case.name: case
    for case in (
        Case("linear", "linear", "{weight: 1.0}", based=False),
        Case("task_arithmetic", "task_arithmetic", "{weight: 0.3}"),
        Case("ties", "ties", _TIES),
        Case("dare_ties", "dare_ties", "{weight: 1.0, density: 0.5}"),
        Case("ties-one-shot", "ties", _TIES, known=False),
        Case("ties-10%", "ties", _TIES, budget="10%"),
        Case("task_arithmetic-10%", "task_arithmetic", "{weight: 0.3}", budget="10%"),
    )
}


@dataclass(frozen=True, slots=True)
class Family:
    """A base and the first experts beside it."""

    base: Path
    experts: tuple[Path, ...]

    @staticmethod
    def at(folder: Path, k: int) -> Family:
        """The first `k` experts in `folder`. Raises SystemExit if there are fewer."""
        experts = sorted(folder.resolve().glob("expert_*"))[:k]
        if len(experts) < k or not (folder / "base").is_dir():
            raise SystemExit(f"{folder} has no base or only {len(experts)} of {k} experts")
        return Family(folder.resolve() / "base", tuple(experts))

    def files(self, *, based: bool) -> list[Path]:
        """The weight files that a merge reads: of the experts, and of the base if it has one."""
        return weight_files([self.base, *self.experts] if based else self.experts)


def write_recipe(case: Case, family: Family, folder: Path) -> Path:
    """A recipe that ours and mergekit read alike; the file's name says case and K."""
    rows = [f"- {{model: {e}, parameters: {case.parameters}}}" for e in family.experts]
    base = [f"base_model: {family.base}"] if case.based else []
    head = [f"merge_method: {case.method}", *base, "dtype: bfloat16", "models:"]
    file = folder / f"{case.method}-{len(family.experts)}.yml"
    file.write_text("\n".join([*head, *rows, ""]))
    return file


def mergepipe(home: Path, verb: str, recipe: Path, case: Case) -> list[str]:
    """Our command line for a verb on a recipe."""
    budget = ["--budget", case.budget] if case.budget else []
    return [MERGEPIPE, "--home", str(home), verb, str(recipe), *budget, "--json"]


def learn(case: Case, recipe: Path, known: Path) -> Needed:
    """Put all that a plan of `recipe` wants to know into the warehouse `known`; what it needs."""

    def ask(verb: str) -> dict[str, int]:
        done = subprocess.run(mergepipe(known, verb, recipe, case), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"mergepipe {verb} {recipe} failed: {done.stderr}")
        found: dict[str, int] = json.loads(done.stdout)
        return found

    checked, planned = ask("check"), ask("plan")
    total, bought = checked["expert_bytes_total"], planned["expert_bytes_planned"]
    return Needed(checked["base_bytes"], bought if case.known else total, checked["output_bytes"])


def ours(case: Case, recipe: Path, known: Path, home: Path) -> list[str]:
    """Our command, in a warehouse that has merged nothing but may know the experts."""
    shutil.rmtree(home, ignore_errors=True)
    if case.known:
        shutil.copytree(known / "catalog", home / "catalog")
    return mergepipe(home, "merge", recipe, case)


def mergekit(recipe: Path, out: Path) -> list[str]:
    """mergekit's command, with its defaults."""
    return [MERGEKIT, str(recipe), str(out), "--quiet"]


def physical_limit(needed: Needed, family: Family, out: Path, *, direct: bool) -> list[str]:
    """Read what is needed, from each expert as much, and write the output; see `limit`."""
    reads = []
    share, rest = divmod(needed.expert_nbytes, len(family.experts))
    wanted = [(family.base, needed.base_nbytes)]
    wanted += [(e, share + (i < rest)) for i, e in enumerate(family.experts)]
    for folder, nbytes in wanted:
        for file in weight_files([folder]):
            here = min(nbytes, file.stat().st_size)
            nbytes -= here
            reads += [f"{file}:{here}"] if here else []
    write = f"{out}:{needed.write_nbytes}"
    how = ["--direct"] if direct else []
    return [sys.executable, limit.__file__, *how, "--read", *reads, "--write", write]
