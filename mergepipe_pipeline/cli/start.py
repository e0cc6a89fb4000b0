"""The first thing that the command `mergepipe` runs: until it is loaded, Ctrl-C just ends it."""

from __future__ import annotations

# `signal` itself takes a millisecond to load, in which Ctrl-C would end in a traceback.
import _signal as signal  # type: ignore[import-not-found]
import gc

#: New objects after which Python looks for cycles. Python's own 700 costs a plan of 20 experts 0.4
#: of 2.7 s: the plan is made of a million small objects, which all stay.
_NEW_OBJECTS = 100_000


def program() -> None:
    """Load `mergepipe` and run it."""
    gc.set_threshold(_NEW_OBJECTS)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mergepipe_pipeline.cli.main import program as run

    run()
