"""Command about merge methods: `ops`."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, verb

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter

_WIDTH = 92


@click.command()
@click.argument("name", required=False)
@verb
def ops(console: Console, name: str | None) -> None:
    """List merge methods with formula, parameters, defaults and source; or one of them."""
    from mergepipe_pipeline.verbs.operators import operators

    schemas = operators(name)
    blocks = [_block(schema) for schema in schemas]
    lines = [line for block in blocks for line in (*block, "")]
    console.show([asdict(schema) for schema in schemas], *lines[:-1])


def _block(schema: OperatorSchema) -> list[str]:
    fewest, most = schema.experts
    count = str(fewest) if fewest == most else f"{fewest} or more" if most is None else f"{most}"
    base = {"required": "a base and", "optional": "a base or none, and", "none": "no base;"}
    lines = [schema.name]
    lines += wrap(schema.formula, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines.append(f"  takes {base[schema.base]} {count} {'model' if count == '1' else 'models'}")
    lines += [f"  {_parameter(p)}" for p in schema.parameters]
    lines.append(f"  {schema.reference}")
    return lines


def _parameter(p: Parameter) -> str:
    default = "required" if p.default is None else str(p.default).lower()
    where = "per model" if p.scope == "model" else "method"
    kind = "|".join(p.choices) if p.choices else p.kind
    return f"{p.name:<18} {where:<10} {kind:<15} {default:<9} {p.help}"
