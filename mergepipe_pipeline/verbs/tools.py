"""The verbs that make results without a recipe: `convert`, `extract_lora`, `moe`,
`transplant_tokenizer`.

Each gives the folder `out`, or a snapshot of the warehouse where there is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.tools.adapter import Extraction, Extractor, details_of
from mergepipe_pipeline.tools.convert import convert_pickles
from mergepipe_pipeline.tools.gguf_convert import convert_gguf, gguf_file
from mergepipe_pipeline.tools.models import making
from mergepipe_pipeline.tools.moe import Mixture, parameters_of
from mergepipe_pipeline.tools.moe_gates import load_moe_config
from mergepipe_pipeline.tools.result import Made
from mergepipe_pipeline.tools.transplant import RowOptions, Transplant
from mergepipe_pipeline.warehouse import Warehouse

#: The rank where neither a rank nor an energy is asked for.
DEFAULT_RANK = 32


def convert(
    warehouse: Warehouse,
    path: str,
    out: str | Path | None = None,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
) -> Made:
    """Write pickles, or a GGUF file, as safetensors with config and tokenizer beside.

    A result that is there is left as it is. `dtype`, a code of safetensors, is for GGUF: the type
    of every tensor (none: as stored, and bfloat16 for codes). Raises CheckpointError for what is no
    local path, holds safetensors already, or is not weights alone; CheckpointChangedError for a
    file that changes meanwhile.
    """
    # The name of a link: what one in the hub's cache leads to has no suffix.
    named = Path(os.path.abspath(Path(path).expanduser()))
    if (file := gguf_file(named)) is not None:
        return convert_gguf(warehouse, named, file, out, dtype, progress or Silent())
    given = named.resolve()
    if dtype is not None:
        raise MergePipeError(
            "A type is asked for, and pickled tensors keep theirs",
            where=f"--dtype {dtype}",
            expected="a GGUF file",
            found=str(given),
            next_step="leave it out; a merge's `dtype` casts",
        )
    return convert_pickles(warehouse, given, out, progress or Silent())


def extract_lora(
    warehouse: Warehouse,
    model: str,
    base: str,
    out: str | Path | None = None,
    *,
    rank: int | None = None,
    energy: float | None = None,
    max_rank: int | None = None,
    modules: Sequence[str] = (),
    save: Sequence[str] = (),
    dtype: str = "F32",
    seed: int = 0,
    progress: Progress | None = None,
) -> Made:
    """Write the difference of `model` to `base` as low-rank factors, and say what they lose.

    Raises IncompatibleCheckpointsError if the two do not fit, CheckpointError, MergePipeError.

    Args:
        rank: of every module (32 where no energy is given).
        energy: instead, as much rank as catches this share of a change's squared norm.
        max_rank: the most that `energy` may take.
        modules: regular expressions of the modules to adapt (none: all linear ones that changed).
        save: ends of the names of modules that are kept whole.
        dtype: the type of the factors.
        seed: of the random sketches.
    """
    rank = _rank(rank, energy)
    _refuse_patterns(modules)
    asked = Extraction(rank, energy, max_rank, tuple(modules), tuple(save), dtype, seed)
    parameters = {**asdict(asked), "modules": list(modules), "save": list(save)}
    with making(warehouse, "extract-lora", out, progress) as made:
        of_base, tuned = made.open("base", base), made.open("expert", model)
        extractor = Extractor(of_base, tuned.named_as(of_base), asked)
        return made.finish(parameters, lambda *to: details_of(extractor.write(*to)))


def moe(
    warehouse: Warehouse,
    path: str | Path,
    out: str | Path | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Made:
    """Write the mixture of experts that mergekit-moe's YAML asks for.

    Raises RecipeError with all problems of the file, IncompatibleCheckpointsError for models that
    do not fit together, CheckpointError for a base that transformers cannot run where prompts
    decide the gates.
    """
    config = load_moe_config(path)
    with making(warehouse, "moe", out, progress, Path(path).resolve().parent) as made:
        base = made.open("base", config.base_model)
        experts = [made.open("expert", e.source_model) for e in config.experts]
        experts += [made.open("shared", e.source_model) for e in config.shared_experts]
        mixture = Mixture(config, base, [e.named_as(base) for e in experts], seed)
        return made.finish(parameters_of(config, seed), mixture.write)


def transplant_tokenizer(
    warehouse: Warehouse,
    model: str,
    donor: str,
    out: str | Path | None = None,
    *,
    method: str = "omp",
    k: int = 64,
    bytes_: str = "no",
    prefixes: str = "no",
    progress: Progress | None = None,
) -> Made:
    """Write `model` with a row for every token of `donor`, whose tokenizer it gets.

    Raises IncompatibleCheckpointsError for vocabularies that share nothing, CheckpointError.

    Args:
        method: how rows of new tokens are made, "omp" or "nearest".
        k: how many shared tokens make a new one.
        bytes_: where fallback bytes stand in, as in `RowOptions`.
        prefixes: where prefixes do.
    """
    options = RowOptions(method, k, bytes_, prefixes)
    with making(warehouse, "transplant-tokenizer", out, progress) as made:
        recipient, giver = (
            made.open(role, text, copies=True) for role, text in (("base", model), ("donor", donor))
        )
        return made.finish(asdict(options), Transplant(recipient, giver, options).write)


def _rank(rank: int | None, energy: float | None) -> int | None:
    if rank is not None and energy is not None:
        raise MergePipeError(
            "A rank and an energy are asked for, and each decides the other",
            where=f"--rank {rank} --energy {energy}",
            expected="one of them",
            found="both",
            next_step="leave one out; --max-rank bounds what --energy may take",
        )
    return DEFAULT_RANK if energy is None and rank is None else rank


def _refuse_patterns(modules: Sequence[str]) -> None:
    for pattern in modules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise MergePipeError(
                "A pattern of modules is no regular expression",
                where=f"--modules {pattern}",
                expected="one that Python reads, as 'self_attn' or 'q_proj$'",
                found=str(error),
                next_step="correct it",
            ) from error
