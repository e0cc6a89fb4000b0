"""The folders of the catalog and the version of what is in each.

A change of what files hold or of how they are named makes a new version. What is in the folder of
another version is not known: it is found again from headers and weights where it is needed.
`docs/formats.md` describes all formats of a warehouse.
"""

from __future__ import annotations

#: Tensor entries of a checkpoint, by its id.
CHECKPOINTS = "checkpoints/v3"
#: Digests of a checkpoint's tensors and of their segments, by its id.
CONTENTS = "contents/v1"
#: How an expert differs from a base, and facts of whole tensors: a folder by the ids of both.
FACTS = "facts/v2"
#: Digests of the files beside a checkpoint's weights, by its id.
SIDE_FILES = "side_files/v2"
#: At which places files are known to be what the digests say, a folder by a checkpoint's id.
PLACES = "places/v1"
