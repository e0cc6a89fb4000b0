"""How far the sources' activations are apart over a file of prompts, layer by layer.

The forward pass is a process of its own: `python -m … PROMPTS FOLDER FOLDER …` prints a JSON list
with one number per layer: 1 − cosine of the last token's states after the layer, the mean over
prompts and over all models but the last against the last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.errors import EvaluationError, SearchError
from mergepipe_pipeline.quality.builtin import LOCAL
from mergepipe_pipeline.quality.child import run_child
from mergepipe_pipeline.quality.evaluators import environment_of
from mergepipe_pipeline.search.search_file import SearchFile

#: Seconds that a forward pass over the prompts may take.
_MOST_S = 3600.0


def refuse_no_activations(
    file: SearchFile, folder: Path, models: Mapping[str, Model], where: str
) -> None:
    """Raise SearchError where the file asks for activations that cannot be had here."""
    if file.prompts is None:
        return
    if find_spec("transformers") is None:
        raise SearchError(
            "Activations need transformers",
            where=where,
            expected="the package transformers",
            found="none",
            next_step="pip install 'mergepipe-pipeline[demo]', or leave `prompts:` out",
        )
    if not (folder / file.prompts).is_file():
        raise SearchError(
            "The prompts of a search are not there",
            where=where,
            expected="a file beside the search file, or its whole path",
            found=str(folder / file.prompts),
            next_step="bring it, or leave `prompts:` out",
        )
    _folders(file, models, where)


def activation_differences(
    file: SearchFile, folder: Path, models: Mapping[str, Model], n_layers: int, where: str
) -> F64Array:
    """A score per numbered layer: 1 − cosine of hidden states, the mean over prompts.

    Between the two sources of a mix, else between each source and the base. Raises EvaluationError
    where the pass fails.
    """
    assert file.prompts is not None
    prompts = folder / file.prompts
    folders = _folders(file, models, where)
    command = [sys.executable, "-m", "mergepipe_pipeline.search.prompts", str(prompts), *folders]
    environment = environment_of(type(file.evaluator)(), Path(folders[0]))
    ended = run_child(command, folder=folder, environment=environment, timeout_s=_MOST_S)
    lines = ended.stdout.decode(errors="replace").strip().splitlines()
    if ended.code != 0 or not lines or len(scores := json.loads(lines[-1])) != n_layers:
        raise EvaluationError(
            "The forward pass over the prompts fails",
            where=f"{prompts}, of {where}",
            expected=f"one number for each of {n_layers} layers",
            found=ended.output.decode(errors="replace")[-1500:].strip() or "no output",
            next_step="mend the prompts or the models, or leave `prompts:` out",
        )
    return np.array(scores, np.float64)


def _folders(file: SearchFile, models: Mapping[str, Model], where: str) -> list[str]:
    """The folders that transformers loads: the sources, the last of which others are held against,
    or the base after them. Raises SearchError.
    """
    texts = file.sources if file.is_mix else (*file.sources, file.base_model)
    roots = []
    for text in texts:
        (checkpoint, *others) = models[text].checkpoints
        if others or checkpoint.kind != "full" or not Path(checkpoint.root).is_dir():
            raise SearchError(
                "Activations need whole checkpoints on this machine",
                where=f"{text}, of {where}",
                expected="a folder that transformers loads",
                found=f"{checkpoint.kind}, {checkpoint.root}",
                next_step="leave `prompts:` out: the prior then has parameters alone",
            )
        roots.append(checkpoint.root)
    return roots


_MOST_TOKENS, _MOST_PROMPTS = 256, 64


def main(prompts: str, *folders: str) -> None:
    """Print the differences of the models in all folders from the last."""
    texts = _texts(Path(prompts))
    import torch
    from torch.nn.functional import cosine_similarity

    *states, last = (_states(folder, texts) for folder in folders)
    apart = [1 - cosine_similarity(of_one, last, dim=-1).mean(dim=0) for of_one in states]
    print(json.dumps([float(x) for x in torch.stack(apart).mean(dim=0)]))


def _texts(file: Path) -> list[str]:
    """One prompt per line that is not blank; of JSON Lines the key `text`, or the line's text."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if file.suffix in {".jsonl", ".ndjson"}:
        rows = [json.loads(line) for line in lines]
        lines = [str(x["text"]) if isinstance(x, dict) else str(x) for x in rows]
    if not lines:
        sys.exit(f"{file} has no prompt")
    return lines[:_MOST_PROMPTS]


def _states(folder: str, texts: list[str]) -> Any:
    """The last token's hidden state after each layer, [prompts, layers, hidden], in float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        sys.exit("activations need transformers: pip install 'mergepipe-pipeline[demo]'")
    import torch

    tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **LOCAL)
    rows = []
    with torch.inference_mode():
        for text in texts:
            given = tokenizer(text, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt")
            states = model(input_ids=given["input_ids"], output_hidden_states=True).hidden_states
            rows.append(torch.stack([layer[0, -1].float() for layer in states[1:]]))
    return torch.stack(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
