"""A call's outputs: converted, bundled, and compared with their declarations; contradictions warn."""

from __future__ import annotations

import json
import keyword
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import export
from jax.tree_util import GetAttrKey

from ...errors import (
    DeclarationWarning,
    InputNameError,
    InputTypeError,
    UnsupportedError,
    did_you_mean,
    names_list,
    with_rules,
)
from ...eval.values import are_maps, is_jax, to_device, without_arrays
from ...ir.graph import Graph, nodes_named
from ...proto.types import TensorType, ValueInfo


class Outputs(tuple[Any, ...]):
    """A named tuple of a model's outputs, in the order of the graph.

    One type for all models, unlike ``collections.namedtuple``: it can be pickled, and ``jax.export`` serializes it.

    >>> outputs = Outputs(["boxes", "scores"], [1, 2])
    >>> outputs.scores
    2
    >>> boxes, scores = outputs
    """

    _fields: tuple[str, ...]

    def __new__(cls, fields: Iterable[str], values: Iterable[Any]) -> Outputs:
        new = super().__new__(cls, values)
        fields = tuple(fields)
        vars(new).update(zip(fields, new, strict=True), _fields=fields)
        return new

    def __setattr__(self, name: str, _value: Any) -> None:
        raise AttributeError(f"outputs cannot be set: {name}")

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{n}={v!r}' for n, v in self._asdict().items())})"

    def __reduce__(self) -> Any:
        return Outputs, (self._fields, tuple(self))

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))


def as_outputs(fields: Iterable[str], results: Iterable[Any]) -> Any:
    """The results as JAX arrays; a single output is returned directly, several as Outputs."""
    return bundled(fields, list(map(to_device, results)))


def bundled(fields: Iterable[str], results: Sequence[Any]) -> Any:
    """A single output directly, several as Outputs."""
    return results[0] if len(results) == 1 else Outputs(fields, results)


def positions(wanted: str | Sequence[str], names: Sequence[str], graph: Graph | None = None) -> list[int]:
    """The positions of the outputs that ``run`` returns.

    Args:
        wanted: their names, or one.
        names: those of all outputs.
        graph: the model's; None for an exported program.

    Raises:
        InputNameError, InputTypeError: there is no such output, or inputs are passed in the place of names.
    """
    if isinstance(wanted, Mapping):
        raise InputTypeError("the arguments are swapped: run(output_names, inputs)")
    wanted = names_list(wanted)
    if unknown := [n for n in wanted if n not in names]:
        what, fix = "program" if graph is None else "model", did_you_mean(unknown, names)
        if graph is not None:
            inner = [n for n in unknown if n in graph.producers]
            others = nodes_named(graph, unknown)
            fix = f"; for inner values: model.values(inputs, names={inner})" if inner else others or fix
        raise InputNameError(
            f"there is no output {', '.join(map(repr, unknown))}; the {what}'s outputs are {list(names)}{fix}"
        )
    return [names.index(n) for n in wanted]


def exportable(outputs: Sequence[ValueInfo], returned: Any) -> tuple[Any, ...]:
    """The results of ``bundled`` as a tuple, for a program of ``jax.export``.

    Raises:
        UnsupportedError: one holds strings or maps.
    """
    results = (returned,) if len(outputs) == 1 else tuple(returned)
    for info, result in zip(outputs, results, strict=True):
        if not is_jax(result):
            others = [v.name for v in outputs if v is not info]
            raise UnsupportedError(
                f"output {info} holds {without_arrays(result)}, which an exported program cannot return"
                + f": leave it out, model.cut(outputs={others})" * bool(others)
            )
    return results


def unshared(results: list[Any], feeds: Iterable[Any]) -> list[Any]:
    """The results, copied where they share memory with the caller's arrays."""
    theirs = list(feeds)
    if {*map(type, theirs)} != {np.ndarray}:
        theirs = [v for v in jax.tree.leaves(theirs) if isinstance(v, np.ndarray)]

    def unshared_copy(result: Any) -> Any:
        if isinstance(result, list):
            return [*result] if are_maps(result) else list(map(unshared_copy, result))
        if not isinstance(result, np.ndarray):
            return result
        if result.base is None:  # memory of its own, in a quarter of the time
            shares = any(result is v or v.base is result for v in theirs)
        else:
            shares = any(np.may_share_memory(result, v) for v in theirs)
        return result.copy() if shares else result

    return list(map(unshared_copy, results))


def field_names(names: Iterable[str]) -> tuple[str, ...]:
    """ONNX names as Python identifiers: invalid characters become _, names that stay invalid _POSITION.

    >>> field_names(["scores", "label:0", "0", "class"])
    ('scores', 'label_0', '_2', '_3')
    """
    fields: list[str] = []
    for i, name in enumerate(names):
        field = re.sub(r"\W", "_", name)
        usable = field.isidentifier() and not keyword.iskeyword(field) and field[0] != "_" and field not in fields
        fields.append(field if usable else f"_{i}")
    return tuple(fields)


jax.tree_util.register_pytree_with_keys(
    Outputs,
    lambda outputs: ([(GetAttrKey(n), v) for n, v in outputs._asdict().items()], outputs._fields),
    Outputs,
    lambda outputs: (outputs, outputs._fields),
)
export.register_pytree_node_serialization(
    Outputs,
    serialized_name="onnx2jax.Outputs",
    serialize_auxdata=lambda fields: json.dumps(fields).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


@dataclass(eq=False)
class Declarations:
    """Compares outputs with their declarations; warns once per model.

    Exporters often misname dimension variables: that is only logged (rule SH-10).
    """

    inputs: Sequence[ValueInfo]
    outputs: Sequence[ValueInfo]
    _warned: bool = field(default=False, init=False)
    _logged: set[str] = field(default_factory=set, init=False)

    def compare(self, values: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Warn about outputs that contradict their declarations; ``values`` are the inputs by name."""
        extents: dict[str, tuple[int, str]] = {}
        texts: list[str] = []
        inputs = [(v, values.get(v.name)) for v in self.inputs]
        for position, (declared, value) in enumerate((*inputs, *zip(self.outputs, results, strict=False))):
            kind, shape, is_output = declared.type, getattr(value, "shape", None), position >= len(inputs)
            if not isinstance(kind, TensorType) or shape is None:
                continue
            pairs = list(zip(kind.shape or (), shape, strict=False))
            for name, have in pairs:
                if not isinstance(name, str) or not isinstance(have, int):  # a symbolic dimension of jax.export
                    continue
                bound, first = extents.setdefault(name, (have, declared.name))
                if is_output and bound != have and declared.name not in self._logged:
                    self._logged.add(declared.name)
                    text = f"{_is_computed(declared, value)}, and {name!r} is {bound} in {first!r}"
                    logging.getLogger("onnx2jax").info(with_rules(text, "SH-10"))
            same_rank = kind.shape is None or len(kind.shape) == len(shape)
            fixed = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
            if is_output and (value.dtype != kind.dtype or not same_rank or not fixed):
                texts.append(with_rules(_is_computed(declared, value), "GR-18"))
        if texts and not self._warned:
            self._warned = True
            more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
            warnings.warn(f"{texts[0]}{more}; the computed value is returned", DeclarationWarning, stacklevel=4)


def _is_computed(declared: ValueInfo, value: Any) -> str:
    return f"output {declared} is computed as {TensorType(value.dtype, value.shape)}"
