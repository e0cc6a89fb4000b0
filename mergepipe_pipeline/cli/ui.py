"""Commands that run Dagster: `ui` over a warehouse, `demo` on a family trained on the spot."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.errors import MergePipeError, not_installed


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve at.")
@click.option(
    "--port",
    "-p",
    type=click.IntRange(1, 65535),
    default=3000,
    show_default=True,
    help="Port to serve at.",
)
@verb
def ui(console: Console, host: str, port: int) -> None:
    """Run the standing pipeline with Dagster's UI until Ctrl-C.

    DAGSTER_HOME lies in the warehouse unless the environment names another. Where one runs already,
    this serves one more UI of it.
    """
    from mergepipe_pipeline.deploy.instance import claim_instance, prepare_instance
    from mergepipe_pipeline.warehouse import ENVIRONMENT

    if find_spec("dagster_webserver") is None:
        raise not_installed("Dagster's UI is not installed", "ui", "no module dagster_webserver")
    _refuse_unusable(host, port)
    if not _is_loopback(host, port):
        said = (
            f"other machines may reach {host}, and Dagster's UI has no login: whoever reaches it "
            "starts and ends runs, and with these what recipes evaluate; put a login in front"
        )
        console.warn(said)
    warehouse = console.warehouse
    home = os.environ.get("DAGSTER_HOME") or str(warehouse.dagster_home)
    workspace = prepare_instance(warehouse, Path(home))
    url = f"http://{host}:{port}"
    other = claim_instance(Path(home), url)
    modules = ["dagster", "dev"] if other is None else ["dagster_webserver"]
    ends = f"its sensors run at {other}; Ctrl-C ends this UI alone" if other else "Ctrl-C ends it"
    click.echo(f"{url} shows {warehouse.root}; {ends}", err=True)
    # Shells have background jobs of scripts ignore it, and Dagster does with SIGTERM as with this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(
        sys.executable,
        [sys.executable, "-m", *modules, "-w", str(workspace), "--host", host, "--port", str(port)],
        {**os.environ, ENVIRONMENT: str(warehouse.root), "DAGSTER_HOME": home},
    )


def _refuse_unusable(host: str, port: int) -> None:
    """Raise MergePipeError for an address that nobody can serve at: Dagster goes on without a UI.

    Whoever has it may show another warehouse there.
    """
    try:
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            _bind(family, place)
    except OSError as error:
        raise MergePipeError(
            "The UI cannot be served at this address",
            where=f"http://{host}:{port}",
            found=error.strerror or str(error),
            next_step="end what serves there, which may be a UI of this warehouse or of another, "
            "or give another address: --port 3001",
        ) from error


def _is_loopback(host: str, port: int) -> bool:
    """Whether all that a name means is this machine alone."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return all(ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)


def _bind(family: int, place: tuple[Any, ...]) -> None:
    """Listen and let go. Raises OSError; a family that the system has not is passed over."""
    try:
        socket.create_server(place, family=family).close()
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise


@click.command()
@verb
def demo(console: Console) -> None:
    """Train a small family, land it expert by expert, merge under budgets, score the results."""
    name = "demo-warehouse" if console.home_dir is None else console.home_dir
    chosen = replace(console, home_dir=name)
    warehouse = chosen.place  # refused before the libraries of the demo load, for seconds
    try:
        from mergepipe_pipeline.demo.demo_run import run_demo
    except ModuleNotFoundError as error:
        what = "The demo needs a package that is not installed"
        raise not_installed(what, "demo", f"no module {error.name}") from error

    result = run_demo(warehouse.ensure(), lambda line: click.echo(line, err=chosen.as_json))
    skills = list(result.rows[0].accuracy)
    rows = [
        (
            r.name,
            *(f"{100 * r.accuracy[s]:.0f} %" for s in skills),
            f"{100 * sum(r.accuracy.values()) / len(skills):.0f} %",
            "" if r.expert_bytes_read is None else f"{r.expert_bytes_read / 1e6:.2f} MB",
            "" if r.relative_error is None else f"{r.relative_error:.3f}",
        )
        for r in result.rows
    ]
    headers = ("model", *skills, "mean", "expert bytes", "error to full")
    chosen.show(
        asdict(result),
        "",
        *table(headers, rows),
        "",
        f"when the last expert landed: {result.layers_reused} layers reused, "
        f"{result.layers_executed} merged anew",
        f"done in {result.seconds:.0f} s; everything is in {result.warehouse}",
        "these models are toys of 335 k parameters; language models: docs/benchmarks.md#packs",
        f"see the runs and the lineage in Dagster: mergepipe ui --home {result.warehouse}",
    )
