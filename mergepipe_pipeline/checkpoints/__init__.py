"""Checkpoints by headers and adapters by configs; from stored bytes to float32 rows.

Only this package turns a full checkpoint, a delta, an adapter or a re-indexed embedding into δ or
T. Where an element is not read, the expert equals the base. No statistics and no merge.
"""

from mergepipe_pipeline.checkpoints.dcp import METADATA
from mergepipe_pipeline.checkpoints.training_run import SCHEME, as_run, run_folder
from mergepipe_pipeline.storage.source import FORMS, SCHEMES

FORMS[METADATA] = as_run
SCHEMES[SCHEME] = run_folder
