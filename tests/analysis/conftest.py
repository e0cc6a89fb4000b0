"""Analysis in short windows needs short segments: a window begins with one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from mergepipe_pipeline.domain import segments

#: Elements of a segment in these tests.
SEGMENT_ELEMS = 4096


@pytest.fixture(autouse=True, scope="package")
def short_segments() -> Iterator[None]:
    """Segments that every window of these tests is made of."""
    with mock.patch.object(segments, "COARSE_ELEMS", SEGMENT_ELEMS):
        yield
