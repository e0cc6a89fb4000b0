"""Entry point: the group of commands, and nothing else."""

from __future__ import annotations

import atexit
import gc as garbage

import click

from mergepipe_pipeline import __version__
from mergepipe_pipeline.cli.calibrate import calibrate
from mergepipe_pipeline.cli.checkpoints import analyze, ls, register, sql
from mergepipe_pipeline.cli.compare import compare
from mergepipe_pipeline.cli.conflicts import conflicts
from mergepipe_pipeline.cli.curve import curve
from mergepipe_pipeline.cli.demo import demo
from mergepipe_pipeline.cli.explain import explain
from mergepipe_pipeline.cli.merging import check, merge, plan
from mergepipe_pipeline.cli.operators import ops
from mergepipe_pipeline.cli.snapshots import gc, history, publish, rollback, verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mergepipe")
@click.option(
    "--home",
    "home_dir",
    metavar="DIR",
    default=None,
    help="Warehouse folder (default: $MERGEPIPE_HOME or ./warehouse).",
)
@click.pass_context
def main(ctx: click.Context, home_dir: str | None) -> None:
    """Merge LLM checkpoints: plan under a byte budget, stream, publish snapshots."""
    ctx.obj = {"home_dir": home_dir}
    # A plan is hundreds of thousands of objects that live until the process ends: searching them
    # for cycles every 700 new ones takes a tenth of planning.
    garbage.set_threshold(100_000, 20, 20)
    # Nor need they be searched when it ends, which takes a quarter of a second.
    atexit.register(garbage.freeze)


for command in (
    register,
    analyze,
    ops,
    check,
    conflicts,
    curve,
    plan,
    merge,
    publish,
    history,
    rollback,
    verify,
    explain,
    compare,
    ls,
    sql,
    calibrate,
    gc,
    demo,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
