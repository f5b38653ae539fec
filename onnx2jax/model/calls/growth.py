"""A decoder whose cache grows is compiled anew for every token: a warning that names the way out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ...runtime.compiled import RecompilationWarning
from .caches import caches

if TYPE_CHECKING:
    from ..model import Model

MOST: Final = 3
"""Compilations for a cache that grows."""


class Growth:
    """The shapes in which a model's inputs have come."""

    def __init__(self) -> None:
        self._last: dict[str, list[tuple[int, ...]]] = {}
        self._names: set[str] | None = None
        """The inputs that are caches and of which nobody has been warned, once that is asked."""

    def note(self, model: Model, values: Mapping[str, Any]) -> None:
        """Note the shapes of a call for which something was compiled; warn once, when a cache has grown by and by.

        Which inputs are caches is asked only when one has grown: it is no part of a model's first call.
        """
        grown = []
        for name, value in values.items():
            last = self._last[name] = [*self._last.get(name, ()), tuple(getattr(value, "shape", ()))][-MOST:]
            if len(last) == MOST and all(a < b for a, b in pairwise(last)):
                grown.append(name)
        if grown and self._names is None:
            self._names = {p.past.name for p in caches(model).pairs if p.axis is not None}
        if name := next((n for n in grown if n in (self._names or ())), ""):
            self._names = set()
            warnings.warn(
                f"{model.graph.name!r} is compiled anew for every token, because its cache {name!r} grows: "
                f"{', '.join(map(str, self._last[name]))}. With a cache of one length it is compiled twice in all: "
                "onnx2jax.decoder(model).generate(tokens, max_new_tokens), or its prefill and step",
                RecompilationWarning,
                stacklevel=5,
            )
