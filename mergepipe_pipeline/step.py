"""Merges a shard in a process or container of its own: `python -m mergepipe_pipeline.step`.

Dagster Pipes starts it, and carries what it is told and tells. It loads no Dagster.
"""

import logging
import os
import sys
from pathlib import Path

from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, PipesContext, open_dagster_pipes

from mergepipe_pipeline.cli.ending import stop_by_signals
from mergepipe_pipeline.deploy.messages import error_message, layer_message, task_of
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.verbs.deploy import merge_shard
from mergepipe_pipeline.warehouse import Warehouse


def main() -> None:
    """Merge the shard that Dagster Pipes tells of; say how each layer ended, and any error."""
    if DAGSTER_PIPES_CONTEXT_ENV_VAR not in os.environ:
        sys.exit("Dagster Pipes starts this: say `pipes=` to build_recipe_defs.")
    stop_by_signals()
    with open_dagster_pipes() as pipes:
        logging.getLogger("mergepipe").addHandler(pipes.log.handlers[0])
        try:
            _merge(pipes)
        except Exception as error:
            pipes.report_custom_message(error_message(error))
            raise


def _merge(pipes: PipesContext) -> None:
    home, task = Path(pipes.get_extra("home")), task_of(pipes.get_extra("task"))
    if not Warehouse.at(home).is_there:
        raise NotFoundError(
            "The warehouse is not where a step of its own runs",
            where=str(home),
            expected="the folder that the run has there",
            next_step="mount it at this path, and checkpoints at theirs, by `pipes_args`",
        )
    count = len(task.shard.layers)
    for number, done in enumerate(merge_shard(Warehouse.at(home), task), 1):
        pipes.report_custom_message(layer_message(done))
        how = "reused" if done.reused else f"merged in {done.cost.layers_s:.1f} s"
        pipes.log.info(f"{done.name}, {number} of {count}: {how}")


if __name__ == "__main__":
    main()
