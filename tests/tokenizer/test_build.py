"""Rows by the rules' definition over random vocabularies; output files that load and encode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.tokenizer.build import TokenizerBuild, build_tokenizer
from mergepipe_pipeline.tokenizer.model_tokenizer import ModelTokenizer, read_tokenizer
from tests.support.laws import examples
from tests.tokenizer.models import Matrix, document, entry, files_of, gather, words

UNION = TokenizerRecipe("union")
TOKENS = tuple("abcdefgh")


@dataclass(frozen=True)
class Setting:
    """Models with random vocabularies and embeddings, and a recipe over them."""

    models: list[ModelTokenizer]
    embeddings: list[Matrix]
    base: int | None
    recipe: TokenizerRecipe


@st.composite
def some_settings(draw: st.DrawFn) -> Setting:
    """Two or three models; ids with gaps, in any order, some beyond the rows; any valid rules."""
    models = []
    for i in range(draw(st.integers(2, 3))):
        tokens = draw(st.lists(st.sampled_from(TOKENS), min_size=1, unique=True))
        ids = draw(st.permutations(range(12)))[: len(tokens)]
        n_rows = draw(st.integers(min(ids) + 1, 14))
        models.append(words(f"m{i}", dict(zip(tokens, ids, strict=True)), n_rows))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    embeddings = [generator.normal(size=(m.n_rows, 3)).astype(np.float32) for m in models]
    numbers = st.integers(0, len(models) - 1)
    rules = []
    for token in draw(st.lists(st.sampled_from([*TOKENS, "new"]), max_size=4, unique=True)):
        model, force = draw(numbers), draw(st.booleans())
        has = sorted(models[model].vocab_in_rows)
        kinds = ["zero", "default", "id", "of", *(["model"] if token in has else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "id":
            of_id = draw(st.integers(0, models[model].n_rows - 1))
            rules.append(TokenRule(token, "model_token", model, of_id=of_id, force=force))
        elif kind == "of":
            of_token = draw(st.sampled_from(has))
            rules.append(TokenRule(token, "model_token", model, of_token, force=force))
        elif kind == "model":
            rules.append(TokenRule(token, "model", model, force=force))
        else:
            rules.append(TokenRule(token, "zero" if kind == "zero" else "default", force=force))
    source: Any = draw(st.one_of(st.just("union"), numbers))
    pad = draw(st.one_of(st.none(), st.integers(1, 9)))
    base = draw(st.one_of(st.none(), numbers))
    return Setting(models, embeddings, base, TokenizerRecipe(source, tuple(rules), pad))


def build_of(setting: Setting) -> TokenizerBuild:
    return build_tokenizer(setting.recipe, setting.models, setting.base)


def row_by_definition(setting: Setting, token: str, model: int) -> Matrix:
    """The row of a token in a model's aligned embedding, from the words of SEMANTICS.md."""
    rows: dict[int, Matrix] = {
        m: setting.embeddings[m][t.vocab[token]]
        for m, t in enumerate(setting.models)
        if t.vocab.get(token, t.n_rows) < t.n_rows
    }
    rule = next((r for r in setting.recipe.tokens if r.token == token), None)
    if model in rows and not (rule and rule.force):
        return rows[model]
    if rule and rule.kind == "model":
        return rows[rule.model or 0]
    if rule and rule.kind == "model_token":
        origin = rule.model or 0
        of_id = setting.models[origin].vocab[rule.of_token] if rule.of_token else rule.of_id
        return setting.embeddings[origin][of_id]
    if (rule and rule.kind == "zero") or not rows:
        return np.zeros(3, dtype=np.float32)
    if setting.base in rows:
        return rows[setting.base]
    mean: Matrix = np.mean(list(rows.values()), axis=0)
    return mean


@given(some_settings())
@settings(max_examples=examples(50), deadline=None)
def test_every_row_is_the_one_that_the_rules_define(setting: Setting) -> None:
    build = build_of(setting)
    for model, rows in enumerate(build.rows):
        matrix = gather(rows, model, setting.embeddings)
        for token, row in build.vocab.items():
            assert_allclose(matrix[row], row_by_definition(setting, token, model), atol=1e-6)
        assert rows.own.dtype == np.int64
        assert all(rows.own[row] == -1 for row in rows.patches)
        gaps = set(range(build.n_rows)) - set(build.vocab.values())
        assert set(rows.mean_rows.tolist()) == gaps


@given(some_settings())
@settings(max_examples=examples(50), deadline=None)
def test_the_output_is_the_source_with_all_that_is_asked_for_behind_it(setting: Setting) -> None:
    build, recipe = build_of(setting), setting.recipe
    lead = setting.base or 0
    source = setting.models[lead if recipe.source == "union" else recipe.source].vocab_in_rows
    assert source.items() <= build.vocab.items()
    wanted = set(source) | {r.token for r in recipe.tokens}
    if recipe.source == "union":
        wanted |= {t for m in setting.models for t in m.vocab_in_rows}
    assert set(build.vocab) == wanted
    assert len(set(build.vocab.values())) == len(build.vocab)
    n, multiple = max(build.vocab.values()) + 1, recipe.pad_to_multiple_of or 1
    assert n <= build.n_rows < n + multiple
    assert build.n_rows % multiple == 0


@given(some_settings())
@settings(max_examples=examples(50), deadline=None)
def test_the_output_file_gives_every_token_its_id_when_it_is_loaded(setting: Setting) -> None:
    build = build_of(setting)
    loaded = Tokenizer.from_str(build.files["tokenizer.json"].decode())
    assert loaded.get_vocab() == build.vocab
    again = read_tokenizer("again", build.files, build.n_rows)
    assert again.vocab == build.vocab
    assert build_tokenizer(UNION, [again], None).files == build.files


@given(some_settings())
@settings(max_examples=examples(25), deadline=None)
def test_equal_vocabularies_give_the_identity_and_the_same_bytes(setting: Setting) -> None:
    model = setting.models[0]
    build = build_tokenizer(UNION, [model, model], 0)
    own = build.rows[1].own
    assert not build.rows[1].patches
    assert all(own[i] == i for i in model.vocab_in_rows.values())
    if len(model.vocab_in_rows) == len(model.vocab):
        assert build.files == model.files


def test_a_weight_that_a_model_lacks_takes_rows_from_the_others_alone() -> None:
    build = build_tokenizer(UNION, [words("a", {"x": 0}), words("b", {"y": 0})], 0)
    assert build.rows[0].patches == {1: ((1, 0),)}
    assert build.rows_among([0])[0].patches == {1: ()}


def test_a_model_without_a_tokenizer_is_taken_to_have_the_bases() -> None:
    bare = read_tokenizer("bare", {}, 2)
    build = build_tokenizer(UNION, [bare, words("a", {"x": 0, "y": 1, "z": 2})], 1)
    assert build.rows[0].own.tolist() == [0, 1, -1]
    assert "bare has no tokenizer; taken to be that of a" in build.warnings
    with pytest.raises(CheckpointError, match="builds on has none"):
        build_tokenizer(UNION, [bare], None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TokenRule("new", "model", 1), "lacks the token.*found it in no model"),
        (TokenRule("x", "model", 1), "lacks the token.*found it in a"),
        (TokenRule("x", "model_token", 1, of_token="x"), "lacks the token.*in b, found it in a"),
        (TokenRule("x", "model_token", 1, of_id=2), "expected 0 to 1 in b|Expected 0 to 1 in b"),
        (TokenRule("x", "model_token", 1, of_id=-1), "outside the embedding"),
        (TokenRule("x", "model", 7), "no part in the embedding"),
        (TokenRule("x", "model"), "found no model"),
        (TokenRule("", "zero"), "empty token"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rule: TokenRule, message: str) -> None:
    models = [words("a", {"x": 0}), words("b", {"y": 0, "z": 1})]
    if rule.model == 7:
        build = build_tokenizer(TokenizerRecipe("union", (TokenRule("x", "model", 0),)), models, 0)
        with pytest.raises(RecipeError, match=message):
            build.rows_among([1])
        return
    with pytest.raises(RecipeError, match=message):
        build_tokenizer(TokenizerRecipe("union", (rule,)), models, 0)


def pieces(n_rows: int) -> ModelTokenizer:
    """A byte-pair tokenizer with ids 0 to 5 and two added tokens behind."""
    vocab = {t: i for i, t in enumerate(["<unk>", "a", "b", "c", "ab", "abc"])}
    added = [entry("<s>", 6, special=True), entry("<t>", 7)]
    doc = document(vocab, added, "BPE", merges=["a b", "ab c"])
    decoder = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in added}
    files = files_of(doc, unk_token="<unk>", bos_token="<s>", added_tokens_decoder=decoder)
    return read_tokenizer("pieces", files, n_rows)


@pytest.mark.parametrize("n_rows", [4, 5, 6, 7, 8])
def test_tokens_beyond_the_embedding_leave_with_their_merges(n_rows: int) -> None:
    build = build_tokenizer(UNION, [pieces(n_rows)], None)
    loaded = Tokenizer.from_str(build.files["tokenizer.json"].decode())
    assert sorted(loaded.get_vocab().values()) == list(range(n_rows))
    assert loaded.encode("abc").tokens == {4: ["a", "b", "c"], 5: ["ab", "c"]}.get(n_rows, ["abc"])
    listed = json.loads(build.files["tokenizer_config.json"])["added_tokens_decoder"]
    special = [] if n_rows == 8 else ["0"]  # <unk> is added where the files are written anew
    assert sorted(listed) == [*special, *(str(i) for i in range(6, n_rows))]
    assert bool(build.warnings) == (n_rows < 8)


def write(build: TokenizerBuild, folder: Path) -> Any:
    for name, data in build.files.items():
        (folder / name).write_bytes(data)
    return AutoTokenizer.from_pretrained(str(folder))


def test_the_output_tokenizer_loads_in_transformers_and_encodes(tmp_path: Path) -> None:
    other = words("other", {"<unk>": 0, "tree": 5, "a": 1}, 9, unk_token="<unk>")
    tokenizer = write(build_tokenizer(UNION, [pieces(8), other], 0), tmp_path)
    assert tokenizer.encode("abc tree <t> a <s>") == [5, 8, 7, 1, 6]
    assert tokenizer.decode([5, 8]) == "abc tree"
    assert tokenizer.bos_token_id == 6


def test_a_unigram_list_gets_tokens_behind_it(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["a", -1.0], ["b", -1.5], ["ab", -0.5]]
    files = files_of(document(vocab, kind="Unigram", unk_id=0), unk_token="<unk>")
    first = read_tokenizer("u", files, 4)
    build = build_tokenizer(UNION, [first, words("other", {"tree": 0})], 0)
    assert write(build, tmp_path).encode("ab tree a") == [3, 4, 1]
    cut = build_tokenizer(UNION, [read_tokenizer("u", files, 3)], 0)
    assert Tokenizer.from_str(cut.files["tokenizer.json"].decode()).encode("ab").ids == [1, 2]


def test_second_copies_of_the_vocabulary_go_when_it_changes() -> None:
    extra = {"vocab.json": b'{"x": 0}', "merges.txt": b"", "tokenizer.model": b"\0"}
    doc = files_of(document({"x": 0}))
    model = read_tokenizer("a", {**doc, **extra, "chat_template.jinja": b"{}"}, 1)
    assert set(build_tokenizer(UNION, [model], 0).files) == {*doc, *extra, "chat_template.jinja"}
    changed = build_tokenizer(UNION, [model, words("b", {"y": 0})], 0)
    assert set(changed.files) == {*doc, "chat_template.jinja"}


def test_a_tokenizer_without_tokenizer_json_gets_new_tokens_in_added_tokens_json() -> None:
    files = {"vocab.json": b'{"x": 0, "y": 1}', "merges.txt": b"#version: 0.2\n"}
    old = read_tokenizer("old", files, 2)
    build = build_tokenizer(UNION, [old, words("b", {"z": 0})], 0)
    assert json.loads(build.files["added_tokens.json"]) == {"z": 2}
    assert read_tokenizer("again", build.files, 3).vocab == build.vocab
    with pytest.raises(CheckpointError, match=r"cannot be stated without tokenizer\.json"):
        build_tokenizer(UNION, [read_tokenizer("old", files, 1)], 0)


def test_the_bytes_are_the_same_in_every_process() -> None:
    code = """
import json
from mergepipe_pipeline.domain.recipe import TokenizerRecipe
from mergepipe_pipeline.tokenizer.build import build_tokenizer
from mergepipe_pipeline.tokenizer.model_tokenizer import read_tokenizer
def words(name, text):
    vocab = {t: i for i, t in enumerate(text)}
    doc = json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}).encode()
    return read_tokenizer(name, {"tokenizer.json": doc}, len(vocab))
models = [words("a", "xy"), words("b", "yqwertz"), words("c", "asdfqw")]
print(build_tokenizer(TokenizerRecipe("union"), models, 0).files)
"""
    out = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(out) == 1


def test_a_damaged_merge_is_refused_where_merges_are_needed() -> None:
    doc = document({"<unk>": 0, "a": 1, "b": 2}, (), "BPE", merges=["a"])
    with pytest.raises(CheckpointError, match=r"model\.merges.*pairs of tokens, found 'a'"):
        build_tokenizer(UNION, [read_tokenizer("m", files_of(doc), 2)], None)


def test_the_package_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mergepipe_pipeline.tokenizer.build, mergepipe_pipeline.tokenizer.chat;"
        "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
