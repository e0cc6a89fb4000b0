"""A sample of the published recipes by kind; `python -m tests.published` runs all of them.

Each recipe runs here and is equal to mergekit's result, but for the exceptions that are named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published.corpus import RECIPES, outcome_of

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

#: Refused here, and by mergekit, too.
REFUSED = {
    "fusionlm-slerp": "slerp of two models beside its base",
    "oowm-slerp": "slerp of two models beside its base",
    "openchat-seraph-slerp": "the base is no source of the slice",
    "llama-code-writing-slerp": "the base is no source of the slice",
    "variant-slerp-without-base": "slerp without a base",
    "goliath-slerp": "slerp without a base",
    "llama2-smart-ties-without-base": "ties without a base",
    "dare-ties-llama": "a mapping as a parameter's value",
    "llama2-smart-dare": "a tokenizer's source that names no model",
    "dolphin-math-sources": "sources of slices without layers",
}
#: Merged here only.
ONLY_HERE = {
    "phantom-ties-dare": "mergekit fails on the tiny tokenizer of a Qwen 2",
    "legal-bert-ties": "mergekit fails on every BertModel",
    "moon-karcher-twice": "one model is listed twice",
}
#: Merged by both, and not equal.
DIFFERENT = {
    "multi-task-mixtral": "mergekit fuses experts first and trims all of a layer's together",
}
#: Refused unless `--lenient`.
LENIENT = {
    "apocrypha-multislerp",
    "base-6-v2-sce",
    "dpopenhermes-11b",
    "fusionlm-biomistral",
    "genetic-lemonade",
    "hermes-metamath-code-dare",
    "novaciano-sce",
}

#: What CI runs: of every method one recipe, and of every kind of exception.
SAMPLE = (
    "fusionlm-ties",
    "weirdcompound-b",
    "thaillm-task-arithmetic",
    "article-nuslerp",
    "article-breadcrumbs",
    "dark-quill-nearswap",
    "fusechat-fusion",
    "novaciano-sce",
    "moon-karcher-twice",
    "dare-ties-llama",
)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


def test_a_hundred_recipes_are_kept_with_their_sources() -> None:
    assert len(RECIPES) >= 100
    assert all(entry["source"] and entry["recipe"]["merge_method"] for entry in RECIPES.values())
    exceptions = {*REFUSED, *ONLY_HERE, *DIFFERENT, *LENIENT}
    assert exceptions <= RECIPES.keys()
    assert set(SAMPLE) <= RECIPES.keys()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_recipe_gives_what_it_gives_in_mergekit(families: Path, name: str) -> None:
    found = outcome_of(name, families)
    assert (found.ours is not None) is (name in REFUSED), found
    assert (found.theirs is not None) is (name in REFUSED or name in ONLY_HERE), found
    assert found.lenient is (name in LENIENT)
    if found.equal is not None and name not in DIFFERENT:
        assert found.equal == 1
