"""A model's weights beside a second form of the same: Mistral's, in its own names.

The names differ, and rows of queries and keys lie in another order, of which the first is the same.
So the beginning of each tensor's first row tells whether both hold one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.source import CheckpointSource

#: Mistral's own names of files: a second form of a model whose other files are transformers'.
NATIVE = "consolidated"
_SAMPLE_NBYTES = 256


def refuse_another_model(
    source: CheckpointSource,
    tensors: Sequence[TensorEntry],
    second: Sequence[TensorEntry],
    uri: str,
) -> None:
    """Raise CheckpointError unless each tensor of the second form is one of the first, too.

    At addresses shapes alone are compared: a sample of each tensor costs a request.
    """
    if not second:
        return

    def place(t: TensorEntry) -> tuple[str, int, int]:
        n_rows = max(1, prod(t.shape[:-1]))
        return t.file, t.start_byte, min(_SAMPLE_NBYTES, t.nbytes // n_rows)

    def key(t: TensorEntry) -> tuple[str, object]:
        return t.dtype, t.shape if source.is_far else source.read_range(*place(t))

    for t in () if source.is_far else (*tensors, *second):
        source.will_need(*place(t))
    own = {key(t) for t in tensors}
    other = next((t for t in second if key(t) not in own), None)
    if other is None:
        return
    raise CheckpointError(
        "A folder holds two models",
        where=f"{uri}, {other.file}, tensor {other.name}",
        expected=f"the weights of {tensors[0].file} under Mistral's names",
        found="others",
        next_step=("download it and " if "://" in uri else "")
        + f"remove {NATIVE}*.safetensors, or the other weights: whichever is not the model that "
        "you mean",
    )
