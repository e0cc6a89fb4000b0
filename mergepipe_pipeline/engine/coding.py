"""What a layer's file has of its tensors, from the windows that the engine merges in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.checkpoints.fp8_blocks import BlockCoder
from mergepipe_pipeline.domain.plan import TensorTask


class Coding:
    """Codes those tensors of a layer whose tasks say so; others pass as they are."""

    def __init__(self, tasks: Iterable[TensorTask]) -> None:
        self._shapes = {t.name: t.shape for t in tasks if t.is_coded}
        self._coder: BlockCoder | None = None
        #: Σ (w − what its code means)² of the tensors that are whole.
        self.sq_error = 0.0

    @property
    def names(self) -> frozenset[str]:
        """The tensors that are coded."""
        return frozenset(self._shapes)

    def pieces(self, tensor: str, out: U8Array, *, is_last: bool) -> Iterator[U8Array]:
        """The bytes to write once a window of a tensor is done; after its last one, the scales."""
        if tensor not in self._shapes:
            yield out
            return
        coder = self._coder = self._coder or BlockCoder(self._shapes[tensor])
        yield from coder.codes(out.view(np.float32))
        if is_last:
            yield coder.scales
            self.sq_error += coder.sq_error
            self._coder = None
