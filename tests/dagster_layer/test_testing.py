"""The helper for the tests of other people's projects."""

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.dagster import (
    MergePipeProps,
    MergePipeTranslator,
    build_inbox_defs,
    build_recipe_defs,
)
from mergepipe_pipeline.dagster.testing import merge_in_process, write_model
from mergepipe_pipeline.errors import MergePipeError
from tests.dagster_layer.test_existing_project import GATE, RECIPE, SETTLED

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

GATED = RECIPE + GATE


def test_a_gate_lets_pass_what_it_asks_for_and_says_why_it_refuses_the_rest(
    tmp_path: Path,
) -> None:
    done = merge_in_process({"both": GATED}, tmp_path / "one", metrics={"size": 1})
    assert (done.passed, done.version) == (True, 1)
    assert done.snapshot is not None
    assert (done.snapshot / "config.json").is_file()
    done = merge_in_process({"both": GATED}, tmp_path / "two", metrics={"size": 0.5})
    assert (done.passed, done.version) == (False, None)
    assert "size is 0.5" in done.said
    assert done.snapshot is not None


class Ours(MergePipeTranslator):
    """Other keys for all assets."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        return props.spec.replace_attributes(key=["ours", *props.spec.key.path])


def test_the_definitions_of_a_project_run_as_they_are_translated(tmp_path: Path) -> None:
    def project(home: Path) -> dg.Definitions:
        return dg.Definitions.merge(
            SETTLED,
            build_inbox_defs(home=home, translator=Ours(), key_prefix="team"),
            build_recipe_defs({"a": RECIPE, "b": RECIPE}, home=home, key_prefix="team"),
        )

    done = merge_in_process(project, tmp_path, name="b")
    assert done.passed
    made = {event.asset_key for event in done.run.get_asset_materialization_events()}
    assert dg.AssetKey(["team", "b", "release"]) in made


def test_selectors_take_what_is_made_besides_and_models_are_ones_own(tmp_path: Path) -> None:
    own = write_model(tmp_path / "own", layers=3)
    text = 'merge_method: ties\nbase_model: base\nmodels: [{match: "expert-*", parameters: '
    text += "{weight: 0.5, density: 0.3}}]\n"
    models = {"expert-c": own}
    done = merge_in_process(
        {"t": text}, tmp_path, also=["expert-a", "expert-b"], models=models, layers=3
    )
    assert done.passed


def test_what_no_recipe_can_do_is_told_as_an_error(tmp_path: Path) -> None:
    with pytest.raises(MergePipeError, match=r"(?s)no recipe to run.*merge_method"):
        merge_in_process({"a": "merge_method: none\n"}, tmp_path / "a")
    with pytest.raises(MergePipeError, match="say by `name` which one"):
        merge_in_process({"a": RECIPE, "b": RECIPE}, tmp_path / "b")
    fails = RECIPE + "evaluate: {command: [python, -c, 'raise SystemExit(3)'], retries: 0}\n"
    with pytest.raises(MergePipeError, match="A chain failed"):
        merge_in_process({"a": fails}, tmp_path / "c")


def test_it_needs_no_extra() -> None:
    extras = "('transformers', 'safetensors', 'tokenizers', 'lm_eval', 'dagster_webserver')"
    code = f"import sys\nfor n in {extras}: sys.modules[n] = None\n"
    code += "import mergepipe_pipeline.dagster.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
