"""The command `ui`: Dagster's UI, sensors and schedules over a warehouse."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from mergepipe_pipeline.cli.common import Console, verb
from mergepipe_pipeline.errors import MergePipeError


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve at.")
@click.option("--port", "-p", default=3000, show_default=True, help="Port to serve at.")
@verb
def ui(console: Console, host: str, port: int) -> None:
    """Run the standing pipeline with Dagster's UI until Ctrl-C; DAGSTER_HOME lies in the warehouse
    unless the environment names another.
    """
    from mergepipe_pipeline.deploy.instance import prepare_instance
    from mergepipe_pipeline.warehouse import ENVIRONMENT

    if find_spec("dagster_webserver") is None:
        raise MergePipeError(
            "Dagster's UI is not installed",
            found="no module dagster_webserver",
            next_step="pip install 'mergepipe-pipeline[ui]' (in a clone: '.[ui]')",
        )
    warehouse = console.warehouse
    workspace = prepare_instance(warehouse)
    home = os.environ.get("DAGSTER_HOME") or str(warehouse.dagster_home)
    click.echo(f"http://{host}:{port} shows {warehouse.root}; Ctrl-C ends it", err=True)
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(workspace)]
    os.execve(
        sys.executable,
        [*command, "--host", host, "--port", str(port)],
        {**os.environ, ENVIRONMENT: str(warehouse.root), "DAGSTER_HOME": home},
    )
