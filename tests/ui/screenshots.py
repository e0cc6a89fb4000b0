"""Takes the pictures of the documentation: `python -m tests.ui.screenshots docs/pictures`.

Starts `dagster dev` over a small deployment, merges in it, and opens the main pages in Chromium.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.dagster_layer.daemon import Daemon
from tests.ui.chromium import Page, browser
from tests.ui.pages import VIEWS, View, running, show, warehouse

#: Bytes that a picture of the documentation may take.
MOST_NBYTES = 150_000
#: Seconds for what moves on a page to come to rest, and for what it fetches after its words.
REST_S = 8


def small(png: bytes) -> bytes:
    """A picture in 256 colours: a third of the bytes, and no fewer than the UI shows."""
    out = BytesIO()
    picture = Image.open(BytesIO(png)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


def take(views: Mapping[str, View], daemon: Daemon, page: Page, folder: Path) -> None:
    """Write one PNG per view, by name. Raises AssertionError for a page without its words."""
    for name, view in views.items():
        show(page, daemon, view)
        time.sleep(REST_S)
        png = small(page.picture())
        assert len(png) <= MOST_NBYTES, (name, len(png))
        (folder / f"{name}.png").write_bytes(png)


def main(folder: Path) -> None:
    """Write one PNG per view. Raises AssertionError for a page without its words."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as scratch,
        running(warehouse(Path(scratch))) as daemon,
        browser(Path(scratch)) as page,
    ):
        take(VIEWS, daemon, page, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
