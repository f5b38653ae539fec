"""What a model with several outputs returns."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax import export
from jax.tree_util import GetAttrKey

from .calling import to_device


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
    results = tuple(map(to_device, results))
    return results[0] if len(results) == 1 else Outputs(fields, results)


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
