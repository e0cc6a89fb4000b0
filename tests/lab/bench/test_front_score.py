"""The evaluator of the benchmark of fronts says what transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.lab.bench.front_score import judged, score

STOP, MOST = 2, 7


def test_the_models_answers_are_those_that_transformers_generates(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 5,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.5, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    prompts = torch.randint(5, (200, 4))
    said = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=MOST, do_sample=False,
        eos_token_id=None,
    )[:, 4:]  # fmt: skip
    answers = torch.where(torch.rand(200, 1) < 0.5, said[:, :2], torch.randint(5, (200, 2)))
    asked = {"a.prompts": prompts, "a.answers": answers, "stop": torch.tensor([STOP])}
    save_file({**asked, "most": torch.tensor([MOST])}, tmp_path / "questions")
    right, lengths = judged(said, answers, STOP)
    assert 0 < right.double().mean() < 1
    assert score(tmp_path / "questions", tmp_path / "model") == {
        "a": right.double().mean().item(),
        "tokens": lengths.double().mean().item(),
    }


def test_an_answer_is_what_stands_before_the_first_stop_and_one_without_an_end_is_wrong() -> None:
    said = torch.tensor([[3, 4, 2, 1], [1, 3, 4, 2], [3, 4, 1, 1], [3, 2, 3, 4], [2, 3, 4, 2]])
    right, lengths = judged(said, torch.tensor([[3, 4]] * 5), STOP)
    assert right.tolist() == [True, True, False, False, False]
    assert lengths.tolist() == [3, 4, 4, 2, 1]
