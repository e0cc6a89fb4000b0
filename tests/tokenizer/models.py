"""Tiny tokenizers and checkpoints with them, and the gathering of rows that the engine would do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mergepipe_pipeline.tokenizer.build import ModelRows
from mergepipe_pipeline.tokenizer.model_tokenizer import ModelTokenizer, read_tokenizer
from tests.support.family import tensors_of, write_model

HIDDEN = 8
Matrix = NDArray[np.float32]


def entry(content: str, id_: int, *, special: bool = False) -> dict[str, Any]:
    """An added token as tokenizer.json lists it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": id_, "content": content, **flags, "normalized": not special, "special": special}


def document(
    vocab: Any, added: Sequence[dict[str, Any]] = (), kind: str = "WordLevel", **model: Any
) -> dict[str, Any]:
    """A tokenizer.json that splits at blanks."""
    unk = {} if kind == "Unigram" else {"unk_token": "<unk>"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": kind, "vocab": vocab, **unk, **model},
    }


def files_of(doc: Mapping[str, Any], **config: Any) -> dict[str, bytes]:
    """The two files of a fast tokenizer."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return {
        "tokenizer.json": json.dumps(doc).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


def words(
    name: str, vocab: Mapping[str, int], n_rows: int | None = None, **config: Any
) -> ModelTokenizer:
    """A word-level tokenizer without added tokens."""
    rows = max(vocab.values()) + 1 if n_rows is None else n_rows
    return read_tokenizer(name, files_of(document(dict(vocab)), **config), rows)


def write_checkpoint(folder: Path, seed: int, n_rows: int, files: Mapping[str, bytes]) -> Matrix:
    """A one-layer float32 llama with these tokenizer files; its embedding [n_rows, HIDDEN]."""
    sizes = {"layers": 1, "hidden": HIDDEN, "vocab": n_rows}
    tensors = tensors_of(seed, None, dtype=torch.float32, **sizes)
    write_model(folder, tensors, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return tensors["model.embed_tokens.weight"].numpy()


def gather(rows: ModelRows, model: int, embeddings: Sequence[Matrix]) -> Matrix:
    """The embedding that `rows` describe, one row after the other."""
    out = np.zeros((len(rows.own), embeddings[model].shape[1]), dtype=np.float32)
    for i, own in enumerate(rows.own):
        if own >= 0:
            out[i] = embeddings[model][own]
        elif pairs := rows.patches.get(i):
            out[i] = np.mean([embeddings[m][r] for m, r in pairs], axis=0)
    named = np.setdiff1d(np.arange(len(out)), rows.mean_rows)
    out[rows.mean_rows] = out[named].mean(axis=0)
    return out
