"""PEFT adapters as experts: merged as if peft had merged them first, for the bytes of the factors.

The judge is peft's own `merge_and_unload`, and the methods' oracles in NumPy.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    IncompatibleCheckpointsError,
    MergePipeError,
)
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.facts.test_input_segments import flip
from tests.support.oracles import ORACLES, Case

pytestmark = pytest.mark.usefixtures("baselines")

pytest.importorskip("peft")

Tensors = dict[str, torch.Tensor]
#: Adapters by name: the model type they are for, and how they are made.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "k_proj", "down_proj"], "r": 4}),
    "rank stabilised": ("llama", {"target_modules": "all-linear", "r": 4, "use_rslora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"], "r": 4}),
    "whole modules": (
        "llama",
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"], "r": 2},
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "r": 3}),
}
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"lambda": 0.9},
    "linear": {},
    "ties": {},
}
#: What `ties` keeps.
DENSITY = 0.4


@dataclass(frozen=True)
class Zoo:
    """Folders of two base models, of adapters on them, and of what peft makes of both.

    `full` is a full expert of the llama.
    """

    bases: dict[str, Path]
    adapters: dict[str, Path]
    merged: dict[str, Path]
    full: Path

    def base_of(self, adapter: str) -> Path:
        return self.bases[ADAPTERS[adapter][0]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("zoo")
    bases = {"llama": folder / "llama", "gpt2": folder / "gpt2"}
    for kind, base in bases.items():
        save(new_model(kind), base)
    zoo = Zoo(bases, {}, {}, folder / "full")
    for i, (name, (kind, config)) in enumerate(ADAPTERS.items()):
        zoo.adapters[name], zoo.merged[name] = folder / f"lora_{i}", folder / f"merged_{i}"
        train(new_model(kind), zoo.adapters[name], zoo.merged[name], seed=i, **config)
    torch.manual_seed(99)
    values = tensors(bases["llama"])
    save_file(
        {n: v + 0.01 * torch.randn(v.shape) for n, v in values.items()},
        shutil.copytree(bases["llama"], zoo.full) / "model.safetensors",
        metadata={"format": "pt"},
    )
    return zoo


def new_model(kind: str) -> Any:
    """A tiny float32 model; the same one every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    llama = {
        "hidden_size": 64,
        "intermediate_size": 160,  # down_proj has three blocks of the smallest size
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **sizes, **(llama if kind == "llama" else gpt2))
    return AutoModelForCausalLM.from_config(config)


def save(model: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder))


def train(
    model: Any, adapter: Path, merged: Path | None = None, *, seed: int = 0, **config: Any
) -> None:
    """Save an adapter with random values, and what peft merges it to."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(lora_alpha=6, **config))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
        adapted.save_pretrained(str(adapter))
        if merged:
            save(adapted.merge_and_unload(), merged)


def recipe(
    method: str,
    base: Path | None,
    models: Sequence[str | Path],
    extra: str = "",
    *,
    density: bool = False,
) -> str:
    """A recipe with weights 0.5, 0.75, …; it writes float32."""
    per_model = f", density: {DENSITY}" if density else ""
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    for i, model in enumerate(models):
        lines += [f"- model: {model}", f"  parameters: {{weight: {0.5 + i / 4}{per_model}}}"]
    return "\n".join([*lines, "out_dtype: float32", extra, ""])


def oracle(method: str, base: Path, models: Sequence[Path]) -> dict[str, np.ndarray]:
    """The method on whole tensors of full checkpoints, in float64."""
    below, experts = tensors(base), [tensors(m) for m in models]
    out = {}
    for name, value in below.items():
        rows = [e[name].double().flatten().numpy() for e in experts]
        density = {"density": DENSITY} if method == "ties" else {}
        case = Case(
            base=None if method == "linear" else value.double().flatten().numpy(),
            experts=np.stack(rows),
            params=METHODS[method],
            model_params=[{"weight": 0.5 + i / 4, **density} for i in range(len(rows))],
        )
        out[name] = ORACLES[method](case)
    return out


def nbytes_of(folder: Path) -> int:
    """Bytes of an adapter's tensors, without the header."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return sum(
            file.get_tensor(n).numel() * file.get_tensor(n).element_size()
            for n in file.keys()  # noqa: SIM118
        )


def assert_close(folder: str, expected: dict[str, np.ndarray]) -> None:
    """Every tensor within 1e-6 of the largest weight of all."""
    found = tensors(folder)
    assert found.keys() == expected.keys()
    largest = max(float(np.abs(v).max()) for v in expected.values())
    for name, value in found.items():
        off = np.abs(value.double().flatten().numpy() - expected[name].flatten())
        assert off.max() <= 1e-6 * largest, (name, off.max())


def files_under(folder: Path) -> set[Path]:
    return {p for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_merges_like_the_full_model_that_peft_makes_of_it(
    home: Warehouse, zoo: Zoo, name: str, method: str
) -> None:
    base = zoo.base_of(name)
    parameters = f"parameters: {json.dumps(METHODS[method])}" if METHODS[method] else ""
    text = recipe(method, base, [zoo.adapters[name]], parameters, density=method == "ties")
    if method == "linear":
        text = text.replace(str(zoo.adapters[name]), f"{base}+{zoo.adapters[name]}")
        text = text.replace(f"base_model: {base}\n", "")
    outcome = run(home, text)
    assert_close(outcome.snapshot.path, oracle(method, base, [zoo.merged[name]]))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_an_adapter_alone_and_on_its_base_by_name_are_one_snapshot(
    tmp_path: Path, zoo: Zoo, method: str
) -> None:
    base, adapter = zoo.bases["llama"], zoo.adapters["plain"]
    ids = set()
    models: list[str | Path] = [adapter, f"{base}+{adapter}"]
    for i, model in enumerate(models):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        text = recipe(method, base, [model], density=method == "ties")
        ids.add(run(home, text).snapshot.snapshot_id)
    assert len(ids) == 1


def test_an_adapter_on_another_model_than_the_base_is_that_model_with_it(
    home: Warehouse, zoo: Zoo, tmp_path: Path
) -> None:
    base = tensors(zoo.bases["llama"])
    on_full = dict(tensors(zoo.full))
    for name, value in tensors(zoo.merged["plain"]).items():
        on_full[name] = on_full[name].double() + (value.double() - base[name].double())
    save_file({n: v.float() for n, v in on_full.items()}, tmp_path / "model.safetensors")
    text = recipe("task_arithmetic", zoo.bases["llama"], [f"{zoo.full}+{zoo.adapters['plain']}"])
    outcome = run(home, text + "parameters: {lambda: 0.9}\n")
    assert_close(outcome.snapshot.path, oracle("task_arithmetic", zoo.bases["llama"], [tmp_path]))


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_bytes_read_for_an_adapter_are_those_of_its_factors(
    home: Warehouse, zoo: Zoo, name: str
) -> None:
    text = recipe("task_arithmetic", zoo.base_of(name), [zoo.adapters[name]])
    outcome, nbytes = run(home, text), nbytes_of(zoo.adapters[name])
    e = outcome.plan.estimates
    assert outcome.summary()["expert_bytes_read"] == nbytes
    assert (e.expert_bytes_total, e.expert_bytes_planned) == (nbytes, nbytes)
    cost = resolve(home, parse(text, name="t", where="t")).cost
    assert cost.expert_bytes_total == nbytes
    full = sum(v.numel() * 4 for v in tensors(zoo.base_of(name)).values())
    assert nbytes < full


def test_the_percentages_of_a_budget_are_of_adapter_and_full_bytes_together(
    tmp_path: Path, zoo: Zoo
) -> None:
    text = recipe("task_arithmetic", zoo.bases["llama"], [zoo.adapters["plain"], zoo.full])
    full = sum(v.numel() * 4 for v in tensors(zoo.full).values())
    total = nbytes_of(zoo.adapters["plain"]) + full
    for percent in (0, 20, 60, 100):
        home = Warehouse.at(tmp_path / str(percent)).ensure()
        s = run(home, text, budget=f"{percent}%").summary()
        assert s["expert_bytes_total"] == total
        assert s["budget_bytes"] == total * percent // 100
        assert s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]


@pytest.mark.parametrize("method", METHODS)
def test_adapters_and_full_experts_mix_in_one_recipe(
    home: Warehouse, zoo: Zoo, method: str
) -> None:
    base = zoo.bases["llama"]
    models = [zoo.adapters["plain"], zoo.full, zoo.adapters["whole modules"]]
    if method == "linear":
        models = [f"{base}+{m}" if m != zoo.full else m for m in models]  # type: ignore[misc]
    parameters = f"parameters: {json.dumps(METHODS[method])}" if METHODS[method] else ""
    given = None if method == "linear" else base
    outcome = run(home, recipe(method, given, models, parameters, density=method == "ties"))
    merged = [zoo.merged["plain"], zoo.full, zoo.merged["whole modules"]]
    assert_close(outcome.snapshot.path, oracle(method, base, merged))


def test_a_budget_of_just_the_adapters_bytes_buys_the_adapter(home: Warehouse, zoo: Zoo) -> None:
    base, adapter = zoo.bases["llama"], zoo.adapters["plain"]
    text = recipe("task_arithmetic", base, [adapter, zoo.full])
    nbytes = nbytes_of(adapter)
    s = run(home, text, budget=str(nbytes), strategy="drop-experts")
    assert s.summary()["expert_bytes_read"] == nbytes
    alone = run(home, recipe("task_arithmetic", base, [adapter]))
    ours, theirs = tensors(s.snapshot.path), tensors(alone.snapshot.path)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_magnitude_buys_the_factors_of_a_change_first_that_costs_little_per_gain(
    home: Warehouse, zoo: Zoo
) -> None:
    text = recipe("task_arithmetic", zoo.bases["llama"], [zoo.adapters["plain"], zoo.full])
    plan = plan_in_stages(home, parse(text, name="t", where="t"), budget="60%")
    bought = {
        (t.name, e.position)
        for layer in plan.layers
        for t in layer.tasks
        for e in t.experts
        if e.read and e.view.low_rank
    }
    assert len(bought) == 6  # three modules of two layers
    assert plan.estimates.error_bound is not None
    assert plan.estimates.error_bound > 0


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_budget_of_zero_gives_the_bits_of_the_base(home: Warehouse, zoo: Zoo, name: str) -> None:
    base = zoo.base_of(name)
    outcome = run(home, recipe("task_arithmetic", base, [zoo.adapters[name]]), budget="0")
    assert outcome.summary()["expert_bytes_read"] == 0
    below = tensors(base)
    for tensor, value in tensors(outcome.snapshot.path).items():
        assert torch.equal(value, below[tensor]), tensor


def test_factors_are_bought_whole_or_not_at_all_and_the_error_stays_within_the_bound(
    home: Warehouse, zoo: Zoo
) -> None:
    text = recipe("task_arithmetic", zoo.bases["llama"], [zoo.adapters["rank stabilised"]])
    full = tensors(run(home, text).snapshot.path)
    part = run(home, text, budget="50%", block_elems=4096)
    for layer in part.plan.layers:
        for task in layer.tasks:
            for e in task.experts:
                if e.view.low_rank and e.read:
                    assert e.read == ((0, e.view.numel),)
    merged = tensors(part.snapshot.path)
    squared = sum(float((full[n].double() - merged[n].double()).square().sum()) for n in full)
    bound = part.plan.estimates.error_bound
    assert bound is not None
    assert 0 < squared**0.5 <= bound * (1 + 1e-6)


def test_no_merged_copy_of_an_adapter_is_written_to_the_warehouse(
    home: Warehouse, zoo: Zoo
) -> None:
    outcome = run(home, recipe("ties", zoo.bases["llama"], [zoo.adapters["plain"]], density=True))
    result = {f.stat().st_ino for f in Path(outcome.snapshot.path).glob("*.safetensors")}
    weights = [f for f in files_under(home.root) if f.suffix == ".safetensors"]
    assert weights
    assert {f.stat().st_ino for f in weights} == result
    objects = {f.stat().st_ino for f in files_under(home.objects_dir)}
    assert objects == result
    assert not list(home.staging.iterdir())
    assert not home.token_rows.exists()


@pytest.mark.parametrize("setting", [{"lora_bias": True}])
def test_adapters_of_other_kinds_are_refused_with_nothing_written(
    home: Warehouse, zoo: Zoo, tmp_path: Path, setting: dict[str, Any]
) -> None:
    train(new_model("llama"), tmp_path / "a", target_modules=["q_proj"], r=2, **setting)
    raw = parse(recipe("ties", zoo.bases["llama"], [tmp_path / "a"]), name="t", where="t")
    before = files_under(home.root)
    with pytest.raises(CheckpointError, match="a bias in lora_B") as caught:
        resolve(home, raw)
    assert caught.value.next_step
    assert "peft" in caught.value.next_step
    with pytest.raises(CheckpointError, match="a bias in lora_B"):
        plan_in_stages(home, raw)
    assert files_under(home.root) == before


def test_an_adapter_without_a_base_model_is_refused_with_what_to_add(
    home: Warehouse, zoo: Zoo
) -> None:
    raw = parse(recipe("linear", None, [zoo.adapters["plain"], zoo.full]), name="t", where="t")
    with pytest.raises(IncompatibleCheckpointsError, match="needs a model to add it to") as caught:
        resolve(home, raw)
    assert "base_model" in str(caught.value.next_step)
    assert not files_under(home.root)


def test_an_adapter_for_another_model_is_refused_by_tensor(home: Warehouse, zoo: Zoo) -> None:
    raw = parse(recipe("ties", zoo.bases["gpt2"], [zoo.adapters["plain"]]), name="t", where="t")
    with pytest.raises(MergePipeError, match="that the base does not have"):
        resolve(home, raw)
    assert not files_under(home.root)


def test_what_stands_behind_a_plus_must_be_an_adapter(home: Warehouse, zoo: Zoo) -> None:
    base = zoo.bases["llama"]
    raw = parse(recipe("ties", base, [f"{base}+{zoo.full}"]), name="t", where="t")
    with pytest.raises(CheckpointError, match="behind the `\\+` is no adapter"):
        resolve(home, raw)


def test_a_registered_adapter_is_analysed_and_merged_by_name(home: Warehouse, zoo: Zoo) -> None:
    register(home, zoo.bases["llama"], "base")
    register(home, zoo.adapters["plain"], "skill", base="base")
    (first,), (again,) = analyze(home, ["skill"]), analyze(home, ["skill"])
    assert (first.fresh, again.fresh) == (True, False)
    base, merged = tensors(zoo.bases["llama"]), tensors(zoo.merged["plain"])
    norm = sum(float((merged[n].double() - base[n].double()).square().sum()) for n in base) ** 0.5
    assert first.norm == pytest.approx(norm, rel=1e-5)
    by_name = run(home, recipe("ties", Path("base"), ["skill", "base+skill"], density=True))
    assert by_name.summary()["expert_bytes_read"] == 2 * nbytes_of(zoo.adapters["plain"])


def test_a_changed_adapter_is_read_anew(home: Warehouse, zoo: Zoo, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo.adapters["plain"], tmp_path / "a")
    text = recipe("task_arithmetic", zoo.bases["llama"], [folder])
    first = run(home, text)
    file = folder / "adapter_model.safetensors"
    save_file({n: 2 * v for n, v in load_file(file).items()}, file)
    second = run(home, text)
    assert first.snapshot.snapshot_id != second.snapshot.snapshot_id
    base = tensors(zoo.bases["llama"])
    once, twice = tensors(first.snapshot.path), tensors(second.snapshot.path)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(twice[name] - base[name], 4 * (once[name] - base[name]))


def test_a_scale_changed_in_the_config_alone_changes_the_result(
    home: Warehouse, zoo: Zoo, tmp_path: Path
) -> None:
    folder = shutil.copytree(zoo.adapters["plain"], tmp_path / "a")
    text = recipe("task_arithmetic", zoo.bases["llama"], [folder])
    first = run(home, text)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 12}))
    second = run(home, text)
    base = tensors(zoo.bases["llama"])
    once, twice = tensors(first.snapshot.path), tensors(second.snapshot.path)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(twice[name] - base[name], 2 * (once[name] - base[name]))


def test_windows_threads_and_block_sizes_change_no_bit_of_an_adapter(
    tmp_path: Path, zoo: Zoo
) -> None:
    from mergepipe_pipeline.engine.options import EngineOptions

    ids = set()
    models = [zoo.adapters["rank stabilised"], zoo.full, zoo.adapters["embedding"]]
    text = recipe("ties", zoo.bases["llama"], models, density=True)
    options = [
        EngineOptions(),
        EngineOptions(threads=1, window_elems=777),
        EngineOptions(threads=3, window_elems=4097),
    ]
    for i, (given, block) in enumerate(zip(options, (None, 4096, 65536), strict=True)):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        ids.add(run(home, text, options=given, block_elems=block).snapshot.snapshot_id)
    assert len(ids) == 1


@pytest.mark.parametrize("method", ["model_stock", "sce", "auto", "multislerp"])
def test_modules_that_an_adapter_leaves_alone_count_as_the_base_in_every_method(
    home: Warehouse, zoo: Zoo, method: str
) -> None:
    base, names = zoo.bases["llama"], ("plain", "embedding", "whole modules")
    found = []
    for folders in (zoo.adapters, zoo.merged):
        text = recipe(method, base, [folders[n] for n in names])
        if method in ("model_stock", "sce"):
            text = "".join(x for x in text.splitlines(True) if "weight:" not in x)
        found.append(tensors(run(home, text).snapshot.path))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=2e-6, msg=name)


def test_an_adapter_takes_part_in_slices_with_the_layers_of_its_base(
    home: Warehouse, zoo: Zoo
) -> None:
    base = zoo.bases["llama"]
    found = []
    for model in (zoo.adapters["plain"], zoo.merged["plain"]):
        text = f"merge_method: task_arithmetic\nbase_model: {base}\nslices:\n"
        for start in (0, 1, 1):
            text += f"- sources:\n  - {{model: {base}, layer_range: [{start}, {start + 1}]}}\n"
            text += f"  - {{model: {model}, layer_range: [{start}, {start + 1}], "
            text += "parameters: {weight: 0.5}}\n"
        outcome = run(home, f"{text}out_dtype: float32\n")
        found.append(tensors(outcome.snapshot.path))
    assert "model.layers.2.self_attn.q_proj.weight" in found[0]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("below", ["another base", "other layers of the base"])
def test_a_base_with_an_adapter_stays_that_model_in_a_slice_on(
    home: Warehouse, zoo: Zoo, below: str
) -> None:
    base, other = zoo.bases["llama"], below == "another base"
    found = []
    for model in (f"{base}+{zoo.adapters['plain']}", zoo.merged["plain"]):
        text = f"merge_method: task_arithmetic\nbase_model: {base}\nslices:\n"
        for start in (0, 1):
            under = zoo.full if other and start else base
            own = start if other else 1 - start
            text += f"- base_model: {under}\n  sources:\n"
            text += f"  - {{model: {under}, layer_range: [{start}, {start + 1}]}}\n"
            text += f"  - {{model: {model}, layer_range: [{own}, {own + 1}], "
            text += "parameters: {weight: 0.5}}\n"
        found.append(tensors(run(home, f"{text}out_dtype: float32\n").snapshot.path))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_an_adapter_may_lie_on_the_result_of_an_earlier_stage(
    home: Warehouse, zoo: Zoo, tmp_path: Path
) -> None:
    base, adapter = zoo.bases["llama"], zoo.adapters["plain"]
    first = recipe("task_arithmetic", base, [zoo.full])
    second = recipe("ties", base, [f"grown+{adapter}"])
    outcome = run(home, f"name: grown\n{first}---\n{second}")
    other = Warehouse.at(tmp_path / "other").ensure()
    grown = run(other, first).snapshot.path
    by_hand = tensors(run(other, second.replace("grown", grown)).snapshot.path)
    for name, value in tensors(outcome.snapshot.path).items():
        assert torch.equal(value, by_hand[name]), name


def test_two_adapters_on_one_model_are_refused_with_a_step_that_works(
    home: Warehouse, zoo: Zoo
) -> None:
    base, first, second = zoo.bases["llama"], zoo.adapters["plain"], zoo.adapters["whole modules"]
    text = recipe("passthrough", None, [f"{base}+{first}+{second}"]).replace("weight: 0.5", "")
    with pytest.raises(CheckpointError, match=r"`name: first`.*first\+ADAPTER"):
        resolve(home, parse(text, name="t", where="t"))
    steps = f"name: first\nmerge_method: passthrough\nmodels: [{{model: {base}+{first}}}]\n---\n"
    steps += f"merge_method: passthrough\nmodels: [{{model: first+{second}}}]\n"
    merged, below = tensors(run(home, steps).snapshot.path), tensors(zoo.merged["plain"])
    whole = tensors(zoo.merged["whole modules"])
    changed = tensors(base)
    for name, value in merged.items():
        expected = below[name] + whole[name] - changed[name]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "linear", "slerp", "model_stock"])
def test_a_model_with_an_adapter_may_be_the_base(
    home: Warehouse, zoo: Zoo, tmp_path: Path, method: str
) -> None:
    base, adapter = zoo.bases["llama"], zoo.adapters["rank stabilised"]
    experts = [zoo.full] if method == "slerp" else [zoo.full, zoo.adapters["plain"]]
    merged = tensors(zoo.merged["rank stabilised"])
    change = {n: v - tensors(base)[n] for n, v in tensors(zoo.merged["plain"]).items()}
    on_merged = shutil.copytree(zoo.merged["rank stabilised"], tmp_path / "both")
    save_file({n: v + change[n] for n, v in merged.items()}, on_merged / "model.safetensors")
    found = []
    for below, models in (
        (Path(f"{base}+{adapter}"), experts),
        (zoo.merged["rank stabilised"], [zoo.full, on_merged][: len(experts)]),
    ):
        text = recipe(method, below, models)
        if method in ("slerp", "model_stock"):
            text = "".join(x for x in text.splitlines(True) if "weight:" not in x)
        text += "parameters: {t: 0.4}\n" if method == "slerp" else ""
        found.append(tensors(run(home, text).snapshot.path))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=3e-6, msg=name)


def test_at_budget_zero_a_base_with_an_adapter_is_written_merged(home: Warehouse, zoo: Zoo) -> None:
    base, adapter = zoo.bases["llama"], zoo.adapters["rank stabilised"]
    text = recipe("ties", Path(f"{base}+{adapter}"), [zoo.full])
    outcome = run(home, text, budget="0")
    merged = tensors(zoo.merged["rank stabilised"])
    assert_close(
        outcome.snapshot.path, {n: v.double().flatten().numpy() for n, v in merged.items()}
    )
    assert outcome.summary()["expert_bytes_read"] == 0


def test_an_adapter_alone_is_no_base(home: Warehouse, zoo: Zoo) -> None:
    raw = parse(recipe("ties", zoo.adapters["plain"], [zoo.full]), name="t", where="t")
    message = "base model is not a whole model.*found an adapter alone.*list this one under models"
    with pytest.raises(IncompatibleCheckpointsError, match=message):
        resolve(home, raw)


@pytest.mark.parametrize("kind", ["adapter", "delta"])
def test_what_holds_no_tensor_is_refused(home: Warehouse, zoo: Zoo, kind: str) -> None:
    empty = home.inbox / "empty"
    empty.mkdir()
    if kind == "delta":
        save_file({}, empty / "model.safetensors", metadata={"mergepipe": "delta"})
    else:
        save_file({}, empty / "adapter_model.safetensors")
        (empty / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    raw = parse(recipe("ties", zoo.full, [empty]), name="t", where="t")
    with pytest.raises(CheckpointError, match=f"nothing in this {kind}.*{empty}.*save it again"):
        resolve(home, raw)


def test_an_adapter_lies_on_a_whole_model_only(home: Warehouse, zoo: Zoo) -> None:
    both = f"{zoo.adapters['plain']}+{zoo.adapters['plain']}"
    raw = parse(recipe("ties", zoo.full, [both]), name="t", where="t")
    message = r"before the `\+` is no model.*found an adapter alone"
    with pytest.raises(IncompatibleCheckpointsError, match=message):
        resolve(home, raw)


def test_a_factor_that_flipped_since_it_was_digested_is_not_analysed(
    home: Warehouse, tmp_path: Path, zoo: Zoo
) -> None:
    adapter = Path(shutil.copytree(zoo.adapters["plain"], tmp_path / "lora"))
    register(home, str(zoo.bases["llama"]), name="base")
    checkpoint = register(home, str(adapter), name="lora").checkpoint
    Contents(home, checkpoint).learn()
    flip(adapter, checkpoint.tensors[0].name, 0.3)
    with pytest.raises(CorruptionError, match="not those that were analysed"):
        analyze(home, ["lora"], base="base")
    flip(adapter, checkpoint.tensors[0].name, 0.3)
    analyze(home, ["lora"], base="base")
