"""Writes a graph's nodes as statements, while abstract evaluation tells their types and folds what is known.

Constants and extents fold as in a call, so shape arithmetic leaves no statement; what returns its input is that input;
equal expressions are one statement; and what nothing reads is dropped.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from typing import Any, Final

import jax
import numpy as np

from ...eval.abstract import UNKNOWN, Extents
from ...eval.interpreter import Context, FunctionCall, actual_attributes, call_of, run_nodes
from ...ir.graph import Function, Graph, Node
from ...ir.patterns import reader_beside_scatters
from ...ops.registry import Operator
from ...proto.mapped import load
from ...proto.types import ValueInfo
from .calls import NARROW, SEVERAL, Imports, called, check_callable, unsupported
from .code import FUNCTION, PARAM, Block, Statement, canonical, live, mark, references
from .forms import ARITHMETIC, Form, NodeCall
from .shapes import MOVES
from .types import (
    AllExtents,
    SampleExtents,
    abstract_of,
    is_host,
    is_wide,
    sample_of,
    typed,
    unchanged,
)
from .values import Value, array, constant, is_inline, stored

PLAIN: Final[Mapping[str, Form]] = {**ARITHMETIC, **MOVES}
"""Operators of ai.onnx with plain forms."""
SAMPLE: Final = 64
"""The sample extent of a dimension of which nothing is known."""


class Emitter:
    """Statements of a model's graphs.

    Attributes:
        params: the types of parameters by key.
        changes: current values of initializers by key, where they are not those of the file.
        control: forms of operators with graphs inside, and of the model's functions (FUNCTION).
        imports: operators that are called.
        constants: constants that are too large for the text, by name.
        attributes: attributes that are, by the name of their node.
        functions: functions at the top of the module, each a Block.
        draws: whether random numbers are drawn.
        conditional: the inputs that decide each If of which both branches are written, by the name of the node.
    """

    def __init__(
        self, params: Mapping[str, Any], changes: Mapping[str, Any], control: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.params, self.changes, self.control = params, changes, control
        self.imports = Imports()
        self.evaluation, self.samples = AllExtents(), SampleExtents(Extents(repeat(SAMPLE)))
        self.constants: dict[str, np.ndarray] = {}
        self.attributes: dict[str, dict[str, Any]] = {}
        self.functions: list[Block] = []
        self.draws = False
        self.conditional: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        """Sample extents of the symbols."""
        self._refs: dict[str, int] = {}

    def reference(self, name: str) -> str:
        """A reference for a value of that name, unique in the module."""
        count = self._refs[name] = self._refs.get(name, 0) + 1
        return name if count == 1 else f"{name}\x04{count}"

    def constant(self, value: Value) -> str:
        """The text of a constant in the file."""
        assert value.known is not None
        name = value.stored or "constant"
        while name in self.constants and self.constants[name] is not value.known:
            name += "_"
        self.constants[name] = value.known
        return stored(name)

    def function(self, block: Block) -> Block:
        """A function at the top of the module; the one that is there already, if their bodies are the same."""
        block.statements = live(block.statements, references(block.result))
        for other in self.functions:
            if canonical(other) == canonical(block):
                return other
        self.functions.append(block)
        return block

    def array(self, value: Value) -> str:
        """The text of a value as an array."""
        if value.known is None:
            return value.text
        if value.is_extents:
            return f"np.array({value.sequence})"
        return array(value.known) if is_inline(value.known) else self.constant(value)

    def arrays(self, values: Sequence[Value]) -> list[str]:
        """The texts of values as arrays."""
        return [*map(self.array, values)]

    def scalar(self, value: Value) -> str:
        """The text of a value of one element as a scalar."""
        return f"{self.array(value)}.reshape(())" if value.rank != 0 else self.array(value)

    def initializer(self, graph: Graph, name: str) -> Value:
        """An initializer: a parameter, or a constant."""
        key = graph.key(name)
        if (kind := self.params.get(key)) is not None:
            return Value(mark(PARAM + key), shape=tuple(kind.shape), dtype=kind.dtype)
        return constant(np.asarray(load(self.changes.get(key, graph.initializers[name]))), key)


@dataclass
class Scope:
    """A graph that is being written: the values by name, and the statements so far.

    Attributes:
        emitter: of the module.
        graph: the graph.
        values: by name, those of graphs around included.
        abstract: their abstract values, for evaluation.
        statements: of the function that the nodes are written into.
        call: the call of a model's function around.
        rng: the text of the random key.
    """

    emitter: Emitter
    graph: Graph
    values: dict[str, Value]
    abstract: dict[str, Any]
    statements: list[Statement]
    call: FunctionCall = field(default_factory=FunctionCall)
    rng: str = "rng"
    _equal: dict[str, tuple[Value, ...]] = field(default_factory=dict)

    def inner(self, graph: Graph, **fields: Any) -> Scope:
        """The scope of a graph inside a node."""
        values, abstract = dict(self.values), dict(self.abstract)
        return replace(self, graph=graph, values=values, abstract=abstract, _equal={}, **fields)

    def bind(self, name: str, value: Value) -> None:
        """Give a name a value."""
        self.values[name], self.abstract[name] = value, abstract_of(value)

    def run(self) -> list[Value]:
        """Write all nodes; the values of the graph's outputs."""
        for name in self.graph.initializers:
            if name not in self.values or name not in {v.name for v in self.graph.inputs}:
                self.bind(name, self.emitter.initializer(self.graph, name))
        context = Context({}, jax.random.key(0), call=self.call)
        run_nodes(self.graph.nodes, self.abstract, context, self._node)
        return [self.values[v.name] for v in self.graph.outputs]

    def _node(self, node: Node, _: Any, context: Context) -> list[Any]:
        values: Sequence[Value]
        form = self.emitter.control.get("" if node.domain else node.op_type)
        if isinstance(node.target, Function):
            values = self.emitter.control[FUNCTION](self, node, call_of(node, self.abstract, context))
        elif form is not None:
            values = form(self, node)
        else:
            values = self._operator(node, context)
        self.values |= {n: v for n, v in zip(node.outputs, values, strict=False) if n}
        return [abstract_of(v) for v in values]

    # ------------------------------------------------------------------------------------------------- operators

    def actual(self, node: Node) -> dict[str, Any]:
        """A node's attributes with the caller's values in place of references."""
        return actual_attributes(node, self.call)

    def _operator(self, node: Node, context: Context) -> Sequence[Value]:
        attributes = self.actual(node)
        operands = tuple(self.values[n] if n else None for n in node.inputs)
        if (node.domain, node.op_type) == ("", "Squeeze") and len(node.inputs) < 2 and "axes" not in attributes:
            shape = self.values[node.inputs[0]].shape or (None,)
            if all(isinstance(d, int) for d in shape):
                attributes["axes"] = tuple(i for i, d in enumerate(shape) if d == 1)
        drawn = isinstance(node.target, Operator) and "rng" in node.target.fixtures
        call = NodeCall(replace(node, attributes=attributes), attributes, operands, (), self.emitter.array)
        results, samples, is_evaluated = self._results(call, context)
        several = len(results) > 1 or (not is_evaluated and node.op_type in SEVERAL)
        host = call.is_host and not drawn
        types = tuple(typed(r, host, s) for r, s in zip_longest(results, samples))
        if host and any(v.known is None and v.dtype is not None and not is_host(v) for v in types):
            host, types = False, tuple(replace(v, host=False) for v in types)
        if all(v.known is not None for v, n in zip(types, node.outputs, strict=False) if n) and not drawn:
            return [replace(v, stored=self.graph.key(n)) for v, n in zip(types, node.outputs, strict=False)]
        call = replace(call, results=types)
        if (same := unchanged(call)) is not None and not any(node.outputs[1:]):
            return [same]
        form = PLAIN.get(node.op_type) if node.domain == "" and (not host or node.op_type == "Range") else None
        text = form(call) if form is not None else None
        if text is None:
            check_callable(node)
            drops = "dropped" in node.operator.fixtures and not host
            if drops and (reader := reader_beside_scatters(self.graph, node)):
                raise unsupported(node, f"its extent depends on values, and {reader} reads its result")
            text = called(call, self.emitter.imports, self.emitter.attributes, partial(self.key, node))
            if (error := self.emitter.samples.untraceable) is not None:
                why = str(error).splitlines()[0].partition(": the value must be known")[0]
                raise unsupported(node, f"{why}. The model runs the node on the host")
            text += f"[:{len(types)}]" if len(types) > 1 and not is_evaluated else ""  # it may return more
            values = self.define(node, text, types, several=several, wide=node.op_type not in NARROW)
            return values if same is None else [same, *values[1:]]  # of a Dropout whose mask is an output
        if sum(map(bool, node.outputs)) == 1 and text == call.value(0).text and types[0].dtype == call.value(0).dtype:
            return [call.value(0)]
        return self.define(node, text, types, several=several)

    def _results(self, call: NodeCall, context: Context) -> tuple[list[Any], list[Any], bool]:
        """(abstract results of a node, those for sample extents where one of them is unknown, whether either are).

        Types that the file declares stand for results that could not be evaluated.
        """
        node = tried = call.node
        self.emitter.samples.untraceable = None
        operands = {n: self.abstract.get(n, UNKNOWN) for n in node.reads}
        is_pad = (node.domain, node.op_type) == ("", "Pad") and "mode" in node.attributes
        if is_pad and type(operands[node.inputs[0]]) is not np.ndarray:  # of one shape in all modes
            tried = replace(node, attributes={**node.attributes, "mode": "constant"})
        results = [*self.emitter.evaluation.outputs(tried, operands, context)]
        if all(r is not UNKNOWN for r in results):
            return results, [], True
        operands = {n: sample_of(self.values.get(n, Value()), self.emitter.sizes) for n in node.reads}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which may be about these extents alone
            samples = [*self.emitter.samples.outputs(tried, operands, context)]
        if not (is_evaluated := any(s is not UNKNOWN for s in samples)):
            declared = (self.graph.value_info.get(n, ValueInfo(n)) for n in node.outputs)
            samples = [*map(self.emitter.samples.declared, declared)]
        return results + [UNKNOWN] * (len(samples) - len(results)), samples, is_evaluated

    def define(
        self, node: Node, text: str, types: Sequence[Value], blocks: Sequence[Block] = (), *, several: bool = False,
        target: Callable[[Sequence[str]], str] = lambda _: "", wide: bool = False, deciding: Sequence[str] = (),
    ) -> list[Value]:  # fmt: skip
        """The values of a node's outputs, defined by one statement.

        Args:
            node: the node.
            text: an expression.
            types: of all its results.
            blocks: functions that it defines first.
            several: whether the expression is a tuple even if there is one result.
            target: the left-hand side for the references of the outputs; a list of them where it is empty.
            wide: whether it needs 64-bit types though no result has one.
            deciding: inputs of the model that decide which of the blocks runs.
        """
        if text in self._equal and not blocks:
            return list(self._equal[text])
        names = [*node.outputs, *[""] * (len(types) - len(node.outputs))]
        outputs = [self.emitter.reference(self.graph.key(n or f"{node.name} {i}")) for i, n in enumerate(names)]
        heavy = isinstance(node.target, Function) or bool(getattr(node.target, "heavy", False))
        statement = Statement(tuple(outputs), text, tuple(blocks), heavy, node, several or len(types) > 1)
        statement.target, statement.wide = target([*map(mark, outputs)]), wide or any(map(is_wide, types))
        statement.hint = "mask" if types and types[0].dtype == np.bool_ else "h"
        statement.inside = (str(node), *deciding) if blocks else ()
        self.statements.append(statement)
        defined = [replace(v, text=mark(o), known=None) for v, o in zip(types, outputs, strict=False)]
        self._equal[text] = tuple(defined)
        return defined

    def key(self, node: Node) -> str:
        """The random key of a node."""
        self.emitter.draws = True
        return f"jax.random.fold_in({self.rng}, {zlib.crc32(node.name.encode())})"
