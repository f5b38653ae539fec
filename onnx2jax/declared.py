"""What a model declares of its outputs, and what it computes: the latter counts, and a contradiction is a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .proto.types import TensorType, ValueInfo


class DeclarationWarning(UserWarning):
    """An output has another element type or shape than the model declares (rules GR-18 and SH-10)."""


class Declarations:
    """The outputs that a model declares, each warned of once."""

    def __init__(self, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._warned: set[str] = set()

    def compare(self, values: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Warn of outputs that are not as declared; ``values`` are the inputs that they come from."""
        for name, text in self._contradictions(values, results):
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{text}; the computed value counts", DeclarationWarning, stacklevel=4)

    def _contradictions(self, values: Mapping[str, Any], results: Sequence[Any]) -> Iterator[tuple[str, str]]:
        extents: dict[str, tuple[int, str]] = {}
        for declared in self._inputs:
            for name, have in _named(declared, values.get(declared.name)):
                extents.setdefault(name, (have, declared.name))
        for declared, value in zip(self._outputs, results, strict=False):
            kind, shape = declared.type, getattr(value, "shape", None)
            if not isinstance(kind, TensorType) or shape is None:
                continue
            is_computed = f"output {declared} is computed as {TensorType(value.dtype, shape)}"
            if value.dtype != kind.dtype or (kind.shape is not None and len(kind.shape) != len(shape)):
                yield declared.name, f"{is_computed} (rule GR-18)"
                continue
            for want, have in zip(kind.shape or (), shape, strict=False):
                if isinstance(want, int) and isinstance(have, int) and want != have:
                    yield declared.name, f"{is_computed} (rule GR-18)"
            for name, have in _named(declared, value):
                bound, first = extents.setdefault(name, (have, declared.name))
                if bound != have:
                    yield declared.name, f"{is_computed}, and {name!r} is {bound} in {first!r} (rule SH-10)"


def _named(declared: ValueInfo, value: Any) -> Iterator[tuple[str, int]]:
    """The dimension variables of a value and their extents; symbolic ones of jax.export cannot be told apart."""
    wanted = declared.type.shape if isinstance(declared.type, TensorType) else None
    for name, have in zip(wanted or (), getattr(value, "shape", ()), strict=False):
        if isinstance(name, str) and isinstance(have, int):
            yield name, have
