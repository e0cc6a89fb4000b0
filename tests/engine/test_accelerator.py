"""The path of an accelerator gives the CPU's files; without a GPU it runs on the CPU's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.domain.plan import MergePlan, TrimRule
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.engine import accelerator
from mergepipe_pipeline.engine.accelerator import DeviceBufferPool, cast, device_of, stays_on_cpu
from mergepipe_pipeline.engine.execute import LayerRunner
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.window import to_bytes
from mergepipe_pipeline.errors import CheckpointChangedError, DeviceError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.steps import sparsify
from tests.engine.plans import merged
from tests.support.kinds import Kinds, make_kinds
from tests.support.laws import examples

COLS = 100
HAS_CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")
NAMES = ("full", "low rank on a full one", "low rank", "delta", "cropped", "gathered")

#: Method and model parameters, and the plan's facts.
MERGES: dict[str, tuple[Params, Params, tuple[float, ...]]] = {
    "linear": ((), (), ()),
    "mean": ((), (), ()),
    "task_arithmetic": ((("normalize", True), ("lambda", 0.7)), (), ()),
    "ties": ((("rescale", True),), (("density", 0.3),), ()),
    "dare_linear": ((("variant", "paper"),), (("density", 0.3),), ()),
    "dare_ties": ((("normalize", True),), (("density", 0.5),), ()),
    "della": ((), (("density", 0.5), ("epsilon", 0.2)), ()),
    "della_linear": ((("variant", "paper"),), (("density", 0.5), ("epsilon", 0.2)), ()),
    "breadcrumbs_ties": ((), (("density", 0.6), ("gamma", 0.1)), ()),
    "sce": ((("select_topk", 0.3),), (), (0.05, 100.0, *(1 / 6,) * 6)),
    "ram": ((), (), ()),
    "multislerp": ((), (), (1.0, 0.3, 0.2, 0.1, -0.1, 0.4, 0.9)),
    "karcher": ((), (), (0.0, 0.3, 0.2, 0.1, -0.1, 0.4, 0.9)),
    "model_stock": ((("filter_wise", True),), (), ()),
}
#: Devices to run on: what a test cannot have is skipped.
every_device = pytest.mark.parametrize(
    "device", ["stand-in", pytest.param("cuda", marks=needs_gpu)]
)
WEIGHTED = {name for name, op in OPERATORS.items() if "weight" in str(op.schema.parameters)}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=150, cols=COLS)


@contextmanager
def on(device: str) -> Iterator[None]:
    """A GPU is there; or the CPU is treated as one."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "stand-in":
            patch.setattr(accelerator, "device_of", lambda name: torch.device("cpu"))
            patch.setattr(sparsify, "_is_on_host", lambda delta: False)
        yield


def plan_for(
    kinds: Kinds, operator: str, names: Sequence[str] = NAMES, out_dtype: str = "F32"
) -> MergePlan:
    """A merge whose experts are partly read, with rules for every sparsifier."""
    method, own, facts = MERGES[operator]
    weights = (0.3, 0.7, -0.1, 1.1, 0.9, 0.6)
    models = [
        tuple(p for p in (("weight", w), *own) if p[0] != "weight" or operator in WEIGHTED)
        for w in weights[: len(names)]
    ]
    reads = [None, None, None, ((17, 5000), (9000, 9001)), None, ((4096, 12000),)]
    plan = merged(kinds, names, operator, method, models, reads, out_dtype=out_dtype)
    rule = TrimRule(int(np.float32(1).view(np.uint32)), 7001)
    outliers = TrimRule(int(np.float32(3).view(np.uint32)), 100)
    (task,) = plan.layers[0].tasks
    experts = tuple(replace(e, trim=rule, outliers=outliers, scale=1.7) for e in task.experts)
    layer = replace(plan.layers[0], tasks=(replace(task, experts=experts, facts=facts),))
    return replace(plan, layers=(layer,))


def run(plan: MergePlan, folder: Path, options: EngineOptions) -> bytes:
    """The file of the plan's one layer."""
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    with LayerRunner(plan, options) as runner:
        runner.run(plan.layers[0], file)
    return file.read_bytes()


@every_device
@pytest.mark.parametrize("operator", MERGES)
def test_a_device_writes_the_file_of_the_cpu(
    kinds: Kinds, tmp_path: Path, device: str, operator: str
) -> None:
    plan = plan_for(kinds, operator)
    wanted = run(plan, tmp_path, EngineOptions(threads=2))
    with on(device):
        for window_elems in (333, None):
            options = EngineOptions(window_elems=window_elems, threads=2, device="cuda")
            assert run(plan, tmp_path, options) == wanted


@every_device
@pytest.mark.parametrize("out_dtype", ["BF16", "F16", "F64", "F8_E4M3"])
def test_results_of_every_type_are_cast_there(
    kinds: Kinds, tmp_path: Path, device: str, out_dtype: str
) -> None:
    plan = plan_for(kinds, "ties", out_dtype=out_dtype)
    wanted = run(plan, tmp_path, EngineOptions(threads=2))
    with on(device):
        assert run(plan, tmp_path, EngineOptions(threads=2, device="cuda")) == wanted


@every_device
def test_stored_bfloat16_is_merged_there_too(
    kinds: Kinds, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(kinds, "ties", ("full", "gathered"))
    wanted = run(plan, tmp_path, EngineOptions(threads=2))
    brought: list[int] = []
    bring = DeviceBufferPool.bring

    def counted(buffers: DeviceBufferPool, values: torch.Tensor) -> U8Array:
        brought.append(len(values))
        return bring(buffers, values)

    monkeypatch.setattr(DeviceBufferPool, "bring", counted)
    with on(device):
        options = EngineOptions(window_elems=4096, threads=2, device="cuda")
        assert run(plan, tmp_path, options) == wanted
    assert sum(brought) == 150 * COLS


@every_device
def test_an_expert_cut_short_ends_the_merge_and_leaves_no_file(tmp_path: Path, device: str) -> None:
    plan = plan_for(make_kinds(tmp_path), "ties", ("full",))
    file = tmp_path / "out"
    options = EngineOptions(window_elems=100, threads=1, device="cuda")
    with (
        on(device),
        LayerRunner(plan, options) as runner,
        pytest.raises(CheckpointChangedError, match="ended while it was read"),
    ):
        runner.run(plan.layers[0], file, lambda _: os.truncate(plan.sources[1].root, 300))
    assert not file.exists()


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(["BF16", "F16", "F32", "F64"]))
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_cast_there_is_the_cast_here(place: str, seed: int, dtype: str) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, 4099, np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    if dtype != "BF16":  # which NaN a NaN is, only bfloat16 says
        values = values.nan_to_num(nan=0.0)
    found = cast(values.to(place), dtype).cpu().view(torch.uint8).numpy()
    np.testing.assert_array_equal(found, to_bytes(values, dtype))


@pytest.mark.parametrize(
    ("operator", "params", "stays"),
    [
        ("arcee_fusion", (), True),
        ("model_stock", (("filter_wise", True),), True),
        ("model_stock", (), False),
        ("nuslerp", (("nuslerp_flatten", False),), True),
        ("nuslerp", (), False),
        ("della", (), False),
    ],
)
def test_what_has_no_one_rounding_stays_on_the_cpu(
    kinds: Kinds, operator: str, params: Params, stays: bool
) -> None:
    task = plan_for(kinds, "ties").layers[0].tasks[0]
    assert stays_on_cpu(replace(task, operator=operator, params=params)) is stays


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:", "cuda:x", "cuda:-1", "cuda:0:0", "CUDA"])
def test_a_device_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(
        DeviceError, match=r"no such device.*Expected cpu, cuda or cuda:0"
    ) as caught:
        device_of(name)
    assert caught.value.found == repr(name)


@pytest.mark.skipif(HAS_CUDA, reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_a_gpu_cuda_is_refused_before_anything_is_read(kinds: Kinds, name: str) -> None:
    with pytest.raises(DeviceError, match=r"not there.*torch .*sees 0 GPUs"):
        LayerRunner(plan_for(kinds, "ties"), EngineOptions(device=name))


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_refusal_says_what_to_do(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if has_cuda else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    advice = "nvidia-smi" if has_cuda else "install the CUDA build of torch"
    with pytest.raises(DeviceError, match=advice):
        device_of("cuda")


def test_a_device_without_memory_is_told() -> None:
    buffers = DeviceBufferPool(torch.device("cpu"))
    with (
        pytest.raises(DeviceError, match=r"does not fit.*found Tried to.*less --memory"),
        buffers.at_work(),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB\nand more")
