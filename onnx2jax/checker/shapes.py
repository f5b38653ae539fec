"""Checks shapes: evaluates the graphs abstractly, and compares what each operator gives with what the file declares.

A free extent stands for two different numbers, one in each of two evaluations: an extent that is equal in both is a
constant. Nothing is computed but small constants, such as the shape operand of Reshape.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import lax

from .. import compat
from ..errors import KnownValueError
from ..ir.binding import required
from ..ir.graph import Function, Graph, Node, Reference
from ..ops.arrays import is_known, is_traced
from ..ops.registry import UNSHARDED, Operator
from ..proto.mapped import is_lazy
from ..proto.types import SparseTensorType, TensorType, ValueInfo
from .report import Note

LARGEST_KNOWN: Final = 64
"""Elements up to which a constant is known, rather than its type alone."""
DEEPEST: Final = 20
"""Nested calls and graphs that are evaluated."""
MOST_NODES: Final = 20_000
"""Nodes that are evaluated, each once for every call of a function around it; others are unknown."""
REFUSALS: Final = (ValueError, TypeError, IndexError, ArithmeticError)
"""What operators, NumPy and JAX raise on operands that do not fit."""
FIXTURES: Final = {
    "extents": None,
    "wide": False,
    "shards": UNSHARDED,
    "warn": lambda *_: None,
    "once": lambda function, *given, **more: function(*given, **{k: v for k, v in more.items() if v is not None}),
}

_ABSENT: Final = object()
"""An operand that a function's caller omits."""
Env = dict[str, Any]
"""Values by name: NumPy where known, otherwise tracers. A name that is missing is unknown."""


def check_shapes(graph: Graph, note: Note) -> None:
    """Check the shapes of a model's values, those of its subgraphs and functions included."""
    first = _evaluated(graph, 199)
    second = _evaluated(graph, 211) if first.extents else first
    for key, found in first.found.items():
        if (twin := second.found.get(key)) is not None and not found.fits(twin):
            pairs = zip(found.value.shape or (), twin.value.shape or (), strict=False)
            constant = TensorType(found.value.dtype, tuple(a if a == b else None for a, b in pairs))
            text = f"{key[1]!r} is declared {found.declared}, but {found.source} gives {constant}"
            note("GR-18" if found.is_output else "GR-20", "warning", key[0], text)
    for path, (title, types, reason) in first.refused.items():
        other = second.refused.get(path)
        if other is not None and other.reason == reason:
            fixed = types == other.types  # operands with free extents may fit in a call
            where = types if fixed else "whose extents are partly free"
            note("ND-15", "error" if fixed else "warning", path, f"{title} refuses its operands ({where}): {reason}")


def _evaluated(graph: Graph, prime: int) -> _Evaluation:
    evaluation = _Evaluation(prime)
    with compat.outside(), compat.enable_x64(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a call will give them
        jax.eval_shape(lambda: evaluation.graph(graph, {}, {}, f"graph {graph.name[:80]!r}"))
    return evaluation


class _Refusal(NamedTuple):
    """Why a node refuses its operands, and their types."""

    op_type: str
    types: str
    reason: str


@dataclass(frozen=True)
class _Found:
    """The shape that a node gives a value, and the type that the file declares."""

    source: str
    value: TensorType
    declared: TensorType
    is_output: bool = False

    def fits(self, other: _Found) -> bool:
        """Whether the declared shape agrees with the constants among the extents of both evaluations."""
        wanted, one, two = self.declared.shape or (), self.value.shape or (), other.value.shape or ()
        if not len(wanted) == len(one) == len(two):
            return False
        return all(a != b or not isinstance(d, int) or a == d for d, a, b in zip(wanted, one, two, strict=True))


@dataclass
class _Evaluation:
    """One abstract evaluation, in which free extents are every second prime number from ``first`` on.

    They are larger than what networks halve images to, and most position tables are larger still.
    """

    first: int
    found: dict[tuple[str, str], _Found] = field(default_factory=dict)
    refused: dict[str, _Refusal] = field(default_factory=dict)
    extents: dict[Any, int] = field(default_factory=dict)
    depth: int = 0
    nodes: int = 0

    def graph(
        self,
        graph: Graph,
        given: Mapping[str, Any],
        outer: Env,
        where: str,
        *,
        attributes: Any = None,
        quiet: bool = False,
    ) -> list[Any]:
        """The outputs of a graph, None where unknown. Without ``given`` its inputs are as declared."""
        env = dict(outer)
        env.update((n, v) for n, v in ((n, _constant(v)) for n, v in graph.initializers.items()) if v is not None)
        for formal in graph.inputs:
            env.pop(formal.name, None)
            value = given.get(formal.name, self.placeholder(formal))
            if value is not None:
                env[formal.name] = value
        outputs = {v.name: v for v in graph.outputs}
        for node in graph.nodes:
            path = f"{where}, node {node.name[:80]!r}"
            results = self.node(node, env, path, attributes or {}, quiet)
            for name, value in zip(node.outputs, results, strict=False):
                declared = outputs.get(name) or graph.value_info.get(name)
                if value is None and declared is not None:
                    value = self.placeholder(declared)
                elif declared is not None:
                    self.compare(path, declared, value, node.op_type, name in outputs)
                if name and value is not None:
                    env[name] = value
        return [env.get(v.name) for v in graph.outputs]

    def node(self, node: Node, env: Env, path: str, attributes: Mapping[str, Any], quiet: bool) -> list[Any]:
        """The outputs of a node, None where unknown."""
        unknown = [None] * len(node.outputs)
        self.nodes += 1
        if self.depth > DEEPEST or self.nodes > MOST_NODES:
            return unknown
        own = {k: attributes.get(v.name) if isinstance(v, Reference) else v for k, v in node.attributes.items()}
        own = {k: v for k, v in own.items() if v is not None}
        self.depth += 1
        try:
            if isinstance(node.target, Function):
                body = node.target.body
                given = {v.name: _ABSENT for v in body.inputs}
                given |= {v.name: env.get(n) for v, n in zip(body.inputs, node.inputs, strict=False) if n}
                return self.graph(body, given, {}, path, attributes={**node.target.defaults, **own}, quiet=quiet)
            inner = [self.body(node, graph, env, path, attributes) for graph in node.graphs]
        finally:
            self.depth -= 1
        if not node.domain and node.op_type in _RESULTS:
            return _RESULTS[node.op_type](self, node, env, inner) or unknown
        if node.graphs or not isinstance(node.target, Operator) or any(n and n not in env for n in node.inputs):
            return unknown
        values = [_known(env, n) for n in node.inputs]
        absent = [
            p for p, v in zip(node.target.inputs, values, strict=False) if v is None and p in required(node.target)
        ]
        if absent and not quiet:
            reason = f"the function's caller leaves out {absent[0]!r}"
            self.refused.setdefault(path, _Refusal(node.op_type, "none", reason))
        if absent:
            return unknown
        try:
            return list(_called(node, node.target, values, own)) or unknown
        except (KnownValueError, NotImplementedError, _Unknown):
            return unknown
        except REFUSALS as e:
            if not quiet:
                types = ", ".join(f"{v.dtype}{list(v.shape)}" for v in values if v is not None)
                self.refused.setdefault(path, _Refusal(node.op_type, types, str(e).partition("\n")[0]))
            return unknown
        except Exception:  # of a user's operator, say: a check goes on
            return unknown

    def body(self, node: Node, graph: Graph, env: Env, path: str, attributes: Mapping[str, Any]) -> list[Any]:
        """The outputs of a subgraph, whose inputs are as declared; a branch that is not taken may refuse them."""
        where = f"{path}, graph {graph.name[:80]!r}"
        given: list[Any] = []
        match node.op_type:
            case "Loop":  # a state of which only the rank is declared may have another extent in each trip
                given = [None, None, *(_known(env, n) for n in node.inputs[2:])]
            case "Scan":
                given = _scanned(node, env)
        for formal, value in zip(graph.inputs, given, strict=False):
            self.compare(where, formal, value, node.op_type)
        return self.graph(graph, {}, env, where, attributes=attributes, quiet=True)

    def compare(self, path: str, declared: ValueInfo, value: Any, source: str, is_output: bool = False) -> None:
        """Note the shape of a value whose type is declared."""
        if value is not None and isinstance(declared.type, TensorType) and declared.type.shape is not None:
            own = TensorType(declared.type.dtype, tuple(value.shape))
            self.found[path, declared.name] = _Found(source, own, declared.type, is_output)

    def placeholder(self, value: ValueInfo) -> Any:
        """A tracer of the declared type; None if that is no tensor of numbers of known rank."""
        kind = value.type
        if not isinstance(kind, TensorType) or isinstance(kind, SparseTensorType) or kind.shape is None:
            return None
        if kind.dtype.hasobject or any(isinstance(d, int) and d < 0 for d in kind.shape):
            return None
        free = (d if isinstance(d, int) else self.extent(d or (value.name, i)) for i, d in enumerate(kind.shape))
        return lax.full(tuple(free), 0, kind.dtype)

    def extent(self, key: Any) -> int:
        """The number for which a free extent stands."""
        if key not in self.extents:
            primes = (n for n in count(self.first, 2) if all(n % k for k in range(3, int(n**0.5) + 1, 2)))
            self.extents[key] = next(islice(primes, 2 * len(self.extents), None))
        return self.extents[key]


def _branches(_run: _Evaluation, _node: Node, _env: Env, inner: list[list[Any]]) -> list[Any]:
    def same(a: Any, b: Any) -> bool:
        return a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)

    return [_settled(lax.full(a.shape, 0, a.dtype)) if same(a, b) else None for a, b in zip(*inner, strict=False)]


def _looped(run: _Evaluation, node: Node, _env: Env, inner: list[list[Any]]) -> list[Any]:
    states, outputs = len(node.inputs) - 2, inner[0][1:]
    trips = run.extent((node.outputs, "trips"))
    return [*outputs[:states], *(o if o is None else lax.full((trips, *o.shape), 0, o.dtype) for o in outputs[states:])]


def _scanned(node: Node, env: Env) -> list[Any]:
    """The operands of a Scan's body: its states, and one element of each of the others."""
    count, axes = node.attributes.get("num_scan_inputs", 0), node.attributes.get("scan_input_axes")
    if node.opset < 9 or not 0 < count <= len(node.inputs):
        return []
    states, xs = node.inputs[: len(node.inputs) - count], node.inputs[len(node.inputs) - count :]
    pairs = zip(xs, axes or (0,) * count, strict=False)
    return [*(_known(env, n) for n in states), *(_element(_known(env, n), axis) for n, axis in pairs)]


def _element(x: Any, axis: int) -> Any:
    return None if x is None or not -x.ndim <= axis < x.ndim else lax.index_in_dim(x, 0, axis, keepdims=False)


def _stacked(_run: _Evaluation, node: Node, env: Env, inner: list[list[Any]]) -> list[Any]:
    """Results of a Scan along the first axes; of other forms they are unknown."""
    count, x = node.attributes.get("num_scan_inputs", 0), _known(env, node.inputs[-1])
    if node.opset < 9 or x is None or any(node.attributes.get(f"scan_{end}put_axes") for end in ("in", "out")):
        return []
    states = len(node.inputs) - count
    rows = (o if o is None or not x.ndim else lax.full((x.shape[0], *o.shape), 0, o.dtype) for o in inner[0][states:])
    return [*inner[0][:states], *rows]


_RESULTS: Final = {"If": _branches, "Loop": _looped, "Scan": _stacked}


class _Unknown(Exception):
    """An operator needs what an abstract evaluation does not have."""


def _called(node: Node, operator: Operator, values: list[Any], attributes: Mapping[str, Any]) -> Iterator[Any]:
    supplied = {**FIXTURES, "opset": node.opset, "n_outputs": len(node.outputs)}
    if operator.function is None or not operator.fixtures <= supplied.keys():
        raise _Unknown
    if any(is_traced(v) and operator.parameter(i) in operator.static for i, v in enumerate(values)):
        raise _Unknown
    results = operator.function(*values, **{**{n: supplied[n] for n in operator.fixtures}, **attributes})
    for result in results if isinstance(results, tuple) else (results,):
        yield _settled(result)


def _known(env: Env, name: str) -> Any:
    """The value of a name; None if it is omitted or unknown."""
    value = env.get(name)
    return None if value is _ABSENT else value


def _settled(value: Any) -> Any:
    """A result; known ones that are large become tracers, and what is no tensor of numbers None."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not hasattr(value, "shape") or value.dtype.hasobject:
        return None
    return lax.full(value.shape, 0, value.dtype) if is_known(value) and value.size > LARGEST_KNOWN else value


def _constant(value: np.ndarray) -> Any:
    if value.dtype.hasobject:
        return None
    return lax.full(value.shape, 0, value.dtype) if value.size > LARGEST_KNOWN or is_lazy(value) else value
