"""Watches the inbox: an expert that landed whole is indexed, a half-copied one waits."""

import json

import dagster as dg

from assets.experts import experts
from mergepipe_pipeline.pipeline.inbox import scan_inbox
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.text import in_one_line
from sensors import interval_s

index_job = dg.define_asset_job("index_experts", selection="expert_index")


@dg.sensor(
    job=index_job,
    minimum_interval_seconds=interval_s(15),
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def inbox_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
    """Requests one `expert_index` run per checkpoint in the inbox that is new or has changed.

    The cursor maps each name to the token (names, sizes, mtimes) that was last requested and to
    how often something was, so that a change and its undoing are two requests. Folders
    whose files are missing, short, or younger than the quiet period wait.
    """
    seen: dict[str, list[str | int]] = json.loads(context.cursor or "{}")
    landed = scan_inbox(mergepipe.warehouse, mergepipe.inbox_quiet_s)
    ready = [x for x in landed if x.waiting is None and seen.get(x.name, [""])[0] != x.token]
    known = set(context.instance.get_dynamic_partitions(experts.name or ""))
    new = [x.name for x in ready if x.name not in known]
    waiting = [in_one_line(f"{x.name}: {x.waiting}") for x in landed if x.waiting]
    for x in ready:
        seen[x.name] = [x.token, int(seen.get(x.name, ["", 0])[1]) + 1]
    return dg.SensorResult(
        run_requests=[
            dg.RunRequest(
                run_key=f"{x.name}:{seen[x.name][1]}:{x.token}",
                partition_key=x.name,
                tags={"mergepipe/expert": x.name},
            )
            for x in ready
        ],
        dynamic_partitions_requests=[experts.build_add_request(new)] if new else [],
        cursor=json.dumps(seen, sort_keys=True),
        skip_reason=None
        if ready
        else dg.SkipReason(
            "nothing new in the inbox" + ("; waiting for " + "; ".join(waiting) if waiting else "")
        ),
    )
