"""Infers and checks types of operands: each is allowed, and equal type variables have equal types (rule ND-09)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final

from ..errors import ModelError
from ..ir.binding import built_in_wins
from ..ir.binding import opsets as imported
from ..ir.importer import DEPTH_LIMIT
from ..ir.signatures import Type, element, formal, is_plain, signature, type_of
from ..ops.registry import is_built_in, resolve
from ..proto.messages import dotted, normal_domain
from .scopes import GraphPlace, places

if TYPE_CHECKING:
    from .report import Note

Env = ChainMap[str, Type]


def check_types(model: Any, opsets: Mapping[str, int], note: Note, deviate: Note | None = None) -> None:
    """Check every operand whose type is declared or can be inferred.

    Args:
        model: the message.
        opsets: the operator sets that it imports.
        note: receives the findings.
        deviate: receives in their place the types that a schema does not allow where the meaning is plain; operators
            that a user has registered then take any type.
    """
    checker = _Checker(model, note, deviate)
    main = Env()
    for place in places(model):
        if place.kind == "main":
            checker.graph(place, opsets, main)
        elif place.kind == "training":
            checker.graph(place, opsets, main if place.outer else Env())
    seen = {memo[:3] for memo in checker.called}
    for key, function in checker.functions.items():
        if key not in seen:
            checker.call(key, [None] * len(function.input))


class _Checker:
    def __init__(self, model: Any, note: Note, deviate: Note | None) -> None:
        self.note, self.deviate = note, deviate
        self.functions = {(normal_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.called: dict[tuple[Any, ...], list[Type]] = {}
        self.depth = 0

    def graph(
        self, place: GraphPlace, opsets: Mapping[str, int], env: Env, operands: Sequence[Type] = ()
    ) -> list[Type]:
        """The types of a graph's outputs; adds those of its values to ``env``. ``operands``: their types."""
        graph = place.graph
        hints = {v.name: type_of(v.type) for v in graph.value_info}
        if place.kind == "function":
            inputs, outputs = list(graph.input), list(graph.output)
        else:
            hints |= {v.name: type_of(v.type) for v in chain(graph.input, graph.output)}
            inputs, outputs = ([v.name for v in ends] for ends in (graph.input, graph.output))
            env.update((t.name, element(t.data_type)) for t in graph.initializer)
            env.update((t.values.name, element(t.values.data_type)) for t in graph.sparse_initializer)
        for name, kind in zip_longest(inputs, operands[: len(inputs)]):
            declared = hints.get(name)
            if kind and declared and kind != declared:
                self.note("GR-20", "warning", place.where, f"input {name!r} is declared {declared}, but given {kind}")
            env[name] = kind or declared
        ends = set(outputs) if place.kind == "main" else set()
        for i, node in enumerate(graph.node):
            kinds = self.node(place, i, opsets, env)
            for name, kind in zip_longest(node.output, kinds[: len(node.output)]):
                declared = hints.get(name)
                if kind and declared and kind != declared:
                    rule = "GR-18" if name in ends else "GR-20"
                    text = f"{name!r} is declared {declared}, but {node.op_type} gives {kind}"
                    self.note(rule, "warning", place.node(i), text)
                if name:
                    env[name] = kind or declared
        return [env.get(name) for name in outputs]

    def node(self, place: GraphPlace, i: int, opsets: Mapping[str, int], env: Env) -> Sequence[Type]:
        """The types of a node's outputs, as far as they can be inferred."""
        node = place.graph.node[i]
        known = {name: env.get(name) for name in set(node.input)}
        domain, types = normal_domain(node.domain), [known[name] for name in node.input]
        key = (domain, node.op_type, node.overload)
        opset = opsets.get(domain, 0)
        inner = [self.graph(p, opsets, env.new_child(), _supplied(node, types)) for p in place.inside(i)]
        if key in self.functions and not built_in_wins(domain, node.op_type, opset):
            return self.call(key, types)
        title = dotted(domain, node.op_type)
        schema = signature(title, opset)
        if schema is None:
            return ()
        operator = resolve(domain, node.op_type, opset)
        if self.deviate and operator and not is_built_in(operator):
            return ()
        bound: dict[str, tuple[str, str]] = {}
        for position, (name, kind) in enumerate(zip(node.input, types, strict=True)):
            wanted = formal(schema.inputs, position)
            if wanted is None:
                break  # more inputs than the operator takes, which the importer reports
            if kind is None:
                continue
            variable = wanted.rstrip("&")
            fits = kind in schema.allowed.get(variable, (variable,))
            moved = operator is not None and operator.moves and variable in schema.outputs  # whatever its type is
            plain = not fits and self.deviate is not None and (moved or is_plain(title, position, kind))
            if not fits and not (plain and moved):
                of = "one of " + ", ".join(sorted(schema.allowed[variable])) if variable in schema.allowed else variable
                text = f"input {name!r} is {kind}, but {node.op_type} of opset {opset} takes {of}"
                note = self.deviate if plain and self.deviate else self.note
                note("ND-09", "error", place.node(i), text)
            if (fits or plain) and not wanted.endswith("&") and variable in schema.allowed:
                first, other = bound.setdefault(variable, (kind, name))
                if first != kind:
                    text = f"input {name!r} is {kind} and {other!r} is {first}, but {node.op_type} takes one type"
                    self.note("ND-09", "error", place.node(i), text)
        if title == "SequenceInsert" and len(types) > 1 and all(types[:2]) and types[0] != f"seq({types[1]})":
            self.note("ND-09", "error", place.node(i), f"{types[1]} is inserted into {types[0]}")
        self.outputs(place, i, schema.outputs, inner)
        if not domain and node.op_type in _RESULTS:
            return _RESULTS[node.op_type](types, inner, len(node.output))
        attribute = _attribute_type(node)
        return [_result(formal(schema.outputs, n), schema.allowed, bound, attribute) for n in range(len(node.output))]

    def outputs(self, place: GraphPlace, i: int, formals: tuple[str, ...], inner: Sequence[Sequence[Type]]) -> None:
        """Note more outputs than an operator has, and types of them in which the branches of an If differ."""
        node = place.graph.node[i]
        count = max((n for n, name in enumerate(node.output, 1) if name), default=0)
        if count and formal(formals, count - 1) is None:
            text = f"{node.op_type} gives {len(formals)} outputs, not {count}"
            self.note("ND-08", "error", place.node(i), text)
        if not normal_domain(node.domain) and node.op_type == "If":
            for name, kinds in zip(node.output, zip(*inner, strict=False), strict=False):
                if None not in kinds and len(set(kinds)) > 1:
                    text = f"its branches return {' and '.join(map(str, kinds))} for {name!r}"
                    self.note("SC-12", "error", place.node(i), text)

    def call(self, key: tuple[str, str, str], types: list[Type]) -> list[Type]:
        """The types of a function's outputs, given those of its operands."""
        memo = (*key, *types)
        if memo in self.called or self.depth > DEPTH_LIMIT:
            return self.called.get(memo, [])
        self.called[memo] = []  # ends recursions, which the importer reports
        function = self.functions[key]
        try:
            opsets = imported(function.opset_import)
        except ModelError:  # reported by the importer
            return []
        self.depth += 1
        place = GraphPlace(function, f"function {function.name[:80]!r}", "function")
        self.called[memo] = self.graph(place, opsets, Env(), types)
        self.depth -= 1
        return self.called[memo]


def _supplied(node: Any, types: list[Type]) -> list[Type]:
    """The types of the operands that a node passes to its subgraphs."""
    supplied = {"Loop": ["int64", "bool", *types[2:]], "Scan": types}
    return [] if normal_domain(node.domain) else supplied.get(node.op_type, [])


def _attribute_type(node: Any) -> Type:
    """The element type that an attribute of the node sets, or that of its value."""
    for a in node.attribute:
        match a.name:
            case _ if a.ref_attr_name:
                continue
            case "to" | "dtype" | "output_dtype" | "output_datatype":
                return element(a.i)
            case "value" if a.HasField("t"):
                return element(a.t.data_type)
            case "sparse_value":
                return element(a.sparse_tensor.values.data_type)
            case "value_int" | "value_ints":
                return "int64"
            case "value_float" | "value_floats":
                return "float"
            case "value_string" | "value_strings":
                return "string"
    return None


def _result(
    wanted: str | None, allowed: Mapping[str, frozenset[str]], bound: Mapping[str, Any], declared: Type
) -> Type:
    """An output's type: that of its type variable, the only allowed one, or the ``declared`` one of an attribute."""
    if wanted is None or wanted.endswith("&"):
        return None
    if wanted in bound:
        return bound[wanted][0]
    choices = allowed.get(wanted, frozenset({wanted}))
    return next(iter(choices)) if len(choices) == 1 else declared if declared in choices else None


def _wrap(kind: str) -> Callable[..., list[Type]]:
    return lambda types, *_: [f"{kind}({types[0]})" if types and types[0] else None]


def _unwrap(types: list[Type], *_: Any) -> list[Type]:
    inner = types[0].partition("(")[2][:-1] if types and types[0] and "(" in types[0] else None
    return [inner]


def _branches(_: Any, inner: list[list[Type]], n: int) -> list[Type]:
    return [kinds[0] if len(set(kinds)) == 1 else None for kinds in list(zip(*inner, strict=False))[:n]]


_RESULTS: Final[dict[str, Callable[..., list[Type]]]] = {
    "SequenceConstruct": _wrap("seq"),
    "SplitToSequence": _wrap("seq"),
    "SequenceAt": _unwrap,
    "ConcatFromSequence": _unwrap,
    "If": _branches,
    "Loop": lambda _, inner, n: (inner[0][1:] if inner else [])[:n],
    "Scan": lambda _, inner, n: (inner[0] if inner else [])[:n],
}
"""Type inference of operators whose output types depend on more than type variables."""
