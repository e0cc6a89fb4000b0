"""Which pools runs need, known to Dagster before the first run asks for one."""

import dagster as dg

#: The pools of our assets and jobs.
POOLS = ("disk_read", "disk_write")


def make_pools_known(instance: dg.DagsterInstance) -> None:
    """Give each pool the default limit of `dagster.yaml` if it has none yet.

    Dagster does so when a run that needs the pool waits in the queue, but only after it has listed
    the pools that it obeys in that look: a burst that is the first of an instance would start as
    many runs as there are places.
    """
    storage = instance.event_log_storage
    if instance.global_op_concurrency_default_limit is None:
        return
    known = {limit.name for limit in storage.get_pool_limits()}
    for pool in POOLS:
        if pool not in known:
            storage.initialize_concurrency_limit_to_default(pool)


def limit_pool(instance: dg.DagsterInstance, pool: str, most: int) -> None:
    """Let at most so many runs take a place of a pool at once."""
    storage = instance.event_log_storage
    if (pool, most) not in {(limit.name, limit.limit) for limit in storage.get_pool_limits()}:
        storage.set_concurrency_slots(pool, most)
