"""The transformers model that a GGUF file holds: its config, its tensors' names, its tokenizer.

transformers says which tensors of which shapes the config means, and builds the tokenizer; the
package gguf says how llama.cpp names them. A tensor without a counterpart is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mergepipe_pipeline.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    MergePipeError,
)
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.tools.gguf_config import (
    ARCHITECTURES,
    EMBEDDING,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    architecture_of,
    config_values,
)
from mergepipe_pipeline.tools.gguf_file import GgufFile, Listed, libraries, refused

T = TypeVar("T")
_HEAD = "lm_head.weight"
_TOKENS = "tokenizer.ggml.tokens"
#: How byte-level vocabularies split text, besides those that transformers knows.
_GPT2, _DIGITS = ("gpt-2",), ("smollm", "starcoder", "refact")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor's name in transformers, its stored one, and how its numbers get there.

    `heads` are those whose rows are put back in order, 0 where they are; `shift` is taken away.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    heads: int
    shift: float


@dataclass(frozen=True, slots=True)
class Model:
    """A config as JSON values, and every tensor, in the order of the file."""

    config: dict[str, Any]
    targets: tuple[Target, ...]


def model_of(file: GgufFile) -> Model:
    """The model of a file. Raises CheckpointError if config and tensors do not fit each other."""
    architecture = architecture_of(file)
    values = config_values(file, architecture)
    is_tied = values["tie_word_embeddings"]
    config, shapes = _asked(file, lambda: _built(values))
    names = _names(architecture, values["num_hidden_layers"])
    wanted = {names(n): n for n in shapes if not (is_tied and n == _HEAD)}
    settings = {LLAMA3_FACTORS} if architecture == "llama" else set()
    settings |= set(LONG_FACTORS) if architecture == "phi3" else set()
    _compare(file, {stored: shapes[n] for stored, n in wanted.items()}, settings)
    known = ARCHITECTURES[architecture]
    turned = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    targets = []
    for stored in (s for s in file.tensors if s in wanted):
        part = stored.split(".")[-2]
        targets.append(
            Target(
                wanted[stored],
                stored,
                shapes[wanted[stored]],
                turned.get(part, 0) if known.is_permuted else 0,
                known.shift if stored.endswith("norm.weight") else 0.0,
            )
        )
    return Model(config, tuple(targets))


def _built(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The whole config, and names and shapes of what its model has; no memory is taken for it."""
    import torch

    transformers = libraries().transformers
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    return json.loads(config.to_json_string()), shapes


def _names(architecture: str, layers: int) -> Callable[[str], str]:
    """From transformers' name of a tensor to llama.cpp's."""
    gguf = libraries().gguf
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, layers)

    def stored(name: str) -> str:
        stem, _, end = name.rpartition(".")
        return f"{table.get_name(stem)}.{end}"

    return stored


def _compare(file: GgufFile, wanted: dict[str, tuple[int, ...]], settings: set[str]) -> None:
    """Raise CheckpointError unless the file has these tensors of these shapes, and no others."""
    for name, shape in wanted.items():
        if name not in file.tensors:
            raise IncompleteCheckpointError(
                "A GGUF file lacks a tensor of its model",
                where=f"{file.path}, tensor {name}",
                expected=f"shape {list(shape)}",
                found="no such tensor",
                next_step="get the file again, or the model that it was made from",
            )
        if file.tensors[name].shape != shape:
            found = f"shape {list(file.tensors[name].shape)}"
            raise refused(file.path, f"tensor {name}", f"shape {list(shape)}", found)
    for name in file.tensors:
        if name not in wanted and name not in settings:
            raise refused(file.path, f"tensor {name}", "tensors of its architecture", "another")


def tokenizer_files(file: GgufFile, folder: Path) -> dict[str, bytes]:
    """The tokenizer's files by name, made below `folder`. Raises CheckpointError."""
    kind = file.metadata.get("tokenizer.ggml.model")
    split = file.metadata.get("tokenizer.ggml.pre")
    known = {*_GPT2, *_DIGITS, *libraries().vocabularies.GGUF_PRE_TOKENIZER_SPLITS}
    if kind != "llama" and (kind != "gpt2" or split not in known):
        raise CheckpointError(
            "The tokenizer of a GGUF file is of a kind that is not converted",
            where=f"{file.path}, tokenizer.ggml.model and tokenizer.ggml.pre",
            expected="llama, or gpt2 with a way to split text that is known",
            found=text_of(f"{str(kind)[:80]} with {str(split)[:80]}"),
            next_step="put the original's tokenizer.json and tokenizer_config.json beside the file "
            "and give the folder",
        )
    n_rows, tokens = file.tensors[EMBEDDING].shape[0], file.metadata.get(_TOKENS)
    if not isinstance(tokens, Listed) or tokens.count > n_rows:
        raise refused(file.path, _TOKENS, f"at most {n_rows}, a row of the embedding each", tokens)
    return _asked(file, lambda: _saved(file.path, tokens.count, split in _DIGITS, folder))


def _saved(path: Path, n_tokens: int, splits_digits: bool, folder: Path) -> dict[str, bytes]:
    """The files in which transformers keeps the tokenizer that it makes of a GGUF file."""
    _, transformers, tokenizers, mapping = libraries()
    architecture, vocabulary, settings = mapping.get_gguf_tokenizer(str(path))
    backend, _ = mapping.convert_gguf_tokenizer(architecture, vocabulary)
    if splits_digits:
        pre = tokenizers.pre_tokenizers
        steps = [pre.Digits(True), pre.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre.Sequence(steps)
    if backend.get_vocab_size() > n_tokens:  # special tokens of a class, which the model has not
        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < n_tokens]
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    with TemporaryDirectory(dir=folder) as place:
        whole.save_pretrained(place)
        return {p.name: p.read_bytes() for p in Path(place).iterdir()}


def _asked(file: GgufFile, call: Callable[[], T]) -> T:
    """What transformers makes of the file. Raises CheckpointError if it makes nothing."""
    log: Any = libraries().transformers.logging
    log.set_verbosity_error()
    try:
        return call()
    except MergePipeError:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
            raise
        raise CheckpointError(
            "transformers makes nothing of what a GGUF file says",
            where=str(file.path),
            expected="metadata of a model and a vocabulary",
            found=text_of(f"{type(error).__name__}: {error}")[:300],
            next_step="get the file again, or the model that it was made from",
        ) from error
