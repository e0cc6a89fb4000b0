"""The folders of the catalog and the version of what is in each.

A change of what files hold or of how they are named makes a new version. What is in the folder of
another version is not known: it is found again from headers and weights where it is needed. Lower
versions, and `checkpoints` without one, hold files without a seal. `tests/golden/FORMATS.md` lists
all formats of a warehouse and what to do when one changes.
"""

from __future__ import annotations

#: Tensor entries of a checkpoint, by its id.
CHECKPOINTS = "checkpoints/v2"
#: Digests of a checkpoint's tensors, by its id.
DIGESTS = "digests/v3"
#: How an expert differs from a base: tensors, blocks and magnitudes, by the ids of both.
BLOCK_STATS = "block_stats/v7"
#: Facts of whole tensors, by base, owner and key.
TENSOR_FACTS = "tensor_facts/v3"
#: Digests of the files beside a checkpoint's weights, by its id.
SIDE_FILES = "side_files/v1"
#: Digests of segments of a checkpoint's tensors, by its id.
SEGMENTS = "segments/v2"
#: At which places files are known to be what the digests say, a folder by a checkpoint's id.
PLACES = "places/v1"
