"""The first thing that the command `mergepipe` runs: until it is loaded, Ctrl-C just ends it."""

from __future__ import annotations

import signal


def program() -> None:
    """Load `mergepipe` and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mergepipe_pipeline.cli.main import program as run

    run()
