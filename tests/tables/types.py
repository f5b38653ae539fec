"""Write onnx2jax/ir/types.txt: the types and attributes of each version of each operator, from ONNX's schemas.

python -m tests.tables.types
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from onnx import defs

from onnx2jax.proto.messages import normal_domain

FILE: Final = Path(__file__).resolve().parents[2] / "onnx2jax" / "ir" / "types.txt"
HEAD: Final = """\
# Written by `python -m tests.tables.types` from the schemas of ONNX; a test keeps it current.
# Sets of types, by number; a tensor is called by its element type.
"""
OPERATORS: Final = """\
# Operators with the version that begins a signature: the types of their inputs -> outputs; what each variable may be;
# their attributes. `?` may be left out, `*` any number of one type, `&` any number of any types, and `T T*` at least
# one; without a signature: withdrawn.
"""


def short(kind: str) -> str:
    """``tensor(float)`` as ``float``; the others keep their form, without blanks."""
    while "tensor(" in kind:
        head, _, rest = kind.partition("tensor(")
        inner, _, tail = rest.partition(")")
        kind = head + inner + tail
    return kind.replace(" ", "")


def formal(parameter: defs.OpSchema.FormalParameter) -> str:
    """A parameter as in the file; the required ones of a variadic parameter are listed before it."""
    options = defs.OpSchema.FormalParameterOption
    mark = {options.Single: "", options.Optional: "?", options.Variadic: "*" if parameter.is_homogeneous else "&"}
    kind = short(parameter.type_str)
    if parameter.option == options.Variadic:
        required = kind if parameter.is_homogeneous else f"{kind}&"
        return " ".join([required] * parameter.min_arity + [kind + mark[parameter.option]])
    return kind + mark[parameter.option]


def text() -> str:
    """The text of the file."""
    sets: dict[tuple[str, ...], int] = {}
    rows = []
    for schema in defs.get_all_schemas_with_history():
        title = ".".join(filter(None, (normal_domain(schema.domain), schema.name)))
        row = f"{title} {schema.since_version}"
        if not schema.deprecated:
            variables = []
            for c in schema.type_constraints:
                allowed = tuple(sorted(map(short, c.allowed_type_strs)))
                variables.append(f"{c.type_param_str}={sets.setdefault(allowed, len(sets))}")
            ends = [" ".join(map(formal, parameters)) for parameters in (schema.inputs, schema.outputs)]
            row += f": {ends[0]} -> {ends[1]}; {' '.join(variables)}; {' '.join(sorted(schema.attributes))}"
        rows.append((title, schema.since_version, row))
    lines = [f"{i} {' '.join(allowed)}" for allowed, i in sets.items()]
    return (
        HEAD + "\n".join(lines) + "\n" + OPERATORS + "\n".join(" ".join(row.split()) for *_, row in sorted(rows)) + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
