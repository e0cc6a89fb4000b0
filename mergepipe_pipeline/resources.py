"""What assets and sensors get from Dagster: the warehouse, and the knobs of the engine.

The only place where Dagster configuration becomes core values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from mergepipe_pipeline.pipeline.leases import lease_run
from mergepipe_pipeline.pipeline.merge import EngineKnobs
from mergepipe_pipeline.warehouse import Warehouse


class MergePipe(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The warehouse at `home`, and how fast and how big a merge may be."""

    home: str
    threads: int | None = None
    memory_mib: int | None = None
    device: str | None = None
    inbox_quiet_s: float = 4.0
    retry_s: float = 30.0
    inbox_retry_s: float = 30.0

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["MergePipe"]:
        """The resource, with a lease that tells while a run has it that its process lives."""
        if context.run is None:
            yield self
            return
        with lease_run(self.warehouse, context.run.run_id):
            yield self

    @property
    def warehouse(self) -> Warehouse:
        """Every path of the warehouse."""
        return Warehouse.at(self.home).ensure()

    @property
    def knobs(self) -> EngineKnobs:
        """Threads, buffer memory and device of the engine."""
        memory_bytes = self.memory_mib and self.memory_mib << 20
        return EngineKnobs(self.threads, None, memory_bytes, self.device)
