"""What an evaluator is: a digest of what the recipe says and of the files that it names.

What these files import or read beyond that is not seen: who changes that asks for a new measurement
(`mergepipe evaluate --fresh`).
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import EvaluationError
from mergepipe_pipeline.spec.evaluation import Evaluator
from mergepipe_pipeline.storage.hashing import file_sha256

#: Changes when the same evaluator would measure something else.
_VERSION = 1
_EXTRA = "pip install 'mergepipe-pipeline[demo]'"


def evaluator_id(evaluator: Evaluator, folder: Path) -> str:
    """The first 32 hex digits of the digest of an evaluator whose recipe lies in `folder`.

    Time-out and retries are no part of it. Raises EvaluationError for a file that cannot be read.
    """
    text = evaluator.perplexity
    said = [evaluator.command, evaluator.python, None if text is None else asdict(text)]
    files = []
    for name in _files(evaluator, folder):
        try:
            files.append([name, file_sha256(folder / name)])
        except OSError as error:
            raise _lost(evaluator, folder / name, error.strerror or str(error)) from error
    return digest_json([_VERSION, said, files])[:32]


def command_of(evaluator: Evaluator, folder: Path) -> list[str]:
    """The command that measures, but for the snapshot's path.

    `python` is the interpreter that runs MergePipe. Raises EvaluationError for a program, a script
    or a package that is not there.
    """
    if evaluator.python is not None:
        return [*_ours("entry_point"), evaluator.python]
    if (text := evaluator.perplexity) is not None:
        if find_spec("transformers") is None:
            raise EvaluationError(
                "The built-in evaluator needs transformers",
                where=evaluator.label,
                expected="the package transformers",
                found="none",
                next_step=_EXTRA,
            )
        if not (folder / text.text).is_file():
            raise _lost(evaluator, folder / text.text, "no such file")
        place = str((folder / text.text).resolve())
        return [*_ours("perplexity"), place, text.field, str(text.max_tokens)]
    program, *arguments = evaluator.command
    if program == "python":
        if arguments and arguments[0][:1] != "-" and not (folder / arguments[0]).is_file():
            raise _lost(evaluator, folder / arguments[0], "no such file")
        return [sys.executable, *arguments]
    place = str(folder / program) if "/" in program else program
    if shutil.which(place) is None:
        raise _lost(evaluator, Path(place), "no such program, or one that may not be executed")
    return [program, *arguments]


def environment_of(evaluator: Evaluator, snapshot: Path) -> dict[str, str]:
    """What the child finds in its environment: all that is in ours, and the snapshot's path."""
    environment = {**os.environ, "MERGEPIPE_SNAPSHOT": str(snapshot)}
    if not evaluator.command:  # the child has to find this package wherever it starts
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, environment.get("PYTHONPATH")))
        )
    return environment


def _ours(module: str) -> list[str]:
    return [sys.executable, "-m", f"mergepipe_pipeline.evaluation.{module}"]


def _files(evaluator: Evaluator, folder: Path) -> list[str]:
    """The files that an evaluator names, as it names them."""
    if evaluator.python is not None:
        module = evaluator.python.partition(":")[0].replace(".", "/")
        named = [f"{module}.py", f"{module}/__init__.py"]
    elif evaluator.perplexity is not None:
        return [evaluator.perplexity.text]
    else:
        program, *named = evaluator.command
        named = [program, *named] if "/" in program else named
    return [name for name in named if _is_file(folder / name)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # an argument need be no path
        return False


def _lost(evaluator: Evaluator, path: Path, found: str) -> EvaluationError:
    return EvaluationError(
        "A file of an evaluator cannot be used",
        where=f"{path} of {evaluator.label}",
        expected="a file beside the recipe, or its whole path",
        found=found,
        next_step="correct `evaluate:` in the recipe, or bring the file",
    )
