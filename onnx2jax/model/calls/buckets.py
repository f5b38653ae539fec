"""Buckets: inputs padded to a few sizes, so that few shapes are compiled, and outputs cut back.

That is right only where a mask covers what is padded, which nothing in a file says. So the first call in which a
variable is padded runs without padding too, and a difference is an error. So it does with other signs: the largest of
numbers above zero is the same with zeros among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import BucketError, OperatorError
from ...ir.graph import Graph, Node
from ...ops.arrays import is_traced
from ...proto.types import ValueInfo
from ...runtime.values import to_host
from .arguments import override_dims

TOLERANCE: Final = 5e-3
"""Of the largest number: sums in another order, and roundings of 8 and 16 bits that they bring about, are below."""


def checked_buckets(inputs: Sequence[ValueInfo], bucket: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The sizes for each dimension variable, ascending."""
    override_dims(inputs, dict.fromkeys(bucket, 0))  # refuses names that are no dimension variables
    return {name: sorted(sizes) for name, sizes in bucket.items()}


def pad(
    inputs: Sequence[ValueInfo], values: dict[str, Any], bucket: Mapping[str, list[int]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Inputs padded with zeros (texts with empty ones) to the next size of their bucket, and the extents they had.

    What is larger than the largest size stays as it is, and so does every input while a value is traced.
    """
    if not bucket or is_traced(values):
        return values, {}
    extents: dict[str, int] = {}
    padded = dict(values)
    for declared in inputs:
        shape = declared.shape or ()
        if not bucket.keys() & set(shape):
            continue
        array = np.asarray(to_host(values[declared.name]))
        widths = []
        for name, have in zip(shape, array.shape, strict=True):
            want = next((n for n in bucket.get(name, ()) if n >= have), have) if isinstance(name, str) else have
            widths.append((0, want - have))
            if want != have:
                extents[str(name)] = have
        nothing = "" if array.dtype == object else 0
        padded[declared.name] = np.pad(array, widths, constant_values=nothing)
    return padded, extents


@contextmanager
def blamed(extents: Mapping[str, int]) -> Iterator[None]:
    """Operators that refuse shapes inside refuse what was padded, if anything was."""
    try:
        yield
    except OperatorError as e:
        if not extents:
            raise
        raise BucketError(f"{e}\nbucket pads {_quoted(extents)}; leave out what the model does not mask") from e


def cut(outputs: Sequence[ValueInfo], results: tuple[Any, ...], extents: Mapping[str, int]) -> tuple[Any, ...]:
    """Outputs without what padding added to the dimensions they declare.

    By NumPy: JAX would compile the slice anew for each extent.
    """
    if not extents:
        return results

    ends = [[extents.get(d) if isinstance(d, str) else None for d in v.shape or ()] for v in outputs]
    return tuple(np.asarray(to_host(r))[tuple(map(slice, e))] for r, e in zip(results, ends, strict=True))


def prove(
    graph: Graph,
    run: Callable[[Graph, dict[str, Any]], Sequence[Any]],
    call: Callable[[dict[str, Any]], Sequence[Any]],
    values: dict[str, Any],
    padded: dict[str, Any],
    results: Sequence[Any],
    extents: Mapping[str, int],
) -> bool:
    """Whether a call has shown that padding changes nothing: inputs of one number throughout show little.

    Args:
        graph: the model's.
        run: gives the outputs of a graph for its inputs.
        call: gives the outputs of the model for inputs that are padded, cut.
        values: the call's inputs.
        padded: they as ``pad`` gave them.
        results: the outputs for these, cut.
        extents: what ``pad`` gave.

    Raises:
        BucketError: padding changes an output.
    """
    _refuse_differences(graph, run, values, padded, results, run(graph, values), extents)
    read = [v.name for v in graph.inputs if v.name in values and set(v.shape or ()) & set(extents)]
    given = {n: np.asarray(to_host(values[n])) for n in read}
    if not any((v != v.flat[0]).any() for v in given.values() if v.size):
        return False
    turned = {n for n, v in given.items() if jnp.issubdtype(v.dtype, jnp.floating) and not np.isin(v, (0, 1)).all()}
    if turned:  # what is 0 and 1 throughout may be a mask
        values, padded = ({n: -v if n in turned else v for n, v in some.items()} for some in (values, padded))
        wanted = run(graph, values)
        if all(map(_is_finite, wanted)):
            _refuse_differences(graph, run, values, padded, call(padded), wanted, extents)
    return True


def _refuse_differences(
    graph: Graph, run: Any, values: dict[str, Any], padded: dict[str, Any], results: Sequence[Any],
    wanted: Sequence[Any], extents: Mapping[str, int],
) -> None:  # fmt: skip
    names = _quoted(extents)
    for output, ours, want in zip(graph.outputs, results, wanted, strict=True):
        if not alike(ours, want):
            node = _culprit(graph, run, values, padded, output.name)
            raise BucketError(
                f"bucket pads {names}, and output {output.name!r} is another than without: {compared(ours, want)}. "
                f"{f'The difference begins at {node}. ' if node else ''}Padding is right only where the model masks "
                f"it, and cut off only where an output declares the variable: leave {names} out of bucket="
            )


def _is_finite(result: Any) -> bool:
    arrays = (np.asarray(to_host(v)) for v in jax.tree.leaves(result))
    return all(bool(np.isfinite(v).all()) for v in arrays if jnp.issubdtype(v.dtype, jnp.inexact))


def _quoted(extents: Mapping[str, int]) -> str:
    return ", ".join(map(repr, extents))


def alike(ours: Any, want: Any) -> bool:
    """Whether two results are the same but for the order in which numbers were added."""
    pairs = [[np.asarray(to_host(v)) for v in jax.tree.leaves(r)] for r in (ours, want)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same, *pairs))


def _same(ours: np.ndarray, want: np.ndarray) -> bool:
    if ours.shape != want.shape or not jnp.issubdtype(want.dtype, jnp.inexact):
        return np.array_equal(ours, want)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    ours, want = ours.astype(wide), want.astype(wide)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    return np.allclose(ours, want, rtol=0, atol=TOLERANCE * scale + 1e-7, equal_nan=True)


def _culprit(graph: Graph, run: Any, values: dict[str, Any], padded: dict[str, Any], name: str) -> Node | None:
    """The node from which a difference in the value of this name comes: those that it reads do not differ."""
    makers = {n: node for node in graph.nodes for n in node.outputs if n}
    every = replace(graph, outputs=tuple(map(ValueInfo, makers)))
    both = zip(makers, run(every, padded), run(every, values), strict=True)
    other = {n for n, ours, want in both if not alike(_corner(ours, want), want)} | {name}
    node = None
    while name in other and name in makers:
        node = makers[name]
        name = next((n for n in node.reads if n in other), "")
    return node


def _corner(ours: Any, want: Any) -> Any:
    """What a value would be without what padding put behind the ends of its axes."""
    if np.ndim(ours) != np.ndim(want):
        return ours
    return np.asarray(to_host(ours))[tuple(map(slice, np.shape(want)))]


def compared(ours: Any, want: Any) -> str:
    if np.shape(ours) != np.shape(want):
        return f"its shape is {list(np.shape(ours))} instead of {list(np.shape(want))}"
    if not jnp.issubdtype(np.asarray(want).dtype, jnp.inexact):
        return "its values differ"
    ours, want = (np.asarray(r).astype(np.complex128) for r in (ours, want))
    return f"it differs by {np.nanmax(np.abs(ours - want)):.3g}, with values up to {np.nanmax(np.abs(want)):.3g}"
