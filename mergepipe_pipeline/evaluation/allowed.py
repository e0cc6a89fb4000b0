"""Whether an evaluator may run here, and which of the environment's variables it gets.

MERGEPIPE_EVALUATORS decides, for recipes, searches and the command line alike. Programs are named
by what would be run and by nothing that whoever writes a recipe can put beside it: a relative path
counts as the whole path of its file.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mergepipe_pipeline.domain.evaluation import Evaluator
from mergepipe_pipeline.errors import EvaluationError, MergePipeError

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
