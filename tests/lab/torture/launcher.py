"""`python -m tests.lab.torture.launcher ROOT [--fault KIND:AT:SEED] [--trace FILE] -- ARGS`.

Runs `mergepipe ARGS` in this process with a fault below ROOT; `--trace` gets its steps, one a line:
kind, module of the product that asked, path.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.lab.torture.shim import KINDS, Fault, Shim


def main(argv: list[str]) -> None:
    """Install the shim, then be the command line."""
    ours, args = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser("python -m tests.lab.torture.launcher", description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--fault", type=_fault)
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args(ours)
    shim = Shim(given.root.resolve(), given.fault)
    from mergepipe_pipeline.cli.main import program

    sys.argv = ["mergepipe", *args]
    shim.install()
    try:
        program()
    finally:
        if given.trace is not None:
            lines = (f"{s.kind}\t{s.module}\t{s.path}\n" for s in shim.steps)
            given.trace.write_text("".join(lines))


def _fault(text: str) -> Fault:
    kind, at, seed = [*text.split(":"), "0"][:3]
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind}: one of {', '.join(KINDS)}")
    return Fault(kind, int(at), int(seed))


if __name__ == "__main__":
    main(sys.argv[1:])
