"""Warns when a decoder is recompiled for every token because its KV cache grows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ...errors import RecompilationWarning
from ...ir.graph import Graph
from ...proto.types import ValueInfo
from .cache_pairs import pairs_of

MOST: Final = 3
"""Compilations for a growing cache before the warning."""


class CacheGrowth:
    """Detects growing KV caches from the last shapes of a model's inputs."""

    def __init__(self) -> None:
        self._last: dict[str, list[tuple[int, ...]]] = {}
        self._names: set[str] | None = None
        """Inputs that are KV caches, computed when an input first grows; empty after the warning."""

    def note(self, graph: Graph, inputs: Sequence[ValueInfo], values: Mapping[str, Any]) -> None:
        """Record the shapes of a call that compiled; warn once, when a KV cache has grown MOST - 1 times.

        The KV caches are identified only then, which keeps the first call short.
        """
        grown = []
        for name, value in values.items():
            last = self._last[name] = [*self._last.get(name, ()), tuple(getattr(value, "shape", ()))][-MOST:]
            if len(last) == MOST and all(a < b for a, b in pairwise(last)):
                grown.append(name)
        if grown and self._names is None:
            self._names = {p.past.name for p in pairs_of(graph, inputs) if p.axis is not None}
        if name := next((n for n in grown if n in (self._names or ())), ""):
            self._names = set()
            warnings.warn(
                f"{graph.name!r} is recompiled for every token, because its cache {name!r} grows: "
                f"{', '.join(map(str, self._last[name]))}. With a KV cache of fixed length it is compiled twice: "
                "onnx2jax.decoder(model).generate(tokens, max_new_tokens), or its prefill and step",
                RecompilationWarning,
                stacklevel=5,
            )
