"""A call's outputs: converted, bundled, and compared with their declarations; contradictions warn."""

from __future__ import annotations

import json
import keyword
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.tree_util import GetAttrKey

from ...errors import DeclarationWarning, UnsupportedError, with_rules
from ...eval.values import are_maps, is_jax, to_device, without_arrays
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
                + f": leave it out, convert(..., outputs={others})" * bool(others)
            )
    return results


def unshared(results: list[Any], feeds: Iterable[Any]) -> list[Any]:
    """The results, copied where they share memory with the caller's arrays."""
    theirs = list(feeds)
    if {*map(type, theirs)} != {np.ndarray}:
        theirs = [v for v in jax.tree.leaves(theirs) if isinstance(v, np.ndarray)]

    def own(result: Any) -> Any:
        if isinstance(result, list):
            return [*result] if are_maps(result) else list(map(own, result))
        if not isinstance(result, np.ndarray):
            return result
        if result.base is None:  # memory of its own, in a quarter of the time
            shares = any(result is v or v.base is result for v in theirs)
        else:
            shares = any(np.may_share_memory(result, v) for v in theirs)
        return result.copy() if shares else result

    return list(map(own, results))


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


class Declarations:
    """Compares outputs with their declarations; warns once per model.

    Exporters often misname dimension variables: that is only logged (rule SH-10).
    """

    def __init__(self, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._warned = False
        self._logged: set[str] = set()

    def compare(self, values: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Warn about outputs that contradict their declarations; ``values`` are the inputs by name."""
        for name, text in self._misnamed(values, results):
            if name not in self._logged:
                self._logged.add(name)
                logging.getLogger("onnx2jax").info(text)
        if not self._warned and (texts := list(self._contradictions(results))):
            self._warned = True
            more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
            warnings.warn(f"{texts[0]}{more}; the computed value is returned", DeclarationWarning, stacklevel=4)

    def _contradictions(self, results: Sequence[Any]) -> Iterator[str]:
        for declared, value in zip(self._outputs, results, strict=False):
            kind, shape = declared.type, getattr(value, "shape", None)
            if isinstance(kind, TensorType) and shape is not None:
                pairs = list(zip(kind.shape or (), shape, strict=False))
                same_rank = kind.shape is None or len(kind.shape) == len(shape)
                fixed = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
                if value.dtype != kind.dtype or not same_rank or not fixed:
                    yield with_rules(_is_computed(declared, value), "GR-18")

    def _misnamed(self, values: Mapping[str, Any], results: Sequence[Any]) -> Iterator[tuple[str, str]]:
        extents: dict[str, tuple[int, str]] = {}
        for declared in self._inputs:
            for name, have in _named(declared, values.get(declared.name)):
                extents.setdefault(name, (have, declared.name))
        for declared, value in zip(self._outputs, results, strict=False):
            for name, have in _named(declared, value):
                bound, first = extents.setdefault(name, (have, declared.name))
                if bound != have:
                    text = f"{_is_computed(declared, value)}, and {name!r} is {bound} in {first!r}"
                    yield declared.name, with_rules(text, "SH-10")


def _is_computed(declared: ValueInfo, value: Any) -> str:
    return f"output {declared} is computed as {TensorType(value.dtype, value.shape)}"


def _named(declared: ValueInfo, value: Any) -> Iterator[tuple[str, int]]:
    """The dimension variables of a value and their extents, except symbolic dimensions of jax.export."""
    for name, have in zip(declared.shape or (), getattr(value, "shape", ()), strict=False):
        if isinstance(name, str) and isinstance(have, int):
            yield name, have
