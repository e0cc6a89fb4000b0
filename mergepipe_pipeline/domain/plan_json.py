"""Reads a plan back from the JSON that `MergePlan.to_json` gives: lists become tuples again."""

from __future__ import annotations

from typing import Any

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.pack import PackedInput, PackedRange, PackSource
from mergepipe_pipeline.domain.plan import (
    BaseInput,
    Estimates,
    ExpertInput,
    LayerTask,
    MergePlan,
    SideFiles,
    Source,
    TensorTask,
    TrimRule,
)
from mergepipe_pipeline.domain.request import Request
from mergepipe_pipeline.domain.view import LowRank, Part, RowValues, Run, TensorView, Update


def plan_from_json(value: dict[str, Any]) -> MergePlan:
    """The plan that gave this material."""
    return MergePlan(
        **{
            **value,
            "sources": tuple(Source(**s) for s in value["sources"]),
            "roles": tuple(value["roles"]),
            "layers": tuple(_layer(v) for v in value["layers"]),
            "side": _side(value["side"]),
            "estimates": Estimates(**value["estimates"]),
            "warnings": tuple(value["warnings"]),
            "request": Request.from_json(value.get("request") or {"models": []}),
            "packs": tuple(PackSource(**p) for p in value.get("packs", ())),
        },
    )


def _side(value: dict[str, Any]) -> SideFiles:
    files = value["files"]
    config = tuple((place, v) for place, v in value["config"])
    return SideFiles(value["template"], config, None if files is None else _pairs(files))


def _layer(value: dict[str, Any]) -> LayerTask:
    return LayerTask(value["name"], tuple(_task(t) for t in value["tasks"]))


def _task(v: dict[str, Any]) -> TensorTask:
    base = v["base"] and BaseInput(_view(v["base"]["view"]), v["base"]["digest"])
    return TensorTask(
        **{
            **v,
            "shape": tuple(v["shape"]),
            "params": _pairs(v["params"]),
            "base": base,
            "experts": tuple(_expert(e) for e in v["experts"]),
            "facts": tuple(v["facts"]),
        }
    )


def _expert(v: dict[str, Any]) -> ExpertInput:
    return ExpertInput(
        **{
            **v,
            "view": _view(v["view"]),
            "params": _pairs(v["params"]),
            "covered": _pairs(v["covered"]),
            "read": _pairs(v["read"]),
            "trim": v["trim"] and TrimRule(**v["trim"]),
            "outliers": v["outliers"] and TrimRule(**v["outliers"]),
            "l1": None if v.get("l1") is None else float(v["l1"]),
            "packed": _packed(v.get("packed")),
        }
    )


def _packed(v: dict[str, Any] | None) -> PackedInput | None:
    return (
        None
        if v is None
        else PackedInput(**{**v, "ranges": tuple(PackedRange(**r) for r in v["ranges"])})
    )


def _view(v: dict[str, Any]) -> TensorView:
    low_rank = v["low_rank"] and _update(v["low_rank"])
    return TensorView(
        **{
            **v,
            "shape": tuple(v["shape"]),
            "stored": tuple(_part(p) for p in v["stored"]),
            "runs": tuple(Run(**r) for r in v["runs"]),
            "low_rank": low_rank,
        }
    )


def _update(v: dict[str, Any]) -> Update:
    if "rows" in v:
        return RowValues(_part(v["values"]), tuple(v["rows"]))
    return _low_rank(v)


def _low_rank(v: dict[str, Any]) -> LowRank:
    parts = {k: _part(v[k]) for k in ("a", "b", "magnitude", "weights") if v.get(k)}
    second = v.get("second")
    return LowRank(**{**v, **parts, "second": second and _low_rank(second)})


def _part(v: dict[str, Any]) -> Part:
    return Part(v["source"], TensorEntry(**{**v["entry"], "shape": tuple(v["entry"]["shape"])}))


def _pairs(values: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(v) for v in values)
