"""The asset family of landed checkpoints: one asset, one dynamic partition per expert."""

import time

import dagster as dg

from assets.metadata import MIB
from mergepipe_pipeline.pipeline.deploy import index_expert
from mergepipe_pipeline.resources import MergePipe

experts = dg.DynamicPartitionsDefinition(name="experts")


@dg.asset(
    partitions_def=experts,
    group_name="catalog",
    kinds={"python", "parquet"},
    retry_policy=dg.RetryPolicy(max_retries=2, delay=5),
    pool="disk_read",
)
def expert_index(
    context: dg.AssetExecutionContext, mergepipe: MergePipe
) -> dg.MaterializeResult[None]:
    """Headers, content digests and block statistics of one checkpoint.

    The data version is the digest of the checkpoint's contents: touching files without changing a
    byte changes nothing downstream.
    """
    started = time.monotonic()
    done = index_expert(mergepipe.warehouse, context.partition_key)
    checkpoint = done.registration.checkpoint
    return dg.MaterializeResult(
        data_version=dg.DataVersion(done.content_sha256),
        metadata={
            "kind": checkpoint.kind,
            "version": done.registration.version,
            "tensors": len(checkpoint.tensors),
            "mib": round(checkpoint.nbytes / MIB, 3),
            "content": done.content_sha256,
            "layers": done.layers,
            "layers_changed": len(done.layers_changed),
            "changed": ", ".join(done.layers_changed) or "none",
            "bases": ", ".join(done.bases) or "none",
            "path": dg.MetadataValue.path(checkpoint.root),
            "seconds": round(time.monotonic() - started, 3),
        },
    )
