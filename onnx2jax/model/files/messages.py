"""Messages of ``jax.export`` in a user's terms: the node, what it needs, the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax

from ...errors import OnnxError
from ...ir.graph import Graph
from ...jaxpr.program import Program

PREFIX: Final = "JAX cannot export the model: "
"""The beginning of messages that JAX wrote."""
_INSIDE: Final = "inside "
_MEANINGS: Final = (
    (r"Symbolic dimension comparison '(.+?)' (\S+) '(.+?)' is inconclusive\.?", r"whether \1 \2 \3 depends on extents"),
    (r"Symbolic dimension '(.+?)' used in a context that requires a constant\.?", r"it needs a fixed extent, not \1"),
    (r"Cannot divide (.+?) by (.+?)\.", r"\1 must be a multiple of \2"),
    (r"'_DimExpr' object cannot be interpreted as an integer", "it needs fixed extents"),
    (
        r"MLIR translation rule for primitive '(\w+)' not found for platforms? (.+)",
        r"JAX has no '\1' for \2: leave it out, export(platforms=[...])",
    ),
    (r"multi-platform lowering for (\w+)", r"JAX lowers '\1' for one platform at a time: export(platforms=['cpu'])"),
    (r"serialization of host_callbacks is not yet implemented", "jax.export cannot store calls of Python functions"),
)
"""What messages of JAX mean; the first of a program's primitives in them tells the node."""
_PRIMITIVE: Final = re.compile(r"primitive '(\w+)' not found|multi-platform lowering for (\w+)")
_SYMBOL: Final = re.compile(r"[A-Za-z_]\w*")


def without_internals(text: str) -> str:
    """A message of JAX without scopes, and advice for those who write in JAX."""
    return re.split(r"\n+(?:Using symbolic scope|This error arises for)", text, maxsplit=1)[0]


def in_our_terms(text: str) -> str:
    """A message in which what JAX says of symbolic dimensions and platforms is in a user's terms.

    >>> in_our_terms("Symbolic dimension comparison 'n - 2' > '5' is inconclusive.")
    'whether n - 2 > 5 depends on extents'
    """
    for pattern, meaning in _MEANINGS:
        text = re.sub(pattern, meaning, text)
    return text


@contextmanager
def explained(dimensions: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Errors of the block name the node first, and the dimensions that JAX has to know.

    Args:
        dimensions: the free dimensions by symbol.
    """
    try:
        yield
    except OnnxError as e:
        notes = [n for n in getattr(e, "__notes__", ()) if not n.startswith("---")]  # JAX's, about tracebacks
        before, message = e.message, in_our_terms(e.message)
        if message != before:
            named = {n for m, _ in _MEANINGS[:3] for found in re.finditer(m, before) for n in _SYMBOL.findall(found[0])}
            names = [name for symbol, name in dimensions().items() if symbol in named]
            notes[:0] = [f"fix {n!r}, to an extent of yours: export(dims={{{n!r}: 512}})" for n in names]
        if message.startswith(PREFIX) and (where := next((n for n in notes if n.startswith(_INSIDE)), "")):
            notes.remove(where)
            node, _, operands = where.removeprefix(_INSIDE).partition("\n")
            message = "\n".join(filter(None, (f"{node}: {message.removeprefix(PREFIX)}", operands)))
        e.message = message
        vars(e)["__notes__"] = notes
        raise


def node_of_primitive(text: str, function: Any, arguments: Sequence[Any], graph: Graph) -> str:
    """A note about the first node that a primitive, which a message of JAX names, comes from; empty if unknown."""
    if (found := _PRIMITIVE.search(text)) is None:
        return ""
    names = {node.name: node for node in graph.nodes}

    def scopes(program: Program, around: str) -> Iterator[str]:
        for equation in program.equations:
            scope = f"{around}/{equation.scope}"
            if equation.name in found.groups():
                yield scope
            for inner in equation.inner:
                yield from scopes(inner, scope)

    for scope in scopes(Program.of(jax.make_jaxpr(function)(*arguments)), ""):
        if node := next((n for name, n in names.items() if f"/{name}/" in f"{scope}/"), None):
            return f"{_INSIDE}{node}"
    return ""
