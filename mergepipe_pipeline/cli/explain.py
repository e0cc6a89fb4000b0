"""The command `explain`: why a merge is what it is, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, table, verb, write_csv, write_file
from mergepipe_pipeline.cli.compare import comparison_lines
from mergepipe_pipeline.cli.evaluation import evaluation_lines, evaluation_records
from mergepipe_pipeline.cli.merging import bound_text, error_text, packed_lines, strategy_text
from mergepipe_pipeline.cli.packs import estimate_lines
from mergepipe_pipeline.cli.selected import selected_lines
from mergepipe_pipeline.text import percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.plan import MergePlan
    from mergepipe_pipeline.report.shares import LevelShare, OperatorChoice, Share
    from mergepipe_pipeline.report.stories import ExpertStory, SnapshotStory, TensorStory


@dataclass(frozen=True)
class Answer:
    """An explanation in all its forms: JSON, lines for people, CSV records, PNG when asked for."""

    data: dict[str, Any]
    lines: list[str]
    records: list[dict[str, Any]]
    picture: Callable[[], bytes]


#: Words after each kind of question.
_WORDS = {"plan": 1, "ref": 1, "snapshot": 1, "tensor": 2, "expert": 1}


@click.command()
@click.argument(
    "words", nargs=-1, required=True, metavar="WHAT | snapshot WHAT | tensor WHAT TENSOR | expert X"
)
@click.option(
    "--by",
    type=click.Choice(["expert", "layer", "tensor"]),
    default="expert",
    show_default=True,
    help="How to group what a plan reads.",
)
@click.option("--in", "where", help="Plan, snapshot or ref whose layers `expert` shows.")
@click.option("--most", default=20, show_default=True, help="Blocks that `tensor` lists.")
@click.option("--csv", "csv_file", type=click.Path(), help="Write every row here.")
@click.option("--picture", "png_file", type=click.Path(), help="Write a heat map (PNG) here.")
@verb
def explain(
    console: Console,
    words: tuple[str, ...],
    by: str,
    where: str | None,
    most: int,
    csv_file: str | None,
    png_file: str | None,
) -> None:
    """Say why: what is read of each expert, block by block, and what came of it.

    WHAT is a plan, a snapshot or a ref: what it reads of each expert, and what it leaves; by tensor
    also which operator makes it. `snapshot WHAT`: what was expected, and what came. `tensor WHAT
    TENSOR` (WHAT may be a recipe, too): why each block was bought or left. `expert NAME`: where it
    is used, at which version, and what it contributed to each layer.
    """
    kind, *rest = ("plan", *words) if len(words) == 1 else words
    if _WORDS.get(kind) != len(rest):
        raise click.UsageError(
            "it is explain WHAT, snapshot WHAT, tensor WHAT TENSOR, or expert NAME"
        )
    if kind == "tensor":
        answer = _tensor(console, rest[0], rest[1], most)
    elif kind == "expert":
        answer = _expert(console, rest[0], where)
    elif kind == "snapshot":
        answer = _snapshot(console, rest[0])
    else:
        answer = _plan(console, rest[0], by)
    if csv_file:
        write_csv(csv_file, answer.records)
    if png_file:
        write_file(png_file, answer.picture())
    console.show(answer.data, *answer.lines)


def _plan(console: Console, what: str, by: str) -> Answer:
    from mergepipe_pipeline.report import shares
    from mergepipe_pipeline.report.explain_tables import bytes_picture

    made, rows = shares.explain(console.existing, what, by)
    console.warn(list(shares.merged_otherwise(console.existing, what, made)))
    tensors = shares.operator_choices(made) if by == "tensor" else ()
    records, levels = [asdict(s) for s in rows], shares.level_shares(made)
    shown = {
        "plan_id": made.plan_id,
        "method": made.method,
        "estimates": asdict(made.estimates),
        "selected": [asdict(s) for s in made.request.selected],
        "shares": records,
        "levels": [asdict(x) for x in levels],
        **({"tensors": [asdict(t) for t in tensors]} if tensors else {}),
    }
    lines = [*_head(made), "", *_share_lines(rows, by), *_level_lines(levels)]
    lines += [*_making_lines(tensors), *selected_lines(made.request.selected)]
    return Answer(shown, lines, records, lambda: bytes_picture(made))


def _head(made: MergePlan) -> list[str]:
    e = made.estimates
    return [
        f"plan {made.plan_id[:16]}  {made.method}, strategy {strategy_text(made)}, "
        f"{size(e.expert_bytes_planned)} of {size(e.expert_bytes_total)} expert bytes",
        *packed_lines(made, "from packs "),
        f"error {error_text(made)}",
        f"error bound {bound_text(made)}",
    ]


def _share_lines(rows: tuple[Share, ...], by: str) -> list[str]:
    lines = [
        (
            s.expert,
            *([] if by == "expert" else [s.place]),
            size(s.nbytes_total),
            size(s.nbytes_read),
            percent(s.nbytes_read / max(1, s.nbytes_total)),
            size(s.nbytes_known_zero),
        )
        for s in rows
    ]
    return table((*dict.fromkeys(("expert", by)), "size", "read", "share", "known zero"), lines)


def _level_lines(levels: tuple[LevelShare, ...]) -> list[str]:
    rows = [(x.level, str(x.blocks), str(x.elems), size(x.nbytes)) for x in levels]
    return ["", *table(("level", "blocks", "elements", "read"), rows)] if rows else []


def _making_lines(tensors: tuple[OperatorChoice, ...]) -> list[str]:
    rows = [(t.tensor, t.operator, t.variant or "-", t.reason or "-") for t in tensors]
    return ["", *table(("tensor", "operator", "variant", "reason"), rows)] if rows else []


def _tensor(console: Console, what: str, tensor: str, most: int) -> Answer:
    from mergepipe_pipeline.report.explain_tables import (
        block_records,
        blocks_picture,
        expert_records,
    )
    from mergepipe_pipeline.report.stories import explain_tensor

    story = explain_tensor(console.existing, what, tensor, console.progress)
    if not story.is_current:
        console.warn(["planned by other statistics or another version; the list is today's"])
    blocks, account = block_records(story), story.account
    shown = {
        "plan_id": story.plan.plan_id,
        "tensor": tensor,
        "layer": story.layer,
        "operator": story.task.operator,
        "variant": story.task.variant,
        "reason": story.task.reason,
        "strategy": story.plan.estimates.strategy,
        "ranking": _ranking(story),
        "offers": account.items,
        "cut": account.cut,
        "cut_worth": account.cut_worth,
        "is_current": story.is_current,
        "experts": expert_records(story),
        "blocks": blocks,
    }
    return Answer(shown, _tensor_lines(story, most), blocks, lambda: blocks_picture(story))


def _tensor_lines(story: TensorStory, most: int) -> list[str]:
    from mergepipe_pipeline.planner.reasons import MEANING
    from mergepipe_pipeline.report.explain_tables import expert_records

    task, account = story.task, story.account
    because = f" ({task.reason})" if task.reason else ""
    cut = f"cut after purchase {account.cut} of {account.items} on the list of {_ranking(story)}"
    worth = "" if account.cut_worth is None else f", worth {account.cut_worth:.3g} per byte"
    experts = [
        (
            r["expert"],
            size(r["nbytes_total"]),
            size(r["nbytes_read"]),
            f"{r['change']:.3g}",
            _span(r["worth_least"], r["worth_most"]),
            ", ".join(f"{n} {why}" for why, n in r["reasons"].items()),
        )
        for r in expert_records(story)
    ]
    first = sorted(story.blocks, key=lambda b: (b.place is None, b.place or 0, b.expert, b.block))
    blocks = [
        (
            story.experts[b.expert],
            b.block,
            size(b.nbytes),
            f"{b.change:.3g}",
            "-" if b.worth is None else f"{b.worth:.3g}",
            "-" if b.place is None else f"{b.place}",
            f"{b.together}",
            f"{b.level}, {size(b.nbytes_read)}" if b.level else "-",
            b.why,
        )
        for b in first[:most]
    ]
    if not experts:
        return [f"{task.name} in {story.layer}: {task.operator}{because}; no expert is read"]
    return [
        f"{task.name} in {story.layer}: {task.operator}{because}",
        f"plan {story.plan.plan_id[:16]}: {cut}{worth}",
        "",
        *table(("expert", "size", "read", "change", "worth per byte", "blocks"), experts),
        "",
        f"the {len(blocks)} blocks of {len(story.blocks)} that stand first on the list",
        *table(
            ("expert", "block", "size", "change", "worth", "place", "bought with", "read", "why"),
            blocks,
        ),
        "",
        *(f"{why}: {MEANING[why]}" for why in dict.fromkeys(b.why for b in story.blocks)),
    ]


def _ranking(story: TensorStory) -> str:
    e = story.plan.estimates
    return e.ranking or e.strategy


def _span(least: float | None, most: float | None) -> str:
    return "-" if least is None or most is None else f"{least:.2g} … {most:.2g}"


def _expert(console: Console, name: str, where: str | None) -> Answer:
    from mergepipe_pipeline.report.explain_tables import (
        contribution_records,
        contributions_picture,
    )
    from mergepipe_pipeline.report.stories import explain_expert
    from mergepipe_pipeline.verbs.pack_estimates import estimates_of_expert

    story = explain_expert(console.existing, name, where, console.progress)
    records = contribution_records(story.contributions)
    packs = estimates_of_expert(console.existing, name, story.plan)
    shown = {
        "expert": name,
        "appearances": [asdict(a) for a in story.appearances],
        "plan_id": story.plan.plan_id,
        "layers": records,
        "packs": [asdict(p) for p in packs],
    }
    lines = [*_expert_lines(story), *estimate_lines(packs, "")]
    return Answer(shown, lines, records, lambda: contributions_picture(story))


def _expert_lines(story: ExpertStory) -> list[str]:
    used = [
        (
            a.kind,
            a.id[:16],
            a.recipe,
            a.method,
            "-" if a.version is None else str(a.version),
            size(a.nbytes_read),
            size(a.nbytes_total),
        )
        for a in story.appearances
    ]
    layers = [
        (
            c.layer,
            size(c.nbytes_total),
            percent(c.share_of_bytes),
            percent(c.share_of_sq_norm),
            "-" if c.change is None else f"{c.change:.3g}",
            percent(c.part),
        )
        for c in story.contributions
    ]
    return [
        *table(("used in", "id", "recipe", "method", "version", "read", "size"), used),
        "",
        f"in plan {story.plan.plan_id[:16]} of {story.plan.recipe_name}",
        *table(
            ("layer", "size", "bytes read", "squared norm read", "change", "part of all read"),
            layers,
        ),
    ]


def _snapshot(console: Console, what: str) -> Answer:
    from mergepipe_pipeline.execution.lookup import plan_of
    from mergepipe_pipeline.report.explain_tables import (
        bytes_picture,
        layer_records,
        snapshot_records,
    )
    from mergepipe_pipeline.report.stories import explain_snapshot

    story = explain_snapshot(console.existing, what)
    records = snapshot_records(story)
    plan_id = story.snapshot.manifest.plan_id
    measured = evaluation_records(console.existing, story.snapshot.snapshot_id)
    shown = {
        "snapshot_id": story.snapshot.snapshot_id,
        "plan_id": plan_id,
        "recipe": story.provenance["recipe_name"],
        "selected": story.provenance.get("request", {}).get("selected", []),
        "made_by": story.provenance.get("made_by"),
        "figures": records,
        "layers": layer_records(story.comparison) if story.comparison else None,
        "evaluations": measured,
    }
    lines = [*_snapshot_lines(story, records), *evaluation_lines(measured)]
    return Answer(shown, lines, records, lambda: bytes_picture(plan_of(console.existing, plan_id)))


def _snapshot_lines(story: SnapshotStory, records: list[dict[str, Any]]) -> list[str]:
    provenance = story.provenance
    if made_by := provenance.get("made_by"):
        given = [(name, str(value)) for name, value in made_by["parameters"].items()]
        head = f"snapshot {story.snapshot.snapshot_id}  {made_by['verb']}, {provenance['created']}"
        return [head, "", *table(("parameter", "value"), given)]
    rows = [
        (
            r["figure"].replace("_", " "),
            _figure(r["figure"], r["expected"]),
            _figure(r["figure"], r["realised"]),
        )
        for r in records
    ]
    return [
        f"snapshot {story.snapshot.snapshot_id}  {provenance['recipe_name']}, "
        f"{story.snapshot.manifest.method}, {provenance['created']}",
        "",
        *table(("figure", "expected", "realised"), rows),
        "",
        *_distance_lines(story),
    ]


def _distance_lines(story: SnapshotStory) -> list[str]:
    if story.is_full:
        return ["this is the full merge"]
    if story.comparison:
        return comparison_lines(story.comparison)
    return ["how far it is from the full merge: `mergepipe compare` measures it"]


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return size(value) if "bytes" in name else f"{value:.4g}"
