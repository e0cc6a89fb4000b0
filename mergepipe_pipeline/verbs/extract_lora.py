"""The verb `extract-lora`: what a fine-tune changed, as a PEFT adapter to its base."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.tools.adapter import Extraction, Extractor, RankChoice, details_of
from mergepipe_pipeline.tools.models import open_input, unchanged_origin
from mergepipe_pipeline.tools.result import Made, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse

VERB = "extract-lora"
#: The rank where neither a rank nor an energy is asked for.
DEFAULT_RANK = 32


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

    `rank` of every module, or as much as catches the share `energy` of its squared norm, at most
    `max_rank`. The result is the folder `out`, or a snapshot. Raises
    IncompatibleCheckpointsError if the two do not fit, CheckpointError, MergePipeError.
    """
    place = None if out is None else check_place(out, warehouse.root)
    wanted = _wanted(rank, energy, max_rank)
    _refuse_patterns(modules)
    asked = Extraction(wanted, tuple(modules), tuple(save), dtype, seed)
    progress = progress or Silent()
    with ExitStack() as stack:
        one = stack.enter_context(open_input(warehouse, "base", base, progress))
        other = stack.enter_context(open_input(warehouse, "expert", model, progress))
        extractor = Extractor(one, other.named_as(one), asked)
        draft = stack.enter_context(drafted(warehouse, VERB, place))
        rows = extractor.write(draft, progress)
        parameters = {**asdict(wanted), "modules": list(modules), "save": list(save)}
        parameters |= {"dtype": dtype, "seed": seed}
        return draft.finish(unchanged_origin(VERB, parameters, (one, other)), details_of(rows))


def _wanted(rank: int | None, energy: float | None, max_rank: int | None) -> RankChoice:
    if rank is not None and energy is not None:
        raise MergePipeError(
            "A rank and an energy are asked for, and each decides the other",
            where=f"--rank {rank} --energy {energy}",
            expected="one of them",
            found="both",
            next_step="leave one out; --max-rank bounds what --energy may take",
        )
    if energy is None and rank is None:
        rank = DEFAULT_RANK
    return RankChoice(rank, energy, max_rank)


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
