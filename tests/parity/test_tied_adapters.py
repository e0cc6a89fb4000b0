"""Adapters on a base whose head is its embedding: what PEFT merges and mergekit loads, and we.

PEFT trains, merges and saves here and now; its folder is loaded by transformers, like ours.
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import read_model, run_mergekit
from tests.resolution.test_adapters import save
from tests.support.architectures import Tensors

pytest.importorskip("peft")
pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EMBED, OUT = "embed_tokens", "lm_head"
#: Adapters whose merged model has a head of its own.
UNTIED: dict[str, dict[str, Any]] = {
    "embedding retrained": {"modules_to_save": [EMBED]},
    "head retrained": {"modules_to_save": [OUT]},
    "both retrained": {"modules_to_save": [OUT, EMBED]},
    "embedding retrained, head updated": {"modules_to_save": [EMBED], "targets": [OUT]},
    "head retrained, embedding updated": {"modules_to_save": [OUT], "targets": [EMBED]},
}
#: The same of those whose head stays the embedding.
TIED: dict[str, dict[str, Any]] = {
    "embedding updated": {"targets": [EMBED]},
    "head updated": {"targets": [OUT]},
    "retrained as one": {"modules_to_save": [EMBED], "ensure_weight_tying": True},
}


@dataclass(frozen=True)
class Zoo:
    """A tied base, adapters on it by case, and what PEFT merges and what its model says."""

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]
    logits: dict[str, torch.Tensor]


def tied_model(kind: str = "llama") -> Any:
    """A tiny float32 model whose head is its embedding; the same one every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    sizes = {"vocab_size": 40, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **sizes, **(llama | heads if kind == "llama" else gpt2))
    return AutoModelForCausalLM.from_config(config).eval()


def trained(model: Any, folder: Path, targets: list[str], seed: int, **config: Any) -> Any:
    """A PEFT model with random values; its adapter is saved in `folder`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, **config)).eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
        adapted.save_pretrained(str(folder))
    return adapted


def unloaded(adapted: Any) -> Any:
    """What PEFT merges; that it unties the head is no failure here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adapted.merge_and_unload()


def says(model: Any) -> torch.Tensor:
    """Logits of a fixed text."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(40)[None]).logits
    return found


def loaded(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def ties(folder: str | Path) -> bool:
    found: bool = json.loads((Path(folder) / "config.json").read_text())["tie_word_embeddings"]
    return found


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("tied")
    save(tied_model(), folder / "base")
    zoo = Zoo(folder / "base", {}, {}, {})
    for seed, (case, given) in enumerate((UNTIED | TIED).items()):
        config = {key: value for key, value in given.items() if key != "targets"}
        targets = ["v_proj", *given.get("targets", [])]
        zoo.adapters[case] = folder / f"adapter_{seed}"
        zoo.merged[case] = folder / f"merged_{seed}"
        adapted = trained(tied_model(), zoo.adapters[case], targets, seed, **config)
        zoo.logits[case] = says(adapted)
        save(unloaded(adapted), zoo.merged[case])
    return zoo


def recipe(method: str, base: Path | str | None, models: list[str], weight: float = 1.0) -> str:
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    for model in models:
        lines.append(f"- model: {model}")
        lines += [f"  parameters: {{weight: {weight}}}"] if method != "passthrough" else []
    return "\n".join([*lines, "dtype: float32", ""])


def assert_close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", UNTIED | TIED)
def test_a_model_with_an_adapter_is_what_peft_merges_and_mergekit_loads(
    home: Warehouse, zoo: Zoo, case: str
) -> None:
    text = recipe("passthrough", None, [f"{zoo.base}+{zoo.adapters[case]}"])
    folder = Path(run(home, text).snapshot.path)
    merged = read_model(zoo.merged[case])
    assert_close(run_mergekit(text), merged)
    assert_close(read_model(folder), merged)
    assert ties(folder) is ties(zoo.merged[case]) is (case in TIED)
    torch.testing.assert_close(says(loaded(folder)), says(loaded(zoo.merged[case])))


@pytest.mark.parametrize("case", UNTIED | TIED)
def test_an_adapter_on_the_base_of_a_recipe_is_what_peft_merges(
    home: Warehouse, zoo: Zoo, case: str
) -> None:
    text = recipe("task_arithmetic", zoo.base, [str(zoo.adapters[case])])
    outcome = run(home, text)
    assert_close(read_model(Path(outcome.snapshot.path)), read_model(zoo.merged[case]))
    assert ties(outcome.snapshot.path) is (case in TIED)
    if case in UNTIED:  # PEFT computes the same before it merges
        torch.testing.assert_close(says(loaded(outcome.snapshot.path)), zoo.logits[case])
    told = [w for w in outcome.plan.warnings if "the head too" in w]
    assert len(told) == ("updated" in case and case in TIED)


@pytest.mark.parametrize(
    ("method", "case"),
    [("linear", "embedding retrained"), *(("task_arithmetic", case) for case in UNTIED)],
)
def test_an_adapter_with_a_head_and_one_without_merge_as_in_mergekit(
    home: Warehouse, zoo: Zoo, method: str, case: str
) -> None:
    adapters = [zoo.adapters[name] for name in ("embedding updated", case, "retrained as one")]
    on_base = [f"{zoo.base}+{adapter}" for adapter in adapters]
    base = zoo.base if method == "task_arithmetic" else None
    theirs = run_mergekit(recipe(method, base, on_base, 0.5))
    models = [str(a) for a in adapters] if base else on_base
    outcome = run(home, recipe(method, base, models, 0.5))
    assert_close(read_model(Path(outcome.snapshot.path)), theirs)
    assert not ties(outcome.snapshot.path)


def test_a_base_with_an_adapter_gives_the_result_its_head(home: Warehouse, zoo: Zoo) -> None:
    base = f"{zoo.base}+{zoo.adapters['embedding retrained']}"
    outcome = run(home, recipe("task_arithmetic", base, [str(zoo.base)]), budget="0")
    assert_close(
        read_model(Path(outcome.snapshot.path)), read_model(zoo.merged["embedding retrained"])
    )
    assert not ties(outcome.snapshot.path)
    text = recipe("task_arithmetic", base, [str(zoo.adapters["head retrained"])])
    found = read_model(Path(run(home, text).snapshot.path))
    assert_close(
        found,
        read_model(zoo.merged["embedding retrained"])
        | {
            HEAD: read_model(zoo.merged["head retrained"])[HEAD],
            **{n: v for n, v in found.items() if "v_proj" in n},
        },
    )


@pytest.mark.parametrize("case", ["embedding retrained", "embedding updated"])
@pytest.mark.parametrize("on_model", [False, True])
def test_a_base_whose_file_has_the_tied_head_a_second_time_merges_like_one_without(
    home: Warehouse, zoo: Zoo, tmp_path: Path, case: str, on_model: bool
) -> None:
    twice = shutil.copytree(zoo.base, tmp_path / "twice")
    values = read_model(zoo.base)
    values[HEAD] = values[EMBEDDING].clone()
    save_file(values, twice / "model.safetensors", metadata={"format": "pt"})
    model = f"{twice}+{zoo.adapters[case]}" if on_model else str(zoo.adapters[case])
    text = recipe("linear" if on_model else "ties", None if on_model else twice, [model])
    folder = run(home, text).snapshot.path
    merged = read_model(zoo.merged[case])
    assert_close(read_model(Path(folder)), {HEAD: merged[EMBEDDING], **merged})
    torch.testing.assert_close(says(loaded(folder)), says(loaded(zoo.merged[case])))


def test_a_model_without_a_head_gets_none(home: Warehouse, tmp_path: Path) -> None:
    inner = tied_model().model
    save(inner, tmp_path / "base")
    adapted = trained(inner, tmp_path / "adapter", ["v_proj"], 5, modules_to_save=[EMBED])
    text = recipe("task_arithmetic", tmp_path / "base", [str(tmp_path / "adapter")])
    found = read_model(Path(run(home, text).snapshot.path))
    save(unloaded(adapted), tmp_path / "merged")
    assert_close(found, read_model(tmp_path / "merged"))


def test_a_head_that_no_adapter_changes_costs_no_budget(home: Warehouse, zoo: Zoo) -> None:
    adapter = zoo.adapters["embedding retrained"]
    raw = parse(recipe("task_arithmetic", zoo.base, [str(adapter)]), name="t", where="t")
    nbytes = sum(v.nbytes for v in read_model(adapter).values())
    assert resolve(home, raw).cost.expert_bytes_total == nbytes
    assert run(home, raw.text).summary()["expert_bytes_read"] == nbytes
    merged = read_model(Path(run(home, raw.text, budget="0").snapshot.path))
    assert torch.equal(merged[HEAD], merged[EMBEDDING])


def test_a_gpt2_whose_embedding_is_retrained_keeps_its_head(
    home: Warehouse, tmp_path: Path
) -> None:
    save(tied_model("gpt2"), tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    given = {"fan_in_fan_out": True, "modules_to_save": ["wte"]}
    adapted = trained(tied_model("gpt2"), tmp_path / "adapter", ["c_attn"], 3, **given)
    text = recipe("task_arithmetic", tmp_path / "base", [str(tmp_path / "adapter")])
    folder = run(home, text).snapshot.path
    torch.testing.assert_close(says(loaded(folder)), says(adapted))


def test_updates_of_both_ends_of_a_tie_add_up_in_the_one_matrix_with_a_warning(
    home: Warehouse, zoo: Zoo, tmp_path: Path
) -> None:
    """PEFT adds both when it merges, which is not what was trained."""
    adapted = trained(tied_model(), tmp_path, ["v_proj", EMBED, OUT], 4)
    before = says(adapted)
    merged = unloaded(adapted)
    assert float((says(merged) - before).abs().max()) > 0.1
    outcome = run(home, recipe("task_arithmetic", zoo.base, [str(tmp_path)]))
    torch.testing.assert_close(says(loaded(outcome.snapshot.path)), says(merged))
    assert [w for w in outcome.plan.warnings if "the head too" in w]


@pytest.mark.parametrize("second", ["lengths", "tokens"])
def test_two_updates_of_one_matrix_that_do_not_add_up_are_refused(
    home: Warehouse, zoo: Zoo, tmp_path: Path, second: str
) -> None:
    more = {"use_dora": True} if second == "lengths" else {}
    trained(tied_model(), tmp_path, ["v_proj", EMBED, OUT], 4, **more)
    if second == "tokens":
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config |= {"trainable_token_indices": [1]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        tensors[f"base_model.model.model.{EMBED}.token_adapter.trainable_tokens_delta"] = (
            torch.zeros(1, 32)
        )
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    raw = parse(recipe("task_arithmetic", zoo.base, [str(tmp_path)]), name="t", where="t")
    with pytest.raises(CheckpointError, match=r"beside a second update.*to which the base ties it"):
        resolve(home, raw)
    assert not [p for p in home.root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("changed", [EMBEDDING, HEAD])
def test_a_retrained_end_of_a_tie_with_more_rows_than_the_other_is_refused(
    home: Warehouse, zoo: Zoo, tmp_path: Path, changed: str
) -> None:
    """What the other's new rows are is in neither file."""
    module = changed.removesuffix(".weight").rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 4, "modules_to_save": [module]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    wide = {f"base_model.model.{changed}": torch.zeros(48, 32)}
    save_file(wide, tmp_path / "adapter_model.safetensors")
    text = recipe("passthrough", None, [f"{zoo.base}+{tmp_path}"])
    with pytest.raises(
        IncompatibleCheckpointsError, match=r"(?s)as many rows.*enlarged vocabulary"
    ):
        resolve(home, parse(text, name="t", where="t"))


def test_modules_to_save_that_is_no_list_of_names_is_refused(
    home: Warehouse, zoo: Zoo, tmp_path: Path
) -> None:
    folder = shutil.copytree(zoo.adapters["embedding retrained"], tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": EMBED}))
    raw = parse(recipe("ties", zoo.base, [str(folder)]), name="t", where="t")
    with pytest.raises(CheckpointError, match=r"modules_to_save.*a list of modules' names"):
        resolve(home, raw)
