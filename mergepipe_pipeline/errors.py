"""Every error a user can meet: one root class, one exit code per class.

A message is built from four parts, so that none is forgotten: what happened, where (file, tensor,
key path), what was expected against what was found, and the next step. The CLI prints
`for_terminal()` and exits with `exit_code`; nothing else in the project decides either.
"""

from __future__ import annotations

from collections.abc import Iterator

from mergepipe_pipeline.secrets import discreet


class MergePipeError(Exception):
    """An error of no other kind, and the root of all."""

    exit_code = 10
    problems: tuple[str, ...] = ()

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self.what)

    def __setattr__(self, name: str, value: object) -> None:
        # Whoever sets a part, also later: no error tells a secret of an address.
        if isinstance(value, str):
            value = discreet(value)
        elif isinstance(value, tuple):
            value = tuple(discreet(v) if isinstance(v, str) else v for v in value)
        super().__setattr__(name, value)

    def __str__(self) -> str:
        parts = [_ended(self.what)]
        if self.where:
            parts.append(f"Where: {self.where}.")
        if self.expected or self.found:
            pair = [
                f"expected {self.expected}" if self.expected else "",
                f"found {self.found}" if self.found else "",
            ]
            sentence = ", ".join(p for p in pair if p)
            parts.append(_ended(sentence[0].upper() + sentence[1:]))
        if self.next_step:
            parts.append(f"Next: {_ended(self.next_step)}")
        return " ".join(parts)

    def for_terminal(self) -> str:
        """The message for people: the cause, and every other part on a line of its own."""
        lines = [_indented(self.what.rstrip("."))]
        lines += _labelled(where=self.where, expected=self.expected, found=self.found)
        lines += [_indented(line) for line in self._listed()]
        return "\n".join([*lines, *_labelled(next=self.next_step)])

    def _listed(self) -> list[str]:
        """The problems, numbered; none where the only one is the cause itself."""
        several = self.problems if len(self.problems) > 1 else ()
        return [f"  {i}. {problem}" for i, problem in enumerate(several, 1)]

    def __reduce__(self) -> tuple[object, ...]:
        # Dagster carries errors between processes; keyword-only arguments need this to pickle.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith("?") else sentence.rstrip(".") + "."


def _labelled(**parts: str | None) -> list[str]:
    return [_indented(f"  {name:<8}  {text}") for name, text in parts.items() if text]


def _indented(text: str) -> str:
    # A name may hold newlines: what follows one must not look like a part of its own.
    return text.replace("\n", "\n" + " " * 12)


def _rebuild(cls: type[MergePipeError], state: dict[str, object]) -> MergePipeError:
    error = cls.__new__(cls)
    Exception.__init__(error, state.get("what"))
    error.__dict__.update(state)
    return error


class RecipeError(MergePipeError):
    """A recipe cannot be understood or cannot run; `problems` holds every problem."""

    exit_code = 11

    def __init__(self, what: str, *, problems: tuple[str, ...] = (), **parts: str | None) -> None:
        super().__init__(what, **parts)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._listed()])


class CheckpointError(MergePipeError):
    """A checkpoint is missing, damaged, hostile or of a format that is not read."""

    exit_code = 12


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint is still being written: files are absent or too short."""

    exit_code = 13


class CheckpointChangedError(CheckpointError):
    """A source file is not the one that was registered or planned."""

    exit_code = 14


class InputChangedError(CheckpointChangedError):
    """An input of a standing recipe is not as it was indexed; the recipe waits until it is."""

    exit_code = 26


class RemoteError(CheckpointError):
    """An address cannot be reached, refuses, or does not serve what is needed."""

    exit_code = 29


class IncompatibleCheckpointsError(MergePipeError):
    """Checkpoints of one recipe do not fit together (tensors, shapes, layers)."""

    exit_code = 15


class BudgetError(MergePipeError):
    """A budget cannot be parsed, or a read would leave the planned access set."""

    exit_code = 16


class NotFoundError(MergePipeError, KeyError):
    """A named thing (checkpoint, plan, snapshot, ref) is not in the warehouse."""

    exit_code = 17

    __str__ = MergePipeError.__str__


class CommitConflictError(MergePipeError):
    """Another writer published first; `expected` and `found` name the versions."""

    exit_code = 18


class CorruptionError(MergePipeError):
    """Stored bytes are not the bytes that were written."""

    exit_code = 19


class DamagedLayerError(CorruptionError):
    """A merged layer is damaged where it is stored; the next try makes it again."""

    exit_code = 25


class DamagedPackError(CorruptionError):
    """A pack is damaged where it is stored; the next try does without it."""

    exit_code = 31

    def __init__(self, what: str, *, pack_id: str = "", **parts: str | None) -> None:
        super().__init__(what, **parts)
        self.pack_id = pack_id


class PackVersionError(DamagedPackError):
    """A pack was written by another version of the codec."""

    exit_code = 32


class StorageFullError(MergePipeError):
    """The disk is full or a quota is reached; nothing published was touched."""

    exit_code = 20


class OperatorError(MergePipeError):
    """An operator cannot be applied to what it was given."""

    exit_code = 21


#: What says that a variant of a recipe gives no merge at all.
UNMERGEABLE = (RecipeError, OperatorError, BudgetError, IncompatibleCheckpointsError)


class DeviceError(MergePipeError):
    """The device to merge on is not there, or too small."""

    exit_code = 23


class BusyError(MergePipeError):
    """Another process does the same work right now."""

    exit_code = 22


class ResourceError(MergePipeError):
    """The system gives less memory or fewer threads than the work needs."""

    exit_code = 24


class EvaluationError(MergePipeError):
    """An evaluator cannot be run, fails, or takes too long."""

    exit_code = 27


class MetricsError(EvaluationError):
    """An evaluator prints no metrics, or not those that a gate asks for."""

    exit_code = 33


class GateError(MergePipeError):
    """A gate refuses a snapshot: its metrics are not what the recipe asks for."""

    exit_code = 28


class SearchError(MergePipeError):
    """A search cannot begin, go on, or give what is asked of its front."""

    exit_code = 30


class DefectError(MergePipeError):
    """An exception that nobody foresaw left a verb."""

    exit_code = 70


def not_installed(
    what: str,
    extra: str,
    found: object,
    or_else: str = "",
    kind: type[MergePipeError] = MergePipeError,
    where: str | None = None,
) -> MergePipeError:
    """What is wrong where an extra of ours is not installed; `or_else` says what helps without."""
    install = f"pip install 'mergepipe-pipeline[{extra}]' (in a clone: '.[{extra}]'){or_else}"
    expected = f"the extra `{extra}`"
    return kind(what, where=where, expected=expected, found=str(found), next_step=install)


def causes(error: BaseException, *, besides: bool = False) -> Iterator[BaseException]:
    """An exception and what caused it, each once; `besides`: also what it was raised beside."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__ or (cause.__context__ if besides else None)
