"""The graphs of a decoder's calls, and what is given to them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import OnnxError
from ..model.caches import Caches, extents
from ..model.calls.cache_pairs import Pair
from ..model.changes.parts import with_graph
from ..model.model import Model
from ..proto.types import TensorType, ValueInfo
from . import in_place
from .cache import Kind
from .traced import ENCODED, TRIED, Known, slopes, traced


class Graphs:
    """The graphs of a decoder's calls: that of its file, and those that are made of it for caches of fixed length.

    Attributes: as those of ``Steps``, which sets them.
    """

    model: Model
    first: Model
    caches: Caches
    pairs: Mapping[str, Pair]
    kinds: Mapping[str, Kind]
    _two_files: bool

    @cached_property
    def _appended(self) -> list[str]:
        return [n for n, kind in self.kinds.items() if kind == "appended"]

    @cached_property
    def _in_place(self) -> Model | None:
        """The model with writes where it appends; None where an appending node is not at hand."""
        graph = in_place.writing(self.model.graph, {n: self.pairs[n] for n in self._appended})
        if graph is None:
            return None
        if self._counts:
            graph = in_place.counting(graph, slopes(self._tried), self.model.params)
        if self._hides:
            graph = in_place.hiding(graph, self._tried)
        return with_graph(self.model, graph)

    @cached_property
    def _counts(self) -> bool:
        """Whether the model can only count positions by the extents of what it appends to."""
        return bool(self._appended) and not self._read & {"positions", "places"}

    @cached_property
    def _hides(self) -> bool:
        """Whether the model has no mask, and what is no token is hidden where it weighs its cache."""
        return bool(self._appended) and not self._read & {"mask", "lengths"} and not self._states

    @cached_property
    def _read(self) -> set[str]:
        """What the inputs are for that the model reads, rather than only declares."""
        read = {n for node in self.model.graph.nodes for n in node.reads}
        return {role for role, v in self.caches.roles.items() if v.name in read}

    @property
    def _states(self) -> bool:
        return "state" in self.kinds.values()

    @cached_property
    def _whole(self) -> Model:
        """The model of calls that are given all of a cache, where it needs to know how much of that is taken."""
        model, mask = self.model, self.caches.roles.get("mask")
        if self._appended or self._two_files or mask is None or not in_place.depends(model.graph, [mask.name]):
            return model
        return with_graph(model, in_place.counting(model.graph, slopes(self._tried), model.params))

    @cached_property
    def _tried(self) -> list[Known]:
        """What is known in steps over a little more of the past each."""
        try:
            return [traced(self.model, self._past(n), self.caches.others, n, self._feeds) for n in TRIED]
        except (
            OnnxError,
            TypeError,
            ValueError,
        ):  # what nobody knows shows where texts are compared
            return []

    def _past(self, length: int) -> dict[str, Any]:
        """The types of caches of one sequence with so many tokens, and room for one more where they do not grow."""
        lengths = {"appended": length, "crossed": ENCODED}
        sizes = {n: max(lengths.get(self.kinds[n], length + 1), p.window) for n, p in self.pairs.items()}
        return {n: jax.ShapeDtypeStruct(extents(p, 1, sizes[n]), p.dtype) for n, p in self.pairs.items()}

    @property
    def _is_fixed(self) -> bool:
        return "fixed" in self.kinds.values()

    def _feeds(self, model: Model, tokens: Any, positions: Any, mask: Any, places: Any) -> dict[str, Any]:
        """The inputs that follow from tokens [batch, count], their positions and places, and a mask of places."""
        roles, lengths = self.caches.roles, jnp.sum(mask, axis=1, dtype=np.int32)
        total, count = mask.shape[1], tokens.shape[1]
        at = places if self._is_fixed else jnp.arange(total - count, total, dtype=np.int32)
        values: dict[str, Any] = {
            "tokens": tokens,
            "embeddings": tokens,
            "places": places,
            "lengths": lengths - 1,
            "total": np.asarray(total),
            "past": np.asarray(total - count),
        }
        feeds = {}
        for role, declared in roles.items():
            shape, dtype = declared.shape or (), _dtype(declared)
            if role == "mask":
                value = _masked(mask, at, dtype) if len(shape) == 4 else mask
            elif role == "positions":
                value = jnp.broadcast_to(positions, (3, *positions.shape)) if len(shape) == 3 else positions
            else:
                value = values.get(role)
            if value is not None and any(v.name == declared.name for v in model.inputs):
                if role in ("total", "past", "lengths"):
                    value = value.reshape([-1] * len(shape) or [])
                feeds[declared.name] = value.astype(dtype)
        return feeds


def deciding(graphs: Graphs) -> list[Model]:
    """The models whose graphs, and tables in them, decide what is compiled."""
    changed = graphs._counts or graphs._hides
    written = [graphs._in_place] if changed and graphs._in_place is not None else []
    return [graphs.model, graphs.first, graphs._whole, *written]


def _masked(mask: Any, at: Any, dtype: np.dtype) -> Any:
    """A mask of places as one of new tokens, which are ``at`` some of them, and places: [batch, 1, count, places]."""
    seen = mask[:, None, None] & (jnp.arange(mask.shape[1], dtype=np.int32) <= at[:, None])
    return seen if dtype == bool else jnp.where(seen, 0, jnp.finfo(dtype).min).astype(dtype)


def _dtype(value: ValueInfo) -> np.dtype:
    assert isinstance(value.type, TensorType)
    return value.type.dtype
