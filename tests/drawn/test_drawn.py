"""A drawn model of most architectures; `python -m tests.drawn` judges as many as are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawn.architectures import NAMES

torch = pytest.importorskip("torch", reason="needs the extra demo")
pytest.importorskip("transformers", reason="needs the extra demo")
draw, judge = (pytest.importorskip(f"tests.drawn.{name}") for name in ("draw", "judge"))

#: Seeds whose draws hold what once went wrong: lists, windows, dense layers, ties, both spellings.
SAMPLE = {
    **dict.fromkeys(("llama", "phi3", "falcon", "stablelm", "olmo3", "opt", "cohere2"), 0),
    **dict.fromkeys(("recurrent_gemma", "qwen3_moe", "mixtral", "gemma3n_text", "gpt_neo"), 0),
    **dict.fromkeys(("deepseek_v3", "bamba", "llama4_text", "paligemma"), 0),
    **dict.fromkeys(("gpt_neox", "lfm2", "gemma3", "qwen2_5_vl"), 1),
    **dict.fromkeys(("gpt_oss", "t5", "bert"), 2),
    **dict.fromkeys(("gpt2", "smollm3"), 3),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    draw.hush()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_sample_is_of_many_architectures() -> None:
    assert len(SAMPLE) >= 25
    assert SAMPLE.keys() <= set(NAMES)


@pytest.mark.parametrize("name", SAMPLE)
def test_merges_of_a_drawn_model_are_what_torch_makes_of_it_or_refused(
    tmp_path: Path, name: str
) -> None:
    found = list(judge.judged(name, SAMPLE[name], tmp_path))
    assert not [str(v) for v in found if not v.is_expected]
    assert sum(v.kind == "right" for v in found) >= 5
