"""How results look in the Dagster UI: plain values, tables, and pictures.

The UI shows entries in the order in which they are given, tables in their place, and Markdown of
1000 characters or more after a click only.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.shards import LayerRecord
from mergepipe_pipeline.domain.evaluation import Metrics, Verdict, figure
from mergepipe_pipeline.domain.layers import layer_count, layer_name
from mergepipe_pipeline.domain.outcome import LayerOutcome, Realised, Shard
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.domain.snapshot import operator_counts
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.text import in_one_line, markdown, size
from mergepipe_pipeline.verbs.conflicts import largest_error, tables
from mergepipe_pipeline.verbs.conflicts import picture as conflicts_picture
from mergepipe_pipeline.verbs.curve import RecipeCurve, picture, rows_of, sentence
from mergepipe_pipeline.verbs.explain import (
    operator_choices,
    plain_name,
    read_shares,
    selected_table,
    shares_picture,
    shares_table,
)

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.conflicts import ConflictReports

_GIB = 1 << 30
#: Chosen operators that are shown with their reasons.
_MOST_REASONS = 8
#: Characters of a recipe that are shown, and experts that have a column.
_MOST_TEXT, _MOST_EXPERTS = 900, 12


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> dg.TableMetadataValue:
    """A table that the UI shows in its place, however long; cells are shown letter by letter."""
    records = [
        dg.TableRecord(dict(zip(headers, (in_one_line(str(cell)) for cell in row), strict=True)))
        for row in rows
    ]
    columns = [dg.TableColumn(header) for header in headers]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))


def description(text: str) -> str:
    """Text of several lines as the UI shows it letter by letter.

    The UI reads descriptions of assets, of observations and of what a check found as Markdown.
    """
    return "\n".join(map(markdown, text.split("\n")))


def recipe_metadata(file: RecipeFile) -> Mapping[str, Any]:
    """A recipe's text, the first lines of a long one: what the UI shows in its place."""
    lines = [in_one_line(line) for line in file.recipe.text.strip().split("\n")]
    shown, left = list[str](), _MOST_TEXT
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            shown.append(f"# … {len(lines) - len(shown)} more lines")
            break
        shown.append(line)
    text = "\n".join(shown)
    fence = "~" * (1 + max(map(len, re.findall("~+", text)), default=2))  # as none inside
    return {"recipe": dg.MetadataValue.md(f"{fence}yaml\n{text}\n{fence}")}


def plan_metadata(plan: MergePlan, recipe_curve: RecipeCurve | None = None) -> Mapping[str, Any]:
    """Answers to what a person asks of a plan: what it reads and loses, and what other budgets
    would; then figures, the inputs, and what each gives.
    """
    e = plan.estimates
    saved = e.expert_bytes_total - e.expert_bytes_planned
    warnings = "\n".join(f"- {markdown(w)}" for w in plan.warnings)
    selected = selected_table(plan.request.selected)
    return {
        "in short": sentence(plan),
        **({"warnings": dg.MetadataValue.md(warnings)} if warnings else {}),
        **_curve_metadata(recipe_curve),
        "method": plan.method,
        "strategy": e.strategy,
        **budget_metadata(plan),
        **({"expert GiB from packs": gib(e.expert_bytes_packed)} if plan.packs else {}),
        "expert GiB in all": gib(e.expert_bytes_total),
        **({"expert GiB saved": gib(saved)} if saved else {}),
        **error_metadata(plan),
        "share read": png(shares_picture(plan), "share of bytes read by layer and expert"),
        "blocks read": e.blocks_bought,
        "blocks in all": e.blocks_total,
        **({"blocks known to be zero": e.blocks_zero} if e.blocks_zero else {}),
        "separate reads": e.reads,
        "inputs": table(
            ("role", "name", "path"),
            [
                (role, plain_name(s.name), s.root)
                for role, s in zip(plan.roles, plan.sources, strict=True)
            ],
        ),
        **({"selected": table(*selected)} if selected[1] else {}),
        "operators": operators_table(plan),
        **_choices_metadata(plan),
        "experts": table(*shares_table([s for s in read_shares(plan, "expert") if s.nbytes_read])),
        "plan id": plan.plan_id,
    }


def budget_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """The bytes that a plan may read of the experts, and those that it reads."""
    e = plan.estimates
    return {
        "budget GiB": "none" if e.budget_bytes is None else gib(e.budget_bytes),
        "expert GiB planned": gib(e.expert_bytes_planned),
    }


def metrics_metadata(metrics: Metrics) -> Mapping[str, float]:
    """Each metric under its name, as a number that the UI plots over time."""
    return {in_one_line(name): float(value) for name, value in metrics.items()}


def gate_metadata(verdict: Verdict) -> Mapping[str, Any]:
    """A table of a gate's thresholds; then each metric and limit as a number to plot."""
    rows, figures = [], dict[str, float]()
    for f in verdict.findings:
        metric, asked = in_one_line(f.threshold.metric), f.threshold.comparison.replace("_", " ")
        live = "-" if f.live is None else figure(f.live)
        met = "yes" if f.passed else "NO"
        rows.append((metric, figure(f.value), live, f.threshold.summary, met))
        named = {metric: f.value, f"{metric}: {asked}": f.limit, f"{metric}: live": f.live}
        figures |= {name: float(value) for name, value in named.items() if value is not None}
    headers = ("metric", "value", "live", "the gate asks for", "met")
    return {"thresholds": table(headers, rows), **figures}


def report_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """By layer and expert, what was read; layers and experts of which nothing was are left out."""
    cells: dict[str, dict[str, list[int]]] = {}
    by_expert = Counter[str]()
    for s in read_shares(plan, "layer"):
        if s.nbytes_read:
            name = s.expert
            cell = cells.setdefault(s.place, {}).setdefault(name, [0, 0])
            cell[0] += s.nbytes_read
            cell[1] += s.nbytes_total
            by_expert[name] += s.nbytes_read
    names = [name for name, _ in by_expert.most_common(_MOST_EXPERTS)]
    rows = [
        (layer, *(" of ".join(map(size, mine[name])) if name in mine else "" for name in names))
        for layer, mine in cells.items()
    ]
    left = len(by_expert) - len(names)
    more = {"experts that are not shown": f"{left}, of which less was read"} if left else {}
    return {"read of each expert": table(("layer", *names), rows) if rows else "nothing", **more}


def error_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """The promise of a plan about its error, in L2 and relative to the update, and why."""
    e, unknown = plan.estimates, plan.estimates.no_error_note
    norms = {
        "predicted error": None if unknown else e.predicted_error,
        "margin of the predicted error": None if unknown else e.predicted_margin,
        "error bound": e.error_bound,
    }
    meta: dict[str, Any] = {"predicted error": unknown} if unknown else {}
    for name, norm in norms.items():
        if norm is not None:
            if e.update_norm:
                meta[f"{name} (share of the update)"] = short(norm / e.update_norm)
            meta[f"{name} (L2)"] = short(norm)
    return meta | {"about the error bound": e.bound_note}


def short(figure: float) -> float:
    """A figure to four digits: more are noise in the UI, and what is exact is in the plan."""
    return float(f"{figure:.4g}")


def operators_table(plan: MergePlan) -> dg.TableMetadataValue:
    """How many tensors each operator makes."""
    return table(("operator", "variant", "tensors"), operator_counts(plan))


def stages_metadata(file: RecipeFile) -> Mapping[str, Any]:
    """The stages of a recipe in the order they run; nothing for a recipe of one."""
    if len(file.stages) < 2:
        return {}
    rows = [
        (s.stage or "the result", s.method, ", ".join(r.text for r in s.references))
        for s in file.stages
    ]
    return {"stages": table(("stage", "method", "models"), rows)}


def _bytes_metadata(cost: Realised) -> dict[str, float]:
    return {
        "expert GiB read": gib(cost.expert_bytes_read),
        "base GiB read": gib(cost.base_bytes_read),
        "GiB written": gib(cost.bytes_written),
    }


def gib(nbytes: int) -> float:
    """Bytes in GiB, for figures that the UI plots over time."""
    return short(nbytes / _GIB)


def merge_metadata(cost: Realised, seconds: float) -> Mapping[str, Any]:
    """The cost of all layers of a run together."""
    return {
        "layers merged": cost.layers_executed,
        "layers reused": cost.layers_reused,
        **_bytes_metadata(cost),
        "seconds to merge": round(seconds, 3),
    }


def shard_metadata(
    shard: Shard, done: Sequence[LayerOutcome], held_nbytes: int, seconds: float
) -> Mapping[str, Any]:
    """The layers that one worker merged, the most memory it held meanwhile, and what that took."""
    return {
        "shard": f"{shard.number} of {shard.count}",
        "layers": ", ".join(shard.layers) or "none",
        "planned GiB": gib(shard.nbytes),
        **merge_metadata(Realised.total(x.cost for x in done), seconds),
        "peak GiB of memory": gib(held_nbytes),
    }


def shards_metadata(records: Sequence[LayerRecord]) -> Mapping[str, Any]:
    """The cost of a plan's layers in all, and each worker's share of it.

    The seconds are those of the worker that took longest, and of all of them.
    """
    workers: dict[tuple[int, str], list[LayerRecord]] = {}
    for record in records:
        workers.setdefault((record.shard, record.worker), []).append(record)
    rows = []
    for (shard, worker), some in sorted(workers.items()):
        cost = Realised.total(r.cost for r in some)
        held = max(r.held_nbytes for r in some)
        nbytes = (cost.expert_bytes_read, cost.base_bytes_read, cost.bytes_written, held)
        counts = (cost.layers_executed, cost.layers_reused)
        rows.append((shard, worker, *counts, *map(size, nbytes), f"{cost.layers_s:.1f}"))
    headers = ("shard", "worker", "merged", "reused", "experts read", "base read", "written")
    total = Realised.total(r.cost for r in records)
    seconds = [sum(r.cost.layers_s for r in some) for some in workers.values()]
    return {
        **merge_metadata(total, max(seconds, default=0.0)),
        "seconds of all workers": round(sum(seconds), 3),
        "workers": table((*headers, "peak memory", "seconds"), rows),
    }


def layer_metadata(plan: MergePlan, layer: LayerTask, done: LayerOutcome) -> Mapping[str, Any]:
    """The origins of a layer, its operators, and its cost."""
    operators = Counter(" ".join(filter(None, (t.operator, t.variant))) for t in layer.tasks)
    return {
        "reused": done.reused,
        "tensors": len(layer.tasks),
        "operators": ", ".join(f"{name}: {n}" for name, n in sorted(operators.items())),
        "made from": in_one_line(", ".join(_origins(plan, layer))),
        **_bytes_metadata(done.cost),
        "seconds to merge": round(done.cost.layers_s, 3),
        "object SHA-256": done.stored.sha256,
    }


def _origins(plan: MergePlan, layer: LayerTask) -> Sequence[str]:
    """The checkpoints' layers that a layer is made from, each once: `expert_00 layer.03`."""
    n_layers = layer_count(t.name for lay in plan.layers for t in lay.tasks)
    return list(
        dict.fromkeys(
            f"{plain_name(plan.sources[part.source].name)} {layer_name(view.name, n_layers)}"
            for task in layer.tasks
            for view in _views(task)
            for part in (*view.stored, *(view.low_rank.parts if view.low_rank else ()))
        )
    )


def _views(task: TensorTask) -> Sequence[TensorView]:
    base = [task.base.view] if task.base else []
    return [*(e.view for e in task.experts), *base]


def _curve_metadata(recipe_curve: RecipeCurve | None) -> Mapping[str, Any]:
    if recipe_curve is None:
        return {}
    if recipe_curve.unknown:
        return {"budgets": recipe_curve.unknown}
    curve = recipe_curve.curve
    return {
        "loss by budget": png(picture(recipe_curve), "predicted loss over bytes"),
        "budgets": table(*rows_of(curve)),
        **({"knee GiB": gib(curve.knee.nbytes)} if curve.knee else {}),
    }


def _choices_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """Per kind of choice (`auto`: KEEP, AVG, TIES, DARE) its tensors, and the first reasons."""
    chosen = [m for m in operator_choices(plan) if m.reason]
    if not chosen:
        return {}
    counts = Counter(m.reason.partition(":")[0] for m in chosen)
    rows = [(m.tensor, m.operator, m.reason) for m in chosen[:_MOST_REASONS]]
    if len(chosen) > _MOST_REASONS:
        rows.append((f"… and {len(chosen) - _MOST_REASONS} more, in provenance.json", "", ""))
    return {
        **{f"tensors made by {kind}": n for kind, n in sorted(counts.items())},
        "choices": table(("tensor", "operator", "reason"), rows),
    }


def conflict_metadata(reports: ConflictReports) -> Mapping[str, Any]:
    """Tables and a picture of one report per stage; keys name the stage where there are several."""
    if not reports:
        return {"compared": "nothing: no model is merged into a checkpoint as its base"}
    meta: dict[str, Any] = {"heat map of cosines": png(conflicts_picture(reports), "cosines")}
    for stage, report in reports.items():
        shown: dict[str, Any] = {
            "experts": len(report.experts),
            "interference": short(report.whole.interference),
            "standard error of the interference": short(report.whole.interference_error),
            "largest standard error of a cosine": short(largest_error(report, "cosine_error")),
        }
        for title, (headers, rows) in tables(report, "layer").items():
            shown[title] = table(headers, rows) if rows else "none"
        prefix = f"{stage}: " if len(reports) > 1 else ""
        meta |= {f"{prefix}{key}": value for key, value in shown.items()}
    return meta


def png(picture: bytes, description: str) -> dg.MarkdownMetadataValue:
    """A picture that the UI shows after a click: Markdown with the bytes in it."""
    encoded = b64encode(picture).decode()
    return dg.MetadataValue.md(f"![{description}](data:image/png;base64,{encoded})")


def dependents_link(expert: str) -> dg.MarkdownMetadataValue:
    """To all assets of recipes that use an expert, as they are when somebody follows the link."""
    chosen = quote(f'tag:"expert/{expert[:63]}"', safe="")
    text = markdown(f"all assets that use {expert}")
    return dg.MetadataValue.md(f"[{text}](/assets?asset-selection={chosen})")
