"""The bench in small: one expert of the real model, a few steps, forty items."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.bench_llm.score import Scored
from tests.lab.bench_llm.table import kept, markdown
from tests.lab.bench_llm.tasks import TASKS

_MISSING = [m for m in ("gguf", "peft", "reasoning_gym", "transformers") if find_spec(m) is None]
pytestmark = [
    pytest.mark.skipif(bool(_MISSING), reason=f"the extra `llm` is not installed: {_MISSING}"),
    pytest.mark.filterwarnings("ignore::Warning"),
]
SUMS = TASKS[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.lab.bench_llm.pretrained import pretrained

    try:
        return pretrained(tmp_path_factory.mktemp("llm"))
    except SystemExit as error:
        pytest.skip(str(error))


def test_no_item_is_in_two_splits_and_a_seed_gives_the_same_ones() -> None:
    for task in TASKS:
        test, valid = task.items("test"), task.items("valid")
        prompts = {i.prompt for i in test}
        assert len(test) == len(prompts) == 512
        assert len(valid) == 128
        assert prompts.isdisjoint(i.prompt for i in task.items("train", seed=1))
        assert all(not task.choices or i.answer[1:] in task.choices for i in (*test, *valid))


def test_an_expert_that_was_stopped_is_that_of_one_go_and_learns(
    base: Path, tmp_path: Path
) -> None:
    from tests.lab.bench_llm.answers import Model, divergence
    from tests.lab.bench_llm.tune import tuned

    with pytest.raises(TimeoutError):
        tuned(base, SUMS, "short", 0, tmp_path / "stopped", steps=4, until=0.0)
    parts = tuned(base, SUMS, "short", 0, tmp_path / "stopped", steps=4)
    whole = tuned(base, SUMS, "short", 0, tmp_path / "whole", steps=4)
    name = "model.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
    losses = [float(x.split(",")[1]) for x in (whole / "losses.csv").read_text().splitlines()]
    assert losses[-1] < losses[0]
    items = SUMS.items("test")[:40]
    before, after = Model(base, base), Model(whole, base)
    assert 0 <= before.right(SUMS, items) <= 1
    assert (
        max(divergence(before, before, 4).values())
        < 1e-6
        < min(divergence(before, after, 4).values())
    )


def test_a_table_says_what_is_kept_with_its_interval(tmp_path: Path) -> None:
    scored = Scored(tmp_path / "scores.jsonl")
    for seed in (0, 1):
        for name, right in (("base", 0.1), ("ties 100%", 0.5), ("ties 3% packs", 0.3)):
            scores = {t.name: right for t in TASKS} | {f"kl {t.name}": 0.5 for t in TASKS}
            texts = {"perplexity english": 9.0, "perplexity code": 8.0}
            scored.put(f"short {seed} {name}", scores | texts | {"read": 0.03})
    found = kept(Scored(tmp_path / "scores.jsonl"), "short", "ties", "3%", "packs")
    assert found is not None
    assert (round(found.share, 9), round(found.low, 9), round(found.high, 9)) == (0.5, 0.5, 0.5)
    assert "50 (50 to 50), 0.5" in markdown(scored, ["short"])
    assert kept(scored, "short", "ties", "50%", "packs") is None
