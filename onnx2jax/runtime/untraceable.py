"""Errors of a call inside a caller's jit, grad or vmap, for graphs that cannot be one program.

y = NonZero(x)      jit(model)(x): NonZero needs the value of 'x': fix it, or leave out what depends on y
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import KnownValueError
from ..eval.node_errors import users_function
from ..eval.values import is_jax
from ..ir import analysis
from ..ir.graph import Graph
from ..ops.cast import is_float
from ..proto.types import FLOAT6, TensorType
from .specialise import NeedsHost


def untraceable(
    cut: NeedsHost, graph: Graph, names: Collection[str], values: Mapping[str, Any], static: Collection[str]
) -> KnownValueError:
    """The error for nodes that have to run on the host, with its fixes: inputs to fix, or where to cut the graph.

    Args:
        cut: the nodes, and why.
        graph: what was traced.
        names: of values in the caller's graph, where it could be cut.
        values: of the call, by name.
        static: names of inputs that are fixed already.
    """
    if isinstance(error := cut.__cause__, KnownValueError):
        if error.node is None or not users_function(error.node):
            error.message += _fixes(error, graph, names, static)
        return error
    unknown = [v.name for v in graph.inputs if not is_jax(values.get(v.name))]
    what = "strings" if "strings" in cut.reason else "its value"
    values_of = ", ".join(f"{n!r}: {what}" for n in unknown)
    fix = f", or fix {', '.join(unknown)}: convert(..., static={{{values_of}}})" if unknown else ""
    if not unknown and any({v.name for v in graph.outputs}.intersection(n.outputs) for n in cut.nodes):
        fix = ", or leave that output out: model.cut(outputs=[...])"
    lacks = f". {FLOAT6}" if "float6" in cut.reason else ""
    return KnownValueError(
        f"{cut.reason}, which JAX cannot trace: call the model outside jit, grad and vmap{fix}{lacks}"
    )


def untraceable_output(name: str, dtype: Any) -> KnownValueError:
    """The error for an output of a type that only NumPy has."""
    return KnownValueError(
        f"output {name!r} is {dtype}, which JAX cannot trace: call the model outside jit, grad and vmap, or leave the "
        f"output out: model.cut(outputs=[...]). {FLOAT6}"
    )


def _fixes(error: KnownValueError, graph: Graph, names: Collection[str], static: Collection[str]) -> str:
    """The end of the message about a traced value: inputs to fix that are not ``static``, or a cut."""
    types = {v.name: v.type for v in graph.inputs if v.name not in static}
    sources = sorted(analysis.sources(graph.nodes, error.values) & types.keys())
    ends = analysis.ends_before(graph, error.node, names) if error.node else []
    tensors = {n: kind for n in sources if isinstance(kind := types[n], TensorType)}
    fixed = [n for n in sources if n not in tensors or not is_float(tensors[n].dtype)] or ([] if ends else sources)
    fix = f": convert(..., static={{{', '.join(f'{n!r}: value' for n in fixed)}}})" if fixed else ""
    cut = f"\n{'or ' * bool(fix)}leave out what depends on it: model.cut(outputs={ends})" if ends else ""
    return f"\nit is computed from: {', '.join(map(repr, sources)) or 'no input'}{fix}{cut}"
