"""What a model returns, and what it declares of that: what it computes counts, and a contradiction is a warning."""

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

from ...errors import with_rules
from ...proto.types import TensorType, ValueInfo
from ...runtime.values import to_device


class Outputs(tuple[Any, ...]):
    """A named tuple of a model's outputs, in the order of the graph.

    One type for all models, unlike those that ``collections.namedtuple`` makes: so it can be pickled, and is part of
    what ``jax.export`` serializes.

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


def packed(fields: Iterable[str], results: Iterable[Any]) -> Any:
    """What a call returns: numbers as JAX arrays; one output bare, several as Outputs."""
    return bundled(fields, list(map(to_device, results)))


def bundled(fields: Iterable[str], results: Sequence[Any]) -> Any:
    """One output bare, several as Outputs."""
    return results[0] if len(results) == 1 else Outputs(fields, results)


def apart(results: list[Any], feeds: Iterable[Any]) -> list[Any]:
    """The results of a run, of which none lies in an array of the caller's, who may write into that afterwards.

    What was compiled gives arrays of its own, read-only ones, but for inputs that are outputs; the host gives views.
    """
    return [_apart(r, feeds) if type(r) is not np.ndarray or r.flags.writeable else r for r in results]


def _apart(result: Any, feeds: Iterable[Any]) -> Any:
    if isinstance(result, list):
        return [r if type(r) is dict else _apart(r, feeds) for r in result]
    if not isinstance(result, np.ndarray):
        return result
    shared = any(isinstance(v, np.ndarray) and np.may_share_memory(result, v) for v in feeds)
    return result.copy() if shared else result


def field_names(names: Iterable[str]) -> tuple[str, ...]:
    """ONNX names as Python's: what cannot be part of one becomes _, and what is none after that its position.

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


class DeclarationWarning(UserWarning):
    """An output has another element type, rank or fixed extent than the model declares (rule GR-18)."""


class Declarations:
    """The outputs that a model declares; the first that contradict are a warning, once for all.

    Exporters often give free dimensions the wrong name: that goes to the log alone (rule SH-10).
    """

    def __init__(self, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._warned = False
        self._logged: set[str] = set()

    def compare(self, values: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Warn of outputs that are not as declared; ``values`` are the inputs that they come from."""
        for name, text in self._misnamed(values, results):
            if name not in self._logged:
                self._logged.add(name)
                logging.getLogger("onnx2jax").info(text)
        if not self._warned and (texts := list(self._contradictions(results))):
            self._warned = True
            more = f" (and {len(texts) - 1} more outputs alike)" if len(texts) > 1 else ""
            warnings.warn(f"{texts[0]}{more}; the computed value counts", DeclarationWarning, stacklevel=4)

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
    """The dimension variables of a value and their extents; symbolic ones of jax.export cannot be told apart."""
    for name, have in zip(declared.shape or (), getattr(value, "shape", ()), strict=False):
        if isinstance(name, str) and isinstance(have, int):
            yield name, have
