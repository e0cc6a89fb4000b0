"""Commands that make results without a recipe, as `convert` and `moe`, and the list of methods."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, counted, table, verb
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.text import four_digits, size

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.operator import OperatorSchema
    from mergepipe_pipeline.tools.result import Made


_OUT = click.option(
    "--out", type=click.Path(), help="Write a plain folder here (default: a snapshot)."
)
_DTYPE = click.Choice(["float32", "float16", "bfloat16"])
#: What is told of each side of a transplanted vocabulary.
_TRANSPLANTED = (
    "same",
    "bytes_and_prefixes",
    "approximated",
    "without_row",
    "residual_mean",
    "residual_most",
)
_WHERE = click.Choice(["no", "embed", "lm_head", "yes"])
_WIDTH = 92


@click.command()
@click.argument("path", type=click.Path())
@_OUT
@click.option("--dtype", type=_DTYPE, help="Of GGUF alone: the type of every tensor.")
@verb
def convert(console: Console, path: str, out: str | None, dtype: str | None) -> None:
    """Write pickled weights (.bin, .pt, .pth, .ckpt) or a GGUF file as safetensors.

    PATH is a folder, or one file. Nothing of a pickle is run: a process of its own with bounds of
    memory and time reads it. GGUF needs the extra `gguf`; its tensors keep their types, and
    quantised ones become bfloat16.
    """
    from mergepipe_pipeline.dtypes import code_from_name
    from mergepipe_pipeline.verbs.tools import convert as run

    code = None if dtype is None else code_from_name(dtype, "--dtype")
    done = run(console.place, path, out, console.progress, dtype=code)
    details = done.details
    lines = [
        f"{counted(details['tensors'], 'tensor')} from {counted(len(details['files']), 'file')}"
    ]
    if "stored_as" in details:
        kinds = ", ".join(f"{n} {kind}" for kind, n in details["stored_as"].items())
        lines += [f"  stored as {kinds}; written {details['written_as']}"]
        lines += [f"  {counted(details['rounded'], 'number')} rounded, {details['rounding']}"]
        _show(console, done, *lines)
        return
    lines += [f"  tied to the embedding, not stored: {name}" for name in details["tied"]]
    lines += [f"  same memory as {a}, stored too: {b}" for b, a in details["shared"].items()]
    lines += [f"  no tensor, left out: {name}" for name in details["left_out"]]
    _show(console, done, *lines)


@click.command("extract-lora")
@click.option("--model", required=True, help="The fine-tune: a name, a path, or a cached model.")
@click.option("--base", required=True, help="The base that it was trained from.")
@_OUT
@click.option("--rank", type=click.IntRange(min=1), help="Rank of every module (default: 32).")
@click.option(
    "--energy",
    type=click.FloatRange(0, 1, min_open=True),
    help="Instead: as much rank as catches this share of each change's squared norm.",
)
@click.option("--max-rank", type=click.IntRange(min=1), help="The most that --energy may take.")
@click.option(
    "--modules", multiple=True, metavar="REGEX", help="Adapt these alone (default: all linear)."
)
@click.option(
    "--save",
    multiple=True,
    metavar="MODULE",
    help="Keep whole, as embed_tokens or input_layernorm.",
)
@click.option(
    "--dtype",
    type=_DTYPE,
    default="float32",
    show_default=True,
    help="Type of the factors.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random sketches.")
@verb
def extract_lora(console: Console, dtype: str, **given: Any) -> None:
    """Write what a fine-tune changed as a PEFT adapter to its base."""
    from mergepipe_pipeline.dtypes import code_from_name
    from mergepipe_pipeline.verbs.tools import extract_lora as run

    code = code_from_name(dtype, "--dtype")
    done = run(console.place, **given, dtype=code, progress=console.progress)
    tensors = done.details["tensors"]
    rows = [
        (t["tensor"], t["kept"], t["rank"] or "-", four_digits(t["norm"]), f"{t['error']:.4f}")
        for t in tensors
    ]
    parts = (t["tensor"].split(".") for t in tensors if t["kept"] == "no")
    left_out = ", ".join(sorted({(part[-2:-1] or part)[0] for part in parts}))
    _show(
        console,
        done,
        *table(("tensor", "kept as", "rank", "|change|", "error"), rows),
        "",
        f"error of all changes together: {four_digits(done.details['error'])} "
        "(‖change − kept‖ / ‖change‖)",
        *([f"changed and not kept (--save keeps them whole): {left_out}"] if left_out else []),
    )


@click.command()
@click.argument("config", type=click.Path())
@_OUT
@click.option("--seed", type=int, default=0, show_default=True, help="Of random gates and noise.")
@verb
def moe(console: Console, config: str, out: str | None, seed: int) -> None:
    """Make a mixture of experts from dense models, by mergekit-moe's YAML."""
    from mergepipe_pipeline.verbs.tools import moe as run

    done = run(console.place, config, out, seed=seed, progress=console.progress)
    _show(console, done, counted(done.details["experts"], "expert"))


@click.command("transplant-tokenizer")
@click.option("--model", required=True, help="The model that gets another tokenizer.")
@click.option("--donor", required=True, help="The model whose tokenizer it gets.")
@_OUT
@click.option(
    "--method",
    type=click.Choice(["omp", "nearest"]),
    default="omp",
    show_default=True,
    help="How rows of new tokens are made from those of shared ones.",
)
@click.option(
    "-k", "k", type=click.IntRange(min=1), default=64, show_default=True, help="Of how many."
)
@click.option(
    "--prefix-match",
    "prefixes",
    type=_WHERE,
    default="no",
    show_default=True,
    help="Where the longest token that begins a new one gives its row.",
)
@click.option(
    "--byte-match",
    "bytes_",
    type=_WHERE,
    default="no",
    show_default=True,
    help="Where a single byte's fallback token (<0x0A>) gives its row.",
)
@verb
def transplant_tokenizer(console: Console, **given: Any) -> None:
    """Give a model the tokenizer of another.

    There is a row for every token; all else stays as it is.
    """
    from mergepipe_pipeline.verbs.tools import transplant_tokenizer as run

    done = run(console.place, **given, progress=console.progress)
    rows = [
        (place, *(four_digits(t[key]) for key in _TRANSPLANTED))
        for place in ("embed", "lm_head")
        if (t := done.details.get(place))
    ]
    headers = ("rows of", *(key.replace("_", " ") for key in _TRANSPLANTED))
    _show(console, done, f"{done.details['tokens']} tokens", *table(headers, rows))


def _show(console: Console, done: Made, *lines: str) -> None:
    console.show(done.summary(), *lines, f"{size(done.nbytes)} in {done.path}")


@click.command()
@click.argument("name", required=False)
@verb
def ops(console: Console, name: str | None) -> None:
    """List merge methods with formula, parameters and source."""
    from mergepipe_pipeline.operators import OPERATORS
    from mergepipe_pipeline.recipe.problems import suggest

    if name not in (None, *OPERATORS):
        near = suggest(name or "", OPERATORS).removeprefix("; ")
        raise NotFoundError(
            "No such merge method",
            where="ops",
            found=repr(name),
            expected="one of " + ", ".join(sorted(OPERATORS)),
            next_step=near or "see `mergepipe ops`",
        )
    schemas = [OPERATORS[n].schema for n in ([name] if name else sorted(OPERATORS))]
    lines = [line for schema in schemas for line in (*_block(schema), "")]
    console.show([asdict(schema) for schema in schemas], *lines[:-1])


def _block(schema: OperatorSchema) -> list[str]:
    fewest, most = schema.experts
    count = str(fewest) if fewest == most else f"{fewest} or more" if most is None else f"{most}"
    base = {"required": "a base and", "optional": "a base or none, and", "none": "no base;"}
    lines = [schema.name]
    lines += wrap(schema.formula, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines.append(f"  takes {base[schema.base]} {count} {'model' if count == '1' else 'models'}")
    for p in schema.parameters:
        default = "required" if p.default is None else str(p.default).lower()
        where = "per model" if p.scope == "model" else "method"
        kind = "|".join(p.choices) if p.choices else p.kind
        lines.append(f"  {p.name:<18} {where:<10} {kind:<15} {default:<9} {p.help}")
    return [*lines, f"  {schema.reference}"]
