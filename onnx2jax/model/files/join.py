"""Joins two models into one file: outputs of the first become inputs of the second; clashing names are prefixed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from google.protobuf.message import Message

from ...errors import InputNameError, InputShapeError, InputTypeError, ModelError, UnsupportedError, did_you_mean
from ...ir.file import check_keywords
from ...proto.messages import keep, nested_graphs, normal_domain, rename, subgraphs, tensors
from ...proto.origin import Opened, nbytes
from ...proto.tensors import EXTERNAL
from ...proto.types import STRING, UNNAMED, MapType, OptionalType, SequenceType, TensorType, to_value_info
from ..convert import convert
from ..model import Model
from .save import INLINE_LIMIT, open_model

Key = tuple[str, str, str]
"""Of a function: domain, name, overload."""


def join(
    first: Any, second: Any, names: Mapping[str, str | Sequence[str]], *, prefix: str = "second/", **options: Any
) -> Model:
    """Join two models into one: outputs of the first become inputs of the second.

    The result has one graph, to call, transform, train, export and save. Its inputs are the first's and those of the
    second that are not joined; its outputs are the first's that are not joined and the second's. Initializers,
    functions and metadata of both are kept; device configurations are not.

    Args:
        first, second: Models, with their present weights, or sources as for ``convert``.
        names: the input of the second, or several, that each output of the first becomes.
        prefix: prepended to names of the second that the first has too: values, nodes, dimension variables. Dimension
            variables of joined outputs and inputs are unified.
        **options: keywords of ``convert`` for the result.

    Raises:
        InputNameError: there is no such output or input.
        InputTypeError, InputShapeError: an output does not match the input that it becomes.
        ModelError: the models import different versions of an operator set.
        UnsupportedError: a model has training_info, or was converted with options that change its graph.

    >>> import numpy as np, onnx.parser, onnx2jax
    >>> softmax = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 22]>
    ...     probabilities (float[n, 10] x) => (float[n, 10] p) { p = Softmax(x) }''')
    >>> both = onnx2jax.join(onnx2jax.demo_model(), softmax, {"logits": "x"})
    >>> both.inputs[0].name, both.outputs[0].name, both.outputs[0].shape
    ('image', 'p', ('batch', 10))
    >>> round(float(both(np.zeros((1, 1, 8, 8), np.float32)).sum()), 4)
    1.0
    """
    check_keywords(options, join, convert)
    if not isinstance(names, Mapping):
        raise InputTypeError(
            "names is the third argument, a dict of outputs to inputs: join(first, second, {'y': 'x'})"
        )
    parts = [_opened(model, which) for model, which in ((first, "first"), (second, "second"))]
    connections = _connections(parts[0].message, parts[1].message, names)
    buffers = _in_memory(parts)
    one, other = (p.message for p in parts)
    _merge(one, other, connections, prefix)
    return convert(one.SerializeToString(), buffers=buffers, **options)


def _opened(model: Any, which: str) -> Opened:
    """A model's message, without the inputs for initializers that files below IR 4 have."""
    if isinstance(model, Model):
        options = {
            "static": model.static,
            "bucket": dict(model.spec.bucket),
            "max_size": dict(model.spec.max_size),
            "rebatch": model.spec.groups is not None,
        }
        if option := next((n for n, v in options.items() if v), ""):
            raise UnsupportedError(
                f"the {which} model was converted with {option}=, which is not in its file: join the files, and pass "
                f"it to join(..., {option}=...)"
            )
    opened = open_model(model)
    message = opened.message
    if message.training_info:
        raise UnsupportedError(
            f"the {which} model has training_info, which refers to its own graph: remove it, del proto.training_info[:]"
        )
    if message.ir_version < 4:
        weights = {t.name for t in message.graph.initializer}
        keep(message.graph.input, lambda v: v.name not in weights)
    del message.configuration[:]
    return opened


def _connections(one: Any, other: Any, names: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """The output of the first model by input of the second."""
    outputs, inputs = [v.name for v in one.graph.output], [v.name for v in other.graph.input]
    seam: dict[str, str] = {}
    if not names:
        raise InputNameError(f"nothing is joined: map some of the outputs {outputs} to some of the inputs {inputs}")
    for output, becomes in names.items():
        if output not in outputs:
            raise InputNameError(
                f"the first model has no output {output!r}; it has {outputs}{did_you_mean(output, outputs)}"
            )
        for name in (becomes,) if isinstance(becomes, str) else becomes:
            if name not in inputs:
                raise InputNameError(
                    f"the second model has no input {name!r}; it has {inputs}{did_you_mean(name, inputs)}"
                )
            if name in seam:
                raise InputNameError(f"input {name!r} of the second model would be {seam[name]!r} and {output!r}")
            seam[name] = output
    return seam


def _in_memory(parts: Sequence[Opened]) -> dict[str, np.ndarray]:
    """Move the bytes of all tensors into the messages, or of large and external ones into buffers, by location."""
    located = [(p, t) for p in parts for t, _ in tensors(p.message)]
    small = sum(nbytes(t) for _, t in located) < INLINE_LIMIT
    buffers: dict[str, np.ndarray] = {}
    for part, tensor in located:
        if tensor.data_location != EXTERNAL and (small or tensor.data_type == STRING or nbytes(tensor) < 1024):
            part.attach(tensor)
            continue
        location = f"#{len(buffers)}"
        data = np.frombuffer(part.data(tensor), np.uint8)
        data.flags.writeable = False
        buffers[location] = data
        part.take(tensor)
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.data_location = EXTERNAL
        tensor.external_data.add(key="location", value=location)
    return buffers


def _merge(one: Any, other: Any, connections: Mapping[str, str], prefix: str) -> None:
    """Merge the second model's message into the first's."""
    _join_opsets(one, other)
    _join_functions(one, other, prefix)
    mine, theirs = _unified_dimensions(one.graph, other.graph, connections, prefix)
    _declare(one.graph, mine)
    _declare(other.graph, theirs)
    taken = set(_values(one.graph))
    clashes = (set(_values(other.graph)) & taken) - connections.keys()
    values = _new_names(clashes, taken | set(_values(other.graph)), prefix) | dict(connections)
    first, second = ({n.name for g in nested_graphs(m.graph) for n in g.node} for m in (one, other))
    nodes = _new_names((first & second) - {""}, first | second, prefix)
    passed = [v for v in other.graph.output if v.name in connections]
    public = _new_names({v.name for v in passed} & taken, taken | set(values.values()), prefix)
    for value in passed:  # an output that is an input too
        node = other.graph.node.add(op_type="Identity", name=f"{prefix}{value.name}/Identity", input=[value.name])
        values[f"{node.name}/output"] = public.get(value.name, value.name)
        value.name = f"{node.name}/output"
        node.output.append(value.name)
    keep(other.graph.sparse_initializer, lambda t: t.values.name not in connections)
    for field in ("initializer", "value_info", "input"):
        keep(getattr(other.graph, field), lambda v: v.name not in connections)
    for graph in nested_graphs(other.graph):
        rename(graph, values, nodes)
    joined, declared = set(connections.values()), {v.name for v in one.graph.value_info}
    one.graph.value_info.extend(v for v in one.graph.output if v.name in joined - declared)
    keep(one.graph.output, lambda v: v.name not in joined)
    initializers = ("initializer", "sparse_initializer", "quantization_annotation")
    for field in ("node", *initializers, "input", "output", "value_info"):
        getattr(one.graph, field).extend(getattr(other.graph, field))
    for ours, others in ((one, other), (one.graph, other.graph)):
        keys = {e.key for e in ours.metadata_props}
        ours.metadata_props.extend(e for e in others.metadata_props if e.key not in keys)
    one.graph.name = f"{one.graph.name}_{other.graph.name}"
    one.ir_version = max(one.ir_version, other.ir_version, 4)
    for field in ("producer_name", "producer_version", "doc_string", "domain", "model_version"):
        one.ClearField(field)
    one.producer_name = "onnx2jax"


def _join_opsets(one: Any, other: Any) -> None:
    mine, theirs = ({normal_domain(o.domain): o.version for o in m.opset_import} for m in (one, other))
    for domain, version in theirs.items():
        if mine.get(domain, version) != version:
            raise ModelError(
                f"the first model imports version {mine[domain]} of {domain or 'ai.onnx'} and the second {version}; a "
                "file has one of each: onnx.version_converter.convert_version(model, version) converts ai.onnx"
            )
        if domain not in mine:
            one.opset_import.add(domain=domain, version=version)


def _join_functions(one: Any, other: Any, prefix: str) -> None:
    """Merge the functions; rename those whose name means something else in the other model."""
    mine, theirs = ({_key(f): f.SerializeToString(deterministic=True) for f in m.functions} for m in (one, other))
    called, calls = ({_called(node) for node in _nodes(m)} for m in (one, other))
    _rename_functions(one, {k for k in mine if k in calls and k not in theirs}, "first")
    clashes = {k for k, f in theirs.items() if mine.get(k, f) != f or (k in called and k not in mine)}
    _rename_functions(other, clashes, re.sub(r"\W+", "_", prefix).strip("_"))
    kept = {_key(f) for f in one.functions}
    one.functions.extend(f for f in other.functions if _key(f) not in kept)


def _key(function: Any) -> Key:
    return normal_domain(function.domain), function.name, function.overload


def _called(node: Any) -> Key:
    return normal_domain(node.domain), node.op_type, node.overload


def _nodes(message: Any) -> Iterator[Any]:
    """All nodes of a model, those of functions included."""
    of_functions = [node for function in message.functions for node in function.node]
    yield from of_functions
    for outer in (message.graph, *(graph for node in of_functions for graph in subgraphs(node))):
        for graph in nested_graphs(outer):
            yield from graph.node


def _rename_functions(message: Any, keys: set[Key], prefix: str) -> None:
    for function in message.functions:
        if _key(function) in keys:
            function.name = f"{prefix}_{function.name}"
    for node in _nodes(message):
        if _called(node) in keys:
            node.op_type = f"{prefix}_{node.op_type}"


def _values(graph: Any) -> Iterator[str]:
    """Every name of a value in a graph and those inside."""
    for inner in nested_graphs(graph):
        yield from (v.name for v in (*inner.input, *inner.output, *inner.initializer))
        yield from (s.values.name for s in inner.sparse_initializer)
        yield from (n for node in inner.node for n in (*node.input, *node.output) if n)


def _new_names(clashes: Iterable[str], taken: set[str], prefix: str) -> dict[str, str]:
    """Unused names for those that clash, by old name."""
    names: dict[str, str] = {}
    for name in sorted(clashes):
        new = prefix + name
        while new in taken or new in names.values():
            new = prefix + new
        names[name] = new
    return names


def _unified_dimensions(
    one: Any, other: Any, connections: Mapping[str, str], prefix: str
) -> tuple[dict[str, str | int], dict[str, str | int]]:
    """New names or extents for the dimension variables of both graphs, unified along the connections."""
    outputs, inputs = ({v.name: to_value_info(v) for v in vs} for vs in (one.output, other.input))
    mine: dict[str, str | int] = {}
    theirs: dict[str, str | int] = {}
    for name, output in connections.items():
        where = f"output {outputs[output]} of the first model does not match input {inputs[name]} of the second"
        for a, b in _extent_pairs(outputs[output].type, inputs[name].type, where):
            a = mine.get(a, a) if isinstance(a, str) else a
            b = theirs.get(b, b) if isinstance(b, str) and not isinstance(theirs.get(b), str) else b
            if isinstance(a, int) and isinstance(b, int) and a != b:
                raise InputShapeError(f"{where}: {a} is not {b}")
            if isinstance(b, str) and a is not None:
                theirs.setdefault(b, a)
            elif isinstance(a, str) and isinstance(b, int):
                mine[a] = b
    first, second = ({d.dim_param for d in _dimensions(g)} for g in (one, other))
    theirs = {n: mine.get(d, d) if isinstance(d, str) else d for n, d in theirs.items()}
    return mine, _new_names((first & second) - theirs.keys(), first | second, prefix) | theirs


def _extent_pairs(actual: Any, required: Any, where: str) -> Iterator[tuple[Any, Any]]:
    """The corresponding extents of two types.

    Raises:
        InputTypeError, InputShapeError: they are of different kinds, element types or ranks.
    """
    if actual is None or required is None:
        return
    if isinstance(actual, TensorType) and isinstance(required, TensorType):
        if actual.dtype != required.dtype:
            raise InputTypeError(f"{where}: {actual.dtype} is not {required.dtype}")
        if actual.shape is not None and required.shape is not None:
            if len(actual.shape) != len(required.shape):
                raise InputShapeError(f"{where}: rank {len(actual.shape)} is not {len(required.shape)}")
            yield from zip(actual.shape, required.shape, strict=True)
    elif type(actual) is not type(required):
        raise InputTypeError(where)
    elif isinstance(actual, SequenceType | OptionalType):
        yield from _extent_pairs(actual.element, required.element, where)
    elif isinstance(actual, MapType):
        if actual.key != required.key:
            raise InputTypeError(where)
        yield from _extent_pairs(actual.value, required.value, where)


def _dimensions(message: Any) -> Iterator[Any]:
    """The dimension variables of all types that are declared in a message, at any depth."""
    for field, value in message.ListFields():
        kind = field.message_type
        inner: Any = (value,) if isinstance(value, Message) else value
        if kind is not None and kind.name == "Dimension":
            yield from (d for d in inner if d.dim_param not in UNNAMED)
        elif kind is not None and kind.name != "TensorProto":
            yield from chain.from_iterable(map(_dimensions, inner))


def _declare(graph: Any, dims: Mapping[str, str | int]) -> None:
    """Rename dimension variables, or replace them by extents."""
    for d in _dimensions(graph):
        extent = dims.get(d.dim_param, d.dim_param)
        if isinstance(extent, int):
            d.dim_value = extent
        else:
            d.dim_param = extent
