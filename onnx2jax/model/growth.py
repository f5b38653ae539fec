"""A decoder whose cache grows is compiled anew for every token: a warning that names the way out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..runtime.compiled import RecompilationWarning
from .caches import caches

if TYPE_CHECKING:
    from .model import Model

MOST: Final = 3
"""Compilations for a cache that grows."""


class Growth:
    """The shapes in which a model's caches have come."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        self._seen: dict[str, list[tuple[int, ...]]] = {}

    def note(self, model: Model, values: Mapping[str, Any]) -> None:
        """Note the shapes of a call for which something was compiled; warn once, when a cache has grown by and by."""
        if self._names is None:
            self._names = frozenset(p.past.name for p in caches(model).pairs if p.axis is not None)
        for name in filter(self._names.__contains__, values):
            shapes = self._seen.setdefault(name, [])
            shapes.append(np.shape(values[name]))
            last = shapes[-MOST:]
            if len(last) == MOST and all(a < b for a, b in pairwise(last)):
                self._names = frozenset()
                warnings.warn(
                    f"{model.graph.name!r} is compiled anew for every token, because its cache {name!r} grows: "
                    f"{', '.join(map(str, last))}. With a cache of one length it is compiled twice in all: "
                    "onnx2jax.decoder(model).generate(tokens, max_new_tokens), or its prefill and step",
                    RecompilationWarning,
                    stacklevel=5,
                )
                return
