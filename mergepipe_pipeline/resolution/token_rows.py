"""Re-indexes the vocabulary matrices of all models to the output's tokenizer.

A matrix becomes runs of its own rows; rows that a model lacks (means of others', zeros) are written
once as a small checkpoint in the warehouse and read like any other. Those that the matrix's type
cannot hold stand there as float32, too, and replace the rounded ones: where a model has the mean of
others, what they sum to is zero and not the rounding. `tokenizer` says where rows come from;
weights are read only for the rows that are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.catalog.seals import find_sealed, read_facts, write_sealed
from mergepipe_pipeline.checkpoints.header import build_header, tensor_order
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader, open_reader
from mergepipe_pipeline.checkpoints.stored import Verifier, as_float32, read_stored, torch_dtype
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.layers import beside_rows, vocabulary_axis
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.domain.segments import COARSE_ELEMS
from mergepipe_pipeline.domain.view import Part, RowValues, Run, TensorView, view_of_part
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.facts.input_segments import checkpoint_inputs
from mergepipe_pipeline.resolution.model_files import tokenizer_of
from mergepipe_pipeline.resolution.vocabulary import embedding_rows, refuse_left_tables
from mergepipe_pipeline.tokenizer.build import ModelRows, Pairs, TokenizerBuild, build_tokenizer
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    import torch

#: Of segments that rows are taken from: 128 KiB each of bfloat16.
_HELD_SEGMENTS = 16
#: Types that hold every float32.
_WIDE = frozenset({"F32", "F64"})
#: Of the tensor with rows as float32, in a checkpoint of made rows.
_EXACT = "{}.float32"


def build_for(recipe: Recipe, models: Sequence[Model]) -> TokenizerBuild | None:
    """The output's tokenizer, or None if the recipe leaves it to the template's files."""
    if recipe.tokenizer is None:
        return None
    tokenizers = [tokenizer_of(m, _embedding_rows(m)) for m in models]
    return build_tokenizer(recipe.tokenizer, tokenizers, recipe.base)


def _embedding_rows(model: Model) -> int:
    """Rows of the input embedding; without one (an adapter) no token is beyond them."""
    return embedding_rows(model) or 1 << 62


def with_own_matrices(recipe: Recipe, models: list[Model]) -> tuple[Recipe, list[Model]]:
    """The recipe and its models with a matrix per end of a tied model, where others do not tie.

    With a tokenizer, rows that it lacks come from the others' embeddings in the one and from their
    heads in the other.
    """
    if recipe.tokenizer is None:
        return recipe, models
    separated = list(models)
    # Of each matrix the tensors that it is merged with, once for each output that it goes to.
    uses: dict[tuple[int, str], list[dict[int, str]]] = {}
    for t in recipe.tensors:
        for matrix in dict.fromkeys(t.sources) if _is_table(t) else ():
            uses.setdefault(matrix, []).append(dict(t.sources))
    shared = {m for m, (first, *more) in uses.items() if any(use != first for use in more)}

    def own(m: int, name: str, output: str) -> str:
        if (m, name) not in shared or output in models[m].views:
            return name
        view = replace(separated[m].views[name], name=output)
        separated[m] = replace(separated[m], views={**separated[m].views, output: view})
        return output

    def separate(t: TensorRecipe) -> TensorRecipe:
        inputs = tuple(replace(i, tensor=own(i.model, i.tensor, t.name)) for i in t.inputs)
        base = t.base and replace(t.base, tensor=own(t.base.model, t.base.tensor, t.name))
        return replace(t, inputs=inputs, base=base)

    return replace(recipe, tensors=tuple(map(separate, recipe.tensors))), separated


def _is_table(t: TensorRecipe) -> bool:
    return vocabulary_axis(t.name) is not None


@dataclass(frozen=True)
class Matrix:
    """Tensor `name` of model number `model`, with the rows that it gets.

    `names`: the tensors that it is merged with, by their models' numbers.
    """

    model: int
    name: str
    rows: ModelRows
    names: Mapping[int, str]

    @property
    def axis(self) -> int:
        """The axis of the rows."""
        return vocabulary_axis(self.name) or 0

    @property
    def made_rows(self) -> I64Array:
        """The rows that the model lacks."""
        return np.flatnonzero(self.rows.own < 0)


#: Makes the rows that a model lacks; the numbers are of those that its type cannot hold.
MakeRows = Callable[[Matrix, tuple[int, ...]], Checkpoint]


class Reindexer:
    """Gives models whose vocabulary matrices follow the output's tokenizer."""

    def __init__(self, recipe: Recipe, models: Sequence[Model], build: TokenizerBuild) -> None:
        self._recipe, self._build = recipe, build
        self._models = list(models)
        self._original = list(models)

    def models(self, make_rows: MakeRows | None = None) -> list[Model]:
        """All models, re-indexed. Raises IncompatibleCheckpointsError for one that cannot be.

        Without `make_rows` shapes are right and what is not a model's own row is missing, which is
        enough to tell costs.
        """
        self._refuse_left_tables()
        reindexed: set[tuple[int, str]] = set()
        for t in filter(_is_table, self._recipe.tensors):
            matrices = t.sources
            among = list(dict.fromkeys(m for m, _ in matrices))
            rows = dict(zip(among, self._build.rows_among(among), strict=True))
            names = dict(matrices)
            for m, name in reversed(matrices):
                if (m, name) not in reindexed:
                    reindexed.add((m, name))
                    self._replace(Matrix(m, name, rows[m], names), make_rows)
        return self._models

    def _refuse_left_tables(self) -> None:
        """Raise IncompatibleCheckpointsError for tables of moved rows that no name tells."""
        used: dict[int, dict[str, tuple[int, ...]]] = {}
        for t in self._recipe.tensors:
            for m, name in t.sources:
                used.setdefault(m, {})[name] = self._original[m].views[name].shape
        for m, names in used.items():
            model, own = self._original[m], self._build.rows[m].own
            n_rows = embedding_rows(model)
            stays = n_rows in (None, len(own)) and np.array_equal(own, np.arange(len(own)))
            if not stays and not model.is_partial:
                root = model.checkpoint.root
                refuse_left_tables(names, n_rows, model.checkpoint.stated, root)

    def _view(self, matrix: Matrix) -> TensorView:
        return self._original[matrix.model].views[matrix.name]

    def _ends_early(self, matrix: Matrix) -> bool:
        """Whether a table has no rows for some tokens of its model, and keeps those that it has.

        Raises IncompatibleCheckpointsError for one that would have to give such rows.
        """
        rows, n_rows = matrix.rows, self._view(matrix).shape[matrix.axis]
        beyond = rows.own[n_rows:]
        if not (rows.own >= n_rows).any():
            return False
        named = np.setdiff1d(np.arange(n_rows, len(rows.own)), rows.mean_rows)
        stays = np.array_equal(rows.own[:n_rows], np.arange(n_rows))
        if stays and (beyond[named - n_rows] >= n_rows).all():
            return True
        raise self._lacks_rows(matrix.model, matrix.name, n_rows, int(rows.own.max()))

    def _lacks_rows(self, m: int, name: str, n_rows: int, at: int) -> IncompatibleCheckpointsError:
        return IncompatibleCheckpointsError(
            "A table of the vocabulary has no rows for some of its model's tokens",
            where=f"{self._original[m].name}, tensor {name}",
            expected=f"a row for each token, or tokens that keep their ids up to {n_rows - 1}",
            found=f"{n_rows} rows, and a token with id {at}",
            next_step="leave out `tokenizer_source` and `tokenizer`, or give the table as many "
            "rows as the embedding has",
        )

    def _replace(self, matrix: Matrix, make_rows: MakeRows | None) -> None:
        m, name, names, axis = matrix.model, matrix.name, matrix.names, matrix.axis
        model, view, own = self._models[m], self._view(matrix), matrix.rows.own
        if view.low_rank or view.runs:
            raise IncompatibleCheckpointsError(
                "A vocabulary matrix with an adapter on it cannot be re-indexed",
                where=f"{model.name}, tensor {name}",
                expected="stored rows",
                found="a low-rank update",
                next_step="merge the adapter into its base first, or leave out the tokenizer",
            )
        if view.stored and self._ends_early(matrix):
            return
        shape = _with_rows(view.shape, axis, len(own))
        note = f"{name}@{sha256_hex(own.tobytes())[:16]}"
        variant = f"{model.variant}; {note}"
        if not view.stored:  # the base's rows, which follow the tokenizer, too
            base = list(names)[-1]
            shape = self._models[base].views[names[base]].shape
            views = {**model.views, name: replace(view, shape=shape)}
            self._models[m] = replace(model, views=views, variant=variant)
            return
        matrix = self._with_stored_sources(matrix)
        self._refuse_partial_sources(matrix)
        made_rows = matrix.made_rows
        checkpoints, parts = list(model.checkpoints), list(view.stored)
        exact: RowValues | None = None
        if len(made_rows) and make_rows is not None:
            rounded = self._rounded_rows(matrix)
            checkpoint = make_rows(matrix, rounded)
            source = len(checkpoints)
            parts.append(Part(source, checkpoint.by_name[name]))
            if rounded:
                exact = RowValues(Part(source, checkpoint.by_name[_EXACT.format(name)]), rounded)
            checkpoints.append(checkpoint)
        width = view.numel // max(1, view.shape[axis])
        runs = _runs(own, made_rows if len(parts) > 1 else made_rows[:0], width)
        new = replace(view, shape=shape, stored=tuple(parts), runs=runs, low_rank=exact)
        views = {**model.views, name: new}
        self._models[m] = replace(
            model, checkpoints=tuple(checkpoints), views=views, variant=variant
        )

    def _with_stored_sources(self, matrix: Matrix) -> Matrix:
        """The rows of a tokenizer's owner that leaves the matrix as it is are its base's."""
        source = self._recipe.tokenizer.source if self._recipe.tokenizer else None
        names = matrix.names
        if not isinstance(source, int) or source not in names:
            return matrix
        if self._original[source].views[names[source]].stored:
            return matrix
        base = list(names)[-1]
        patches = {
            row: tuple((base if k == source else k, at) for k, at in pairs)
            for row, pairs in matrix.rows.patches.items()
        }
        return replace(matrix, rows=replace(matrix.rows, patches=patches))

    def _refuse_partial_sources(self, matrix: Matrix) -> None:
        """Rows made for one model come from models that have the matrix as values."""
        names, patches = matrix.names, matrix.rows.patches
        # The highest row of each model.
        needed = dict(sorted(pair for pairs in patches.values() for pair in pairs))
        for k, at in needed.items():
            view = self._original[k].views[names[k]]
            n_rows = view.shape[vocabulary_axis(names[k]) or 0]
            if at >= n_rows:
                raise self._lacks_rows(k, names[k], n_rows, at)
            if not view.stands_alone:
                raise IncompatibleCheckpointsError(
                    "A token's row is to come from an adapter or a delta that has no such rows",
                    where=f"{self._original[k].name}, tensor {names[k]}",
                    expected="a model with an embedding of its own",
                    found="differences from the base's",
                    next_step="name another model as the token's source",
                )

    def _rounded_rows(self, matrix: Matrix) -> tuple[int, ...]:
        """The made rows that the matrix's type cannot hold: means, and rows of another type."""
        view, rows, names = self._view(matrix), matrix.rows, matrix.names
        # A delta's rows are differences, which no value can replace.
        is_matrix = len(view.shape) == 2 and not vocabulary_axis(view.name)
        if view.is_delta or view.dtype in _WIDE or not is_matrix:
            return ()

        def is_held(sources: Pairs) -> bool:
            dtypes = {self._original[k].views[names[k]].dtype for k, _ in sources}
            return len(sources) < 2 and dtypes <= {view.dtype}

        patched = [row for row, sources in rows.patches.items() if not is_held(sources)]
        return tuple(sorted([*patched, *rows.mean_rows.tolist()]))


def _with_rows(shape: tuple[int, ...], axis: int, n_rows: int) -> tuple[int, ...]:
    return (*shape[:axis], n_rows, *shape[axis + 1 :])


def _runs(own: I64Array, made_rows: I64Array, width: int) -> tuple[Run, ...]:
    """Runs of rows that follow each other in the model's matrix (part 0) or the made rows (1)."""
    part = np.zeros(len(own), dtype=np.int64)
    at = own.copy()
    part[made_rows] = 1
    at[made_rows] = np.arange(len(made_rows))
    present = (own >= 0) | (part == 1)
    breaks = np.ones(len(own), dtype=np.bool_)
    breaks[1:] = (part[1:] != part[:-1]) | (at[1:] != at[:-1] + 1) | (present[1:] != present[:-1])
    starts = np.flatnonzero(breaks)
    stops = np.append(starts[1:], len(own))
    return tuple(
        Run(int(a) * width, int(part[a]), int(at[a]) * width, int(b - a) * width)
        for a, b in zip(starts, stops, strict=True)
        if present[a]
    )


class MadeRows:
    """Rows that models lack, each written once as a small checkpoint of the warehouse."""

    def __init__(self, warehouse: Warehouse, models: Sequence[Model]) -> None:
        self._warehouse, self._models = warehouse, models

    def checkpoint(self, matrix: Matrix, rounded: tuple[int, ...]) -> Checkpoint:
        """A checkpoint with the rows that a model lacks, in order; written if it is not there.

        Those of `rounded` are in a second tensor as float32.
        """
        name, rows, names = matrix.name, matrix.rows, matrix.names
        identity = [
            # Patches name models by number: this says which models they are.
            [[k, self._models[k].model_id, names[k]] for k in sorted(names)],
            matrix.model,
            name,
            {str(r): rows.patches.get(int(r)) for r in matrix.made_rows},
            sha256_hex(rows.own.tobytes()),
            rows.mean_rows.tolist(),
            *([rounded] if rounded else []),
        ]
        folder, stem = self._warehouse.token_rows, digest_json(identity)[:24]
        path = next((p for p in find_sealed(folder, stem) if read_facts(p, len)), None)
        if path is None:
            view = self._models[matrix.model].views[name]
            shape = _with_rows(view.shape, matrix.axis, len(matrix.made_rows))
            values = self._values(matrix, view).reshape(shape)
            at = np.searchsorted(matrix.made_rows, rounded)
            data = _made_file(name, view.dtype, values, at)
            path = write_sealed(folder, stem, data, suffix="safetensors")
        # The name enters snapshots' lineage, where only content may.
        return open_checkpoint(str(path), f"token-rows-{sha256_hex(path.read_bytes())[:16]}")

    def _values(self, matrix: Matrix, view: TensorView) -> torch.Tensor:
        """The made rows as float32 [made rows, *width]."""
        import torch

        rows, made_rows = matrix.rows, matrix.made_rows
        width = beside_rows(matrix.name, view.shape) or ()
        with _RowReader(self._warehouse, self._models) as reader:
            values = torch.zeros((len(made_rows), *width))
            index_by_row = {int(r): i for i, r in enumerate(made_rows)}
            # Rows that a delta's model lacks its base lacks, too: they do not differ.
            for r, sources in () if view.is_delta else rows.patches.items():
                for k, at in sources:
                    own = self._models[k].views[matrix.names[k]]
                    values[index_by_row[r]] += reader.row(own, k, at)
                if sources:
                    values[index_by_row[r]] /= len(sources)
            means = [int(r) for r in rows.mean_rows]
            if means:
                others = [i for r, i in index_by_row.items() if r not in set(means)]
                total = values[others].double().sum(0)
                for at in rows.own[rows.own >= 0].tolist():
                    total += reader.row(view, matrix.model, at)
                mean = total / (len(rows.own) - len(means))
                values[[index_by_row[r] for r in means]] = mean.float()
        return values


def _made_file(name: str, dtype: str, values: torch.Tensor, rounded: I64Array) -> bytes:
    """A safetensors file of rows in `dtype`, and as float32 of those with a number in `rounded`."""
    import torch

    tensors = {name: (dtype, values.to(torch_dtype(dtype)))}
    if len(rounded):
        tensors[_EXACT.format(name)] = ("F32", values[torch.from_numpy(rounded)])
    made = [(n, dtype, tuple(t.shape)) for n, (dtype, t) in tensors.items()]
    data = [tensors[n][1].view(torch.uint8).numpy().tobytes() for n, _, _ in tensor_order(made)]
    return build_header(made, {"format": "pt"}) + b"".join(data)


class _RowReader:
    """Single rows of stored matrices of several models, as float32, from verified segments.

    Rows come in any order; a few segments are held, those used last.
    """

    def __init__(self, warehouse: Warehouse, models: Sequence[Model]) -> None:
        self._warehouse, self._models, self._stack = warehouse, models, ExitStack()
        self._readers: dict[tuple[int, int], BlockReader] = {}
        self._verifiers: dict[tuple[int, TensorEntry], tuple[TensorView, Verifier]] = {}
        self._segment = lru_cache(maxsize=_HELD_SEGMENTS)(self._read_segment)

    def __enter__(self) -> _RowReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def row(self, view: TensorView, model: int, at: int) -> torch.Tensor:
        """Row `at` of a view of a model. Raises CorruptionError."""
        part = view.stored[0]
        width = part.numel // part.shape[vocabulary_axis(view.name) or 0]
        first, size = at * width // COARSE_ELEMS, itemsize(part.dtype)
        last = -(-(at + 1) * width // COARSE_ELEMS)
        segments = [self._segment(model, part, number) for number in range(first, last)]
        raw = segments[0] if len(segments) == 1 else np.concatenate(segments)
        start = (at * width - first * COARSE_ELEMS) * size
        return as_float32(raw[start : start + width * size], part.dtype).view(
            beside_rows(view.name, view.shape) or ()
        )

    def _read_segment(self, model: int, part: Part, number: int) -> U8Array:
        whole, verifier = self._verifier(model, part)
        start = number * COARSE_ELEMS
        stop = min(start + COARSE_ELEMS, whole.numel)
        raw = np.empty((stop - start) * itemsize(whole.dtype), np.uint8)
        read_stored(partial(self._reader, model), whole, start, stop, raw.data, verifier.check)
        return raw

    def _verifier(self, model: int, part: Part) -> tuple[TensorView, Verifier]:
        key = (model, part.entry)
        if key not in self._verifiers:
            checkpoints = self._models[model].checkpoints
            inputs = checkpoint_inputs(self._warehouse, checkpoints).of_part(part)
            whole = view_of_part(part, part.entry.name)
            self._verifiers[key] = whole, Verifier(whole, inputs)
        return self._verifiers[key]

    def _reader(self, model: int, source: int) -> BlockReader:
        key = (model, source)
        if key not in self._readers:
            checkpoint = self._models[model].checkpoints[source]
            self._readers[key] = self._stack.enter_context(open_reader(checkpoint))
        return self._readers[key]
