"""A decoder with caches of fixed length: what a file says about its caches, as two pure functions.

Files grow their caches by appending, so that every step has other shapes and is compiled anew. Here an array of fixed
length is written in place, by one of three ways:

- An operator that writes into the cache it is given (GroupQueryAttention) is given all of it.
- ``Concat(past, new)`` becomes a write into the array where one token is fed. The model is told of a past as long as
  the array is but for that token, so everything that it computes from extents fits; the mask says what is real, and
  what counts positions by extents is made to count tokens (see ``in_place``).
- Where several tokens are fed at once, or the new ones are appended elsewhere, the model appends them to the whole
  array, and they are written to their place afterwards.

Order does not matter to attention, but positions do, and some models count them by the extent of the past, or let
tokens see only so many places back. So whoever generates compares first (see ``generate``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import InputNameError, InputShapeError, InputTypeError, UnsupportedError
from ..ir.graph import Graph
from ..model.caches import Caches, caches, extents
from ..model.calls.cache_pairs import BY_OPERATOR, Pair, namesake
from ..model.changes.parts import with_graph
from ..model.model import Model
from ..ops.arrays import identical
from ..proto.types import TensorType
from ..runtime.params import DeviceParams
from . import cache as cached
from . import in_place
from .branches import taken
from .cache import Cache, Kind
from .embedding import PREFIX, Embedding
from .graphs import Graphs

FIRST: Final = "first/"
"""Before the names of weights that only the file of the first call has."""


class Steps(Graphs):
    """A decoder's first call and its steps, over caches of fixed length, as pure functions.

    Attributes:
        model: the model of a step.
        first: the model of the first call: the same, or that of a file of its own.
        caches: what the model's inputs and outputs are for.
        pairs: the caches, by input name.
        kinds: how the model treats each of them.
        vocabulary: the number of tokens that it tells apart; None where its file leaves it open.
        embedding: what makes embeddings of tokens; None where nothing does.
        others: inputs that a caller gives beside tokens, such as what an encoder gives.
    """

    def __init__(self, model: Model, first: Model | None = None, embed: Any = None) -> None:
        if flag := caches(model).roles.get("has_past"):  # a file for both calls
            first, model = (
                with_graph(model, taken(model.graph, flag.name, past), {flag.name: np.array([past])})
                for past in (False, True)
            )
        self.caches = found = caches(model)
        self.embedding = Embedding(embed) if embed is not None else None
        self.pairs = {p.past.name: p for p in found.pairs}
        self.model, self.first, self._two_files = model, first or model, first is not None
        self._outputs = {n: p.present for n, p in self.pairs.items()}
        for value in found.others if first else ():  # what a step only reads, the first call has made
            present = namesake(value.name, {v.name: v for v in first.outputs}) if first else None
            if present is not None and isinstance(value.type, TensorType):
                axis = next((i for i, d in enumerate(value.shape or ()) if i and not isinstance(d, int)), None)
                self.pairs[value.name] = Pair(value, present, axis)
                self._outputs[value.name] = present
        _check(model, found, self.pairs)
        self.kinds: dict[str, Kind] = {
            n: "crossed" if n not in {q.past.name for q in found.pairs} else cached.kind_of(p)
            for n, p in self.pairs.items()
        }
        assert found.logits is not None
        self._logits = found.logits
        shape = next(v.shape for v in model.outputs if v.name == found.logits)
        last = shape[-1] if shape else None
        self.vocabulary = last if isinstance(last, int) else None
        self.others = tuple(v.name for v in self.first.inputs if v.name not in self._known(self.first))
        self.others += self.embedding.others if self.embedding else ()

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """The weights: ``model.params``; those of a first call's own file that differ have FIRST before their names."""
        own = {FIRST + n: self.first.params[n] for n in self._own}
        return {**self.model.params, **own, **(self.embedding.params if self.embedding else {})}

    @cached_property
    def weights(self) -> DeviceParams:
        """The weights on their devices."""
        weights = self.model.weights
        weights = weights.merged(FIRST, self.first.weights, self._own) if self._own else weights
        return self.embedding.beside(weights) if self.embedding else weights

    @cached_property
    def _own(self) -> list[str]:
        """The weights of the first call's file that are not identical to the step's of the same name."""
        if not self._two_files:
            return []
        ours, theirs = self.model.params, self.first.params
        return [n for n, v in theirs.items() if n not in ours or not identical(v, ours[n])]

    @cached_property
    def rounds(self) -> bool:
        """Whether the model rounds what it computes with to 8 bits, so that the least difference can grow."""
        nodes = (node for graph in self.model.graph.walk() for node in graph.nodes)
        rounded = re.compile("(Dynamic)?Quantize|QLinear|QAttention|QGemm|MatMulInteger")
        return any(rounded.match(n.op_type) for n in nodes) or any(p.dtype.itemsize == 1 for p in self.pairs.values())

    @property
    def masks(self) -> bool:
        """Whether what is padding stays out of sight: a mask covers it, and no state would run on into it."""
        return bool(self._read & {"mask", "lengths"}) and not self._states

    @property
    def pads(self) -> bool:
        """Whether prompts may be padded behind."""
        hides = (self._hides and self._in_place is not None) or ("places" in self._read and not self._states)
        return (self.masks or hides) and not self._one_logit

    @cached_property
    def shares_places(self) -> bool:
        """Whether sequences of different lengths may share places: padding is masked, positions are given."""
        return self.masks and not self._counts and not (self._is_fixed and "positions" not in self._read)

    @property
    def fixed_length(self) -> int | None:
        """The length that the file gives its caches, if it does."""
        sizes = (cached.own_length(p) for n, p in self.pairs.items() if self.kinds[n] != "crossed")
        return next((n for n in sizes if n is not None), None)

    def empty_cache(self, batch: int, length: int, *, aligned: bool = False, apart: bool = False) -> Cache:
        """A cache for so many sequences of at most so many tokens.

        Args:
            batch, length: how many.
            aligned: keep tokens at the end of their arrays, which costs a copy of them for each token; for models that
                append to their caches and let a token see so many places back. ``generate`` finds out.
            apart: run each sequence for itself, which takes longer; for sequences of different lengths where nothing
                masks padding or positions are not given (``shares_places`` is False).

        Raises:
            UnsupportedError: the file has caches of another length, or does not say the extents of its caches.
        """
        with compat.enable_x64():
            return cached.empty(self.pairs, self.kinds, batch, length, aligned=aligned, apart=apart)

    def prefill(
        self, params: Mapping[str, Any], cache: Cache, tokens: Any, lengths: Any = None, **others: Any
    ) -> tuple[Any, Cache]:
        """The first call: whole prompts into an empty cache. A pure function.

        Args:
            params: the weights, ``decoder.params``.
            cache: as ``empty_cache`` gives it; donate it.
            tokens: int[batch, count], padded behind; or embeddings [batch, count, size] where the model takes these.
            lengths: int[batch], the tokens of each prompt; all of them when left out.
            **others: inputs of the model that no text is made of, such as what an encoder gives.

        Returns:
            The logits behind each prompt's last token, [batch, vocabulary], and the cache. Logits are NaN for prompts
            shorter than others where the next step would be wrong: their cache has to be ``apart``.

        Raises:
            InputShapeError: more tokens than the cache has room for.
        """
        with compat.enable_x64():
            tokens, params, others = self._embedded(params, tokens, others)
            batch, count = tokens.shape[:2]
            _check_room(count, cache)
            misplaces = lengths is not None and not (self.shares_places or cache.apart)
            lengths = jnp.full(batch, count, np.int32) if lengths is None else jnp.asarray(lengths, np.int32)
            places = jnp.arange(count, dtype=np.int32)
            live = places < lengths[:, None]
            marks = cached.filled(cache, lengths, jnp.max(lengths))
            sizes = _sizes(self.first, others)
            past = {
                n: self._none(n, batch, sizes) if self.kinds[n] in ("appended", "crossed") else v
                for n, v in cache.values.items()
            }
            positions = jnp.broadcast_to(places, (batch, count))
            model = self.first if self.first is not self.model else self._whole
            given = self._feeds(model, tokens, positions, marks.live if self._is_fixed else live, places)
            given |= _asked(model, {in_place.SHIFT: marks.end - (cache.length if self._is_fixed else count)})
            results = self._run(model, params, given | past | others)
            values = {n: self._kept(n, v, results, 0, count, first=True) for n, v in cache.values.items()}
            if cache.aligned:
                rows = {n: (v, self.pairs[n]) for n, v in values.items() if self.kinds[n] == "appended"}
                values |= {n: cached.to_the_end(v, lengths, p.axis, p.batch) for n, (v, p) in rows.items()}
                marks = replace(marks, live=marks.live[:, ::-1])
            logits = results[self._logits]
            if logits.shape[1] > 1:
                logits = jnp.take_along_axis(logits, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
            if misplaces:
                logits = jnp.where((lengths == marks.end)[:, None, None], logits, jnp.asarray(np.nan, logits.dtype))
            return logits[:, -1], replace(marks, values=values)

    def step(self, params: Mapping[str, Any], cache: Cache, tokens: Any, **others: Any) -> tuple[Any, Cache]:
        """One more token for each sequence. A pure function; ``extend`` for one token.

        Args:
            params: the weights.
            cache: what the call before gave; donate it.
            tokens: int[batch], or embeddings [batch, size].
            **others: as for ``prefill``.

        Returns:
            The logits behind the token, [batch, vocabulary], and the cache. Logits are NaN where the cache is full.
        """
        with compat.enable_x64():
            logits, cache = self.extend(params, cache, jnp.asarray(tokens)[:, None], **others)
            return logits[:, -1], cache

    def extend(self, params: Mapping[str, Any], cache: Cache, tokens: Any, **others: Any) -> tuple[Any, Cache]:
        """Some more tokens for each sequence, none of them padding. A pure function.

        Args:
            params: the weights.
            cache: what the call before gave; donate it.
            tokens: int[batch, count], or embeddings.
            **others: as for ``prefill``.

        Returns:
            The logits behind each token, [batch, count, vocabulary], and the cache. Logits are NaN where the cache is
            full.
        """
        with compat.enable_x64():
            tokens, params, others = self._embedded(params, tokens, others)
            _check_room(tokens.shape[1], cache)
            if cache.apart:
                return self._extend_apart(params, cache, tokens, others)
            batch, count = tokens.shape[:2]
            positions = cache.lengths[:, None] + jnp.arange(count, dtype=np.int32)
            start = cache.length - count if cache.aligned else cache.end
            writes = not cache.aligned and (count == 1 or self._counts or self._hides) and self._in_place is not None
            model = self.model if cache.aligned else self._in_place if writes else self._whole
            assert model is not None
            marks = cached.advanced(cache, count, side_by_side="shared" in self.kinds.values())
            mask, past, whole = marks.live, dict(cache.values), writes or cache.aligned
            if whole:  # the model is told of a past that is as long as the arrays with the new tokens
                past |= {f"{in_place.WHOLE}{n}": past[n] for n in self._appended if writes}
                room = cache.length - count
                past |= {n: cached.tail(past[n], room, self.pairs[n].axis or 0) for n in self._appended}
            elif self._appended:
                mask = jnp.concatenate([cache.live, jnp.ones((batch, count), bool)], axis=1)
            given = self._feeds(model, tokens, positions, mask, start + jnp.arange(count, dtype=np.int32))
            shift = cache.end + count - cache.length
            given |= _asked(model, {in_place.START: cache.end, in_place.SHIFT: shift, in_place.LIVE: marks.live})
            results = self._run(model, params, given | past | others)
            values = {n: self._kept(n, v, results, cache.end, count, whole=whole) for n, v in cache.values.items()}
            logits, fits = results[self._logits], cache.end + count <= cache.length
            return jnp.where(fits, logits, jnp.asarray(np.nan, logits.dtype)), replace(marks, values=values)

    def _embedded(
        self, params: Mapping[str, Any], tokens: Any, others: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any], dict[str, Any]]:
        """Tokens, or their embeddings where the model takes these; the model's own weights and other inputs."""
        tokens, embedding = jnp.asarray(tokens), self.embedding
        integers = jnp.issubdtype(tokens.dtype, np.integer)
        if tokens.ndim < 2 or not (integers or ("embeddings" in self.caches.roles and tokens.ndim == 3)):
            raise InputTypeError(f"tokens is {tokens.dtype} {tokens.shape}: integers (batch, count), or embeddings")
        if "tokens" not in self.caches.roles and integers:
            if embedding is None:
                name = self.caches.roles["embeddings"].name
                raise InputNameError(
                    f"the decoder takes {name!r} rather than tokens: decoder(..., embed=model) makes them of tokens, "
                    "where the model is that of the embedding, or a function; prefill and extend take embeddings, too"
                )
            tokens = embedding(params, tokens)
        if embedding is None:
            return tokens, params, dict(others)
        own = {n: v for n, v in params.items() if not n.startswith(PREFIX)}
        return tokens, own, {n: v for n, v in others.items() if n not in embedding.others}

    def _extend_apart(
        self, params: Mapping[str, Any], cache: Cache, tokens: Any, others: Mapping[str, Any]
    ) -> tuple[Any, Cache]:
        """``extend`` of each sequence for itself, as if it were alone."""
        batch, count = tokens.shape[:2]
        axes = {n: self.pairs[n].batch or 0 for n in cache.values}
        own = {n: 0 if np.ndim(v) and v.shape[0] == batch else None for n, v in others.items()}

        def alone(values: Any, live: Any, tokens: Any, others: Any) -> tuple[Any, Any, Any]:
            values = {n: jnp.expand_dims(v, axes[n]) for n, v in values.items()}
            others = {n: v if own[n] is None else v[None] for n, v in others.items()}
            before = Cache(values, live[None], jnp.sum(live, dtype=np.int32))
            logits, after = self.extend(params, before, tokens[None], **others)
            return logits[0], {n: jnp.squeeze(v, axes[n]) for n, v in after.values.items()}, after.live[0]

        every = jax.vmap(alone, (axes, 0, 0, own), (0, axes, 0))
        logits, values, live = every(cache.values, cache.live, tokens, dict(others))
        return logits, replace(cache, values=values, live=live, end=cache.end + count)

    @cached_property
    def _one_logit(self) -> bool:
        """Whether the model gives the logits behind the last token alone."""
        shape = next(v.shape for v in self.model.outputs if v.name == self.caches.logits)
        return bool(shape and shape[1] == 1)

    def _none(self, name: str, batch: int, sizes: Mapping[str, int]) -> Any:
        """A cache before the first call; of what that makes, in the extents of the other inputs."""
        pair = self.pairs[name]
        length = sizes.get(str(pair.dims[pair.axis]), 0) if pair.axis is not None else 0
        return jnp.zeros(extents(pair, batch, length), pair.dtype)

    def _known(self, model: Model) -> set[str]:
        """The inputs that are filled here."""
        return {v.name for v in self.caches.roles.values()} | self.pairs.keys() | model.static.keys()

    def _run(self, model: Model, params: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        names = [v.name for v in model.inputs]
        if unknown := sorted(set(feeds) - {v.name for v in (*self.first.inputs, *model.inputs)} - self.pairs.keys()):
            raise InputNameError(f"the decoder has no input {', '.join(map(repr, unknown))}; it has {names}")
        if absent := [n for n in names if n not in feeds]:
            raise InputNameError(f"input {absent[0]!r} of the decoder is not given: {absent[0]}=array")
        if self._two_files:  # each has some of the weights
            prefix = FIRST if model is self.first else ""
            params = {n: params.get(prefix + n, params.get(n)) for n in model.params if {prefix + n, n} & params.keys()}
        elif model not in (self.model, self.first):  # tables that became one are no weights any more
            params = {n: v for n, v in params.items() if n in model.params or n not in self.model.params}
        results = model.apply(params, **{n: feeds[n] for n in names})
        outputs = results if isinstance(results, tuple) else (results,)
        return dict(zip((v.name for v in model.outputs), outputs, strict=True))

    def _kept(
        self, name: str, old: Any, results: Mapping[str, Any], start: Any, count: int, *, first: bool = False,
        whole: bool = False,
    ) -> Any:  # fmt: skip
        """What stays of a cache after a call; ``whole`` where the model gives all of it."""
        kind, pair, new = self.kinds[name], self.pairs[name], results.get(self._outputs[name])
        if new is None or (kind == "crossed" and not first):
            return old
        if kind != "appended" or whole:
            return new
        assert pair.axis is not None
        return cached.write(old, new if first else cached.tail(new, count, pair.axis), start, axis=pair.axis)


def _check_room(count: int, cache: Cache) -> None:
    if count > cache.length:
        raise InputShapeError(
            f"there are {count} tokens, and the cache has room for {cache.length}: empty_cache(batch, length={count})"
        )


def _sizes(model: Model, given: Mapping[str, Any]) -> dict[str, int]:
    """The extents of what is given, by the names that the model has for them."""
    shapes = [(v.shape or (), np.shape(given[v.name])) for v in model.inputs if v.name in given]
    return {d: n for dims, shape in shapes for d, n in zip(dims, shape, strict=False) if isinstance(d, str)}


def _asked(model: Model, values: dict[str, Any]) -> dict[str, Any]:
    """Those of some values for which a model has an input."""
    names = {v.name for v in model.inputs}
    return {n: v for n, v in values.items() if n in names}


def positions_in_tables(graph: Graph) -> int | None:
    """The positions that the shortest table of rotations has; None without."""
    tables = [
        graph.initializers[n].shape[0]
        for node in graph.nodes
        if node.op_type in ("GroupQueryAttention", "RotaryEmbedding")
        for n in node.inputs
        if "cos" in n and n in graph.initializers and graph.initializers[n].ndim == 2
    ]
    return min(tables, default=None)


def _check(model: Model, found: Caches, pairs: Mapping[str, Pair]) -> None:
    """Refuse what is no decoder with caches."""
    if not found.roles.keys() & {"tokens", "embeddings"}:
        raise UnsupportedError(
            f"no input of model {model.graph.name!r} is for tokens: a decoder has input_ids, and this model "
            f"{[v.name for v in model.inputs]}"
        )
    if found.logits is None:
        raise UnsupportedError(f"model {model.graph.name!r} has no output of rank 3 for logits")
    if not pairs:
        makers = ", ".join(sorted({o for _, o in BY_OPERATOR}))
        raise UnsupportedError(
            f"model {model.graph.name!r} has no cache: no input leads to an output of its kind by Concat or {makers}; "
            "export the decoder with its past (optimum: --task text-generation-with-past)"
        )
