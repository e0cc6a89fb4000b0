"""What the tensors of checkpoints hold: digests, and segments that reads are compared with."""

from pathlib import Path

import mergepipe_pipeline.remote  # noqa: F401  roots may be addresses, which it opens
from mergepipe_pipeline.domain.checkpoint import AWAY
from mergepipe_pipeline.storage.source import SCHEMES, CheckpointSource, Reading


def _away_files(folder: str, reading: Reading) -> CheckpointSource:
    from mergepipe_pipeline.contents.away_files import AwayFiles  # the codec, compiled

    return AwayFiles(Path(folder), reading)


#: Storage cannot name what decodes packs, since that reads bases through storage.
SCHEMES[AWAY.removesuffix("://")] = _away_files
