"""Models with other numbers of embedding rows, and with a head of their own where others tie it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import Size, tensors_of, write_model
from tests.support.oracles import ORACLES, Case

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = {"layers": 2, "hidden": 32}
ROWS = 200
Tensors = dict[str, torch.Tensor]
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"lambda": 0.8},
    "ties": {},
    "linear": {},
    "sce": {},
}
#: Methods with method parameters, model parameters, and the models they take, for which rows that
#: equal the base's are as good as none.
BY_ROWS = {
    "dare_ties": ("", "weight: 0.5, density: 0.4", 2),
    "della": ("", "weight: 0.5, density: 0.4", 2),
    "della_linear": ("", "weight: 0.5, density: 0.4", 2),
    "sce": ("select_topk: 0.5", "", 2),
    "model_stock": ("", "", 2),
    "multislerp": ("", "weight: 0.5", 2),
    "nuslerp": ("", "weight: 0.5", 2),
    "slerp": ("t: 0.3", "", 1),
    "nearswap": ("t: 0.001", "", 1),
    "arcee_fusion": ("", "", 1),
    "ram": ("", "", 2),
    "ramplus_tl": ("", "", 2),
}


def write(
    folder: Path, seed: int, rows: int = ROWS, *, head: bool | None = None, base: Path | None = None
) -> Path:
    """A float32 model; `head` says whether it has one (None: as its base).

    On `base`, it is the base plus noise, with rows of its own behind the base's.
    """
    values = tensors_of(seed, None, dtype=torch.float32, vocab=rows, **SIZES)
    torch.manual_seed(seed)
    if head or (base is not None and head is None and HEAD in tensors(base)):
        values[HEAD] = 0.02 * torch.randn(rows, SIZES["hidden"])
    for name, value in tensors(base).items() if base else ():
        if name in values and not (head and name == HEAD):
            n = min(len(value), len(values[name]))
            values[name] = values[name].clone()
            values[name][:n] = value[:n] + 0.01 * torch.randn(value[:n].shape)
    write_model(folder, values, vocab=rows, **SIZES)
    change_config(folder, tie_word_embeddings=HEAD not in values)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def config_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


def recipe(method: str, base: Path | None, models: Sequence[Path], extra: str = "") -> str:
    weighted = method != "sce"
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    for i, model in enumerate(models):
        lines.append(f"- model: {model}")
        if weighted:
            density = ", density: 0.5" if method == "ties" else ""
            lines.append(f"  parameters: {{weight: {0.5 + i / 4}{density}}}")
    lines.append(f"parameters: {json.dumps(METHODS[method])}")
    return "\n".join([*lines, extra, ""])


def oracle(method: str, base: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    density = {"density": 0.5} if method == "ties" else {}
    case = Case(
        base=base.double().flatten().numpy(),
        experts=np.stack([e.double().flatten().numpy() for e in experts]),
        params=METHODS[method],
        model_params=[{"weight": 0.5 + i / 4, **density} for i in range(len(experts))],
    )
    return torch.from_numpy(ORACLES[method](case)).reshape(base.shape)


def as_long_as(base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A matrix with the base's rows: the first of its own, the base's behind them."""
    n = min(len(base), len(value))
    return torch.cat([value[:n], base[n:]])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied and an untied base, and experts of all kinds on them; read-only."""
    folder = tmp_path_factory.mktemp("vocabulary")
    tied, untied = write(folder / "tied", 0), write(folder / "untied", 1, head=True)
    for base, name in ((tied, "tied"), (untied, "untied")):
        for seed, rows in ((2, ROWS), (3, ROWS + 20), (4, ROWS - 30)):
            write(folder / f"{name}_{rows}", seed, rows, base=base)
    write(folder / "with_head", 5, head=True, base=tied)
    write(folder / "without_head", 6, head=False, base=untied)
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("rows", [ROWS + 20, ROWS - 30])
def test_the_bases_rows_count_and_rows_that_an_expert_lacks_are_the_bases(
    home: Warehouse, folder: Path, method: str, base: str, rows: int
) -> None:
    models = [folder / f"{base}_{ROWS}", folder / f"{base}_{rows}"]
    outcome = run(home, recipe(method, folder / base, models))
    below, first, second = (tensors(m) for m in (folder / base, *models))
    merged = tensors(outcome.snapshot.path)
    assert merged.keys() == below.keys()
    assert config_of(outcome.snapshot.path)["vocab_size"] == ROWS
    if method != "ties" or rows > ROWS:  # what is trimmed depends on how many rows there are
        for name, value in merged.items():
            other = as_long_as(below[name], second[name])
            assert_close(value, oracle(method, below[name], [first[name], other]))
    told = "only the first 200 of 220 rows" if rows > ROWS else "has 170 of 200 rows"
    assert any(told in w for w in outcome.plan.warnings)


@pytest.mark.parametrize("method", BY_ROWS)
def test_a_short_expert_merges_as_one_with_the_bases_rows_behind_its_own(
    home: Warehouse, folder: Path, tmp_path: Path, method: str
) -> None:
    base, short, other = (folder / n for n in ("tied", f"tied_{ROWS - 30}", f"tied_{ROWS}"))
    below, own = tensors(base), tensors(short)
    padded = tmp_path / "padded"
    write_model(padded, {n: as_long_as(below[n], v) for n, v in own.items()}, vocab=ROWS, **SIZES)
    parameters, per_model, n_models = BY_ROWS[method]
    found = []
    for expert in (short, padded):
        text = f"merge_method: {method}\nbase_model: {base}\nmodels:\n"
        for model in (expert, other)[:n_models]:
            text += f"- {{model: {model}, parameters: {{{per_model}}}}}\n"
        text += f"parameters: {{{parameters}}}\n"
        found.append(run(home, text))
    ours, theirs = (tensors(f.snapshot.path) for f in found)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-8)
    s = run(home, text.replace(str(padded), str(short)), budget="40%").summary()
    assert s["expert_bytes_read"] <= s["expert_bytes_planned"] <= s["budget_bytes"]


def test_a_trim_counts_the_rows_that_an_expert_has(home: Warehouse, folder: Path) -> None:
    short = folder / f"tied_{ROWS - 30}"
    outcome = run(home, recipe("ties", folder / "tied", [short]))
    below, own = tensors(folder / "tied")[EMBEDDING], tensors(short)[EMBEDDING]
    n = len(own)
    merged = tensors(outcome.snapshot.path)[EMBEDDING]
    assert torch.equal(merged[n:], below[n:])
    changed = int((merged[:n] != below[:n]).sum())
    whole = int(((own - below[:n]) != 0).sum())
    assert changed == pytest.approx(whole / 2, rel=0.01)


def test_only_the_rows_that_are_used_are_paid_for(home: Warehouse, folder: Path) -> None:
    models = [folder / f"tied_{ROWS + 20}"]
    outcome = run(home, recipe("task_arithmetic", folder / "tied", models))
    stored = sum(v.numel() * 4 for v in tensors(models[0]).values())
    assert outcome.summary()["expert_bytes_read"] == stored - 20 * SIZES["hidden"] * 4


def test_without_a_base_all_are_cropped_to_the_shortest(home: Warehouse, folder: Path) -> None:
    models = [folder / f"untied_{n}" for n in (ROWS, ROWS + 20, ROWS - 30)]
    outcome = run(home, recipe("linear", None, models))
    merged, found = tensors(outcome.snapshot.path), [tensors(m) for m in models]
    assert config_of(outcome.snapshot.path)["vocab_size"] == ROWS - 30
    for name, value in merged.items():
        rows = [f[name][: len(value)].double() for f in found]
        weights = (0.5, 0.75, 1.0)
        summed = sum(w * r for w, r in zip(weights, rows, strict=True))
        mean = torch.as_tensor(summed / sum(weights))
        assert_close(value, mean)
    assert merged[EMBEDDING].shape == merged[HEAD].shape == (ROWS - 30, SIZES["hidden"])


def test_a_cropped_model_loads_and_runs(home: Warehouse, folder: Path) -> None:
    models = [folder / f"untied_{n}" for n in (ROWS, ROWS - 30)]
    path = run(home, recipe("linear", None, models)).snapshot.path
    assert logits(path).shape[-1] == ROWS - 30


def test_other_tensors_of_another_shape_are_refused(
    home: Warehouse, folder: Path, tmp_path: Path
) -> None:
    sizes: Size = {"layers": 2, "hidden": 64, "vocab": ROWS}
    write_model(tmp_path / "wide", tensors_of(0, None, **sizes), **sizes)
    text = recipe("ties", folder / "tied", [tmp_path / "wide"])
    with pytest.raises(MergePipeError, match="do not fit"):
        resolve(home, parse(text, name="t", where="t"))
    assert not [p for p in home.root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("method", METHODS)
def test_an_untied_expert_gives_a_tied_base_a_head(
    home: Warehouse, folder: Path, method: str
) -> None:
    models = [folder / "with_head", folder / f"tied_{ROWS}"]
    outcome = run(home, recipe(method, folder / "tied", models))
    below, first, second = (tensors(m) for m in (folder / "tied", *models))
    expected = {n: oracle(method, v, [first[n], second[n]]) for n, v in below.items()}
    expected[HEAD] = oracle(method, below[EMBEDDING], [first[HEAD], second[EMBEDDING]])
    merged = tensors(outcome.snapshot.path)
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        assert_close(value, expected[name])
    assert config_of(outcome.snapshot.path)["tie_word_embeddings"] is False
    assert_logits(outcome.snapshot.path, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_tied_expert_counts_with_its_embedding_as_head_on_an_untied_base(
    home: Warehouse, folder: Path, method: str
) -> None:
    models = [folder / "without_head", folder / f"untied_{ROWS}"]
    outcome = run(home, recipe(method, folder / "untied", models))
    below, first, second = (tensors(m) for m in (folder / "untied", *models))
    first[HEAD] = first[EMBEDDING]
    expected = {n: oracle(method, v, [first[n], second[n]]) for n, v in below.items()}
    merged = tensors(outcome.snapshot.path)
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        assert_close(value, expected[name])
    assert config_of(outcome.snapshot.path)["tie_word_embeddings"] is False
    assert_logits(outcome.snapshot.path, expected)


def test_tied_models_stay_tied(home: Warehouse, folder: Path) -> None:
    models = [folder / f"tied_{ROWS}", folder / f"tied_{ROWS + 20}"]
    outcome = run(home, recipe("ties", folder / "tied", models))
    assert HEAD not in tensors(outcome.snapshot.path)
    assert config_of(outcome.snapshot.path)["tie_word_embeddings"] is True


def test_the_head_that_appears_is_told_and_at_budget_zero_it_is_the_embedding(
    home: Warehouse, folder: Path
) -> None:
    outcome = run(home, recipe("ties", folder / "tied", [folder / "with_head"]), budget="0")
    merged = tensors(outcome.snapshot.path)
    assert torch.equal(merged[HEAD], merged[EMBEDDING])
    assert any("lm_head" in w for w in outcome.plan.warnings)
    assert outcome.summary()["expert_bytes_read"] == 0


def test_a_head_in_a_model_whose_config_ties_it_is_no_reason_to_untie(
    home: Warehouse, folder: Path, tmp_path: Path
) -> None:
    """Some hub files store the tied head a second time; transformers ignores it."""
    expert = write(tmp_path / "twice", 7, base=folder / "tied")
    from safetensors.torch import save_file

    values = tensors(expert)
    values[HEAD] = values[EMBEDDING].clone()
    save_file(values, expert / "model.safetensors", metadata={"format": "pt"})
    outcome = run(home, recipe("task_arithmetic", folder / "tied", [expert]))
    assert config_of(outcome.snapshot.path)["tie_word_embeddings"] is True
    merged = tensors(outcome.snapshot.path)
    assert torch.equal(merged[HEAD], merged[EMBEDDING])


def test_a_base_that_is_tied_by_default_is_untied_in_so_many_words(
    home: Warehouse, folder: Path, tmp_path: Path
) -> None:
    """A Gemma's config does not say that it is tied."""
    base = Path(shutil.copytree(folder / "tied", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    config |= {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    (base / "config.json").write_text(json.dumps(config))
    outcome = run(home, recipe("task_arithmetic", base, [folder / "with_head"]))
    assert HEAD in tensors(outcome.snapshot.path)
    assert config_of(outcome.snapshot.path)["tie_word_embeddings"] is False


def logits(folder: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return forward(model)


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result = model(torch.tensor([[1, 7, 9, 42]])).logits
    assert isinstance(result, torch.Tensor)
    return result


def assert_logits(folder: str, expected: Tensors) -> None:
    """The loaded snapshot computes what a model with these tensors, untied, computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict({n: v.float() for n, v in expected.items()})
    torch.testing.assert_close(logits(folder), forward(model.eval()), rtol=1e-4, atol=1e-6)
