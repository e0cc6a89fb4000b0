"""The command `calibrate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.text import size

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.machine_profile import EnginePace


class _Place(click.Path):
    """A path that exists, or an address."""

    def __init__(self) -> None:
        super().__init__(exists=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As for a path; an address is left as it is."""
        return value if _is_address(str(value)) else super().convert(value, param, ctx)


def _is_address(text: str) -> bool:
    from mergepipe_pipeline.remote.address import is_address  # storage, which help does without

    return is_address(text)


@click.command()
@click.argument("path", type=_Place(), required=False)
@click.option(
    "--size",
    "temp_mib",
    type=click.IntRange(min=4),
    default=1024,
    show_default=True,
    help="MiB of the temporary file that is read if nothing is registered yet.",
)
@click.option(
    "--storage-only", is_flag=True, help="Leave the engine out: times will not be predicted."
)
@verb
def calibrate(console: Console, path: str | None, temp_mib: int, storage_only: bool) -> None:
    """Measure what seeks, reads and writes cost here, on a file under PATH that is read cold, and
    how fast the engine is, on a small family made for it.

    Of an address, as hf://org/model, what requests and bytes take; plans and downloads weigh
    requests with it. Default: the largest file of a registered checkpoint. The planner weighs
    scattered blocks with the result, and `check` tells how long a merge will take.
    """
    if path is not None and _is_address(path):
        _measure(console, path)
        return
    from mergepipe_pipeline.timing.calibrate import calibrate as run

    done = run(
        console.warehouse,
        path,
        temp_nbytes=temp_mib << 20,
        with_engine=not storage_only,
        progress=console.progress,
    )
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
        f"  write  {size(p.write_bytes_per_s)}/s, hashed and durable",
        *_engine_lines(p.engine),
        "",
        *table(("reads", "number", "of size", "took s", "model s"), rows),
    )


def _measure(console: Console, address: str) -> None:
    """Measure what requests to an address take."""
    from mergepipe_pipeline.timing.remote_benchmark import measure_address

    pace = measure_address(address, console.progress)
    console.show(
        {"address": address, **asdict(pace), "gap_nbytes": pace.gap_nbytes},
        f"measured on {address}",
        f"  request  {1000 * pace.latency_s:.1f} ms, as long as {size(pace.gap_nbytes)} of one of "
        "several",
        f"  read     {size(pace.bytes_per_s)}/s",
    )


def _engine_lines(engine: EnginePace | None) -> list[str]:
    """The engine's figures for people."""
    if engine is None:
        return []
    rows = [
        (name, f"{1e9 * m.learn_byte_s:.2f}", f"{1e9 * m.merge_elem_s:.2f}")
        for name, m in engine.methods.items()
    ]
    return [
        f"  engine on {engine.cores} cores",
        f"    cold reads   {size(engine.read_bytes_per_s)}/s",
        f"    start        {engine.start_s:.2f} s",
        f"    planning     {1e3 * engine.plan_input_s:.2f} ms per tensor and expert, for a budget",
        "",
        *table(("method", "analysis ns per byte", "merge ns per element"), rows),
    ]
