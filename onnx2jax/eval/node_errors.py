"""Errors at a node in a user's terms: the node, its operands, the fix."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..errors import DeviationWarning, KnownValueError, OnnxError, OperatorError, RandomKeyError, UnsupportedError
from ..ir.graph import Function, Graph, Node
from ..ir.patterns import reader_beside_scatters
from ..ir.signatures import type_mismatch, type_of_array
from ..limits import LARGEST_ARRAY
from ..ops.arrays import is_known, is_string, is_traced
from ..ops.registry import PADDED, Operator, resolve
from ..proto.types import ValueInfo

ON_PURPOSE: Final = (ValueError, NotImplementedError, OverflowError, MemoryError, jax.errors.JaxRuntimeError)
"""Exceptions by which operators, JAX and NumPy refuse operands."""
FOREIGN: Final = (TypeError, IndexError, ArithmeticError)
"""Exceptions of JAX and NumPy; raised by this library, they are bugs unless operands have a wrong type or rank."""
LIBRARY_FIX: Final = (
    "If the model runs elsewhere, the inputs given here do not fit it: compare shapes and dtypes with model.inputs."
)
"""The fix for errors of JAX and NumPy, which do not know the model."""
THEIRS: Final = "{} raised this, a function of your own: correct it there, or what it is given."
"""The fix for errors of JAX and NumPy in a function of the user's."""
OURS: Final = str(Path(__file__).parents[1])
PACKAGE: Final = __name__.partition(".")[0]


def node_error(e: Exception, node: Node, values: Sequence[Any], on_host: bool) -> Exception:
    """The error of a node in a user's terms; a bug of this library or of a user's operator is returned unchanged."""
    if isinstance(e, KnownValueError) and e.node is None:  # the operator's own
        operator = node.target if isinstance(node.target, Operator) else None
        named = filter(None, node.inputs)
        if operator is not None and operator.relative:  # of these the values are needed, not of the data
            named = filter(None, (n for i, n in enumerate(node.inputs) if operator.parameter(i) in operator.relative))
        return KnownValueError(f"{node}: {e}{bound_fix(node)}", tuple(named), node)
    if isinstance(e, OnnxError):
        if isinstance(node.target, Function) or node.graphs or node.differentiates:
            if not node.is_private:
                e.add_note(f"inside {node}")
            if node.differentiates and on_host:
                return OperatorError(f"{node} meets a node on its way that has no derivative\n{e}")
            if isinstance(e, KnownValueError):
                e.values, e.node = node.reads, node  # in terms of the graph outside
        return e
    if isinstance(e, FloatingPointError):  # jax.debug_nans
        e.add_note(f"inside {node}")
        return e
    theirs = users_function(node)
    if isinstance(e, jax.errors.JAXTypeError):
        # The body looked at a traced value: conversion to int, bool or NumPy.
        return _needs_jax(node, theirs) if theirs else needs_known(node, "an operand", node.inputs)
    if isinstance(e, NotImplementedError):
        fix = f"\n{THEIRS.format(theirs)}" if theirs and _raised_by_a_library(e) else ""
        return UnsupportedError(f"{node}: {e}\n{operands(node, values)}{fix}")
    wrong = "" if theirs else _misfit(node, values, e)
    fix = wrong or ((THEIRS.format(theirs) if theirs else LIBRARY_FIX) if _raised_by_a_library(e) else "")
    if wrong or isinstance(e, ON_PURPOSE) or (isinstance(e, FOREIGN) and fix):
        if any(map(is_string, values)) and not is_known(values):
            return needs_known(node, "an operand beside strings", node.inputs)
        text = str(e) if theirs else _explained(e)
        return OperatorError("\n".join(filter(None, (f"{node}: {text}", operands(node, values), fix))))
    e.add_note(f"inside {node}\n{operands(node, values)}")
    return e


_EXPLAINED: Final = (
    (
        r"could not be broadcast|[Ii]ncompatible (shapes|types) for broadcasting|Cannot broadcast to",
        "the shapes {shapes}do not broadcast against each other",
    ),
    (r"contracting dimensions|gufunc signature|gufunc core", "the inner extents of the matrices differ"),
    (r"values to unpack|axes don't match array", "an operand or attribute has a wrong number of axes or entries"),
    (r"division by zero|modulo by zero", "an attribute or extent that divides is 0"),
    (r"index arguments to dynamic_(update_)?slice", "a position must be an integer"),
    (r"requires arguments to have (the same|matching|equal) dtypes", "the operands must have one element type"),
    (r"Cannot (do|take).*empty axis|Slice size at index", "indices into an axis without elements"),
    (r"transpose permutation|repeated axis in transpose", "perm must name each axis of the operand once"),
    (r"[Cc]annot reshape array", "an operand has too few or too many elements: {text}"),
)
"""What messages of NumPy and JAX mean for a node, whose user has called neither."""


def _explained(e: Exception) -> str:
    """The message of an exception, in terms of the node's operands where NumPy and JAX speak of their own."""
    text = str(e)
    for pattern, meaning in _EXPLAINED:
        if re.search(pattern, text):
            shapes = list(dict.fromkeys(re.findall(r"\([\d, ]*\)", text)))
            return meaning.format(shapes=f"{' and '.join(shapes)} " if len(shapes) > 1 else "", text=text)
    return text


def check_special_values(outputs: Sequence[ValueInfo], results: Sequence[Any]) -> None:
    """Check what NumPy computed for ``jax.debug_nans`` and ``debug_infs``, as JAX does for its own results.

    Raises:
        FloatingPointError: an output has such a value.
    """
    for output, result in zip(outputs, results, strict=False) if compat.checks_values() else ():
        if isinstance(result, np.ndarray) and (what := compat.rejected_value(result)):
            raise FloatingPointError(
                f"invalid value ({what}) in output {output.name!r}; to find its node, look at model.values(...)"
            )


def check_memory_of_outputs(graph: Graph, results: Iterable[Any]) -> None:
    """Raise OperatorError if the results of a program on a CPU take more than LARGEST_ARRAY bytes for each process.

    An array inside a program may be larger, because XLA fuses it into its reader; an output is in memory as it is.
    Without the refusal the system ends the process.
    """
    arrays = (v for v in jax.tree.leaves(list(results)) if hasattr(v, "dtype"))
    sizes = [n * v.dtype.itemsize for v in arrays if isinstance(n := math.prod(v.shape), int)]  # not of jax.export
    limit = LARGEST_ARRAY * jax.process_count()
    if (needed := sum(sizes)) > limit and jax.default_backend() == "cpu":
        raise OperatorError(
            f"the {len(sizes)} outputs of {graph.name!r} take {needed:.1e} bytes together, and there are {limit:.1e} "
            "bytes of memory: choose smaller extents (--dim name=size, dims={name: size}, or inputs), or "
            "fewer outputs, model.cut(outputs=[...])"
        )


def _misfit(node: Node, values: Sequence[Any], e: Exception) -> str:
    """What is wrong with a node's operands; empty if nothing is found."""
    shapes = {i: v.shape for i, v in enumerate(values) if hasattr(v, "shape")}
    lowest = min(map(len, shapes.values()), default=0)
    if isinstance(e, IndexError) and shapes and (lowest == 0 or (lowest == 1 and "tuple index" in str(e))):  # of shapes
        inputs = _inputs(i for i, s in shapes.items() if len(s) == lowest)
        return f"{inputs} of rank {lowest}: {node.title} reads more axes"
    if isinstance(e, ZeroDivisionError) and any(0 in s for s in shapes.values()):
        return f"{_inputs(i for i, s in shapes.items() if 0 in s)} without elements: {node.title} divides by an extent"
    return type_mismatch(node.title, node.opset, list(map(type_of_array, values)))


def _inputs(positions: Iterable[int]) -> str:
    """Inputs, one of which does not fit."""
    return f"input {' or '.join(map(str, positions))}"


def users_function(node: Node) -> str:
    """The function of the user's that a node calls, given to ``replace`` or registered; empty for operators of ours."""
    function = node.attributes.get("function")
    if not callable(function):
        function = getattr(node.target, "function", None)
        if function is None or (function.__module__ or "").partition(".")[0] in (PACKAGE, "functools"):
            return ""
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _raised_by_a_library(e: Exception) -> bool:
    """Whether an error was raised by JAX or NumPy rather than by this package."""
    if type(e).__module__.startswith("numpy") or any("JAX has removed" in note for note in getattr(e, "__notes__", ())):
        return True
    *_, (frame, _) = walk_tb(e.__traceback__)
    return not frame.f_code.co_filename.startswith(OURS)


def operands(node: Node, values: Sequence[Any]) -> str:
    """Shapes and dtypes of a node's operands, for messages."""

    def describe(value: Any) -> str:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
        if isinstance(value, list):
            return f"sequence of {len(value)}"
        return "absent" if value is None else type(value).__name__

    shown = ", ".join(f"{name or '-'}: {describe(v)}" for name, v in zip(node.inputs, values, strict=False))
    return f"operands: {shown or 'none'}"


def needs_known(node: Node, parameter: str, names: Sequence[str]) -> KnownValueError:
    names = tuple(filter(None, names))
    return KnownValueError(
        f"{node}: {parameter} (value {' or '.join(map(repr, names))}) must be known before compiling, because a "
        "shape or the course of the computation depends on it, but it is traced.\n"
        "Call the model itself (model(x) or model.run(...)), which finds such values by itself; or pin the input it "
        f"comes from: convert(..., static={{'input name': value}}){bound_fix(node)}",
        names,
        node,
    )


def _needs_jax(node: Node, function: str) -> KnownValueError:
    """The error of a user's function that converts a traced value to NumPy, a number or a bool."""
    return KnownValueError(
        f"{node}: {function} converts a value to NumPy, a number or a bool, which is traced in jit, grad or vmap.\n"
        "Write the function with jax.numpy: jnp.maximum for np.maximum, jnp.where(condition, a, b) for if; or call the "
        "model itself, outside of them, which gives the function NumPy arrays",
        tuple(filter(None, node.inputs)),
        node,
    )


def bound_fix(node: Node) -> str:
    """The fix for nodes whose results can be padded, and are not."""
    if node.domain or (padded := resolve(PADDED, node.op_type, 1)) is None or node.target is padded:
        return ""
    return f"; or bound the result: convert(..., max_size={{{node.name!r}: n}})"


def warn(node: Node, warned: set[str], text: str) -> None:
    """Warn once per model that an operator follows ONNX where other implementations differ."""
    if node.op_type not in warned:
        warned.add(node.op_type)
        warnings.warn(f"{node}: {text}", DeviationWarning, stacklevel=2)


def forward_only(node: Node, values: Any, why: str) -> Any:
    """The values; reverse-mode differentiation raises an error that says why."""
    error = partial(KnownValueError, f"{node}: {why}", tuple(filter(None, node.inputs)), node)
    return jax.tree.map(lambda v: compat.forward_only(v, error) if is_traced(v) else v, values)


def dropped(node: Node, graph: Graph) -> None:
    """Raise KnownValueError if not only scatters, which drop padding, read the node's results."""
    if reader := reader_beside_scatters(graph, node):
        error = needs_known(node, "'X'", node.inputs[:1])
        error.add_note(
            f"{reader} reads its result; if scatters alone did, by rows, it would be padded to the size of 'X'"
        )
        raise error


class NoKey:
    """Placeholder for a missing PRNG key; using it raises."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        raise RandomKeyError(f"{self._node} draws random numbers: pass a key, model.apply(..., rng=jax.random.key(0))")
