"""What mergekit's tests import as `tests.common`: tiny models, and merges by our command.

Written anew: mergekit's own file is in no release. Stands in a folder `tests` beside the test files
of mergekit's source release; `run_merge` is replaced in them, too, by `foreign.plugin`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from mergepipe_pipeline.cli.main import main

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


#: The test that runs, and those that merged.
TEST: list[str] = [""]
MERGING: set[str] = set()


class RefusedError(ValueError):
    """Our command ended with an error; its text is what was told."""


def run_merge(config: Any, out_path: str, options: Any = None) -> None:
    """Merge by `mergepipe merge`; raises RefusedError with what it says."""
    MERGING.add(TEST[0])
    given = config.model_dump(mode="json", exclude_none=True, by_alias=True)
    arguments = [] if options is None or options.copy_tokenizer else ["--no-copy-tokenizer"]
    if options is not None and options.unsafe_truncate_embeddings:
        arguments.append("--unsafe-truncate-embeddings")
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yml"
        recipe.write_text(yaml.safe_dump(_plain(given), sort_keys=False))
        told = _call(["--home", f"{folder}/warehouse", "merge", str(recipe), *arguments], out_path)
    if told:
        raise RefusedError(told)


def _call(arguments: list[str], out_path: str) -> str:
    """What the command says where it fails, else nothing."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([*arguments, "--lenient", "--out", out_path], standalone_mode=False)
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            return str(error)
    return said.getvalue() or f"exit {code}" if code else ""


def _plain(value: Any) -> Any:
    """A configuration as mergekit dumps it, with its references as texts."""
    if isinstance(value, dict):
        if isinstance(value.get("model"), dict) and "path" in value["model"]:
            return value["model"]["path"]
        if set(value) == {"path"}:
            return value["path"]
        return {k: _plain(v) for k, v in value.items() if v not in (None, {}, [])}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def run_and_check_merge(
    config: Any,
    check_nan: bool = True,
    validate: Callable[[str], None] | None = None,
    auto_arch: bool = False,
    **_: Any,
) -> None:
    """Merge, and check that the result is whole, finite, and what `validate` asks for."""
    with tempfile.TemporaryDirectory() as above:
        folder = os.path.join(above, "out")
        run_merge(config, folder)
        assert os.path.exists(os.path.join(folder, "config.json"))
        names = set()
        for file in Path(folder).glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    names.add(name)
                    value = tensors.get_tensor(name)
                    assert not check_nan or not bool(value.isnan().any()), name
        source = config.base_model or (config.models or config.slices[0].sources)[0].model
        with torch.device("meta"):
            given = AutoConfig.from_pretrained(str(source.model.path))
            like = AutoModelForImageTextToText if auto_arch else AutoModelForCausalLM
            wanted = {n for n, _ in like.from_config(given).named_parameters()}
        if not auto_arch and config.slices is None:
            assert wanted - names <= {"lm_head.weight"}, sorted(wanted - names)[:3]
        if validate:
            validate(folder)


def _save(kind: str, path: Any, like: Any = AutoModelForCausalLM, **config: Any) -> str:
    like.from_config(AutoConfig.for_model(kind, **config)).save_pretrained(str(path))
    return str(path)


def make_picollama(path: Any, vocab_size: int = 64) -> str:
    """A tiny llama."""
    return _save("llama", path, vocab_size=vocab_size, num_attention_heads=16, **_SMALL)


def make_gpt2size(path: Any, vocab_size: int = 64) -> str:
    """A GPT-2 of twelve small layers."""
    sizes = {"n_embd": 32, "n_layer": 12, "n_head": 4, "n_positions": 64}
    return _save("gpt2", path, vocab_size=vocab_size, **sizes)


def make_picogranite(path: Any) -> str:
    """A tiny Granite."""
    return _save("granite", path, vocab_size=64, num_attention_heads=4, **_SMALL)


def make_picoLlaVa(path: Any) -> str:
    """A tiny LLaVA."""
    text = {"model_type": "llama", "vocab_size": 64, "num_attention_heads": 16, **_SMALL}
    vision = {"model_type": "clip_vision_model", "num_attention_heads": 4, **_SMALL}
    vision |= {"image_size": 32, "patch_size": 16}
    return _save(
        "llava",
        path,
        AutoModelForImageTextToText,
        text_config=text,
        vision_config=vision,
        image_token_index=63,
    )
