"""A Decoder as a pytree: its leaves are its parameters by name, as in ``params``, all else is static.

JAX builds decoders from any leaves, as it builds models: nothing is checked before a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.tree_util import DictKey

from .embedding import PREFIX
from .loop import Programs
from .steps import FIRST
from .verified import VerifiedSteps

OF_VALUES: Final = frozenset(
    (
        *("model", "first", "embedding", "weights", "_prefill_model", "_full_cache_model", "_in_place_model"),
        *("_programs", "_verified", "_failed_layouts", "_structure"),
    )
)
"""Attributes of a decoder that depend on the values of its parameters."""


class DecoderStructure:
    """The static part of a decoder, without parameter values: decoders that differ only in these have equal ones.

    Attributes:
        names: the names of the leaves, in order.
    """

    def __init__(self, decoder: VerifiedSteps) -> None:
        self._models = {prefix: (tuple(m.types), jax.tree.structure(m)) for prefix, m in decoder._parts.items()}
        self.names: tuple[str, ...] = tuple(prefix + n for prefix, names in decoder._names.items() for n in names)
        self._embedding = None if decoder.embedding is None else decoder.embedding.over(None)
        self._attributes = {n: v for n, v in vars(decoder).items() if n not in OF_VALUES}
        function = None if self._embedding is None else self._embedding.function
        settings = (self._attributes[n] for n in ("stop", "pad", "context", "tokenizer"))
        self._key = (*((p, *pair) for p, pair in self._models.items()), self.names, function, *settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoderStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"{len(self.names)} parameters"

    def leaves(self, decoder: VerifiedSteps) -> list[Any]:
        """The parameters of a decoder of this structure, on their devices."""
        values: dict[str, Any] = {}
        for prefix, part in decoder._parts.items():
            leaves, _ = part._flat  # whatever they are: jax.tree.leaves would look into them
            values |= {prefix + n: v for n, v in zip(self._models[prefix][0], leaves, strict=True)}
        return [values[n] for n in self.names]

    def decoder(self, cls: type[VerifiedSteps], leaves: Sequence[Any]) -> VerifiedSteps:
        """The decoder of this structure with these leaves."""
        values = dict(zip(self.names, leaves, strict=True))
        models = {}
        for prefix, (names, structure) in self._models.items():
            leaves = [values[prefix + n] if prefix + n in values else values[n] for n in names]
            models[prefix] = jax.tree.unflatten(structure, leaves)
        new = object.__new__(cls)
        vars(new).update(self._attributes, _structure=self)
        new.model, new.first = models[""], models.get(FIRST, models[""])
        new.embedding = None if self._embedding is None else self._embedding.over(models.get(PREFIX))
        new._programs, new._verified, new._failed_layouts = Programs(new), set(), set()
        return new


def register(cls: type[Any]) -> None:
    """Register the class of decoders with JAX."""

    def with_keys(decoder: Any) -> tuple[list[tuple[DictKey, Any]], DecoderStructure]:
        structure = decoder._structure
        return list(zip(map(DictKey, structure.names), structure.leaves(decoder), strict=True)), structure

    def flat(decoder: Any) -> tuple[list[Any], DecoderStructure]:
        return decoder._structure.leaves(decoder), decoder._structure

    jax.tree_util.register_pytree_with_keys(
        cls, with_keys, lambda structure, leaves: structure.decoder(cls, list(leaves)), flat
    )
