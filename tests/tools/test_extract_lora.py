"""`extract-lora`: the best factors, the error as it is, and what PEFT and merges make of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.tools.adapter import Extraction, factorize, squared_error, squared_norm
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.architectures import make as make_architecture
from tests.support.family import tensors_of, write_model
from tests.support.laws import examples
from tests.tools.record import RANK, RECORD, lora_errors

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
MODULES = ("embed_tokens", "input_layernorm", "post_attention_layernorm", "norm")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the verb has it: threads of small products only wait for each other."""
    with threadpool_limits(1, "blas"):
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a fine-tune in float32."""
    folder = tmp_path_factory.mktemp("pair")
    for name, expert in (("base", None), ("tuned", 1)):
        write_model(folder / name, tensors_of(3, expert, dtype=torch.float32))
    return folder


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


@settings(max_examples=examples(12))
@given(
    st.integers(0, 1000),
    st.sampled_from([(260, 300), (300, 260), (40, 7)]),
    st.sampled_from([1, 8, 40]),
    st.sampled_from([0.0, 0.3, 0.7, 2.0]),
)
def test_the_error_is_within_a_percent_of_the_best(
    seed: int, shape: tuple[int, int], rank: int, decay: float
) -> None:
    rng = np.random.default_rng(seed)
    scale = (1.0 + np.arange(shape[1])) ** -decay
    matrix = (rng.standard_normal(shape) * scale).astype(np.float32)
    values = np.linalg.svd(matrix, compute_uv=False)
    best = float(np.sqrt(np.square(values[rank:], dtype=np.float64).sum()))
    factors = factorize(matrix, Extraction(rank, None, None, seed=seed), "x")
    found = squared_error(matrix, factors) ** 0.5
    assert best * 0.99 - 1e-3 <= found <= best * 1.01 + 1e-5 * float(values[0])


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.9, 0.999]))
def test_energy_takes_the_least_rank_that_catches_it(seed: int, energy: float) -> None:
    matrix = np.random.default_rng(seed).standard_normal((60, 90)).astype(np.float32)
    matrix *= 0.9 ** np.arange(90, dtype=np.float32)
    total = squared_norm(matrix)
    factors = factorize(matrix, Extraction(None, energy, None), "x")
    values = np.square(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)
    needed = int(np.searchsorted(np.cumsum(values), energy * total)) + 1
    assert abs(len(factors.a) - needed) <= 1
    assert squared_error(matrix, factors) <= (1 - energy) * total * 1.0001
    assert len(factorize(matrix, Extraction(None, energy, 3), "x").a) <= 3


def test_the_errors_are_those_of_the_files_and_as_small_as_mergekits(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    base, tuned = family / "base", family / "expert_01"
    made = extract_lora(home, str(tuned), str(base), tmp_path / "out", rank=RANK)
    found = lora_errors(tmp_path / "out", base, tuned)
    stated = {t["tensor"]: t["error"] for t in made.details["tensors"] if t["kept"] == "factors"}
    assert stated == pytest.approx(found, rel=1e-5)
    of_mergekit = json.loads(RECORD.read_text())["extract-lora"]
    assert found.keys() == of_mergekit.keys()
    assert all(found[name] <= 1.0001 * error for name, error in of_mergekit.items())
    one, other = read(base), read(tuned)
    norms = {t["tensor"]: t["norm"] for t in made.details["tensors"]}
    assert norms == pytest.approx(
        {k: float((other[k].double() - one[k].double()).norm()) for k in one}, rel=1e-5
    )


def test_peft_and_our_merge_give_back_the_fine_tune_within_the_stated_error(
    pair: Path, home: Warehouse, tmp_path: Path
) -> None:
    made = extract_lora(
        home, str(pair / "tuned"), str(pair / "base"), energy=0.9, max_rank=40, save=MODULES
    )
    assert verify(home, made.snapshot_id).files == 5
    recipe = tmp_path / "r.yml"
    recipe.write_text(
        f"merge_method: linear\ndtype: float32\nmodels:\n  - model: {pair / 'base'}+{made.path}\n"
        "    parameters: {weight: 1}\n"
    )
    merged = read(merge(home, recipe).outcome.snapshot.path)
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair / "base", dtype=torch.float32)
    of_peft = peft.PeftModel.from_pretrained(model, made.path).merge_and_unload().state_dict()
    base, tuned = read(pair / "base"), read(pair / "tuned")
    lost = 0.0
    for told in made.details["tensors"]:
        name = told["tensor"]
        change = tuned[name].double() - base[name].double()
        residual = float((tuned[name].double() - merged[name].double()).norm())
        assert residual == pytest.approx(told["error"] * float(change.norm()), abs=1e-5)
        assert torch.allclose(of_peft[name], merged[name], atol=1e-6)
        lost += residual**2
    whole = sum(float((tuned[k].double() - base[k].double()).norm()) ** 2 for k in base)
    assert made.details["error"] == pytest.approx((lost / whole) ** 0.5, rel=1e-3)
    config = json.loads((Path(made.path) / "adapter_config.json").read_text())
    assert len({config["r"], *config["rank_pattern"].values()}) > 1


def test_the_bits_are_the_same_with_any_number_of_threads_and_others_with_another_seed(
    pair: Path, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(seed: int = 0) -> str:
        tuned, base = str(pair / "tuned"), str(pair / "base")
        return extract_lora(home, tuned, base, rank=4, seed=seed).snapshot_id

    first = once()
    for n in (1, 3):
        monkeypatch.setattr(threads, "cores", lambda n=n: n)
        assert once() == first
    assert once(1) != first


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_layers_that_store_their_weight_transposed_load_in_peft_by_either_name(
    home: Warehouse, tmp_path: Path, prefix: str
) -> None:
    family = make_architecture("gpt2", tmp_path / "family", 1)
    base, tuned = sorted(p for p in family.iterdir() if p.is_dir())
    for folder in (base, tuned):
        named = {prefix + n.removeprefix("transformer."): t for n, t in read(folder).items()}
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    made = extract_lora(home, str(tuned), str(base), tmp_path / "out", rank=4, dtype="BF16")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload()
    values, other = merged.state_dict(), read(tuned)
    kept = [t for t in made.details["tensors"] if t["kept"] == "factors"]
    assert kept
    for told in kept:
        name = told["tensor"]
        full = "transformer." + name.removeprefix("transformer.")
        residual = (other[name].double() - values[full].double()).norm()
        assert float(residual) == pytest.approx(told["error"] * told["norm"], rel=1e-3)


def test_modules_are_chosen_and_what_cannot_be_is_refused_before_anything_is_written(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    base, tuned = str(family / "base"), str(family / "expert_00")
    shutil.copytree(tuned, tmp_path / "untied")
    values = load_file(f"{tuned}/model.safetensors")
    head = {"lm_head.weight": values["model.embed_tokens.weight"].clone()}
    save_file(values | head, tmp_path / "untied" / "model.safetensors")
    made = extract_lora(home, str(tmp_path / "untied"), base, rank=2, modules=["q_proj$"])
    assert "lm_head.weight" in {t["tensor"] for t in made.details["tensors"] if t["kept"] == "no"}
    kept = {t["tensor"] for t in made.details["tensors"] if t["kept"] == "factors"}
    assert kept == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    out = tmp_path / "out"
    with pytest.raises(MergePipeError, match="--save other"):
        extract_lora(home, tuned, base, out, save=["other"])
    with pytest.raises(MergePipeError, match="each decides the other"):
        extract_lora(home, tuned, base, out, rank=1, energy=0.5)
    with pytest.raises(MergePipeError, match="nothing to extract"):
        extract_lora(home, base, base, out)
    small = write_model(tmp_path / "small", tensors_of(0, None, hidden=32), hidden=32)
    with pytest.raises(IncompatibleCheckpointsError, match="not one of this base"):
        extract_lora(home, str(small), base, out)
    assert not out.exists()


def test_a_changed_tensor_whose_name_has_no_dot_is_named_among_those_not_kept(
    pair: Path, tmp_path: Path
) -> None:
    for name, value in (("base", 1.0), ("tuned", 2.0)):
        shutil.copytree(pair / name, tmp_path / name)
        (file,) = (tmp_path / name).glob("*.safetensors")
        tensors = {**load_file(file), "logit_scale": torch.tensor(value)}
        save_file(tensors, file, metadata={"format": "pt"})
    words = ["extract-lora", "--model", str(tmp_path / "tuned"), "--base", str(tmp_path / "base")]
    words += ["--rank", "2", "--out", str(tmp_path / "lora")]
    done = CliRunner().invoke(main, ["--home", str(tmp_path / "home"), *words])
    assert done.exit_code == 0, done.output
    assert "logit_scale" in done.stdout
