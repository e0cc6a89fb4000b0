"""What reading elsewhere costs is said before, while and after it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.remote.ranges import downloads_folder, parse_size
from mergepipe_pipeline.storage.atomic import remove_tree
from tests.remote.servers import FolderServer, HubServer


def _run(home: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(main, ["--home", str(home), "--json", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_check_plan_and_provenance_tell_bytes_and_requests_per_address(
    folder: FolderServer, tmp_path: Path, recipe_at: Callable[..., str]
) -> None:
    recipe, home = tmp_path / "r.yml", tmp_path / "home"
    recipe.write_text(recipe_at(lambda name: f"{folder.url}/{name}"))
    sizes = {p.name: open_checkpoint(str(p), p.name).nbytes for p in folder.folder.iterdir()}

    def egress(verb: str) -> dict[str, dict[str, int]]:
        found = json.loads(_run(home, verb, str(recipe)).stdout)["egress"]
        return {e["address"].rpartition("/")[2]: e for e in found}

    unknown = egress("check")
    assert {n: e["nbytes"] for n, e in unknown.items()} == {n: sizes[n] for n in unknown}
    assert max(n for _, path, n in folder.seen.requests if path.endswith(".safetensors")) < 5000

    planned = egress("plan")
    # Analysis has read all of it, and all of it is kept.
    assert all(e["nbytes"] == e["requests"] == 0 for e in planned.values())
    assert planned["base"]["kept_nbytes"] == sizes["base"]
    remove_tree(downloads_folder())
    # A budget of a curve's recipe fetches the base, and of an expert at most so much.
    bent = egress("curve")
    assert bent["base"]["nbytes"] == sizes["base"]
    assert all(bent[n]["at_most"] and bent[n]["nbytes"] < sizes[n] for n in bent if n != "base")
    planned = egress("plan")
    folder.seen.requests.clear()
    ran = _run(home, "merge", str(recipe))
    merged = json.loads(ran.stdout)
    told = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("{")]
    shown = [t for t in told if t["task"] == "download r"]
    # The base may have come while the plan was made.
    experts = sum(e["nbytes"] for name, e in planned.items() if name != "base")
    assert experts <= shown[-1]["total"] <= experts + sizes["base"]
    assert shown[-1]["done"] >= experts
    sent = {}
    for name in planned:
        got = [
            n
            for method, path, n in folder.seen.of(f"/{name}/")
            if method == "GET" and path.endswith(".safetensors")
        ]
        sent[name] = [len(got), sum(got)]
    assert {n: [e["requests"], e["nbytes"]] for n, e in planned.items()} == sent
    told = merged["downloads"]
    assert sum(d["nbytes"] for d in told.values()) == folder.seen.nbytes
    provenance = json.loads((Path(merged["path"]) / "provenance.json").read_bytes())
    assert provenance["downloads"] == told


def test_an_address_lands_whole_in_the_inbox(hub: HubServer, tmp_path: Path) -> None:
    done = json.loads(_run(tmp_path / "home", "land", "hf://org/expert_01").stdout)
    landed = Path(done["path"])
    assert landed.name == "org-expert_01"
    for path in sorted((hub.folder / "org" / "expert_01").iterdir()):
        if path.suffix in (".json", ".safetensors"):
            assert (landed / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("text", "nbytes"), [("20GB", 20 * 10**9), ("512MiB", 512 << 20), ("1.5 kB", 1500), ("7", 7)]
)
def test_a_limit_is_written_with_a_unit(text: str, nbytes: int) -> None:
    assert parse_size(text, "here") == nbytes


def test_a_limit_that_cannot_be_read_is_refused_by_its_place() -> None:
    with pytest.raises(MergePipeError, match="MERGEPIPE_CACHE_LIMIT"):
        parse_size("much", "MERGEPIPE_CACHE_LIMIT")
