"""How far the sources' activations are apart over a file of prompts, in a child process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.errors import EvaluationError, SearchError
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
    command = [sys.executable, "-m", "mergepipe_pipeline.search.activation", str(prompts), *folders]
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
    texts = file.sources if file.is_mix else (*file.sources, file.base)
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
