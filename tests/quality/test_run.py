"""A snapshot is measured once by a real child, and what fails names its log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.evaluation import Evaluator, Perplexity
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, EvaluationError, MetricsError
from mergepipe_pipeline.quality.child import AbandonedError
from mergepipe_pipeline.quality.measure import evaluate, evaluations_of
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.warehouse import Warehouse
from tests.facts.test_input_segments import flip
from tests.snapshots.tiny import Crash, Store, count_steps, crash_at

SCRIPT = Evaluator(("python", "eval.py"), retries=0)
#: Counts its calls beside itself, and measures how many files a snapshot has.
COUNTS = """
import os, sys
from pathlib import Path
calls = Path("calls"); calls.write_text(str(n := int(calls.read_text()) + 1))
assert os.environ["MERGEPIPE_SNAPSHOT"] == sys.argv[-1]
print("files")
print('{"files": %d}' % len(list(Path(sys.argv[-1]).iterdir())))
"""
Write = Callable[[str], None]


@pytest.fixture
def snapshot(home: Warehouse) -> Snapshot:
    return Store(home.root).commit((1,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a recipe."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "calls").write_text("0")
    return tmp_path / "recipes"


@pytest.fixture
def script(folder: Path) -> Write:
    def write(code: str) -> None:
        (folder / "eval.py").write_text(code)

    return write


def calls(folder: Path) -> int:
    return int((folder / "calls").read_text())


def failure(home: Warehouse, snapshot: Snapshot, evaluator: Evaluator, folder: Path) -> str:
    with pytest.raises(EvaluationError) as caught:
        evaluate(home, snapshot, evaluator, folder)
    return str(caught.value)


def test_a_snapshot_is_measured_once_for_each_evaluator(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS)
    found = evaluate(home, snapshot, SCRIPT, folder)
    assert found.metrics == {"files": 5}
    assert evaluate(home, snapshot, SCRIPT, folder) == found
    assert calls(folder) == 1
    longer = Evaluator(SCRIPT.command, timeout_s=9.0)
    assert evaluate(home, snapshot, longer, folder) == found
    script(COUNTS + "\n# another content is another evaluator")
    assert evaluate(home, snapshot, SCRIPT, folder).evaluator_id != found.evaluator_id
    assert evaluate(home, snapshot, SCRIPT, folder, fresh=True).metrics == found.metrics
    assert calls(folder) == 3
    assert len(evaluations_of(home, snapshot.snapshot_id)) == 2
    log = home.evaluation_path(found.snapshot_id, found.evaluator_id).with_suffix(".log")
    assert log.read_text().splitlines() == [
        "== attempt 1 of 1: python eval.py",
        "files",
        '{"files": 5}',
    ]


@pytest.mark.parametrize(
    ("code", "why", "end"),
    [
        ("raise SystemExit('no data set')", "it exits with code 1", "no data set"),
        ("import os; os.abort()", "it dies of signal 6", "no output"),
        ("print('accuracy 0.5')", "its last line is no JSON: accuracy 0.5", "accuracy 0.5"),
        ("print('{\"a\": NaN}')", "its metric 'a' is no finite number", "NaN"),
        ("import time; time.sleep(60)", "it has not ended after 1 s", "no output"),
    ],
)
def test_an_evaluator_that_fails_names_its_log_and_shows_its_end(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write, code: str, why: str, end: str
) -> None:
    script(code)
    told = failure(home, snapshot, Evaluator(SCRIPT.command, timeout_s=1, retries=0), folder)
    assert f"An evaluator fails: {why}" in told
    assert end in told
    (log,) = home.evaluations.rglob("*.failed.log")
    assert str(log) in told
    assert why in log.read_text()
    assert evaluations_of(home, snapshot.snapshot_id) == ()


def test_what_fails_is_tried_again_as_often_as_the_recipe_says(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS.replace("print", "assert n == 3, 'busy'; print", 1))
    assert "after 2 attempts" in failure(home, snapshot, Evaluator(SCRIPT.command), folder)
    (folder / "calls").write_text("0")
    assert evaluate(home, snapshot, Evaluator(SCRIPT.command, retries=2), folder).metrics
    assert calls(folder) == 3


def test_an_evaluator_that_ends_well_without_metrics_fails_and_is_not_run_again(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS.replace("print('{", "print('accuracy: {"))
    with pytest.raises(MetricsError, match="its last line is no JSON") as caught:
        evaluate(home, snapshot, Evaluator(SCRIPT.command, retries=2), folder)
    assert "after 1 attempt:" in str(caught.value)
    assert 'accuracy: {"files": 5}' in str(caught.value)
    assert calls(folder) == 1
    assert evaluations_of(home, snapshot.snapshot_id) == ()


def test_a_python_function_is_called_in_a_process_of_its_own(
    home: Warehouse, snapshot: Snapshot, folder: Path
) -> None:
    (folder / "checks").mkdir()
    (folder / "checks" / "skills.py").write_text(
        "import numpy, os\nprint('x')\n"
        "def score(path): return {'pid': os.getpid(), 'half': numpy.float32(0.5)}\n"
        "def words(path): return 'good'\n"
    )
    found = evaluate(home, snapshot, Evaluator(python="checks.skills:score"), folder)
    assert found.metrics["half"] == 0.5
    assert found.metrics["pid"] != json.loads(Path("/proc/self/stat").read_text().split()[0])
    told = failure(home, snapshot, Evaluator(python="checks.skills:words", retries=0), folder)
    assert "checks.skills:words returns str; expected a mapping" in told


@pytest.mark.parametrize(
    ("evaluator", "lost"),
    [
        (SCRIPT, "eval.py"),
        (Evaluator(("./eval.sh",)), "eval.sh"),
        (Evaluator(("no-such-program",)), "no-such-program"),
        (Evaluator(perplexity=Perplexity("notes.txt")), "notes.txt"),
    ],
)
def test_a_file_that_is_not_there_is_said_before_anything_runs(
    home: Warehouse, snapshot: Snapshot, folder: Path, evaluator: Evaluator, lost: str
) -> None:
    assert lost in failure(home, snapshot, evaluator, folder)
    assert list(home.evaluations.iterdir()) == []


def test_a_crash_at_any_step_leaves_a_measurement_whole_or_none(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS)
    steps = count_steps(lambda: evaluate(home, snapshot, SCRIPT, folder, fresh=True))
    for step in range(steps):
        for record in home.evaluations.rglob("*.json"):
            record.unlink()
        crash_at(step)
        with pytest.raises(Crash):
            evaluate(home, snapshot, SCRIPT, folder)
        atomic.crash_hook = None
        assert all(e.metrics == {"files": 5} for e in evaluations_of(home, snapshot.snapshot_id))
        assert evaluate(home, snapshot, SCRIPT, folder).metrics == {"files": 5}


def test_nothing_is_measured_of_a_snapshot_in_which_a_bit_turned(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS)
    shard = snapshot.manifest.shards[0]
    name, _ = shard.tensors[0]
    flip(Path(snapshot.path), name, 0.5)
    with pytest.raises(CorruptionError, match="not the bytes that were written") as error:
        evaluate(home, snapshot, SCRIPT, folder)
    assert name in str(error.value)
    assert (calls(folder), evaluations_of(home, snapshot.snapshot_id)) == (0, ())
    flip(Path(snapshot.path), name, 0.5)
    assert evaluate(home, snapshot, SCRIPT, folder).metrics == {"files": 5}


def test_an_evaluation_that_nobody_wants_any_more_ends_before_all_is_checked(
    home: Warehouse, snapshot: Snapshot, folder: Path, script: Write
) -> None:
    script(COUNTS)
    flip(Path(snapshot.path), snapshot.manifest.shards[0].tensors[0][0], 0.5)
    stop, writing = os.pipe()
    os.close(writing)
    with pytest.raises(AbandonedError):
        evaluate(home, snapshot, SCRIPT, folder, stop=stop)
    os.close(stop)
