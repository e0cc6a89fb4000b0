"""The asset family of one search: prior → evaluations → front → refs.

An evaluation is a partition, and a run evaluates one; `search_sensor` starts as many at once as the
search has workers. The ledger in the warehouse remembers everything, so that a run that is killed
loses nothing but its own merge.
"""

from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.experts import experts_used
from mergepipe_pipeline.assets.labels import asset_of
from mergepipe_pipeline.assets.metadata import metrics_metadata, png, short, table
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.deploy.instance import own_name
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.text import in_one_line, size
from mergepipe_pipeline.verbs.search import (
    Front,
    Prior,
    Result,
    Search,
    SearchCost,
    StandingSearch,
    begin,
    evaluate_candidate,
    front_picture,
    publish_front,
    results_token,
    search_of,
)
from mergepipe_pipeline.verbs.search import front as find_front

#: The tag of a run that says for which search it works.
SEARCH_TAG = "mergepipe/search"


def candidates(standing: StandingSearch, identity: str) -> dg.DynamicPartitionsDefinition:
    """The candidates that a search of the warehouse of this identity has proposed, by number."""
    name = own_name(f"{standing.name} candidates", identity)
    return dg.DynamicPartitionsDefinition(name=name)


def pool(standing: StandingSearch, identity: str) -> str:
    """The pool of which each evaluation of a search takes a place."""
    return own_name(f"search_{standing.identifier}", identity)


def build_search_assets(
    standing: StandingSearch, identity: str, place: Place = ALONE
) -> list[dg.AssetsDefinition]:
    """All assets of one search of the warehouse of this identity."""
    return [
        _prior(standing, place),
        _evaluations(standing, identity, place),
        _front(standing, place),
        _refs(standing, place),
    ]


def build_search_jobs(standing: StandingSearch, place: Place = ALONE) -> dict[str, Any]:
    """The jobs of one search: `begin` it, `evaluate` a candidate, `show` and publish its front."""
    steps = {
        "begin": (["prior"], "Begins {0}: its prior, and its first candidates."),
        "evaluate": (["evaluations", "front"], "Evaluates one candidate of {0}, draws the front."),
        "show": (["front", "refs"], "Draws the front of {0}; publishes it when all is done."),
    }
    return {
        step: dg.define_asset_job(
            place.name(f"{step}_{standing.identifier}"),
            selection=dg.AssetSelection.assets(
                *(place.key(standing.name, asset) for asset in chosen)
            ),
            description=text.format(standing.name),
            tags={SEARCH_TAG: standing.name, **place.tags},
        )
        for step, (chosen, text) in steps.items()
    }


def _prior(standing: StandingSearch, place: Place) -> dg.AssetsDefinition:
    @asset_of(standing, "python", "json", place=place, after=experts_used(standing, place))
    def prior(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Says how much each layer is expected to matter, and what the search costs at most.

        From the catalog's statistics. Then the first candidates are proposed.
        """
        cost, of_layers, proposed = begin(mergepipe.warehouse, standing)
        return dg.MaterializeResult(metadata=_prior_metadata(cost, of_layers, proposed))

    return prior


def _evaluations(standing: StandingSearch, identity: str, place: Place) -> dg.AssetsDefinition:
    @asset_of(
        standing,
        "python",
        "safetensors",
        place=place,
        after=["prior"],
        pool=pool(standing, identity),
        partitions=candidates(standing, identity),
    )
    def evaluations(
        context: dg.AssetExecutionContext, mergepipe: MergePipe, engine: Engine
    ) -> dg.MaterializeResult[None]:
        """Merges one candidate through the action cache, measures it, and proposes the next one.

        A candidate that cannot be merged or measured has a result, too: a failure.
        """
        number = int(context.partition_key)
        done, state = evaluate_candidate(mergepipe.warehouse, standing, number, engine.options)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(done.snapshot_id or done.ended),
            metadata={**_result_metadata(done), "search": state.summary},
        )

    return evaluations


def _front(standing: StandingSearch, place: Place) -> dg.AssetsDefinition:
    @asset_of(standing, "python", place=place, after=["evaluations"])
    def front(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Draws what no other candidate beats in everything, and how that has grown.

        The hypervolume is what the front covers above the worst values.
        """
        results, search = _results(mergepipe, standing)
        shown = find_front(mergepipe.warehouse, search)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(results),
            metadata={"front": _picture(shown), **_front_metadata(shown)},
        )

    return front


def _refs(standing: StandingSearch, place: Place) -> dg.AssetsDefinition:
    @asset_of(standing, "json", place=place, after=["front"])
    def refs(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Publishes what lies on the front of a search that has ended, each under a ref.

        The picture names them.
        """
        results, search = _results(mergepipe, standing)
        made = publish_front(mergepipe.warehouse, search)
        rows = [(ref.name, ref.number, ref.snapshot_id[:16]) for ref in made]
        return dg.MaterializeResult(
            data_version=dg.DataVersion(results),
            metadata={
                "refs": table(("ref", "version", "snapshot"), rows),
                "front": _picture(find_front(mergepipe.warehouse, search)),
            },
        )

    return refs


def _results(mergepipe: MergePipe, standing: StandingSearch) -> tuple[str, Search]:
    """The token of the results so far, taken first: what comes meanwhile is shown later; and the
    search.
    """
    token = results_token(mergepipe.warehouse, standing)
    return token, search_of(mergepipe.warehouse, standing.name)


def _prior_metadata(cost: SearchCost, prior: Prior, proposed: list[int]) -> dict[str, Any]:
    rows = [
        (label, short(score), short(length))
        for label, score, length in zip(
            prior.labels, prior.scores, prior.length_scales, strict=True
        )
    ]
    return {
        "cost at most": cost.summary,
        "coordinates": table(("weight of", "score", "length-scale"), rows),
        "candidates proposed": ", ".join(map(str, proposed)) or "none",
    }


def _result_metadata(done: Result) -> dict[str, Any]:
    merge = done.merge
    return {
        **metrics_metadata(done.metrics),
        **({"failure": in_one_line(done.failure)} if done.failure else {}),
        "snapshot id": done.snapshot_id or "none",
        **(
            {
                "layers merged": merge.layers_merged,
                "layers reused": merge.layers_reused,
                "read": f"{size(merge.nbytes_read)} of {size(merge.scratch_nbytes)} from scratch",
                "seconds to merge": merge.seconds,
            }
            if merge
            else {}
        ),
        "seconds to evaluate": done.evaluation_s,
    }


def _picture(shown: Front) -> dg.MarkdownMetadataValue:
    return png(front_picture(shown), "front and hypervolume")


def _front_metadata(front: Front) -> dict[str, Any]:
    names = [o.metric for o in front.objectives]
    rows = [
        (t.number, t.ref or "-", *(f"{t.metrics[name]:.4g}" for name in names)) for t in front.best
    ]
    failures = sum(bool(t.failure) for t in front.trials)
    return {
        "hypervolume": short(front.hypervolume),
        "evaluations": len(front.trials),
        **({"failures": failures} if failures else {}),
        "on the front": len(front.best),
        **({"warnings": "; ".join(front.warnings)} if front.warnings else {}),
        "candidates": table(("candidate", "ref", *names), rows),
    }
