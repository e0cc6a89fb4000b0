"""`python -m tests.lab.torture [CAMPAIGN …] [--seed N] [--short]` prints a table; 1: it found.

Campaigns: faults, kills, flips, hostile, states, hubs, rot, twins, travelling, guests; without one,
all.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.lab.torture.faults import Faults
from tests.lab.torture.flips import Flips
from tests.lab.torture.guests import Guests
from tests.lab.torture.hostile import Hostile
from tests.lab.torture.hubs import Hubs
from tests.lab.torture.kills import Kills
from tests.lab.torture.rot import Rot
from tests.lab.torture.scenes import RECIPES, learn_ids
from tests.lab.torture.states import States
from tests.lab.torture.tally import COLUMNS, Outcome, Problem, Tally
from tests.lab.torture.travelling import Travelling
from tests.lab.torture.twins import Twins
from tests.lab.torture.world import make_world, state_of

CAMPAIGNS = {
    "faults": Faults,
    "kills": Kills,
    "flips": Flips,
    "hostile": Hostile,
    "states": States,
    "hubs": Hubs,
    "rot": Rot,
    "twins": Twins,
    "travelling": Travelling,
    "guests": Guests,
}
_SHOWN = 12


def main(argv: Sequence[str]) -> int:
    """Run the campaigns; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.torture", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", default=list(CAMPAIGNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a sample, for `make test-all`")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for one campaign")
    parser.add_argument("--only", default="", help="tries whose description contains this")
    given = parser.parse_args(argv)
    wanted = CAMPAIGNS if given.campaigns == ["all"] else given.campaigns
    if unknown := set(wanted) - set(CAMPAIGNS):
        parser.error(f"no such campaign: {', '.join(unknown)}")
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        world = make_world(root / "world")
        warm_up(world)
        learn_ids(world, root / "oracle")
        tallies = [_run(name, world, root / name, given) for name in wanted]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"python -m tests.lab.torture {' '.join(argv)}")
    _show(tallies)
    return int(any(t.problems for t in tallies))


def warm_up(world: Path) -> None:
    """Load and compile what verbs need, once: a child then starts in milliseconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    os.environ.pop("MERGEPIPE_HOME", None)
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]  # as the program does
    import torch

    from mergepipe_pipeline.cli.main import main as cli

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    place = world.parent / "warm" / "w"
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        for args in (
            *(("merge", str(world / f"{name}.yml"), "--publish") for name in RECIPES),
            ("pack", "expert_00", "--base", "base"),
            ("merge", str(world / "budget.yml")),  # from the pack
            ("rollback", "full", "--to", "1"),
            ("gc", "--older-than", "0"),
        ):
            cli([*args, "--home", str(place)], standalone_mode=False)
        state_of(place.parent)


_campaign: Any = None
_folder = Path()
#: When tries begin no more. Processes end by themselves: some tries leave handlers of signals.
_until = 0.0


def _run(name: str, world: Path, folder: Path, given: argparse.Namespace) -> Tally:
    global _campaign, _folder, _until
    began = time.monotonic()
    _until = began + 60 * given.minutes
    _folder, tally = folder, Tally(name)
    _campaign = CAMPAIGNS[name](world, folder, short=given.short)
    tries = [t for t in _campaign.tries(given.seed) if given.only in str(t)]
    with get_context("fork").Pool(given.jobs) as pool:  # which inherit the campaign
        for number, outcome in enumerate(pool.imap_unordered(_judge, enumerate(tries))):
            if outcome is None:
                continue  # the table tells what was done
            tally.add(outcome)
            for problem in outcome.problems:
                print(f"{problem.column}: {problem.where}", file=sys.stderr)
            if sys.stderr.isatty():
                print(f"\r{name}: {number + 1} of {len(tries)}", end="", file=sys.stderr)
    tally.seconds = time.monotonic() - began
    _tell(tally)
    return tally


def _judge(numbered: tuple[int, Any]) -> Outcome | None:
    number, one = numbered
    if time.monotonic() > _until:
        return None
    folder = _folder / f"try-{number}"
    folder.mkdir(parents=True)
    try:
        outcome: Outcome = _campaign.judge(one, folder)
    except Exception:  # of the campaign itself: it must not pass for a try that went well
        told = traceback.format_exc()[-1500:]
        return Outcome.of("not judged", [Problem("wrong", str(one), told)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _tell(tally: Tally) -> None:
    print(f"{tally.campaign}: {', '.join(f'{n} {k}' for k, n in sorted(tally.tried.items()))}")
    if tally.states:
        print(f"{tally.campaign}: {len(tally.states)} distinct states")
    for problem in tally.problems[:_SHOWN]:
        print(f"  {problem.column}: {problem.where}\n    {problem.what}")
    if len(tally.problems) > _SHOWN:
        print(f"  … and {len(tally.problems) - _SHOWN} more")
    sys.stdout.flush()


def _show(tallies: Sequence[Tally]) -> None:
    rows = [("campaign", "tried", *COLUMNS, "seconds"), *(t.row() for t in tallies)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        shown = (c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *shown]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
