"""The verb `transplant-tokenizer`: a model with the tokenizer of another, without training."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.tools.models import open_input, unchanged_origin
from mergepipe_pipeline.tools.result import Made, check_place, drafted
from mergepipe_pipeline.tools.transplant import Transplant, Wish
from mergepipe_pipeline.warehouse import Warehouse

VERB = "transplant-tokenizer"


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

    `method` is "omp" or "nearest", `k` how many shared tokens make a new one; `bytes_` and
    `prefixes` as in `Wish`. The result is the folder `out`, or a snapshot. Raises
    IncompatibleCheckpointsError for vocabularies that share nothing, CheckpointError.
    """
    place = None if out is None else check_place(out, warehouse.root)
    wish, progress = Wish(method, k, bytes_, prefixes), progress or Silent()
    with ExitStack() as stack:
        one = stack.enter_context(open_input(warehouse, "base", model, progress, copies=True))
        other = stack.enter_context(open_input(warehouse, "donor", donor, progress, copies=True))
        transplant = Transplant(one, other, wish)
        draft = stack.enter_context(drafted(warehouse, VERB, place))
        details = transplant.write(draft, progress)
        return draft.finish(unchanged_origin(VERB, asdict(wish), (one, other)), details)
