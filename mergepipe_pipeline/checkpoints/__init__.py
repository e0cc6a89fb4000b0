"""Checkpoints by headers and adapters by configs; what they store, read and verified.

No statistics and no merge.
"""

from mergepipe_pipeline.checkpoints.dcp import METADATA
from mergepipe_pipeline.checkpoints.training_run import SCHEME, as_run, run_folder
from mergepipe_pipeline.storage.source import FORMS, SCHEMES

FORMS[METADATA] = as_run
SCHEMES[SCHEME] = run_folder
