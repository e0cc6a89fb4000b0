"""Layers run from plans made by hand, over experts of every kind, against NumPy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.domain.plan import (
    BaseInput,
    ExpertInput,
    MergePlan,
    TensorTask,
    TrimRule,
)
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.view import TensorView, moved
from mergepipe_pipeline.engine.execute import LayerRunner
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.window import to_bytes
from mergepipe_pipeline.errors import CheckpointChangedError, CorruptionError
from tests.engine.plans import case_of, copied, merged, plan_of, values_in
from tests.support import oracles
from tests.support.kinds import KINDS, Kinds, make_kinds
from tests.support.stored import encode, low_rank_of, model_of, write

COLS = 100
ALL = EngineOptions(threads=2)
WEIGHTS: tuple[Params, ...] = tuple((("weight", w),) for w in (1.0, 0.5, -2.0, 0.25))
MIXED = ("low rank", "delta", "cropped", "gathered")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=150, cols=COLS)


def run(plan: MergePlan, folder: Path, options: EngineOptions = ALL) -> tuple[Path, LayerOutcome]:
    """The one layer of a plan in a new file."""
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    with LayerRunner(plan, options) as runner:
        return file, runner.run(plan.layers[0], file)


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear"])
@pytest.mark.parametrize("name", KINDS)
def test_an_expert_of_any_kind_is_merged_as_numpy_says(
    kinds: Kinds, tmp_path: Path, name: str, operator: str
) -> None:
    params: Params = (("normalize", False),) if operator == "linear" else (("lambda", 0.5),)
    plan = merged(kinds, [name], operator, params, WEIGHTS[1:2])
    file, result = run(plan, tmp_path)
    wanted = oracles.ORACLES[operator](case_of(kinds, plan, [name]))
    np.testing.assert_array_equal(values_in(file), wanted)
    assert result.cost.expert_bytes_read == kinds.experts[name].view.nbytes


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "linear"])
@pytest.mark.parametrize("names", [*combinations(MIXED, 3), MIXED], ids="+".join)
def test_experts_of_different_kinds_are_merged_as_numpy_says(
    kinds: Kinds, tmp_path: Path, names: Sequence[str], operator: str
) -> None:
    plan = merged(kinds, names, operator, (("normalize", False),), WEIGHTS)
    file, _ = run(plan, tmp_path)
    wanted = oracles.ORACLES[operator](case_of(kinds, plan, names))
    np.testing.assert_array_equal(values_in(file), wanted)


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear"])
def test_outside_what_is_read_experts_equal_the_base(
    kinds: Kinds, tmp_path: Path, operator: str
) -> None:
    names = ("low rank", "delta", "gathered", "short", "transposed low rank")
    reads = [(), ((0, 4096), (8192, 9001)), ((17, 5000),), ((4096, 12000),), None]
    plan = merged(
        kinds, names, operator, (("normalize", False),), (*WEIGHTS, (("weight", 1.0),)), reads
    )
    wanted = oracles.ORACLES[operator](case_of(kinds, plan, names))
    for window_elems in (777, 4096, None):
        file, result = run(plan, tmp_path, EngineOptions(window_elems=window_elems, threads=2))
        np.testing.assert_array_equal(values_in(file), wanted)
        assert result.cost.expert_bytes_read == plan.layers[0].expert_bytes_planned


#: Operators with every scope, space and sparsifier; numbers that round, so that order would show.
WINDOWED: dict[str, tuple[Params, Params]] = {
    "linear": ((), ()),
    "ties": ((), (("density", 0.3),)),
    "dare_ties": ((), (("density", 0.5),)),
    "della": ((), (("density", 0.5), ("epsilon", 0.2))),
    "breadcrumbs": ((), (("density", 0.6), ("gamma", 0.1))),
}


@pytest.mark.parametrize("operator", WINDOWED)
def test_bits_depend_neither_on_windows_nor_on_threads(
    kinds: Kinds, tmp_path: Path, operator: str
) -> None:
    method, own = WINDOWED[operator]
    names = ("low rank on a full one", *MIXED)
    weights = (0.3, 0.7, -0.1, 1.1, 0.9)
    plan = merged(kinds, names, operator, method, [(("weight", w), *own) for w in weights])
    plan = with_rules(plan, TrimRule(int(np.float32(1).view(np.uint32)), 7001))
    ways = [(None, 1), (None, 4), (COLS, 2), (333, 3), (4097, 4), (1 << 20, 1)]
    found = {
        run(plan, tmp_path, EngineOptions(window_elems=w, threads=t))[1].stored.sha256
        for w, t in ways
    }
    assert len(found) == 1


def with_rules(plan: MergePlan, rule: TrimRule) -> MergePlan:
    """The plan with this trim rule, and one of larger outliers, for every expert."""
    ((task,),) = (layer.tasks for layer in plan.layers)
    outliers = TrimRule(int(np.float32(3).view(np.uint32)), 100)
    experts = tuple(replace(e, trim=rule, outliers=outliers, scale=1.7) for e in task.experts)
    layer = replace(plan.layers[0], tasks=(replace(task, experts=experts),))
    return replace(plan, layers=(layer,))


@pytest.mark.parametrize("transposed", [False, True])
def test_factors_whose_products_round_give_the_same_bits_in_any_windows(
    tmp_path: Path, transposed: bool
) -> None:
    rng, (n_out, n_in) = np.random.default_rng(0), (700, 300)  # several tiles of the product
    shape = (n_in, n_out) if transposed else (n_out, n_in)
    base = model_of(write(tmp_path, "base", {"w": encode(rng.standard_normal(shape), "BF16")}))
    factors = {
        "w.a": encode(rng.standard_normal((8, n_in)), "F32"),
        "w.b": encode(rng.standard_normal((n_out, 8)), "F32"),
    }
    adapter = write(tmp_path, "adapter", factors)
    low = low_rank_of(adapter, "w", 0.3, transposed=transposed)
    view = moved(TensorView("w", "F32", shape, low_rank=low), 1)
    span = ((0, view.numel),)
    expert = ExpertInput(0, view, "", (("weight", 0.7),), span, span)
    below = BaseInput(base.views["w"], "")
    task = TensorTask("w", shape, "F32", "task_arithmetic", (), 0, below, (expert,))
    plan = plan_of((*base.checkpoints, adapter), [task])
    ways = [(shape[1], 4), (4099, 3), (65536, 2), (None, 1)]
    (tmp_path / "out").mkdir()
    found = {
        run(plan, tmp_path / "out", EngineOptions(window_elems=w, threads=t))[1].stored.sha256
        for w, t in ways
    }
    assert len(found) == 1


def test_values_that_cover_everything_leave_the_base_unread(kinds: Kinds, tmp_path: Path) -> None:
    plan = merged(kinds, ["full", "gathered"], "linear")
    assert run(plan, tmp_path)[1].cost.base_bytes_read == 0
    alone = merged(kinds, ["full", "gathered"], "linear", base=False)
    assert run(alone, tmp_path)[1].stored.sha256 == run(plan, tmp_path)[1].stored.sha256
    part = merged(kinds, ["full", "gathered"], "linear", reads=[None, ((0, 4096),)])
    file, result = run(part, tmp_path, EngineOptions(window_elems=4096, threads=2))
    assert result.cost.base_bytes_read == kinds.base.nbytes - 2 * 4096
    wanted = oracles.linear(case_of(kinds, part, ["full", "gathered"]))
    np.testing.assert_array_equal(values_in(file), wanted)


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_a_merge_that_reads_nothing_is_the_base_s_own_bytes(
    kinds: Kinds, tmp_path: Path, operator: str
) -> None:
    names = ("low rank", "full")
    plan = merged(kinds, names, operator, reads=[(), ()], out_dtype="BF16")
    file, result = run(plan, tmp_path)
    assert file.read_bytes().endswith(Path(kinds.base.checkpoint.root).read_bytes()[-30000:])
    assert (result.cost.expert_bytes_read, result.cost.base_bytes_read) == (0, 30000)


@pytest.mark.parametrize("out_dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", ["full", "gathered", "low rank on a full one"])
def test_a_copy_has_the_values_of_its_view(
    kinds: Kinds, tmp_path: Path, name: str, out_dtype: str
) -> None:
    kind = kinds.experts[name]
    sources = (*kinds.base.checkpoints, *kind.model.checkpoints)
    plan = plan_of(sources, [copied(moved(kind.view, 1), out_dtype=out_dtype)])
    file, result = run(plan, tmp_path)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[out_dtype]
    values = torch.from_numpy(kinds.values + kind.delta).to(dtype).float()
    np.testing.assert_array_equal(values_in(file), values.numpy())
    assert (result.cost.expert_bytes_read, result.cost.base_bytes_read) == (0, kind.view.nbytes)


def test_integers_and_empty_tensors_are_copied_byte_for_byte(kinds: Kinds, tmp_path: Path) -> None:
    data = np.arange(5, dtype="<i8").tobytes()
    empty = encode(np.zeros((0, 4)), "F32")
    model = model_of(write(tmp_path, "m", {"ids": ("I64", (5,), data), "none": empty}))
    tasks = [copied(view, name) for name, view in model.views.items()]
    (tmp_path / "out").mkdir()
    file, result = run(plan_of(model.checkpoints, tasks), tmp_path / "out")
    assert file.read_bytes().endswith(data)
    assert sorted(name for name, _ in result.stored.tensors) == ["ids", "none"]


def test_a_result_names_the_file_s_bytes_and_every_tensor_s_end(
    kinds: Kinds, tmp_path: Path
) -> None:
    plan = merged(kinds, ["full"], "task_arithmetic")
    task = plan.layers[0].tasks[0]
    layer = replace(plan.layers[0], tasks=(replace(task, name="b"), replace(task, name="a")))
    done: list[int] = []
    file = tmp_path / "f.safetensors"
    with LayerRunner(replace(plan, layers=(layer,)), ALL) as runner:
        result = runner.run(layer, file, done.append)
    data = file.read_bytes()
    assert (result.stored.sha256, result.stored.nbytes) == (
        hashlib.sha256(data).hexdigest(),
        len(data),
    )
    assert [name for name, _ in result.stored.tensors] == ["a", "b"]
    assert result.stored.tensors[0][1] == hashlib.sha256(data[: -task.out_nbytes]).hexdigest()
    assert result.stored.tensors[1][1] == result.stored.sha256
    assert sum(done) == 2 * task.out_nbytes
    assert result.cost.expert_bytes_read == 2 * kinds.experts["full"].view.nbytes
    assert result.cost.layers_s >= 0


def test_layers_of_one_plan_share_readers_and_count_their_own_bytes(
    kinds: Kinds, tmp_path: Path
) -> None:
    plan = merged(kinds, ["low rank", "full"], "task_arithmetic")
    ((task,),) = (layer.tasks for layer in plan.layers)
    tasks = [replace(task, experts=task.experts[:k]) for k in (1, 2, 1)]
    layers = [replace(plan.layers[0], name=f"layer.{i}", tasks=(t,)) for i, t in enumerate(tasks)]
    options = EngineOptions(window_elems=1000, threads=3)
    with LayerRunner(replace(plan, layers=tuple(layers)), options) as runner:
        results = list(runner.run_all([(layer, tmp_path / layer.name) for layer in layers]))
    low, full = (kinds.experts[name].view.nbytes for name in ("low rank", "full"))
    assert [r.cost.expert_bytes_read for r in results] == [low, low + full, low]
    assert {r.cost.base_bytes_read for r in results} == {kinds.base.views["w"].nbytes}
    assert results[0].stored.sha256 == results[2].stored.sha256 != results[1].stored.sha256


def test_a_run_that_is_left_in_the_middle_keeps_what_it_finished_and_nothing_else(
    kinds: Kinds, tmp_path: Path
) -> None:
    plan = merged(kinds, ["full"], "task_arithmetic")
    layers = [replace(plan.layers[0], name=f"layer.{i}") for i in range(3)]
    options = EngineOptions(window_elems=1000, threads=3)
    with LayerRunner(replace(plan, layers=tuple(layers)), options) as runner:
        results = runner.run_all([(layer, tmp_path / layer.name) for layer in layers])
        next(results)
        results.close()
    assert [p.name for p in tmp_path.iterdir()] == ["layer.0"]


def test_a_layer_that_reads_other_than_planned_is_refused(kinds: Kinds, tmp_path: Path) -> None:
    plan = merged(kinds, ["full"], "task_arithmetic", reads=[((0, 15_000), (20_000, 20_100))])
    with pytest.raises(CorruptionError, match=r"did not read.*30200 expert bytes, found 30000"):
        run(plan, tmp_path)


def test_an_expert_replaced_while_a_layer_runs_is_noticed(tmp_path: Path) -> None:
    plan = merged(make_kinds(tmp_path), ["full"], "task_arithmetic")

    def touch(_: int) -> None:
        os.utime(plan.sources[1].root, ns=(1, 1))

    (tmp_path / "out").mkdir()
    with (
        LayerRunner(plan, ALL) as runner,
        pytest.raises(CheckpointChangedError, match="while it was read"),
    ):
        runner.run(plan.layers[0], tmp_path / "out" / "f", touch)


def test_an_expert_cut_short_while_a_layer_runs_leaves_no_file(tmp_path: Path) -> None:
    plan = merged(make_kinds(tmp_path), ["full"], "task_arithmetic")
    (tmp_path / "out").mkdir()
    options = EngineOptions(window_elems=100, threads=1)
    with LayerRunner(plan, options) as runner:
        file = tmp_path / "out" / "f"
        with pytest.raises(CheckpointChangedError, match="ended while it was read"):
            runner.run(plan.layers[0], file, lambda _: os.truncate(plan.sources[1].root, 300))
        assert not file.exists()


def test_threads_of_torch_are_given_back(kinds: Kinds, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run(merged(kinds, ["full"], "linear"), tmp_path)
    assert torch.get_num_threads() == before


def test_output_bytes_are_rounded_to_nearest_even_and_never_the_rows_themselves() -> None:
    values = torch.tensor([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0])
    assert to_bytes(values, "BF16").view("<u2").tolist() == [0x3F80, 0x3F80, 0x3F82, 0x8000]
    raw = to_bytes(values, "F32")
    values.zero_()
    assert raw.view("<f4").tolist() == [1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0]
