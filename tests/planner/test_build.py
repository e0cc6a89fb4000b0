"""Plans over experts of every kind: what is covered and read, what it costs, what it promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.digests import digest_checkpoint
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.operator import Choosing
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan, SideFiles
from mergepipe_pipeline.domain.recipe import (
    BaseTensor,
    Budget,
    ModelRef,
    Params,
    Recipe,
    TensorInput,
    TensorRecipe,
)
from mergepipe_pipeline.domain.view import LowRank
from mergepipe_pipeline.planner.parts import TensorFacts
from mergepipe_pipeline.planner.plan_builder import PlanBuilder
from mergepipe_pipeline.storage.forms import record_of
from tests.analysis.pairs import analyze_one
from tests.support import oracles
from tests.support.kinds import KINDS, Kinds, make_kinds
from tests.support.oracles import Case

pytestmark = pytest.mark.usefixtures("baselines")

GRID = BlockGrid(4096)
PARTIAL = ["magnitude", "hash", "drop-experts"]


def digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The digest of every tensor."""
    return {name: taken[0].content for name, taken in digest_checkpoint(checkpoint).items()}


class Family:
    """Experts of every kind, analysed once; model 0 is the base."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.models = [kinds.base, *(kinds.experts[name].model for name in KINDS)]
        checkpoints = (c for m in self.models for c in m.checkpoints)
        self.digests = {c.checkpoint_id: digests_of(c) for c in checkpoints}
        self.stats = {
            (i, 0): analyze_one(m, kinds.base, [("w", "w")], GRID)
            for i, m in enumerate(self.models)
            if i
        }

    def plan(
        self,
        fraction: float | None = None,
        strategy: str = "magnitude",
        *,
        method: str = "task_arithmetic",
        params: Params = (),
        chosen: Mapping[str, Choosing] | None = None,
    ) -> MergePlan:
        """The plan that merges tensor `w` of all kinds under a share of the bytes."""
        sign = 1 if dict(params).get("normalize") else -1
        inputs = tuple(
            TensorInput(i, "w", i - 1, (("weight", sign**i * i / 4),))
            for i in range(1, len(self.models))
        )
        recipe = Recipe(
            name="r",
            text="",
            method=method,
            models=tuple(ModelRef(m.name, m.name) for m in self.models),
            base=0,
            tensors=(
                TensorRecipe("w", params, BaseTensor(0, "w"), inputs),
                TensorRecipe("v", (), BaseTensor(0, "w"), ()),
            ),
            dtype=None,
            out_dtype="F32",
            budget=Budget(fraction=fraction),
            strategy=strategy,
            seed=1,
            ref="main",
        )
        facts = TensorFacts(chosen=chosen or {})
        return PlanBuilder(
            recipe=recipe,
            models=self.models,
            digests=self.digests,
            stats=self.stats,
            facts=facts,
            grid=GRID,
            side=SideFiles(2),
        ).build()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(make_kinds(tmp_path_factory.mktemp("kinds"), rows=300))


def experts_of(plan: MergePlan) -> dict[str, ExpertInput]:
    (task,) = (t for layer in plan.layers for t in layer.tasks if t.name == "w")
    return dict(zip(KINDS, task.experts, strict=True))


@pytest.mark.parametrize("strategy", PARTIAL)
@given(fraction=st.floats(0, 1))
def test_a_plan_reads_what_it_states_within_its_budget(
    family: Family, strategy: str, fraction: float
) -> None:
    plan = family.plan(fraction, strategy)
    found = plan.estimates
    read = sum(e.read_nbytes for e in experts_of(plan).values())
    assert read == found.expert_bytes_planned <= int(fraction * found.expert_bytes_total)
    assert found.expert_bytes_total == sum(k.view.nbytes for k in family.kinds.experts.values())
    for name, e in experts_of(plan).items():
        if e.view.low_rank:
            assert e.read in ((), ((0, e.view.numel),)), name
            assert e.covered == e.read, name


@pytest.mark.parametrize("strategy", PARTIAL)
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("task_arithmetic", (("normalize", False), ("lambda", 1.5))),
        ("ties", (("normalize", False), ("lambda", 1.0))),
        ("ties", (("normalize", True), ("lambda", 0.5))),
    ],
)
@given(fraction=st.floats(0, 1))
def test_the_merge_of_a_plan_is_as_near_to_the_full_one_as_it_promises(
    family: Family, method: str, params: Params, strategy: str, fraction: float
) -> None:
    plan = family.plan(fraction, strategy, method=method, params=params)
    experts = experts_of(plan)
    base = family.kinds.values.astype(np.float64)
    full = np.stack([base + family.kinds.experts[name].delta for name in experts])
    part = np.repeat(base[None], len(full), axis=0)
    for number, e in enumerate(experts.values()):
        for a, b in e.covered:
            part[number, a:b] = full[number, a:b]
    weights = [dict(e.params) for e in experts.values()]
    merged, wanted = (
        oracles.ORACLES[method](Case(base, rows, dict(params), weights)) for rows in (part, full)
    )
    assert plan.estimates.error_bound is not None
    assert np.linalg.norm(merged - wanted) <= plan.estimates.error_bound * (1 + 1e-9)


def test_without_a_budget_everything_useful_is_read_and_the_rest_is_covered(family: Family) -> None:
    plan = family.plan()
    for name, e in experts_of(plan).items():
        whole = ((0, e.view.numel),)
        assert (e.covered, e.read) == (whole, () if name == "empty" else whole), name
        assert e.read_nbytes == family.kinds.experts[name].view.nbytes
    assert plan.estimates.error_bound == 0.0


def test_a_bundle_is_one_thing_to_buy(family: Family) -> None:
    blocks = {name: GRID.count(k.view.numel) for name, k in family.kinds.experts.items()}
    bundles = [n for n, k in family.kinds.experts.items() if k.view.low_rank or not k.view.stored]
    units = sum(blocks.values()) - sum(blocks[n] for n in bundles) + len(bundles)
    found = family.plan().estimates
    assert (found.blocks_total, found.blocks_zero) == (units, 1)
    assert found.blocks_bought == units - 1


def test_sources_of_models_with_several_checkpoints_are_numbered_through(family: Family) -> None:
    plan = family.plan()
    checkpoints = [*family.kinds.base.checkpoints]
    for name, e in experts_of(plan).items():
        low = e.view.low_rank
        assert low is None or isinstance(low, LowRank)
        used = {p.source for p in e.view.stored} | ({low.a.source, low.b.source} if low else set())
        mine = range(len(checkpoints), len(checkpoints) + len(family.kinds.experts[name].stored))
        assert used <= set(mine), name
        checkpoints += family.kinds.experts[name].model.checkpoints
    assert [s.checkpoint_id for s in plan.sources] == [c.checkpoint_id for c in checkpoints]
    assert plan.roles == ("base", *["expert"] * (len(checkpoints) - 1))
    assert plan.side.template == 2


def test_an_expert_is_named_by_what_it_holds(family: Family) -> None:
    found = experts_of(family.plan())
    expert = family.models[1].checkpoint
    assert found["full"].digest == family.digests[expert.checkpoint_id]["w"]
    assert len({e.digest for e in found.values()}) == len(KINDS)
    assert all(len(e.digest) == 64 for e in found.values())


def test_plans_of_every_kind_of_view_survive_their_json(family: Family) -> None:
    plan = family.plan(0.4)
    again = record_of(MergePlan, json.loads(plan.to_json()))
    assert again == plan
    assert again.plan_id == plan.plan_id


def test_what_is_not_read_counts_in_the_plan_s_id_and_where_files_lie_does_not(
    family: Family, tmp_path: Path
) -> None:
    plan = family.plan()
    assert family.plan(0.4).plan_id != plan.plan_id
    moved = replace(plan, sources=tuple(replace(s, root=str(tmp_path)) for s in plan.sources))
    assert moved.plan_id == plan.plan_id


def test_a_tensor_that_is_only_copied_reads_no_expert(family: Family) -> None:
    plan = family.plan(chosen={"w": Choosing("copy", (), ((),) * len(KINDS), "all alike")})
    tasks = {t.name: t for layer in plan.layers for t in layer.tasks}
    assert (tasks["w"].operator, tasks["w"].experts, tasks["w"].reason) == ("copy", (), "all alike")
    assert tasks["v"].operator == "copy"
    assert plan.estimates.expert_bytes_planned == plan.estimates.expert_bytes_total == 0
