"""The command `calibrate`."""

from __future__ import annotations

from dataclasses import asdict

import click

from mergepipe_pipeline.cli.common import Console, size, table, verb


@click.command()
@click.argument("path", type=click.Path(exists=True), required=False)
@click.option(
    "--size",
    "temp_mib",
    type=click.IntRange(min=4),
    default=1024,
    show_default=True,
    help="MiB of the temporary file that is read if nothing is registered yet.",
)
@verb
def calibrate(console: Console, path: str | None, temp_mib: int) -> None:
    """Measure what seeks, reads and writes cost here, on a file under PATH that is read cold.

    Default: the largest file of a registered checkpoint. The planner weighs scattered blocks with
    the result.
    """
    from mergepipe_pipeline.pipeline.calibrate import calibrate as run

    done = run(console.home, path, temp_nbytes=temp_mib << 20, progress=console.progress)
    p = done.profile
    rows = [
        (
            "in one run" if o.seeks == 1 else "scattered",
            o.seeks,
            size(o.nbytes / o.seeks),
            f"{o.seconds:.4f}",
            f"{p.read_s(o.seeks, o.nbytes):.4f}",
        )
        for o in done.observations
    ]
    console.show(
        {
            **p.to_json(),
            "seek_nbytes": p.seek_nbytes,
            "observations": [asdict(o) for o in done.observations],
        },
        f"measured on {p.where}",
        f"  read   {size(p.read_bytes_per_s)}/s",
        f"  seek   {1000 * p.seek_s:.3f} ms, as long as reading {size(p.seek_nbytes)}",
        f"  write  {size(p.write_bytes_per_s)}/s, durable",
        "",
        *table(("reads", "number", "of size", "took s", "model s"), rows),
    )
