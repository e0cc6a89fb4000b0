"""Commands about how good a snapshot is: `evaluate`, `promote`, `bisect`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, recipe_folder, table, verb
from mergepipe_pipeline.text import visible

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.evaluation import Evaluation, Evaluator
    from mergepipe_pipeline.quality.bisection import Bisection
    from mergepipe_pipeline.warehouse import Warehouse


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics in one line: `accuracy 0.61, perplexity 12.3`."""
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def evaluation_records(warehouse: Warehouse, snapshot_id: str) -> list[dict[str, Any]]:
    """What was measured of a snapshot, with the paths of the logs."""
    from mergepipe_pipeline.verbs.evaluate import evaluations_of

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
@click.option("--recipe", type=click.Path(), help="Measure as this recipe's `evaluate:` says.")
@click.option("--command", "command", help="Run this command, split at blanks, without a shell.")
@click.option(
    "--perplexity", "text", type=click.Path(), help="Perplexity of this text, or `text` of JSONL."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for --command and --perplexity (600).",
)
@click.option(
    "--env",
    "env",
    metavar="NAME",
    multiple=True,
    help="Let the command see this variable though its name says that it is a secret; repeatable.",
)
@click.option("--fresh", is_flag=True, help="Measure again what was measured before.")
@verb
def evaluate(
    console: Console,
    snapshot: str,
    recipe: str | None,
    command: str | None,
    text: str | None,
    timeout_s: float | None,
    env: tuple[str, ...],
    fresh: bool,
) -> None:
    """Measure a snapshot, and keep what was measured; no ref changes.

    The command gets the snapshot's path as its last argument and in MERGEPIPE_SNAPSHOT, and prints
    a JSON object of numbers as its last line.
    """
    from mergepipe_pipeline.verbs.evaluate import evaluate as run

    if sum(given is not None for given in (recipe, command, text)) != 1:
        raise click.UsageError("give one of --recipe, --command and --perplexity")
    evaluator, folder = _evaluator(console.warehouse, recipe, command, text, timeout_s)
    evaluator = replace(evaluator, env=(*evaluator.env, *env))
    evaluation = run(console.warehouse, snapshot, evaluator, folder, fresh=fresh)
    record = _record(console.warehouse, evaluation)
    console.show(
        record,
        f"snapshot {evaluation.snapshot_id}",
        *(f"  {name}  {value:.10g}" for name, value in evaluation.metrics.items()),
        f"  by {evaluation.evaluator}, {evaluation.created}, in {evaluation.seconds:.1f} s",
        f"  log {record['log']}",
    )


def _evaluator(
    warehouse: Warehouse,
    recipe: str | None,
    command: str | None,
    text: str | None,
    timeout_s: float | None,
) -> tuple[Evaluator, Path]:
    """The evaluator that the options name, and the folder of its paths."""
    from mergepipe_pipeline.domain.evaluation import Evaluator, Perplexity
    from mergepipe_pipeline.resolution.recipe_text import load_recipe
    from mergepipe_pipeline.verbs.gate import require_evaluator

    if recipe is not None:
        return require_evaluator(load_recipe(recipe, warehouse)), recipe_folder(recipe)
    limit_s = Evaluator().timeout_s if timeout_s is None else timeout_s
    if text is not None:
        return Evaluator(perplexity=Perplexity(text), timeout_s=limit_s), Path.cwd()
    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise click.BadParameter(f"{command!r}: {error}.", param_hint="--command") from None
    if not words:
        raise click.BadParameter("it is empty.", param_hint="--command")
    return Evaluator(words, timeout_s=limit_s), Path.cwd()


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
    """Publish a snapshot if it passes the gate of a recipe; it is measured if it was not yet."""
    from mergepipe_pipeline.verbs.promote import promote as run

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
    if not yes:
        click.confirm("Begin?", abort=True, err=True)
    done = run(console.warehouse, prepared, progress=console.progress, tell=tell)
    console.show(
        {**done.to_json(), "changes": asdict(changes), "cost": asdict(cost)}, *_lines(done)
    )


def _lines(done: Bisection) -> Sequence[str]:
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
