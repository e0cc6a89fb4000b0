"""Entry point: the group of commands, and nothing else."""

from __future__ import annotations

import atexit
import gc as garbage
import os
import sys
from contextlib import suppress
from importlib import import_module

import click

from mergepipe_pipeline import __version__
from mergepipe_pipeline.cli.common import fail, options
from mergepipe_pipeline.cli.ending import (
    Stopped,
    as_error,
    prepare_streams,
    stop_by_signals,
    traced,
)
from mergepipe_pipeline.secrets import discreet
from mergepipe_pipeline.text import json_text

#: The modules whose commands these are.
_MODULES = ("checkpoints", "evaluation", "explain", "merging", "snapshots", "tools", "ui")


class _Commands(click.Group):
    """Commands whose complaints about arguments repeat no secret of an address."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that the arguments name. Raises ClickException for wrong ones."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = discreet(error.message)
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mergepipe")
@options
def main() -> None:
    """Merge LLM checkpoints: plan under a byte budget, stream, publish snapshots."""


for name in _MODULES:
    for command in vars(import_module(f"mergepipe_pipeline.cli.{name}")).values():
        if isinstance(command, click.Command):
            main.add_command(command)


def program() -> None:
    """`mergepipe` as a process of its own, which may do what a library must not."""
    atexit.register(_leave)
    # Numba loads scipy, if it is there, for products of matrices, which no kernel here has: a fifth
    # of a second.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    # Arrow's own allocators keep what they once had for each thread: 20 MiB after a plan of twenty
    # experts, on top of the merge.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    stop_by_signals()
    prepare_streams()
    try:
        main(standalone_mode="--json" not in sys.argv)
    except click.ClickException as error:  # of those who call for a machine
        _show_json(error, error.format_message(), error.exit_code)
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(1)
    except Stopped as stopped:
        if "--json" in sys.argv:
            _show_json(stopped, str(stopped), 128 + stopped.number)
        click.echo(f"error: {stopped}", err=True)
        sys.exit(128 + stopped.number)
    except (MemoryError, SystemError) as error:  # where no verb is: loading one, or leaving it
        click.echo(traced(error), nl=False, err=True)
        fail(as_error(error), "--json" in sys.argv)


def _show_json(error: BaseException, what: str, exit_code: int) -> None:
    shown = {"class": type(error).__name__, "what": what}
    with suppress(OSError):  # a full disk may be where stdout goes
        click.echo(json_text({"error": shown, "exit_code": exit_code}))


def _leave() -> None:
    """Let the end be short: the plan's objects need not be searched, for a quarter of a second."""
    if "duckdb" not in sys.modules:  # which complains of objects that nobody collected
        garbage.freeze()


if __name__ == "__main__":
    program()
