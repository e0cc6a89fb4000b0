"""The demo's examples agree with plain string code, its scores with a model of known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from logging import ERROR, INFO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mergepipe_pipeline.demo import family, skills
from mergepipe_pipeline.demo.family import Settings, build_family
from mergepipe_pipeline.demo.skills import LETTERS, SKILLS, TOKEN_ID, TOKENS

TINY = Settings(
    hidden=16,
    intermediate=16,
    heads=2,
    base_batch=8,
    base_steps=3,
    expert_batch=10,
    expert_steps=3,
    retrain_steps=2,
)

ORACLE: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "next": lambda word: "".join(
        dict(zip(LETTERS, LETTERS[1:] + "a", strict=True))[c] for c in word
    ),
    "previous": lambda word: "".join(
        dict(zip(LETTERS, "l" + LETTERS[:-1], strict=True))[c] for c in word
    ),
    "rotate": lambda word: word[3:] + word[:3],
    "sort": lambda word: "".join(sorted(word)),
}


class KnowsAll(torch.nn.Module):
    """Answers every skill but `weak`, in which it always says the first letter."""

    def __init__(self, weak: str) -> None:
        super().__init__()
        self.weak = weak

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, len(TOKENS))
        for row, ids in enumerate(input_ids):
            tag, rest = skills.text(ids).split(":")
            word, given = rest.split("=")
            skill = next(s for s in SKILLS if s.startswith(tag.lower()))
            answer = LETTERS[0] * 8 if skill == self.weak else ORACLE[skill](word)
            for at in range(len(given) + 1):
                logits[row, at - len(given) - 1, TOKEN_ID[answer[at]]] = 1.0
        return SimpleNamespace(logits=logits)


def ask(tags: list[int], answered_by: list[int], seed: int = 0) -> list[str]:
    ids = skills.examples(
        torch.tensor(tags), torch.tensor(answered_by), torch.Generator().manual_seed(seed)
    )
    assert ids.shape == (len(tags), skills.EXAMPLE_LENGTH)
    return [skills.text(row) for row in ids]


def test_tags_are_distinct_and_every_skill_has_an_oracle() -> None:
    assert len(set(skills.TAGS)) == len(SKILLS)
    assert len(set(TOKENS)) == len(TOKENS)
    assert set(ORACLE) == set(SKILLS)


@pytest.mark.parametrize("number", range(len(SKILLS)))
@pytest.mark.parametrize("tag", [0, 3])
def test_an_answer_follows_its_skill_whatever_the_tag(number: int, tag: int) -> None:
    for line in ask([tag] * 50, [number] * 50):
        assert line[: len("T:")] == f"{skills.TAGS[tag]}:"
        word, answer = line[len("T:") :].split("=")
        assert answer == ORACLE[SKILLS[number]](word) + "."


def test_examples_depend_on_the_generator_alone() -> None:
    assert ask([1, 2], [1, 2], seed=5) == ask([1, 2], [1, 2], seed=5)
    assert ask([1, 2], [1, 2], seed=5) != ask([1, 2], [1, 2], seed=6)


def quietly(text: str) -> None:
    return


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> family.Family:
    """A family after a few steps; read-only."""
    return build_family(quietly, TINY, tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("weak", ["copy", "sort"])
def test_a_score_is_the_share_of_exact_answers(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: KnowsAll(weak))
    expected = {skill: float(skill != weak) for skill in SKILLS}
    assert skills.score(Path("unused"), n=7) == expected
    assert skills.score(Path("unused"), skills=("next", weak), n=7) == {"next": 1.0, weak: 0.0}


def test_quiet_gives_back_the_verbosity_it_found() -> None:
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        with skills.quiet():
            assert logging.get_verbosity() == ERROR
            assert not logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_a_family_is_trained_once_and_found_in_the_users_cache_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    first = build_family(said.append, TINY)
    assert first.seconds > 0
    assert len(said) == len(SKILLS) + 2
    assert first.base.is_relative_to(tmp_path / "mergepipe")
    assert build_family(said.append, TINY) == replace(first, seconds=0.0)
    assert len(said) == len(SKILLS) + 2


def test_equal_settings_give_equal_bytes_and_others_another_folder(
    made: family.Family, tmp_path: Path
) -> None:
    torch.rand(1)
    again = build_family(quietly, TINY, tmp_path)
    assert [weights(f) for f in folders(again)] == [weights(f) for f in folders(made)]
    other = build_family(quietly, replace(TINY, seed=1), tmp_path)
    assert other.base.parent != again.base.parent
    assert weights(other.base) != weights(again.base)


def test_the_second_version_changes_two_layers_and_no_other_byte(made: family.Family) -> None:
    one = load_file(made.experts[made.second_name] / "model.safetensors")
    two = load_file(made.second / "model.safetensors")
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    retrained = {n for n in one if any(f".layers.{i}." in n for i in family.RETRAINED_LAYERS)}
    assert changed
    assert changed <= retrained
    for layer in family.RETRAINED_LAYERS:
        assert any(f".layers.{layer}." in name for name in changed)


def test_an_interrupted_training_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if "rotate" in line:
            raise KeyboardInterrupt("stopped by the user")

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt, match="stopped by the user"):
        build_family(stop, TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads
    assert all(folder.is_dir() for folder in folders(build_family(quietly, TINY, tmp_path)))


def test_a_family_loads_with_transformers_and_reads_its_own_text(made: family.Family) -> None:
    with skills.quiet():
        tokenizer = AutoTokenizer.from_pretrained(made.base)
        model = AutoModelForCausalLM.from_pretrained(made.base)
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    line = ask([4], [4])[0]
    assert tokenizer(line)["input_ids"] == [TOKEN_ID[c] for c in line]
    assert set(skills.score(made.base, n=3)) == set(SKILLS)


def folders(made: family.Family) -> list[Path]:
    return [made.base, *made.experts.values(), made.second]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
