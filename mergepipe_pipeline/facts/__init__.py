"""What is known of checkpoints and pairs of them, from the catalog or from one pass over what it
lacks: digests and segments that reads are compared with, statistics, facts of whole tensors.
"""

from pathlib import Path

import mergepipe_pipeline.remote  # noqa: F401  roots may be addresses, which it opens
from mergepipe_pipeline.domain.checkpoint import PACKED
from mergepipe_pipeline.storage.source import SCHEMES, CheckpointSource, Reading


def _pack_files(folder: str, reading: Reading) -> CheckpointSource:
    from mergepipe_pipeline.facts.pack_source import pack_files  # the codec, compiled

    return pack_files(Path(folder), reading)


#: Storage cannot name what decodes packs, since that reads bases through storage.
SCHEMES[PACKED.removesuffix("://")] = _pack_files
