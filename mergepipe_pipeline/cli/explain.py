"""The command `explain`: what a merge reads, what that should lose, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, cells, table
from mergepipe_pipeline.cli.compare import comparison_lines
from mergepipe_pipeline.cli.evaluation import evaluation_lines, evaluation_records
from mergepipe_pipeline.cli.merging import (
    bound_text,
    error_text,
    packed_lines,
    selected_lines,
)
from mergepipe_pipeline.text import four_digits, percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.plan import MergePlan
    from mergepipe_pipeline.domain.snapshot import Snapshot
    from mergepipe_pipeline.verbs.explain import (
        Explanation,
        Figure,
        LevelShare,
        OperatorChoice,
        ReadShare,
    )


#: What each table of read shares, of levels and of operators shows under its headers.
_SHARES: dict[str, Callable[[ReadShare], Any]] = {
    "expert": lambda s: s.expert,
    "place": lambda s: s.place,
    "size": lambda s: size(s.nbytes_total),
    "read": lambda s: size(s.nbytes_read),
    "share": lambda s: percent(s.nbytes_read / max(1, s.nbytes_total)),
    "known zero": lambda s: size(s.nbytes_known_zero),
}
_LEVELS: dict[str, Callable[[LevelShare], Any]] = {
    "level": lambda x: x.level,
    "blocks": lambda x: x.blocks,
    "elements": lambda x: x.elems,
    "read": lambda x: size(x.nbytes),
}
_TENSORS: dict[str, Callable[[OperatorChoice], Any]] = {
    "tensor": lambda t: t.tensor,
    "operator": lambda t: t.operator,
    "variant": lambda t: t.variant or "-",
    "reason": lambda t: t.reason or "-",
}


@click.command()
@click.argument("what")
@click.option(
    "--by",
    type=click.Choice(["expert", "layer", "tensor"]),
    default="expert",
    show_default=True,
    help="How to group what a plan reads.",
)
@answer(csv="Write every row here.", picture="Write a heat map of what is read (PNG) here.")
def explain(console: Console, what: str, by: str) -> Answer:
    """Show what a plan reads of each expert, what that loses, and what came of it.

    WHAT is a plan, a snapshot or a ref. By tensor also which operator makes each. Of a snapshot,
    what was expected stands beside what came, and how far it is from the full merge once `compare`
    has measured that.
    """
    from mergepipe_pipeline.verbs.explain import (
        explain,
        figures,
        level_shares,
        operator_choices,
        read_shares,
        shares_picture,
    )

    explanation = explain(console.existing, what)
    console.warn(*explanation.warnings)
    plan, snapshot = explanation.plan, explanation.snapshot
    shares = read_shares(plan, by) if plan else []
    levels = level_shares(plan) if plan else []
    tensors = operator_choices(plan) if plan and by == "tensor" else []
    selected = plan.request.selected if plan else ()
    expected = figures(explanation)
    measured = evaluation_records(console.existing, snapshot.snapshot_id) if snapshot else []
    data = {
        "plan_id": plan.plan_id if plan else None,
        "snapshot_id": snapshot.snapshot_id if snapshot else None,
        "method": plan.method if plan else None,
        "made_by": explanation.provenance.get("made_by"),
        "estimates": asdict(plan.estimates) if plan else None,
        "selected": [asdict(s) for s in selected],
        "figures": [asdict(f) for f in expected],
        "shares": [asdict(s) for s in shares],
        "levels": [asdict(x) for x in levels],
        "tensors": [asdict(t) for t in tensors],
        "layers": explanation.comparison and explanation.comparison.records,
        "evaluations": measured,
    }
    lines = [
        *(_snapshot_lines(explanation, snapshot, expected) if snapshot else []),
        *(_plan_lines(plan) if plan else []),
        *cells(shares, {k: v for k, v in _SHARES.items() if k != "place" or by != "expert"}),
        *cells(levels, _LEVELS),
        *cells(tensors, _TENSORS),
        *selected_lines(selected),
        *evaluation_lines(measured),
    ]
    picture = partial(shares_picture, plan) if plan else None
    return Answer(data, lines, [asdict(s) for s in shares], picture)


def _plan_lines(plan: MergePlan) -> list[str]:
    e = plan.estimates
    return [
        f"plan {plan.plan_id[:16]}  {plan.method}, strategy {plan.estimates.strategy}, "
        f"{size(e.expert_bytes_planned)} of {size(e.expert_bytes_total)} expert bytes",
        *packed_lines(plan, "from packs "),
        f"error {error_text(plan)}",
        f"error bound {bound_text(plan)}",
    ]


def _snapshot_lines(
    explanation: Explanation, snapshot: Snapshot, expected: list[Figure]
) -> list[str]:
    made = explanation.provenance
    head = f"snapshot {snapshot.snapshot_id}  "
    if made_by := made.get("made_by"):
        given = [(name, str(value)) for name, value in made_by["parameters"].items()]
        head += f"{made_by['verb']}, {made['created']}"
        return [head, "", *table(("parameter", "value"), given)]
    rows = [
        (f.figure.replace("_", " "), _figure(f.figure, f.expected), _figure(f.figure, f.realised))
        for f in expected
    ]
    distance = ["how far it is from the full merge: `mergepipe compare` measures it"]
    if explanation.is_full:
        distance = ["this is the full merge"]
    elif explanation.comparison:
        distance = comparison_lines(explanation.comparison)
    head += f"{made['recipe_name']}, {snapshot.manifest.method}, {made['created']}"
    return [head, "", *table(("figure", "expected", "realised"), rows), "", *distance, ""]


def _figure(name: str, value: float | None) -> str:
    return size(value) if "bytes" in name and value is not None else four_digits(value)
