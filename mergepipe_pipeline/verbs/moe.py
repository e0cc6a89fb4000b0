"""The verb `moe`: a mixture of experts from dense models, as mergekit-moe's YAML asks for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.tools.models import Input, open_input, unchanged_origin
from mergepipe_pipeline.tools.moe import Mixture, parameters_of
from mergepipe_pipeline.tools.moe_config import load_moe_config
from mergepipe_pipeline.tools.result import Made, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse

VERB = "moe"


def moe(
    warehouse: Warehouse,
    path: str | Path,
    out: str | Path | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Made:
    """Write the mixture that a file asks for: a folder `out`, or a snapshot.

    Raises RecipeError with all problems of the file, IncompatibleCheckpointsError for models that
    do not fit together, CheckpointError for a base that transformers cannot run where prompts
    decide the gates.
    """
    place = None if out is None else check_place(out, warehouse.root)
    config = load_moe_config(path)
    folder, progress = Path(path).resolve().parent, progress or Silent()
    with ExitStack() as stack:

        def opened(role: str, text: str) -> Input:
            return stack.enter_context(open_input(warehouse, role, text, progress, folder))

        base = opened("base", config.base_model)
        experts = [opened("expert", e.source_model) for e in config.experts]
        experts += [opened("shared", e.source_model) for e in config.shared_experts]
        mixture = Mixture(config, base, [e.named_as(base) for e in experts], seed)
        draft = stack.enter_context(drafted(warehouse, VERB, place))
        mixture.write(draft, progress)
        origin = unchanged_origin(VERB, parameters_of(config, seed), (base, *experts))
        return draft.finish(origin, {"experts": len(config.experts)})
