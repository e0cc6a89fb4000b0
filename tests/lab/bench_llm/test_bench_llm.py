"""The bench in small: one expert of the real model, a few steps, forty items."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench_llm.kinds import KINDS
from tests.lab.bench_llm.score import Scored
from tests.lab.bench_llm.table import kept, markdown
from tests.lab.bench_llm.tasks import TASKS, Item

_MISSING = [m for m in ("gguf", "peft", "reasoning_gym", "transformers") if find_spec(m) is None]
pytestmark = [
    pytest.mark.skipif(bool(_MISSING), reason=f"the extra `llm` is not installed: {_MISSING}"),
    pytest.mark.filterwarnings("ignore::Warning"),
]
SUMS, KINSHIP, LOGIC = TASKS[0], TASKS[5], TASKS[6]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.lab.bench_llm.pretrained import SMOLLM2

    try:
        return SMOLLM2.folder(tmp_path_factory.mktemp("llm"))
    except SystemExit as error:
        pytest.skip(str(error))


def _plain(base: Path) -> Any:
    """The model as transformers has it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)


def _losses(expert: Path) -> list[float]:
    return [float(line.split(",")[1]) for line in (expert / "losses.csv").read_text().splitlines()]


def test_no_item_is_in_two_splits_and_a_seed_gives_the_same_ones() -> None:
    for task in TASKS:
        test, valid = task.items("test"), task.items("valid")
        asked, chosen_by = ({i.prompt for i in items} for items in (test, valid))
        assert len(test) == len(asked) == 512
        assert len(valid) == len(chosen_by) == 128
        assert asked.isdisjoint(chosen_by)
        assert (asked | chosen_by).isdisjoint(i.prompt for i in task.items("train", seed=1))
        assert all(not task.choices or i.answer[1:] in task.choices for i in (*test, *valid))


def test_an_expert_of_another_seed_learns_from_other_items() -> None:
    steps = 60 * 16
    for task in TASKS:
        one, other = (task.items("train", seed)[:steps] for seed in (0, 1))
        # Of the short words some come again.
        assert len(set(one) & set(other)) < steps / 3, task.name


def test_a_prompt_begins_with_what_its_tokenizer_puts_first(base: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from tests.lab.bench_llm.encoded import Encoder

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    first = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    items = [Item("1 + 1\nAnswer:", " 2"), Item("12 + 1\nAnswer:", " 13")]
    ids, mask = Encoder(tmp_path).questions(items)
    plain, _ = Encoder(base).questions(items)
    starts = mask.argmax(1, keepdim=True)
    assert ids.gather(1, starts).unique().tolist() == [tokenizer.bos_token_id]
    assert ids.shape[1] == plain.shape[1] + 1
    batch = Encoder(tmp_path).batch(items)
    assert (batch.ids == tokenizer.bos_token_id).sum() == len(items)
    assert (batch.ids[batch.rows, batch.places + 1] == batch.targets).all()


def test_an_expert_that_was_stopped_is_that_of_one_go_and_learns(
    base: Path, tmp_path: Path
) -> None:
    import torch

    from tests.lab.bench_llm.answers import Model, answered, divergence
    from tests.lab.bench_llm.tune import BATCH, Run, Schedule, tuned

    few = Schedule(3, 5e-5)
    with pytest.raises(TimeoutError):
        tuned(base, SUMS, few, 0, tmp_path / "stopped", until=0.0)
    parts = tuned(base, SUMS, few, 0, tmp_path / "stopped")
    whole = tuned(base, SUMS, few, 0, tmp_path / "whole")
    name = "model.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
    runs = [Run(model, few, tmp_path / "none") for model in (base, whole)]
    learned = runs[0].encoder.batch(SUMS.items("train")[:BATCH])
    first, last = (float(run.step(learned, torch.tensor(0.0))) for run in runs)
    assert last < first
    assert first == pytest.approx(_losses(whole)[0], rel=1e-3)
    before, after = (answered(Model(m, base), "test", [SUMS, LOGIC], 40) for m in (base, whole))
    assert all(0 <= a.share <= 1 and len(a.right) == 40 for a in before.values())
    assert max(divergence(before, before).values()) < 1e-6 < min(divergence(before, after).values())


def test_batches_of_one_shape_teach_as_those_of_their_own_do(base: Path, tmp_path: Path) -> None:
    import torch

    from tests.lab.bench_llm.card import stacked
    from tests.lab.bench_llm.encoded import Batch
    from tests.lab.bench_llm.tune import BATCH, Run, Schedule

    few, items = Schedule(2, 5e-5), SUMS.items("train")[:20]
    one, other = (Run(base, few, tmp_path) for _ in range(2))
    other.model.set_attn_implementation("sdpa")
    for n, (rate, *fields) in enumerate(
        zip(map(torch.tensor, few.rates()), *stacked(one.encoder, items, few.steps), strict=True)
    ):
        own = one.encoder.batch([items[(n * BATCH + i) % 20] for i in range(BATCH)])
        losses = one.step(own, rate), other.step(Batch(*fields), rate)
        # Two kinds of attention in bfloat16 add up in two orders.
        torch.testing.assert_close(*losses, rtol=0.01, atol=0)


def test_right_is_what_greedy_decoding_says_and_nothing_else(base: Path) -> None:
    from transformers import AutoTokenizer

    from tests.lab.bench_llm.answers import Model

    # In bfloat16 the first tokens often tie, and a batch adds up in another order.
    plain, said = _plain(base).float(), []
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    for item in SUMS.items("test")[:3]:
        ids = tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        made = plain.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :].tolist()
        if (end := tokenizer.eos_token_id) in made:
            said.append(Item(item.prompt, tokenizer.decode(made[: made.index(end)])))
    assert said
    others = [Item(i.prompt, f"{i.answer}0") for i in said]
    model = Model(base, base)
    model.lm = model.lm.float()
    assert model.answers(SUMS, said).share == 1
    assert model.answers(SUMS, others).share == 0


def test_choices_in_one_row_are_as_likely_as_each_alone(base: Path) -> None:
    import torch

    from tests.lab.bench_llm.answers import Model
    from tests.lab.bench_llm.encoded import Encoder

    plain, encoder = _plain(base).float(), Encoder(base)
    items = KINSHIP.items("test")[:1]
    with torch.inference_mode():
        model = Model(base, base)
        model.lm = model.lm.float()
        found = model.likelihoods(KINSHIP, items)
        for row, item in zip(found, items, strict=True):
            for likely, choice in list(zip(row, KINSHIP.choices, strict=True))[::5]:
                one = encoder.batch([Item(item.prompt, f" {choice}")])
                logits = plain(input_ids=one.ids).logits[0, one.places].float()
                alone = logits.log_softmax(1).gather(1, one.targets[:, None]).sum()
                assert abs(float(likely - alone)) < 1e-3


def test_a_table_says_what_is_kept_with_its_interval(tmp_path: Path) -> None:
    scored, short = Scored(tmp_path / "scores.jsonl"), KINDS["short"]
    texts = {"perplexity english": 9.0, "perplexity code": 8.0}
    merges = (("ties 100%", 0.5), ("ties 3% packs", 0.3))
    for name, right in (
        ("SmolLM2-135M-Instruct", 0.1),
        *((f"short {s} {n}", r) for s in (0, 1) for n, r in merges),
    ):
        scores = {t.name: right for t in TASKS} | {f"kl {t.name}": 0.5 for t in TASKS}
        scored.put(name, partial(dict, scores | texts), read=0.03)
    found = kept(Scored(tmp_path / "scores.jsonl"), short, "ties", "3%", "packs")
    assert found is not None
    assert (round(found.share, 9), round(found.low, 9), round(found.high, 9)) == (0.5, 0.5, 0.5)
    assert "50 (50 to 50), 0.5" in markdown(scored, [short])
    assert kept(scored, short, "ties", "50%", "packs") is None


def test_a_second_seed_that_says_the_same_makes_no_interval_narrower(tmp_path: Path) -> None:
    def scored_with(seeds: int) -> Scored:
        scored = Scored(tmp_path / f"{seeds}.jsonl")
        scored.put("SmolLM2-135M-Instruct", lambda: {t.name: 0.0 for t in TASKS})
        for seed in range(seeds):
            for name, least in (("ties 100%", 0.5), ("ties 3% packs", 0.1)):
                found = {t.name: least + 0.05 * n for n, t in enumerate(TASKS)}
                found |= {f"kl {t.name}": 0.5 for t in TASKS}
                scored.put(f"short {seed} {name}", partial(dict, found), read=0.03)
        return scored

    one, two = (kept(scored_with(n), KINDS["short"], "ties", "3%", "packs") for n in (1, 2))
    assert one is not None
    assert two is not None
    assert (two.low, two.high) == pytest.approx((one.low, one.high))
