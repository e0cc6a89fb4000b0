"""A whole search over a tiny family: by the command line, by its verbs, and where things fail."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import (
    BusyError,
    CheckpointChangedError,
    CorruptionError,
    EvaluationError,
    RecipeError,
    SearchError,
)
from mergepipe_pipeline.search.candidate import Candidates, Merged, evaluate
from mergepipe_pipeline.search.ledger import Ledger, searches
from mergepipe_pipeline.search.loop import propose
from mergepipe_pipeline.search.prior import search_prior
from mergepipe_pipeline.search.start import start_search
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.search import (
    Bound,
    front,
    pick,
    publish_front,
    read_search,
    run_search,
    search_cost,
    search_of,
    state_of,
)
from mergepipe_pipeline.verbs.verify import verify_all
from tests.search.world import EVALUATOR, World
from tests.support.family import layout, write_model


def call(world: World, *words: object) -> Result:
    return CliRunner().invoke(main, ["--home", str(world.home.root), *map(str, words)])


def _snapshots(world: World) -> set[str]:
    return {s.snapshot_id for s in list_snapshots(world.home.snapshots)}


def test_a_search_publishes_its_front_and_costs_no_more_than_was_stated(world: World) -> None:
    path, home = world.write(), world.home
    dry = call(world, "--json", "search", path, "--dry-run")
    assert searches(home) == []
    cost = json.loads(dry.stdout)["cost"]
    done = call(world, "--json", "search", path)
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    told = [json.loads(line) for line in done.stderr.splitlines() if '"evaluations"' in line]
    assert [line["done"] for line in told] == [1, 2, 3, 4, 5, 6]
    trials = shown["trials"]
    assert [t["number"] for t in trials] == [1, 2, 3, 4, 5, 6]
    for t in trials:
        first, _, last, _ = t["point"]
        assert t["metrics"]["good"] == pytest.approx((first + last) / 2, abs=1e-6)
        assert t["values"] == pytest.approx([t["metrics"]["good"], 1 - t["metrics"]["cost"] / 2])
    spent = [t["merge"] for t in trials]
    assert spent[0]["layers_merged"] == cost["layers"] == 5
    # The embeddings are not searched: every other candidate takes them over.
    assert max(m["layers_merged"] for m in spent[1:]) == cost["layers_changed"] == 4
    assert sum(m["nbytes_read"] for m in spent) <= cost["nbytes"] < cost["scratch_nbytes"]
    assert all(m["nbytes_read"] < m["scratch_nbytes"] for m in spent[1:])
    _front_is_published(world, shown)
    again = call(world, "--json", "search", path)
    assert json.loads(again.stdout)["trials"] == trials
    assert len(world.log("begun")) == 6


def _front_is_published(world: World, shown: dict) -> None:  # type: ignore[type-arg]
    home, by_number = world.home, {t["number"]: t for t in shown["trials"]}
    best = [by_number[n] for n in shown["front"]]
    assert [t["ref"] for t in best] == [f"mix.{k}" for k in range(1, len(best) + 1)]
    goods = [t["metrics"]["good"] for t in best]
    assert goods == sorted(goods, reverse=True)
    for t in shown["trials"]:
        dominated = any(np.all(np.array(b["values"]) >= t["values"]) for b in best if b is not t)
        assert dominated != (t in best)
    assert home.refs.current("mix.1").snapshot_id == best[0]["snapshot_id"]
    collect(home, older_than_s=0)
    assert _snapshots(world) == {t["snapshot_id"] for t in best}
    assert len(best) < len(by_number)
    picture = world.folder / "front.png"
    shown_again = call(world, "--json", "front", world.folder / "mix.yml", "--picture", picture)
    assert json.loads(shown_again.stdout)["front"] == shown["front"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for command in (("explain", "mix.1"), ("verify", "mix.1"), ("replay", "mix.1")):
        found = call(world, *command)
        assert found.exit_code == 0, found.output


def test_half_of_the_first_candidates_have_one_weight_for_all_layers(world: World) -> None:
    search = start_search(world.home, world.write("evaluations: 6\ninitial: 6\n"))
    run_search(world.home, search)
    points = [t.point for t in front(world.home, search).trials]
    assert points[:3] == [(x,) * 4 for x in (0.0, 0.5, 1.0)]
    assert all(len(set(point)) == 4 for point in points[3:])


def test_of_candidates_with_equal_values_the_first_is_on_the_front(world: World) -> None:
    path = world.write("evaluations: 3\ninitial: 3\n")
    path.write_text(path.read_text().replace("good:", "half:").replace("cost:", "third:"))
    evaluator = world.folder / "eval.py"
    evaluator.write_text(evaluator.read_text().replace('"half": 0.5', '"half": 0.5, "third": 1'))
    run_search(world.home, search := start_search(world.home, path))
    assert len(front(world.home, search).trials) == 3
    assert front(world.home, search).numbers == (1,)


def test_what_is_worse_than_the_worst_anchor_is_still_told_apart_by_front_and_pick(
    world: World,
) -> None:
    path = world.write("evaluations: 4\ninitial: 4\n")
    text = path.read_text().replace("good:", "half:")
    worse = "{direction: max, anchors: [5, 6]}"
    path.write_text(text.replace("{direction: min, anchors: [2, 0]}", worse))
    run_search(world.home, search := start_search(world.home, path))
    found = front(world.home, search)
    assert {t.values for t in found.trials} == {(0.5, -0.2)}
    cheapest = max(found.trials, key=lambda t: t.metrics["cost"])
    assert cheapest.number != 1
    assert found.numbers == (cheapest.number,)
    assert pick(world.home, search, [Bound("half", True, 0.5)]).snapshot_id == cheapest.snapshot_id


def test_a_failed_evaluation_is_a_result_and_not_the_end(world: World) -> None:
    world.flag("picky")
    search = start_search(world.home, world.write("evaluations: 4\ninitial: 4\n"))
    state = run_search(world.home, search)
    trials = front(world.home, search).trials
    failed = [t for t in trials if t.failure]
    assert state.done == 4
    assert 0 < state.failed == len(failed) < 4
    assert all("this one is too hard" in t.failure and t.values == (-0.2, -0.2) for t in failed)
    assert not any(t.is_on_front for t in failed)
    assert [t.failure == "" for t in trials] == [t.point[0] <= 0.5 for t in trials]


def test_a_search_whose_evaluations_all_fail_ends_and_goes_on_when_it_is_mended(
    world: World,
) -> None:
    path = world.write("evaluations: 6\ninitial: 6\nfailures: 3\n")
    path.write_text(path.read_text().replace("good:", "best:"))
    done = call(world, "search", path)
    assert done.exit_code == SearchError.exit_code
    assert "the last 3 evaluations failed" in done.stderr
    assert "does not print the metric 'best'; it prints good, cost, half" in done.stderr
    search = search_of(world.home, "mix")
    assert (state_of(world.home, search).done, len(world.log("ended"))) == (3, 3)
    assert call(world, "search", path).exit_code == SearchError.exit_code
    for result in (world.home.search_ledgers / "mix" / "results").iterdir():
        result.unlink()
    assert list(state_of(world.home, search).waiting) == [1, 2, 3]


def test_a_search_of_which_nothing_could_be_measured_ends_with_an_error(world: World) -> None:
    path = world.write("evaluations: 2\ninitial: 2\n")
    (world.folder / "eval.py").write_text("raise SystemExit('no such dataset')")
    for _ in range(2):
        done = call(world, "search", path)
        assert done.exit_code == SearchError.exit_code, done.stdout
        assert "2 of 2 evaluated, 2 of them failed" in done.stderr
        assert "no such dataset" in done.stderr
        assert "remove these files and run it again" in done.stderr
    for result in (world.home.search_ledgers / "mix" / "results").iterdir():
        result.unlink()
    (world.folder / "eval.py").write_text("raise SystemExit('no such dataset')")
    assert len(state_of(world.home, search_of(world.home, "mix")).waiting) == 2


def test_an_objective_in_which_all_candidates_are_beyond_its_worst_anchor_is_told(
    world: World,
) -> None:
    path = world.write("evaluations: 4\ninitial: 2\n")
    path.write_text(path.read_text().replace("anchors: [2, 0]", "anchors: [-1, -2]"))
    done = call(world, "search", path)
    assert done.exit_code == 0, done.stderr
    said = "nothing is learned of cost: all results lie far beyond its worst anchor, -1"
    assert done.stderr.count(said) == 2, "once after the first candidates, once in the end"
    assert done.stderr.index(said) < done.stderr.index("3 of 4")
    shown = call(world, "front", "mix", "--json")
    assert said in shown.stderr
    (warning,) = json.loads(shown.stdout)["warnings"]
    assert "the nearest is 0" in warning
    path = world.write("evaluations: 4\ninitial: 4\n", "sound")
    assert said.split(" of")[0] not in call(world, "search", path).stderr


def test_models_without_numbered_layers_are_told_to_have_none(world: World) -> None:
    for name in ("base", "one", "zero"):
        shutil.rmtree(world.folder / name)
        write_model(world.folder / name, {"proj.weight": torch.ones(4, 4)})
    done = call(world, "search", world.write())
    assert done.exit_code == RecipeError.exit_code
    assert "The models of a search have no numbered layers" in done.stderr
    assert searches(world.home) == []


def test_a_search_whose_name_ends_in_a_number_waits_for_no_candidate_of_another(
    world: World,
) -> None:
    home = world.home
    start_search(home, world.write(name="mix"))
    other = start_search(home, world.write(name="mix-0001"))
    with ThreadPoolExecutor(1) as pool, Ledger(home, "mix").claim(1):
        assert pool.submit(propose, home, other, 1).result(timeout=30) == [1]


def test_a_candidate_is_evaluated_by_one_process_at_a_time(world: World) -> None:
    home = world.home
    search = start_search(home, world.write("evaluations: 3\ninitial: 3\n"))
    assert propose(home, search, 2) == [1, 2]
    with Ledger(home, "mix").claim(1):
        state = state_of(home, search)
        assert (list(state.running), list(state.waiting)) == ([1], [2])
        with pytest.raises(BusyError, match="process"):
            evaluate(home, search, 1)
    assert evaluate(home, search, 1) == evaluate(home, search, 1)
    assert len(world.log("begun")) == 1
    assert propose(home, search, 9) == [3]
    assert propose(home, search, 1) == []
    assert list(home.leases_dir.glob("search-mix-*.lock")) == []


def test_a_search_whose_last_candidates_others_propose_meanwhile_is_not_used_up(
    world: World,
) -> None:
    home = world.home
    search = start_search(home, world.write("evaluations: 3\ninitial: 3\n"))
    for number in propose(home, search, 2):
        evaluate(home, search, number)
    ledger = Ledger(home, "mix")
    with ThreadPoolExecutor(1) as pool:
        with ledger.claim(3):
            with ledger.turn():
                running = pool.submit(run_search, home, search)
                time.sleep(1)  # it has seen that one is left, and waits for its turn
                ledger.put_proposal(3, (0.25,) * len(search_prior(home, search).labels))
            time.sleep(1)
            assert not running.done()
        assert running.result(60).done == 3
    assert len(world.log("begun")) == 3


def test_a_search_that_has_tried_every_point_of_its_grid_says_so(world: World) -> None:
    home = world.home
    keys = "evaluations: 66\ninitial: 66\nspace: {blocks: 1, head: 0.5}\n"
    search = start_search(home, world.write(keys))
    assert len(search_prior(home, search).labels) == 1
    ledger = Ledger(home, "mix")
    for number in range(1, 66):
        ledger.put_proposal(number, ((number - 1) / 64,))
    one = evaluate(home, search, 1)
    for number, proposal in ledger.proposals().items():
        ledger.put_result(replace(one, number=number, point=proposal.point))
    with pytest.raises(SearchError, match="used up") as refused:
        run_search(home, search)
    assert "found 65 points, and no other on the grid" in str(refused.value)


def test_another_file_another_source_and_another_evaluator_are_refused(world: World) -> None:
    home, path = world.home, world.write()
    search = start_search(home, path)
    path.write_text("# the same\n" + path.read_text())
    assert start_search(home, path).began == search.began
    world.write("evaluations: 7\ninitial: 7\n")
    with pytest.raises(SearchError, match="Another search has this name"):
        start_search(home, path)
    world.write()
    (number,) = propose(home, search, 1)
    evaluator = world.folder / "eval.py"
    evaluator.write_text(EVALUATOR + "# another")
    with pytest.raises(EvaluationError, match="not what it was when the search began"):
        evaluate(home, search, number)
    evaluator.write_text(EVALUATOR)
    world.make("one", 2.0)
    with pytest.raises(CheckpointChangedError, match="one, of the search mix"):
        evaluate(home, search, number)
    world.make("one", 1.0)
    assert evaluate(home, search, number).failure == ""


@pytest.mark.parametrize("text", [EVALUATOR.replace("(first + last) / 2", "9.0"), None])
def test_an_evaluator_that_changes_or_goes_during_a_merge_gives_no_result(
    world: World, text: str | None
) -> None:
    search = start_search(world.home, world.write())
    (number,) = propose(world.home, search, 1)
    proposal, evaluator = Ledger(world.home, "mix").proposals()[number], world.folder / "eval.py"
    with ExitStack() as leases:
        merged = Candidates(world.home, search).merge(proposal, leases)
        assert isinstance(merged, Merged)
        evaluator.unlink() if text is None else evaluator.write_text(text)
        with pytest.raises(EvaluationError, match="not what it was when the search began"):
            Candidates(world.home, search).measure(merged)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("space: {blocks: 9}", "expected  at most 3"),
        ("parameters: {wieght: 1}", "wieght"),
        ("budget: lots", "lots"),
        ("sources: [one, gone]", "gone"),
        ("evaluate: {command: [python, gone.py]}", "gone.py"),
    ],
)
def test_what_does_not_fit_the_models_is_refused_before_anything_is_written(
    world: World, keys: str, told: str
) -> None:
    path = world.write(f"evaluations: 3\n{keys}\n")
    if (key := keys.partition(":")[0]) in ("sources", "evaluate"):
        lines = [x for x in path.read_text().splitlines() if not x.startswith(key) or x == keys]
        path.write_text("\n".join(lines))
    found = call(world, "search", path)
    assert found.exit_code not in (0, 1, 70), found.output
    assert told in found.stderr
    assert searches(world.home) == []


def test_pick_publishes_the_cheapest_and_says_the_best_there_is(world: World) -> None:
    home = world.home
    search = start_search(home, world.write())
    run_search(home, search)
    trials = front(home, search).trials
    enough = [t for t in trials if t.metrics["good"] >= 0.4]
    cheapest = min(enough, key=lambda t: t.metrics["cost"])
    collect(home, older_than_s=0)
    assert pick(home, search, [Bound("good", True, 0.4)]).snapshot_id == cheapest.snapshot_id
    best = pick(home, search, [], cost="good", ref="best")
    assert best.snapshot_id == max(trials, key=lambda t: t.metrics["good"]).snapshot_id
    # A candidate off the front was collected: it is merged again, to the same bytes.
    (off, *_) = [t for t in trials if not t.is_on_front]
    assert off.snapshot_id not in _snapshots(world)
    exact = [Bound(n, is_min, off.metrics[n]) for n in ("good", "cost") for is_min in (True, False)]
    assert pick(home, search, exact, ref="off").snapshot_id == off.snapshot_id
    with pytest.raises(SearchError) as caught:
        pick(home, search, [Bound("good", True, 1.5)])
    top = max(trials, key=lambda t: t.metrics["good"])
    assert caught.value.found == (
        f"the highest good is {top.metrics['good']:.10g}, of candidate {top.number}"
    )
    with pytest.raises(SearchError, match="Nothing of the search has this metric"):
        pick(home, search, [Bound("speed", True, 1)])
    for bound in ("good", "good=nan"):
        assert call(world, "pick", "mix", "--min", bound).exit_code == 2


def test_a_metric_too_far_from_its_anchors_for_a_number_is_a_failure_of_its_candidate(
    world: World,
) -> None:
    pytest.importorskip("botorch", reason="needs the extra `search`")
    path = world.write("evaluations: 2\ninitial: 1\n")
    path.write_text(path.read_text().replace("anchors: [0, 1]", "anchors: [0, 1.0e-309]"))
    search = start_search(world.home, path)
    with pytest.raises(SearchError, match="without a front"):
        run_search(world.home, search)
    failures = [t.failure for t in front(world.home, search).trials]
    assert len(failures) == 2
    assert all("too far from its anchors" in failure for failure in failures)


def test_a_candidate_that_would_be_another_snapshot_by_now_is_not_published(world: World) -> None:
    generator = torch.Generator().manual_seed(1)
    size = {"layers": 3, "hidden": 64, "vocab": 64}
    base = {name: torch.randn(shape, generator=generator) for name, shape in layout(**size)}
    for name, far in (("base", 0.0), ("one", 0.01), ("zero", 0.01)):
        far_off = {k: v + far * torch.randn(v.shape, generator=generator) for k, v in base.items()}
        write_model(world.folder / name, far_off, **size)
    path = world.write("evaluations: 2\ninitial: 2\nbudget: 40%\n")
    assert call(world, "search", path).exit_code == 0
    refs = sorted(world.home.refs.names())
    names = [world.folder / name for name in ("one", "zero")]
    packed = call(world, "pack", *names, "--base", world.folder / "base")
    assert packed.exit_code == 0, packed.output
    world.home.snapshots.rename(world.home.root / "gone")
    world.home.snapshots.mkdir()
    refused = call(world, "pick", "mix", "--min", "good=-99", "--ref", "other")
    assert refused.exit_code == EvaluationError.exit_code, refused.output
    assert "A candidate is not merged to what was measured" in refused.stderr
    assert sorted(world.home.refs.names()) == refs


@pytest.mark.parametrize("number", [2, 6])
def test_a_search_goes_on_and_publishes_without_a_proposal_that_has_a_result(
    world: World, number: int
) -> None:
    path, home = world.write("evaluations: 6\ninitial: 6\n"), world.home
    assert call(world, "search", path).exit_code == 0
    before = front(home, search_of(home, "mix"))
    proposal = Ledger(home, "mix").folder / "proposals" / f"{number:04d}.json"
    proposal.write_bytes(b"")
    assert call(world, "search", path).exit_code == 19
    assert str(proposal) in repair(home).taken
    assert verify_all(home, ["structure"]).ok
    assert call(world, "search", path).exit_code == 0
    assert front(home, search_of(home, "mix")) == before
    home.snapshots.rename(home.root / "gone")  # so that candidates are merged again to publish
    home.snapshots.mkdir()
    assert call(world, "search", path).exit_code == 0
    assert len(world.log("ended")) == 6


def test_a_damaged_result_is_said_and_repair_has_it_evaluated_again(world: World) -> None:
    home = world.home
    search = start_search(home, world.write("evaluations: 2\ninitial: 2\n"))
    run_search(home, search)
    before = front(home, search)
    path = home.search_ledgers / "mix" / "results" / "0002.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"0002\.json"):
        front(home, search)
    assert any(str(path) == f.file for f in verify_all(home, ["structure"]).findings)
    # What may name a snapshot of the front is in doubt, so that all stay.
    stay = _snapshots(world)
    assert "may name one" in "".join(collect(home, older_than_s=0).notes)
    assert _snapshots(world) == stay
    assert str(path) in repair(home).taken
    state = state_of(home, search)
    assert [*state.running, *state.waiting] == [2]
    run_search(home, search)
    assert [t.values for t in front(home, search).trials] == [t.values for t in before.trials]
    assert len(world.log("begun")) == 2


def test_a_fact_under_another_name_or_of_another_search_is_no_fact(world: World) -> None:
    home = world.home
    search = start_search(home, world.write("evaluations: 2\ninitial: 2\n"))
    propose(home, search, 2)
    folder = home.search_ledgers / "mix" / "proposals"
    (folder / "0003.json").write_bytes((folder / "0002.json").read_bytes())
    with pytest.raises(CorruptionError, match=r"found mergepipe-search/1, proposals/0002\.json of"):
        propose(home, search, 1)
    (folder / "0003.json").unlink()
    folder.parent.rename(home.search_ledgers / "other")
    with pytest.raises(CorruptionError, match=r"search\.json of mix"):
        search_of(home, "other")


def test_layers_that_differ_more_have_shorter_length_scales_and_blocks_of_their_own(
    world: World,
) -> None:
    world.make("one", 1.0, layer_1=9.0)
    path = world.write("evaluations: 2\ninitial: 2\nspace: {blocks: 2, embeddings: search}\n")
    search = start_search(world.home, path)
    prior = search_prior(world.home, search)
    assert prior.parameter == pytest.approx((3 / 11, 27 / 11, 3 / 11), rel=1e-3)
    assert prior.labels[2:] == ("head", "embed")
    assert len(prior.blocks) == 2
    (own,) = [n for n, block in enumerate(prior.blocks) if "layer.01" in block]
    assert prior.length_scales[own] == min(prior.length_scales)


def test_layers_that_do_not_change_are_taken_over_from_other_candidates(world: World) -> None:
    path = world.write("evaluations: 3\ninitial: 3\nspace: {blocks: 1, head: 0.5}\n")
    path.write_text(path.read_text().replace("task_arithmetic", "linear"))
    search = start_search(world.home, path)
    assert search_cost(world.home, search).layers_changed == 3
    run_search(world.home, search)
    trials = front(world.home, search).trials
    assert [t.merge.layers_reused for t in trials if t.merge] == [0, 2, 2]
    assert [t.metrics["good"] for t in trials] == pytest.approx([t.point[0] for t in trials])
    (ref, *_) = publish_front(world.home, search)
    merged = open_checkpoint(f"{world.home.snapshots / ref.snapshot_id}", "x")
    assert len(merged.tensors) == len(open_checkpoint(f"{world.folder / 'base'}", "b").tensors)


def test_each_source_may_have_a_weight_of_its_own_and_a_density(world: World) -> None:
    text = "evaluations: 2\ninitial: 2\nspace: {weights: each, density: [0.5, 1]}\n"
    path = world.write(text)
    path.write_text(path.read_text().replace("task_arithmetic", "ties"))
    search = read_search(world.home, path)
    assert len(search_prior(world.home, start_search(world.home, path)).labels) == 2 * 4 + 1
    assert search_cost(world.home, search).layers_changed == 5
    assert run_search(world.home, start_search(world.home, path)).failed == 0


def test_a_file_that_is_none_and_a_search_that_is_none_are_said(world: World) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_search(world.home, Path("gone.yml"))
    assert call(world, "front", "gone").exit_code == 17


def test_with_a_budget_of_nothing_the_stated_cost_reads_the_base_alone(world: World) -> None:
    search = start_search(world.home, world.write("evaluations: 4\ninitial: 4\nbudget: 0\n"))
    cost = search_cost(world.home, search)
    run_search(world.home, search)
    merges = [t.merge for t in front(world.home, search).trials if t.merge is not None]
    assert cost.scratch_nbytes == sum(m.scratch_nbytes for m in merges)
