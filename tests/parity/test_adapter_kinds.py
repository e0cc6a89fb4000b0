"""Every kind of LoRA adapter is what PEFT's `merge_and_unload` makes of it, tied and untied.

PEFT trains, merges and saves here and now; mergekit loads what it loads.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import read_model, run_mergekit
from tests.parity.test_tied_adapters import (
    EMBED,
    OUT,
    assert_close,
    loaded,
    recipe,
    trained,
    unloaded,
)
from tests.resolution.test_adapters import save
from tests.support.architectures import fused

pytest.importorskip("peft")
pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

_ALL = ["q_proj", "v_proj", "down_proj"]
#: Kinds of adapters: the model they are for, and what PEFT is told beside r and lora_alpha.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases of all modules": ("qwen2", {"targets": ["v_proj"], "bias": "all"}),
    "biases of updated modules": ("qwen2", {"targets": ["v_proj"], "bias": "lora_only"}),
    "biases of a conv1d": ("gpt2", {"targets": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "dora": ("llama", {"targets": _ALL, "use_dora": True}),
    "dora of an embedding": ("llama", {"targets": ["v_proj", EMBED], "use_dora": True}),
    "dora of a head": ("llama", {"targets": ["v_proj", OUT], "use_dora": True}),
    "dora of a conv1d": (
        "gpt2",
        {"targets": ["c_attn", "c_fc"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "pissa": ("llama", {"targets": _ALL, "init_lora_weights": "pissa"}),
    "pissa of a conv1d": (
        "gpt2",
        {"targets": ["c_attn"], "init_lora_weights": "pissa", "fan_in_fan_out": True},
    ),
    "pissa and dora": (
        "llama",
        {"targets": _ALL, "init_lora_weights": "pissa", "use_dora": True},
    ),
    "olora": ("llama", {"targets": _ALL, "init_lora_weights": "olora"}),
    "olora of an embedding": (
        "llama",
        {"targets": [EMBED, "v_proj"], "init_lora_weights": "olora"},
    ),
    "pissa of a head": ("llama", {"targets": [OUT, "v_proj"], "init_lora_weights": "pissa"}),
    "olora of a head": ("llama", {"targets": [OUT, "v_proj"], "init_lora_weights": "olora"}),
    "olora with other ranks": (
        "llama",
        {
            "targets": _ALL,
            "init_lora_weights": "OLoRA",
            "use_rslora": True,
            "rank_pattern": {"v_proj": 5},
        },
    ),
    "olora and dora": (
        "llama",
        {"targets": _ALL, "init_lora_weights": "olora", "use_dora": True},
    ),
    "velora": (
        "llama",
        {"targets": _ALL, "velora_config": {"num_groups": 4, "init_type": "random"}},
    ),
    "velora and olora": (
        "llama",
        {"targets": _ALL, "init_lora_weights": "olora", "velora_config": {"num_groups": 5}},
    ),
    "tokens": ("llama", {"targets": ["v_proj"], "trainable_token_indices": [7, 3]}),
    "tokens of both": (
        "llama",
        {"targets": ["v_proj"], "trainable_token_indices": {EMBED: [3, 7], OUT: [3, 7]}},
    ),
    "parameters": (
        "mixtral",
        {
            "targets": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "one parameter": (
        "mixtral",
        {"targets": ["v_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "parameters the other way round": (
        "gpt_oss",
        {
            "targets": ["v_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        },
    ),
    "embedding and head": ("llama", {"targets": ["v_proj", EMBED, OUT]}),
    "embedding and head as one": (
        "llama",
        {"targets": ["v_proj", EMBED, OUT], "ensure_weight_tying": True},
    ),
    "embedding tied to its head": (
        "llama",
        {"targets": ["v_proj", EMBED], "ensure_weight_tying": True},
    ),
    "head tied to its embedding": (
        "llama",
        {"targets": ["v_proj", OUT], "ensure_weight_tying": True},
    ),
    "retrained head tied to its embedding": (
        "llama",
        {"targets": ["v_proj"], "modules_to_save": [OUT], "ensure_weight_tying": True},
    ),
}
#: What PEFT itself cannot do: kind and whether the base is tied.
IMPOSSIBLE = {
    *((kind, False) for kind in KINDS if "tied" in kind or "as one" in kind),
}
CASES = [(kind, tied) for kind in KINDS for tied in (False, True) if (kind, tied) not in IMPOSSIBLE]


@dataclass(frozen=True)
class Zoo:
    """Folders by model and tie, and by kind and tie; each is made when it is first asked for."""

    folder: Path

    def base(self, kind: str, tied: bool) -> Path:
        made = self.folder / f"base-{KINDS[kind][0]}-{tied}"
        if not made.exists():
            save(new_model(KINDS[kind][0], tied=tied), made)
        return made

    def adapter(self, kind: str, tied: bool) -> tuple[Path, Path]:
        """The adapter, and what PEFT merges of it and the base."""
        stem = f"{list(KINDS).index(kind)}-{tied}"
        adapter, merged = self.folder / f"adapter-{stem}", self.folder / f"merged-{stem}"
        if not merged.exists():
            model, given = KINDS[kind]
            config = {k: v for k, v in given.items() if k != "targets"}
            targets, seed = given["targets"], list(KINDS).index(kind)
            trained(new_model(model, tied=tied), adapter, targets, seed, lora_alpha=6, **config)
            save(unloaded(_loaded(self.base(kind, tied), adapter)), merged)
        return adapter, merged


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("kinds"))


def new_model(kind: str, *, tied: bool) -> Any:
    """A tiny float32 model; the same one every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    others = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    given = gpt2 if kind == "gpt2" else others
    if kind in ("mixtral", "gpt_oss"):
        given = given | experts
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **sizes, **given)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # gpt_oss leaves its experts as they were in memory
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def _loaded(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(loaded(base), str(adapter))


@pytest.mark.parametrize(("kind", "tied"), CASES)
def test_an_adapter_of_any_kind_is_what_peft_merges(
    home: Warehouse, zoo: Zoo, kind: str, tied: bool
) -> None:
    base, (adapter, merged) = zoo.base(kind, tied), zoo.adapter(kind, tied)
    on_model = recipe("passthrough", None, [f"{base}+{adapter}"])
    on_base = recipe("task_arithmetic", base, [str(adapter)])
    found = run(home, on_base if tied else on_model).snapshot.path
    expected = read_model(merged)
    # transformers writes experts apart; an update of the fused ones is merged as it is.
    arch = "mixtral" if KINDS[kind][0] == "mixtral" else ""
    assert_close(read_model(Path(found)), fused(arch, expected))


@pytest.mark.parametrize("kind", ["dora", "pissa", "olora", "tokens", "embedding and head"])
def test_mergekit_loads_what_peft_merges(zoo: Zoo, kind: str) -> None:
    base, (adapter, merged) = zoo.base(kind, True), zoo.adapter(kind, True)
    theirs = run_mergekit(recipe("passthrough", None, [f"{base}+{adapter}"]))
    assert_close(theirs, read_model(merged))


def test_adapters_of_all_kinds_merge_like_the_models_that_peft_makes_of_them(
    tmp_path: Path, zoo: Zoo
) -> None:
    """In any windows, by any number of threads; what each changes is told by an analysis."""
    kinds = ["dora", "pissa and dora", "olora", "tokens", "dora of a head"]
    base = zoo.base("dora", False)
    options = [EngineOptions(threads=1, window_elems=777), EngineOptions(window_elems=4097)]
    ids, found = set(), {}
    for which, given in ((0, options[0]), (0, options[1]), (1, EngineOptions())):
        home = Warehouse.at(tmp_path / f"{which}-{given.window_elems}").ensure()
        text = recipe("ties", base, [str(zoo.adapter(kind, False)[which]) for kind in kinds], 0.5)
        text = text.replace("weight: 0.5", "weight: 0.5, density: 0.6")
        outcome = run(home, text, options=given)
        found[which] = read_model(Path(outcome.snapshot.path))
        ids |= {outcome.snapshot.snapshot_id} if which == 0 else set()
    assert len(ids) == 1
    different = total = 0
    for name, value in found[0].items():
        wrong = ~torch.isclose(value, found[1][name], rtol=1e-4, atol=1e-5)
        different, total = different + int(wrong.sum()), total + wrong.numel()
    assert different <= 1e-3 * total  # a magnitude next to its threshold may be cut


def test_dora_on_a_base_that_an_adapter_changes_is_refused(home: Warehouse, zoo: Zoo) -> None:
    base, (adapter, _) = zoo.base("dora", False), zoo.adapter("dora", False)
    below, _ = zoo.adapter("embedding and head", False)
    raw = parse(recipe("task_arithmetic", f"{base}+{below}", [str(adapter)]), name="t", where="t")
    with pytest.raises(IncompatibleCheckpointsError, match="merge the adapter below first"):
        resolve(home, raw)
