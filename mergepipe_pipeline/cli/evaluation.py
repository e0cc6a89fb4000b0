"""Commands about how good snapshots are: `evaluate`, `promote`, `bisect`, and searches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import (
    Console,
    counted,
    picture_option,
    table,
    verb,
    write_file,
)
from mergepipe_pipeline.text import in_one_line, size, visible

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.evaluation import Evaluation
    from mergepipe_pipeline.quality.bisection import Bisection
    from mergepipe_pipeline.verbs.search import Bound, Front, Result, Search, SearchState
    from mergepipe_pipeline.warehouse import Warehouse


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics in one line: `accuracy 0.61, perplexity 12.3`."""
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def evaluation_records(warehouse: Warehouse, snapshot_id: str) -> list[dict[str, Any]]:
    """The evaluations of a snapshot, with the paths of the logs."""
    from mergepipe_pipeline.quality.measure import evaluations_of

    return [_record(warehouse, e) for e in evaluations_of(warehouse, snapshot_id)]


def evaluation_lines(records: list[dict[str, Any]]) -> list[str]:
    """The same for people."""
    return [
        f"measured by {r['evaluator']}, {r['created']}: {metrics_text(r['metrics'])}"
        for r in records
    ]


def _record(warehouse: Warehouse, evaluation: Evaluation) -> dict[str, Any]:
    path = warehouse.evaluation_path(evaluation.snapshot_id, evaluation.evaluator_id)
    return {**asdict(evaluation), "log": str(path.with_suffix(".log"))}


@click.command()
@click.argument("snapshot", metavar="SNAPSHOT|REF")
@click.option(
    "--recipe", type=click.Path(), required=True, help="Measure as this recipe's `evaluate:` says."
)
@click.option("--fresh", is_flag=True, help="Measure again what was measured before.")
@verb
def evaluate(console: Console, snapshot: str, recipe: str, fresh: bool) -> None:
    """Measure a snapshot, and keep what was measured.

    No ref changes.
    """
    from mergepipe_pipeline.verbs.gate import measure

    evaluation = measure(console.warehouse, snapshot, Path(recipe), fresh=fresh)
    record = _record(console.warehouse, evaluation)
    console.show(
        record,
        f"snapshot {evaluation.snapshot_id}",
        *(f"  {name}  {value:.10g}" for name, value in evaluation.metrics.items()),
        f"  by {evaluation.evaluator}, {evaluation.created}, in {evaluation.seconds:.1f} s",
        f"  log {record['log']}",
    )


@click.command()
@click.argument("snapshot", metavar="SNAPSHOT|REF")
@click.option("--ref", required=True, help="Name to publish under.")
@click.option(
    "--recipe",
    type=click.Path(),
    help="Whose gate counts (default: the standing recipe that releases under the ref).",
)
@click.option("--force", metavar="REASON", help="Publish without the gate; the ref tells why.")
@verb
def promote(
    console: Console, snapshot: str, ref: str, recipe: str | None, force: str | None
) -> None:
    """Publish a snapshot if it passes the gate of a recipe.

    It is measured if it was not yet.
    """
    from mergepipe_pipeline.verbs.gate import promote as run

    done = run(
        console.warehouse,
        snapshot,
        ref,
        recipe=None if recipe is None else Path(recipe),
        force=force,
    )
    verdict = done.judged and done.judged.verdict and done.judged.verdict.summary
    console.show(
        {**asdict(done.ref), "gate": verdict},
        *([f"the gate passes: {verdict}"] if verdict else []),
        f"{done.ref.name} is version {done.ref.number}: {done.ref.snapshot_id}",
    )


@click.command()
@click.argument("what", metavar="REF|RECIPE")
@click.option("--metric", help="The metric of the gate that counts (default: all of it).")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Candidates that are evaluated at most.",
)
@click.option("--yes", is_flag=True, help="Begin without asking whether the cost is right.")
@verb
def bisect(console: Console, what: str, metric: str | None, most: int, yes: bool) -> None:
    """Find the expert, and its layers, that made a recipe's result fail its gate.

    What changed since the live snapshot is undone in parts, by an expert's previous version where
    its bytes can be had, else without it; each candidate is merged and measured, and none is
    published. The cost is told first. Run again after an interruption, it goes on where it was.
    """
    from mergepipe_pipeline.verbs.bisect import bisect as run
    from mergepipe_pipeline.verbs.bisect import prepare

    prepared = prepare(console.warehouse, what, metric=metric, most=most)
    changes, cost = prepared.regression.changes, prepared.cost

    def tell(line: str) -> None:
        if not console.as_json:
            click.echo(visible(line), err=True)

    tell(f"{changes.summary}\nat most {cost.summary}")
    if cost.candidates and not yes:
        click.confirm("Begin?", abort=True, err=True)
    done = run(console.warehouse, prepared, progress=console.progress, tell=tell)
    console.show(
        {**done.to_json(), "changes": asdict(changes), "cost": asdict(cost)},
        *_bisection_lines(done),
    )


def _bisection_lines(done: Bisection) -> Sequence[str]:
    rows = [
        (
            ", ".join(c.undone),
            "all" if c.layers is None else ", ".join(c.layers),
            "yes" if c.passed else "no",
            (c.snapshot_id or "-")[:16],
            ", ".join(f"{name} {value:.10g}" for name, value in c.metrics.items()) or c.summary,
        )
        for c in done.candidates
    ]
    conclusion = [done.summary]
    if done.suspect is not None:
        conclusion.append(f"keep it out until it changes: mergepipe quarantine {done.suspect}")
    return [*table(("undone", "in layers", "passes", "snapshot", "metrics"), rows), "", *conclusion]


@click.command()
@click.argument("file", metavar="SEARCH.yml", type=click.Path())
@click.option("--dry-run", is_flag=True, help="State the cost of the whole search, and end.")
@verb
def search(console: Console, file: str, dry_run: bool) -> None:
    """Search the weights of a merge for several objectives at once.

    The cost of the whole search is stated first. Each candidate is merged and measured, and what
    lies on the front in the end is published as SEARCH.1, SEARCH.2 and so on. Run again after an
    interruption, it goes on where it was.
    """
    from mergepipe_pipeline.verbs import search as verbs

    if sys.modules.get("scipy", sys) is None:  # `program` hides it from Numba; BoTorch needs it
        del sys.modules["scipy"]
    home = console.warehouse
    asked = verbs.read_search(home, Path(file))
    cost = verbs.search_cost(home, asked)
    if dry_run:
        console.show({"cost": asdict(cost)}, cost.summary)
        return
    if not console.as_json:
        click.echo(cost.summary, err=True)
    if cost.disk_nbytes > cost.free_nbytes:
        lack = f"the candidates may take {size(cost.disk_nbytes)}, {size(cost.free_nbytes)} are "
        console.warn(f"{lack}free: `mergepipe gc` removes those that are not on the front")
    begun = verbs.begin_search(home, asked, console.progress)
    state = verbs.state_of(home, begun)
    if state.done and not console.as_json:
        click.echo(f"it goes on: {state.summary}", err=True)
    verbs.run_search(home, begun, progress=console.progress, tell=_teller(console, begun))
    refs = verbs.publish_front(home, begun, console.progress)
    results = verbs.front(home, begun)
    console.warn(*results.warnings)
    shown = {**_json(results), "cost": asdict(cost), "refs": [asdict(r) for r in refs]}
    console.show(shown, *_front_lines(results))


def _teller(console: Console, search: Search) -> Any:
    """Says each result on stderr, as a line of text or of JSON."""

    def tell(result: Result, state: SearchState) -> None:
        show(result, state)
        if state.done == search.file.initial < state.evaluations:
            from mergepipe_pipeline.verbs.search import front

            console.warn(*front(console.warehouse, search).warnings)

    def show(result: Result, state: SearchState) -> None:
        if console.as_json:
            line = {"task": f"search {search.name}", "done": state.done}
            line |= {"total": state.evaluations, "unit": "evaluations", "result": asdict(result)}
            click.echo(json.dumps(line), err=True)
            return
        outcome = metrics_text(result.metrics) or f"failed: {in_one_line(result.failure)}"
        layers = (
            ""
            if result.merge is None
            else f" ({counted(result.merge.layers_merged, 'layer')} merged)"
        )
        text = f"{state.done} of {state.evaluations}: candidate {result.number}{layers}: {outcome}"
        click.echo(visible(text), err=True)

    return tell


@click.command()
@click.argument("name", metavar="SEARCH")
@picture_option("the front")
@verb
def front(console: Console, name: str, png_file: str | None) -> None:
    """Show the front of a search that has begun."""
    from mergepipe_pipeline.verbs import search as verbs

    results = verbs.front(console.warehouse, _search(console, name))
    console.warn(*results.warnings)
    if png_file is not None:
        write_file(png_file, verbs.front_picture(results))
    console.show(_json(results), *_front_lines(results))


@click.command()
@click.argument("name", metavar="SEARCH")
@click.option("--min", "minima", multiple=True, metavar="METRIC=X", help="At least so much.")
@click.option("--max", "maxima", multiple=True, metavar="METRIC=X", help="At most so much.")
@click.option("--cheapest", metavar="OBJECTIVE", help="What says cheap (the last objective).")
@click.option("--ref", help="Name to publish under (default: the search's).")
@verb
def pick(
    console: Console,
    name: str,
    minima: Sequence[str],
    maxima: Sequence[str],
    cheapest: str | None,
    ref: str | None,
) -> None:
    """Publish the cheapest candidate of a search that keeps to given bounds."""
    from mergepipe_pipeline.verbs import search as verbs

    bounds = [*_bounds(minima, "min"), *_bounds(maxima, "max")]
    searched = _search(console, name)
    done = verbs.pick(console.warehouse, searched, bounds, cost=cheapest, ref=ref)
    trials = verbs.front(console.warehouse, searched).trials
    metrics = next(t.metrics for t in trials if t.snapshot_id == done.snapshot_id)
    console.show(
        {**asdict(done), "metrics": dict(metrics)},
        f"{done.name} is version {done.number}: {done.snapshot_id} ({metrics_text(metrics)})",
    )


def _search(console: Console, name: str) -> Search:
    from mergepipe_pipeline.verbs.search import search_of

    path = Path(name)
    return search_of(console.warehouse, path.stem if path.suffix in {".yml", ".yaml"} else name)


def _bounds(given: Sequence[str], option: str) -> Iterator[Bound]:
    from mergepipe_pipeline.verbs.search import Bound

    for text in given:
        metric, _, number = text.rpartition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = nan
        if not metric or isnan(limit):
            raise click.BadParameter(f"{text!r} is not METRIC=NUMBER.", param_hint=f"--{option}")
        yield Bound(metric, option == "min", limit)


def _json(front: Front) -> Mapping[str, Any]:
    return {**front.to_json(), "spent": _spent(front)}


def _spent(front: Front) -> dict[str, Any]:
    """What candidates took on average, beside merges from scratch; of their seconds the most that
    one took, None if there was none.
    """
    merges = [t.merge for t in front.trials if t.merge is not None]
    if not merges:
        return {}
    n = len(merges)
    return {
        "candidates": n,
        "mean_layers_merged": sum(m.layers_merged for m in merges) / n,
        "mean_layers_reused": sum(m.layers_reused for m in merges) / n,
        "mean_nbytes_read": sum(m.nbytes_read for m in merges) / n,
        "mean_scratch_nbytes": sum(m.scratch_nbytes for m in merges) / n,
        "mean_merge_s": sum(m.seconds for m in merges) / n,
        "scratch_merge_s": max((m.seconds for m in merges if not m.layers_reused), default=None),
        "mean_evaluation_s": sum(t.evaluation_s for t in front.trials) / n,
    }


def _front_lines(front: Front) -> Sequence[str]:
    names = [o.metric for o in front.objectives]
    rows = [
        (
            t.ref or "-",
            t.number,
            *(round(t.metrics[name], 6) for name in names),
            t.merge.layers_merged if t.merge else 0,
            t.merge.layers_reused if t.merge else 0,
            (t.snapshot_id or "-")[:16],
        )
        for t in front.best
    ]
    headers = ("ref", "candidate", *names, "merged", "reused", "snapshot")
    failed = sum(bool(t.failure) for t in front.trials)
    heading = f"{counted(len(front.trials), 'result')}, {failed} of them failed; hypervolume "
    spent = _spent(front)
    lines = [*table(headers, rows), "", f"{heading}{front.hypervolume:.4f}"]
    if spent:
        lines.append(
            f"a candidate merged {spent['mean_layers_merged']:.1f} layers and reused "
            f"{spent['mean_layers_reused']:.1f}; it read {size(spent['mean_nbytes_read'])} "
            f"({size(spent['mean_scratch_nbytes'])} from scratch), and took "
            f"{spent['mean_merge_s']:.1f} s to merge and {spent['mean_evaluation_s']:.1f} s to "
            "measure"
        )
    return lines
