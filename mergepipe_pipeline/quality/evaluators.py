"""Evaluators: whether one may run here, its command and environment, and its digest.

The digest covers what the recipe says and the files that it names. What these import or read beyond
that is not seen: who changes that asks for a new measurement (`mergepipe evaluate --fresh`).
MERGEPIPE_EVALUATORS decides what may run, for recipes, searches and the command line alike. A
program is named by what would be run and by nothing that whoever writes a recipe can put beside it:
a relative path counts as the whole path of its file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.evaluation import Evaluator
from mergepipe_pipeline.errors import EvaluationError, MergePipeError, not_installed
from mergepipe_pipeline.storage.hashing import file_sha256

#: What the harness reads of a folder of tasks.
_TASK_FILES = frozenset({".yaml", ".py"})
#: Changes when the same evaluator would measure something else.
_VERSION = 1
#: The package that a built-in evaluator needs, and the extra that has it.
_EXTRAS = {"transformers": "demo", "lm_eval": "lm-eval"}


def evaluator_id(evaluator: Evaluator, folder: Path) -> str:
    """The first 32 hex digits of the digest of an evaluator whose recipe lies in `folder`.

    Time-out, retries and `env` are no part of it. Raises EvaluationError for a file that cannot be
    read, or a package that is not there.
    """
    text = evaluator.perplexity
    said = [evaluator.command, evaluator.python, None if text is None else asdict(text)]
    if evaluator.lm_eval is not None:
        _require("lm_eval", evaluator)
        said += [asdict(evaluator.lm_eval), version("lm_eval")]
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
    or a package that is not there, or that may not run here.
    """
    refuse_forbidden(evaluator, folder)
    if evaluator.python is not None:
        return _ours("python", {"entry": evaluator.python})
    if (text := evaluator.perplexity) is not None:
        _require("transformers", evaluator)
        if not (folder / text.text).is_file():
            raise _lost(evaluator, folder / text.text, "no such file")
        place = str((folder / text.text).resolve())
        return _ours("perplexity", {**asdict(text), "text": place})
    if evaluator.lm_eval is not None:
        _require("lm_eval", evaluator)
        options = asdict(evaluator.lm_eval)
        if (tasks := evaluator.lm_eval.include_path) is not None:
            options["include_path"] = str(_tasks(evaluator, folder / tasks).resolve())
        return _ours("lm_eval", options)
    program, *arguments = evaluator.command
    if program == "python":
        if arguments and arguments[0][:1] != "-" and not (folder / arguments[0]).is_file():
            raise _lost(evaluator, folder / arguments[0], "no such file")
        return [sys.executable, *arguments]
    place = str(folder / program) if "/" in program else program
    if shutil.which(place) is None:
        raise _lost(evaluator, Path(place), "no such program, or one that may not be executed")
    return [program, *arguments]


def _tasks(evaluator: Evaluator, place: Path) -> Path:
    """The folder of tasks that an evaluator names. Raises EvaluationError if it is none."""
    if not place.is_dir():
        raise _lost(evaluator, place, "no such folder")
    return place


def _require(package: str, evaluator: Evaluator) -> None:
    """Raise EvaluationError where a package that an evaluator is made of is not installed."""
    if find_spec(package) is None:
        what, found = f"A built-in evaluator needs the package {package}", "no such package"
        extra, where = _EXTRAS[package], evaluator.label
        raise not_installed(what, extra, found, kind=EvaluationError, where=where)


def environment_of(evaluator: Evaluator, snapshot: Path) -> dict[str, str]:
    """The environment of the child: the snapshot's path, and what is in ours.

    Of our tokens, keys and passwords it gets those that the evaluator names.
    """
    environment = without_secrets(os.environ, evaluator.env)
    environment["MERGEPIPE_SNAPSHOT"] = str(snapshot)
    if not evaluator.command:  # the child has to find this package wherever it starts
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, environment.get("PYTHONPATH")))
        )
    return environment


def _ours(kind: str, options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "mergepipe_pipeline.quality.builtin", kind, json.dumps(options)]


def _files(evaluator: Evaluator, folder: Path) -> list[str]:
    """The files that an evaluator names, as it names them."""
    if evaluator.python is not None:
        module = evaluator.python.partition(":")[0].replace(".", "/")
        named = [f"{module}.py", f"{module}/__init__.py"]
    elif evaluator.perplexity is not None:
        return [evaluator.perplexity.text]
    elif evaluator.lm_eval is not None:
        tasks = evaluator.lm_eval.include_path
        places = [] if tasks is None else sorted(_tasks(evaluator, folder / tasks).rglob("*"))
        named = [str(p.relative_to(folder)) for p in places if p.suffix in _TASK_FILES]
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


#: `off`, `any` (the default), or names of evaluators with commas between them.
EVALUATORS = "MERGEPIPE_EVALUATORS"
#: Names of variables that hold what opens doors.
_SECRET = re.compile(
    r"AWS_.*|(.*_)?(TOKEN|SECRET|KEY)|.*(PASSWORD|PASSWD|CREDENTIAL|CONNECTION_STRING).*"
    r"|MERGEPIPE_WEBHOOK",
    re.IGNORECASE,
)


def refuse_forbidden(evaluator: Evaluator, folder: Path) -> None:
    """Raise EvaluationError for an evaluator, of a recipe in `folder`, that may not run here.

    Raises MergePipeError for a wrong value of the variable.
    """
    text = os.environ.get(EVALUATORS) or "any"
    if text == "any":
        return
    allowed = frozenset() if text == "off" else _allowed(text)
    for names in _parts(evaluator, folder):
        if allowed.isdisjoint(names):
            raise EvaluationError(
                "An evaluator may not run here",
                where=evaluator.label,
                expected=f"what {EVALUATORS} allows: {text}",
                found=names[-1],
                next_step=f"let whoever runs this process add {names[-1]} to {EVALUATORS}, if it "
                "is to be trusted, or take `evaluate:` out",
            )


def without_secrets(environment: Mapping[str, str], named: tuple[str, ...]) -> dict[str, str]:
    """The environment without tokens, keys and passwords, but for those that are `named`."""
    return {
        name: value
        for name, value in environment.items()
        if name in named or not _SECRET.fullmatch(name)
    }


def _allowed(text: str) -> frozenset[str]:
    names = frozenset(part for name in text.split(",") if (part := name.strip()))
    wrong = sorted(n for n in names if n in ("any", "off") or ("/" in n and not n.startswith("/")))
    if wrong or not names:
        raise MergePipeError(
            "A setting has a wrong value",
            where=EVALUATORS,
            expected="off, any, or with commas between them perplexity, lm_eval, names of "
            "programs, and whole paths",
            found=repr(wrong[0] if wrong else text),
            next_step="correct it, or leave it out for any",
        )
    return names


def _parts(evaluator: Evaluator, folder: Path) -> Iterator[tuple[str, ...]]:
    """The names of each thing that an evaluator runs, the last of which is the surest."""
    if evaluator.perplexity is not None:
        yield ("perplexity",)
    elif (chosen := evaluator.lm_eval) is not None:
        yield ("lm_eval",)
        if chosen.include_path is not None:  # whose tasks may call Python beside them
            yield _places(folder / chosen.include_path)
    elif evaluator.python is not None:
        module = folder / evaluator.python.partition(":")[0].replace(".", "/")
        files = [p for p in (module.with_suffix(".py"), module / "__init__.py") if p.is_file()]
        where = _places(files[0]) if files else (evaluator.python,)
        yield ("python", *_places(Path(sys.executable)), *where)
    else:
        program = evaluator.command[0]
        if "/" in program:
            yield _places(folder / program)
        else:
            found = sys.executable if program == "python" else shutil.which(program)
            yield (*((program,) if found is None else _places(Path(found))), program)


def _places(path: Path) -> tuple[str, str]:
    """A file's whole path as it is given, and where its links lead."""
    return os.path.abspath(path), str(path.resolve())
