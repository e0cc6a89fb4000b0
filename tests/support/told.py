"""What verbs say while they work."""

from __future__ import annotations

from mergepipe_pipeline.progress import Silent


class Told(Silent):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, *messages: str) -> None:
        self.warnings += messages
