"""Commands about a recipe: `check`, `plan`, `merge`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mergepipe_pipeline.cli.checkpoints import estimate_lines
from mergepipe_pipeline.cli.common import (
    Console,
    download_options,
    recipe_folder,
    section,
    verb,
)
from mergepipe_pipeline.cli.evaluation import metrics_text
from mergepipe_pipeline.cli.mergekit_flags import RecipeCommand
from mergepipe_pipeline.text import percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.plan import MergePlan
    from mergepipe_pipeline.execution.packs import PackedCost
    from mergepipe_pipeline.execution.run import MergeOutcome
    from mergepipe_pipeline.remote.egress import Egress
    from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
    from mergepipe_pipeline.snapshots.export import Shards
    from mergepipe_pipeline.verbs.merge import Merged
    from mergepipe_pipeline.warehouse import Warehouse

T = TypeVar("T")
_COUNT = click.IntRange(min=1)
_SIZE = re.compile(r"([0-9]+)\s*([kmgtb]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def planning_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that decide how a recipe is read, and what a plan buys."""
    for option in (
        click.option(
            "--copy-tokenizer/--no-copy-tokenizer",
            "copies_tokenizer",
            default=True,
            help="Give the result a tokenizer (default).",
        ),
        click.option(
            "--unsafe-truncate-embeddings",
            "truncates",
            is_flag=True,
            help="Crop all vocabularies to the shortest, as if token numbers meant the same.",
        ),
        click.option(
            "--lenient",
            is_flag=True,
            help="Warn about keys and parameters that mergekit ignores, and ignore them, too.",
        ),
        click.option(
            "--block-size",
            "block_elems",
            type=int,
            help="Elements per block (a power of two, 4096 to 1048576).",
        ),
        click.option(
            "--no-packs",
            is_flag=True,
            help="Read the experts themselves, although they have packs.",
        ),
        click.option(
            "--strategy",
            help="packs (default where experts have packs), magnitude (default otherwise) or full.",
        ),
        click.option(
            "--budget",
            help="Expert bytes that may be read: 25%, 8GiB, 0, none; or error=2% for the fewest "
            "bytes within that error. Pins and other budget options of the recipe stay.",
        ),
    ):
        function = option(function)
    return function


def of_recipe(
    home: Warehouse, recipe: str, planning: dict[str, Any], verb: Callable[..., T], **given: Any
) -> T:
    """Return what a verb makes of a recipe's file under the options of `planning_options`.

    Raises UsageError for options that contradict each other.
    """
    from mergepipe_pipeline.resolution.recipe_text import load_recipe

    if planning.get("strategy") == "packs" and planning.get("no_packs"):
        raise click.UsageError(
            "--strategy packs and --no-packs exclude each other: give one of them"
        )
    parsed = load_recipe(recipe, home, lenient=planning.pop("lenient"))
    return verb(home, parsed, relative_to=recipe_folder(recipe), **given, **planning)


@click.command(cls=RecipeCommand)
@click.argument("recipe", type=click.Path())
@planning_options
@verb
def check(console: Console, recipe: str, **planning: Any) -> None:
    """Show every problem of a recipe and its cost, from headers alone.

    Of experts that are analysed and not packed, what packs would take and save, from samples.
    """
    from mergepipe_pipeline.execution.throughput import UNKNOWN
    from mergepipe_pipeline.verbs.check import check as run
    from mergepipe_pipeline.verbs.explain import selected_table

    checked = of_recipe(console.warehouse, recipe, planning, run)
    console.warn(*checked.warnings)
    stages = list(zip(checked.stages, checked.packed, strict=True))
    *before, last = (_stage_json(*stage) for stage in stages)
    estimates = [asdict(p) for p in checked.estimates]
    shown = {**last, "seconds": checked.seconds, "pack_estimates": estimates}
    shown["egress"], shown["when"] = [asdict(e) for e in checked.egress], checked.when
    if before:
        shown["stages"] = [*before, last]
    known = checked.seconds is not None
    time = f"about {checked.seconds:.3g} s, as fast as the last merge" if known else UNKNOWN
    console.show(
        shown,
        *(line for stage in stages for line in _stage_lines(*stage)),
        f"  time                {time}",
        *egress_lines(checked.egress, "  download            "),
        *estimate_lines(checked.estimates, "  packs               "),
        f"  standing pipeline   {checked.when}",
        *section(*selected_table(checked.stages[-1].request.selected)),
    )


def _stage_json(resolved: ResolvedRecipe, packed: PackedCost | None) -> dict[str, Any]:
    return {
        "recipe": resolved.recipe.name,
        "method": resolved.recipe.method,
        "base": resolved.base.name if resolved.base else None,
        "experts": [e.name for e in resolved.experts],
        **asdict(resolved.cost),
        "packs": packed and asdict(packed),
        "selected": [asdict(s) for s in resolved.request.selected],
        "warnings": list(resolved.recipe.warnings),
    }


def _stage_lines(resolved: ResolvedRecipe, packed: PackedCost | None) -> tuple[str, ...]:
    c = resolved.cost
    has = f"{packed.experts} of {len(resolved.experts)} experts have one" if packed else ""
    return (
        f"{resolved.recipe.name}: {resolved.recipe.method} of {len(resolved.experts)} models, "
        f"{c.tensors} tensors in {c.layers} layers",
        f"  expert bytes        {size(c.expert_bytes_total)}",
        *([f"  exact with packs    at most {size(packed.exact_nbytes)} ({has})"] if packed else []),
        f"  budget              {size(c.budget_bytes)}",
        f"  base bytes          {size(c.base_bytes)}",
        f"  output bytes        {size(c.output_bytes)} ({size(c.free_bytes)} free)",
        f"  read once to learn  {size(c.analysis_bytes)}",
    )


@click.command(cls=RecipeCommand)
@click.argument("recipe", type=click.Path())
@planning_options
@download_options
@verb
def plan(console: Console, recipe: str, **planning: Any) -> None:
    """Decide what to read under the budget, and print what that costs."""
    from mergepipe_pipeline.execution.egress import egress_of_plan
    from mergepipe_pipeline.execution.stages import plan_in_stages
    from mergepipe_pipeline.execution.sums import slid_nbytes
    from mergepipe_pipeline.verbs.explain import read_shares, selected_table, shares_table

    given = {"progress": console.progress}
    made = of_recipe(console.warehouse, recipe, planning, plan_in_stages, **given)
    egress, slid = egress_of_plan(made), slid_nbytes(console.warehouse, made)
    console.warn(*made.warnings)
    console.show(
        {
            "plan_id": made.plan_id,
            "recipe": made.recipe_name,
            "method": made.method,
            "layers": len(made.layers),
            "selected": [asdict(s) for s in made.request.selected],
            **asdict(made.estimates),
            "expert_bytes_beside_sums": slid,
            "egress": [asdict(of_address) for of_address in egress],
        },
        *plan_lines(made),
        *([] if slid is None else [f"  kept sums      leave {size(slid)} of experts to read"]),
        *egress_lines(egress, "  download       "),
        *section(*shares_table(read_shares(made, "expert"))),
        *section(*selected_table(made.request.selected)),
    )


def _allowed(budget_bytes: int | None) -> str:
    return "" if budget_bytes is None else f" (budget {size(budget_bytes)})"


def plan_lines(made: MergePlan) -> list[str]:
    """Say what a plan reads, and what that loses."""
    e = made.estimates
    return [
        f"plan {made.plan_id[:16]}  {made.method}, {e.strategy}",
        f"  expert bytes   {size(e.expert_bytes_planned)} of {size(e.expert_bytes_total)}"
        f"{_allowed(e.budget_bytes)}",
        *packed_lines(made, "  from packs     "),
        f"  blocks         {e.blocks_bought} bought, {e.blocks_zero} known to be zero, "
        f"{e.blocks_total - e.blocks_bought - e.blocks_zero} left of {e.blocks_total}",
        f"  error          {error_text(made)}",
        f"  error bound    {bound_text(made)}",
        f"  reads          {e.reads}",
    ]


def egress_lines(egress: Sequence[Egress], label: str) -> list[str]:
    """Say what is to be fetched from each address, and what is on disk already."""
    lines = [
        f"{label}{e.address}: {'at most ' if e.at_most else ''}{size(e.nbytes)} in {e.requests} "
        f"request(s), {e.why}" + (f", {size(e.kept_nbytes)} on disk" if e.kept_nbytes else "")
        for e in egress
    ]
    if len(egress) > 1:
        lines.append(f"{label}{size(sum(e.nbytes for e in egress))} in all")
    return lines


def packed_lines(made: MergePlan, label: str) -> list[str]:
    """How many of the bytes come from packs, and how many from the experts themselves."""
    e = made.estimates
    if not made.packs:
        return []
    stored = e.expert_bytes_planned - e.expert_bytes_packed
    return [f"{label}{size(e.expert_bytes_packed)}, {size(stored)} from the experts themselves"]


def error_text(made: MergePlan) -> str:
    """The predicted error, absolute and relative to the update; four standard errors with it."""
    e = made.estimates
    if e.predicted_error is None or e.no_error_note:
        return e.no_error_note
    margin = "" if e.predicted_margin is None else f" ± {e.predicted_margin:.2g}"
    relative = ""
    if e.update_norm:
        relative = f" ({percent(e.predicted_error / e.update_norm)} of the update)"
    return f"{e.predicted_error:.4g}{margin} in L2 predicted{relative}"


def bound_text(made: MergePlan) -> str:
    """The bound, absolute and relative to the predicted update, with the argument behind it."""
    e = made.estimates
    if e.error_bound is None:
        return f"none: {e.bound_note}"
    relative = ""
    if e.update_norm:
        times = e.error_bound / e.update_norm
        share = f"{percent(times)} of" if times <= 1 else f"no promise: {times:.1f} times"
        relative = f" ({share} the update's predicted norm)"
    return f"{e.error_bound:.4g} in L2{relative}, {e.bound_note}"


@click.command(cls=RecipeCommand)
@click.argument("recipe", type=click.Path())
@planning_options
@click.option("--out", type=click.Path(), help="Also write a plain Hugging Face folder here.")
@click.option(
    "--shard-size",
    "--out-shard-size",
    "shard_size",
    help="Bytes of a weight file in --out: 5GB, 500MiB, none for one file (default: a file per "
    "layer).",
)
@click.option("--publish", "publish_ref", is_flag=True, help="Publish under the recipe's ref.")
@click.option("--threads", type=_COUNT, help="Threads for arithmetic and reading.")
@click.option(
    "--window-size",
    "window_elems",
    type=_COUNT,
    help="Elements per window (default: what fits --memory; short ones are slow).",
)
@click.option(
    "--memory", "memory_mib", type=_COUNT, help="Memory for plan and windows in MiB (128 to 256)."
)
@click.option("--device", help="Where to compute: cpu (default), cuda or cuda:N.")
@click.option("--fresh", is_flag=True, help="Run every layer, those merged before, too.")
@download_options
@verb
def merge(
    console: Console, recipe: str, out: str | None, shard_size: str | None, **asked: Any
) -> None:
    """Plan and merge a recipe into a snapshot.

    What is not known yet is registered and analysed. A recipe with `evaluate:` measures the result;
    with `gate:`, what does not pass gets neither folder nor ref.
    """
    from mergepipe_pipeline.engine.options import EngineOptions
    from mergepipe_pipeline.verbs.merge import export
    from mergepipe_pipeline.verbs.merge import merge as run

    console.tell_of_compilation()
    cut = cut_of(console.place, out, shard_size)
    mib = asked.pop("memory_mib")
    engine = EngineOptions(
        threads=asked.pop("threads"),
        memory_bytes=mib and mib << 20,
        window_elems=asked.pop("window_elems"),
        device=asked.pop("device") or "cpu",
    )
    engine.check()  # before a recipe is read
    merged = of_recipe(
        console.place,
        recipe,
        asked,
        run,
        options=engine,
        out=None if cut else out,
        progress=console.progress,
        began_s=console.began_s,
    )
    if cut is not None:
        export(console.place, merged.outcome.snapshot.snapshot_id, *cut)
        merged = replace(merged, folder=cut[0])
    console.show(merged.summary(), *_merged_lines(merged))


def _merged_lines(merged: Merged) -> list[str]:
    outcome, judged, ref = merged.outcome, merged.judged, merged.ref
    s, verdict = outcome.summary(), judged and judged.verdict
    return [
        f"snapshot {s['snapshot_id']}",
        f"  layers        {s['layers_executed']} executed, {s['layers_reused']} reused",
        f"  expert bytes  {size(s['expert_bytes_read'])} read, {size(s['expert_bytes_planned'])} "
        f"planned of {size(s['expert_bytes_total'])}{_allowed(s['budget_bytes'])}",
        *packed_lines(outcome.plan, "  from packs    "),
        *([f"  kept sums     {size(s['sum_bytes_read'])} read"] if s["sum_bytes_read"] else []),
        f"  base bytes    {size(s['base_bytes_read'])} read, {size(s['bytes_written'])} written",
        *(
            f"  downloaded    {size(d['nbytes'])} in {d['requests']} request(s) from {address}"
            for address, d in outcome.times.downloaded().items()
        ),
        f"  error         {error_text(outcome.plan)}",
        f"  error bound   {bound_text(outcome.plan)}",
        *rounding_lines(outcome),
        f"  time          {s['time']['total_s']:.2f} s",
        f"  path          {outcome.snapshot.path}",
        *([f"  metrics       {metrics_text(judged.evaluation.metrics)}"] if judged else []),
        *([f"  gate          passed: {verdict.summary}"] if verdict else []),
        *([f"  folder        {merged.folder}"] if merged.folder else []),
        *([f"  published     {ref.name}, version {ref.number}"] if ref else []),
    ]


def rounding_lines(outcome: MergeOutcome) -> list[str]:
    """What fp8 with scales changed of the merged weights; nothing where there are none."""
    error, update = outcome.rounding_error, outcome.plan.estimates.update_norm
    if error is None:
        return []
    relative = f" ({percent(error / update)} of the update)" if update else ""
    return [f"  fp8 rounding  {error:.4g} in L2 measured{relative}"]


def cut_of(warehouse: Warehouse, out: str | None, size: str | None) -> tuple[Path, Shards] | None:
    """The folder and its files' size; None where the option is not given.

    Raises UsageError for a size that is none, or without a folder, and what `check_out` raises.
    """
    if size is None:
        return None
    from mergepipe_pipeline.snapshots.export import Shards, check_out, refuse_full

    if out is None:
        raise click.UsageError("--shard-size is of the files in --out, and there is none")
    folder = check_out(out, warehouse.root)
    refuse_full(folder)
    return folder, Shards(_nbytes(size))


def _nbytes(size: str) -> int | None:
    """Bytes of `5GB`, `500MiB`, `5B` (billions, as in mergekit) or a number; None for `none`."""
    if size.lower() == "none":
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None or int(match[1]) == 0:
        raise click.UsageError(f"--shard-size {size!r} is no size: write 5GB, 500MiB or none")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    return int(match[1]) * unit
