"""The same embeddings and added tokens as mergekit 0.1.5, token by token, run live.

By token and not by id: mergekit numbers new tokens in another order on every run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from mergepipe_pipeline.tokenizer.build import build_tokenizer
from mergepipe_pipeline.tokenizer.model_tokenizer import ModelTokenizer, read_tokenizer
from tests.tokenizer.models import Matrix, document, entry, files_of, gather, write_checkpoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
)

WEIGHTS = (1.0, 2.0, 0.5)
EMBEDDING = "model.embed_tokens.weight"
#: Runs recipes one after the other in one process, as importing mergekit takes seconds.
DRIVER = """
import sys, pathlib, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for file in sys.argv[1:]:
    text = pathlib.Path(file).read_text()
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    run_merge(config, file.removesuffix(".yml"), MergeOptions(quiet=True), config_source=text)
"""
MIXED: dict[str, tuple[Any, bool]] = {
    "w1": ({"kind": "zero"}, True),
    "w6": (1, True),
    "w3": ({"kind": "model_token", "model": 2, "token": "w5"}, True),
    "w4": ({"kind": "model_token", "model": 1, "token_id": 3}, False),
    "b1": (1, False),
    "only in c": (2, True),
    "all new": (None, False),
    "new of w7": ({"kind": "model_token", "model": 0, "token": "w7"}, False),
}


@dataclass(frozen=True)
class Case:
    """A recipe's tokenizer part over a family; `rules` as token to (source, force)."""

    family: Literal["words", "gaps", "pieces"]
    source: int | Literal["union"]
    base: int | None = 0
    rules: tuple[str, ...] = ()
    pad: int | None = None


CASES = {
    "union with a base": Case("words", "union"),
    "union on another base": Case("words", "union", 2),
    "union without a base": Case("words", "union", None),
    "padded union": Case("words", "union", 0, (), 32),
    "union with gaps beside the base": Case("gaps", "union"),
    "base": Case("words", 0),
    "second model, padded": Case("words", 1, 0, (), 7),
    "rules": Case("words", "union", 0, tuple(MIXED)),
    "rules on the base's tokens, padded": Case("words", 0, 0, tuple(MIXED), 8),
    "pieces, union": Case("pieces", "union"),
    "pieces, base beyond its rows": Case("pieces", 1, 1),
    "pieces, padded union": Case("pieces", "union", 1, (), 64),
}


def word_family(*, gaps: bool) -> list[tuple[dict[str, bytes], int]]:
    """Word-level vocabularies: in order, permuted with own tokens, shorter than the embedding."""
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    a = special | {f"w{i}": i + 2 for i in range(1, 13)}
    b = {f"w{i}": 13 - i for i in range(3, 13)} | {"b1": 11, "b2": 0, "<s>": 13, "shared": 12}
    c = special | {f"w{i}": 11 - i for i in range(1, 9)} | {"only in c": 11, "shared": 12}
    if gaps:
        c |= {f"w{i}": 2 * i + 1 for i in range(1, 9)} | {"only in c": 4, "shared": 6}
    return [
        (files_of(document(a), **names), len(a)),
        (files_of(document(b, [entry("<|b|>", 14, special=True), entry("w12", 1)])), 16),
        (files_of(document(c), **names), 24),
    ]


def piece_family() -> list[tuple[dict[str, bytes], int]]:
    """Byte-pair vocabularies; the second has added tokens beyond its embedding."""

    def pieces(merges: list[str], added: list[str], rows: int) -> tuple[dict[str, bytes], int]:
        vocab = ["<unk>", *"abcde", *(m.replace(" ", "") for m in merges)]
        ids = {t: i for i, t in enumerate(vocab)}
        entries = [entry(t, len(vocab) + i, special=True) for i, t in enumerate(added)]
        doc = document(ids, entries, "BPE", merges=[m.split(" ") for m in merges])
        return files_of(doc, unk_token="<unk>"), rows

    return [
        pieces(["a b", "ab c", "d e"], ["<s>", "<|tool|>"], 11),
        pieces(["d e", "c de", "a b", "ab cde"], ["<beyond>", "<pad>"], 10),
        pieces(["b a", "a b"], ["<|im_end|>"], 9),
    ]


def yaml_of(case: Case, names: list[str]) -> str:
    """The case's recipe (JSON, which is YAML)."""

    def source(value: Any) -> Any:
        if isinstance(value, dict) and "model" in value:
            return {**value, "model": names[value["model"]]}
        return names[value] if isinstance(value, int) else value

    tokens = {t: {"source": source(MIXED[t][0]), "force": MIXED[t][1]} for t in case.rules}
    tokens = {t: {k: v for k, v in r.items() if v is not None} for t, r in tokens.items()}
    if "all new" in tokens:
        tokens["all new"]["source"] = {"kind": "zero"}
    recipe: dict[str, Any] = {
        "merge_method": "linear",
        "models": [
            {"model": n, "parameters": {"weight": w}} for n, w in zip(names, WEIGHTS, strict=True)
        ],
        "tokenizer": {
            "source": origin(case, names),
            "tokens": tokens,
            "pad_to_multiple_of": case.pad,
        },
    }
    if case.base is not None:
        recipe["base_model"] = names[case.base]
    return json.dumps(recipe)


def origin(case: Case, names: list[str]) -> str:
    """The source as written; "base" fails in mergekit 0.1.5 with rules for new tokens."""
    if case.source == "union":
        return "union"
    return "base" if case.source == case.base and not case.rules else names[case.source]


def rules_of(case: Case) -> tuple[TokenRule, ...]:
    out = []
    for token in case.rules:
        source, force = MIXED[token]
        if source is None:
            out.append(TokenRule(token, "default", force=force))
        elif isinstance(source, int):
            out.append(TokenRule(token, "model", source, force=force))
        elif source["kind"] == "zero":
            out.append(TokenRule(token, "zero", force=force))
        else:
            of = (source.get("token"), source.get("token_id"))
            out.append(TokenRule(token, "model_token", source["model"], *of, force=force))
    return tuple(out)


@dataclass(frozen=True)
class Family:
    """Checkpoint folders with their tokenizers and embeddings."""

    folders: list[Path]
    models: list[ModelTokenizer]
    embeddings: list[Matrix]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    out = {}
    members_of = {
        "words": word_family(gaps=False),
        "gaps": word_family(gaps=True),
        "pieces": piece_family(),
    }
    for name, members in members_of.items():
        family = Family([], [], [])
        for i, (files, n_rows) in enumerate(members):
            family.folders.append(tmp_path_factory.mktemp(name))
            family.embeddings.append(write_checkpoint(family.folders[-1], 7 + i, n_rows, files))
            family.models.append(read_tokenizer(f"{name}{i}", files, n_rows))
        out[name] = family
    return out


@pytest.fixture(scope="module")
def merged(families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mergekit's output folders, one per case."""
    folder = tmp_path_factory.mktemp("mergekit")
    for name, case in CASES.items():
        names = [str(f) for f in families[case.family].folders]
        (folder / f"{name}.yml").write_text(yaml_of(case, names))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *(str(folder / f"{n}.yml") for n in CASES)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def load(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.peer
@pytest.mark.parametrize("name", CASES)
def test_every_token_has_the_row_that_mergekit_gives_it(
    name: str, families: dict[str, Family], merged: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    family = families[case.family]
    recipe = TokenizerRecipe(case.source, rules_of(case), case.pad)
    build = build_tokenizer(recipe, family.models, case.base)
    parts = [gather(r, m, family.embeddings) for m, r in enumerate(build.rows)]
    summed = np.asarray(sum(w * p for w, p in zip(WEIGHTS, parts, strict=True)))
    ours = summed / np.float32(sum(WEIGHTS))
    theirs = load_file(merged / name / "model.safetensors")[EMBEDDING]
    their_tokenizer = load(merged / name)
    their_vocab = their_tokenizer.get_vocab()

    assert set(build.vocab) == set(their_vocab)
    assert ours.shape == theirs.shape
    for token, row in build.vocab.items():
        np.testing.assert_allclose(ours[row], theirs[their_vocab[token]], atol=1e-6, err_msg=token)
    np.testing.assert_allclose(ours[len(build.vocab) :], theirs[len(build.vocab) :], atol=1e-6)

    for file, data in build.files.items():
        (tmp_path / file).write_bytes(data)
    our_tokenizer = load(tmp_path)
    assert our_tokenizer.get_vocab() == build.vocab
    if case.base is None:
        return  # mergekit then builds on any of the models, so what is added differs
    added, expected = (
        {repr(t) for t in tokenizer.added_tokens_decoder.values()}
        for tokenizer in (our_tokenizer, their_tokenizer)
    )
    assert added == expected
