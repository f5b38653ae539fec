"""Prefill, step and extend of a decoder over fixed-length KV caches, as pure functions.

Exported decoders grow their caches by appending, so every step has new shapes and would compile again. Here buffers of
fixed length are updated in place, in one of three ways:

- An operator that writes into the cache it receives (GroupQueryAttention) gets the full buffer.
- For a single token, ``Concat(past, new)`` becomes a write into the buffer. The model sees a KV cache as long as the
  buffer but for that token, so all shapes are consistent; the mask state the live slots, and positions derived from
  extents are shifted to the number of tokens (see ``in_place``).
- For several tokens at once, or if they are appended in another way, the model appends them to the full buffer, and
  they are copied to their slots afterwards.

Attention does not depend on the order of slots, but on positions, which some models derive from the extent of the
cache, and on sliding windows, which some measure in slots. So logits are verified before generating (see ``verified``).
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
from ..errors import InputNameError, InputShapeError, InputTypeError, InputValueError, UnsupportedError
from ..model.caches import Caches, caches
from ..model.calls.cache_pairs import BY_OPERATOR, namesake
from ..model.changes.dtype import with_narrow_ends
from ..model.changes.parts import with_graph
from ..model.model import Model
from ..ops.arrays import identical
from ..proto.types import TensorType
from ..runtime.params import DeviceParams
from . import cache as cached
from . import in_place
from .arguments import whole_number
from .cache import Buffer, Cache
from .embedding import PREFIX, Embedding
from .graphs import LAST, Graphs, inline_branch, select_last, with_layer_calls

FIRST: Final = "first/"
"""Prefix for parameters of the prefill file that the step file does not have or that differ from its own."""


class Steps(Graphs):
    """Prefill and decoding steps over fixed-length KV caches, as pure functions.

    Attributes:
        model: the model of a step.
        first: the model of the first call: the same, or that of a separate file.
        caches: the roles of the model's inputs and outputs.
        pairs: the cache inputs and their outputs, by input name, as buffers.
        vocabulary: the vocabulary size; None if the file leaves it dynamic.
        embedding: computes embeddings from tokens; None if the model takes tokens.
        others: further inputs that a caller passes, such as the outputs of an encoder.
    """

    model: Model
    first: Model
    caches: Caches
    pairs: dict[str, Buffer]
    vocabulary: int | None
    embedding: Embedding | None
    others: tuple[str, ...]

    def __init__(self, model: Model, first: Model | None = None, embed: Any = None) -> None:
        if flag := caches(model, sized=False).roles.get("has_past"):  # one file for prefill and step
            first, model = (
                with_graph(model, inline_branch(model.graph, flag.name, past), {flag.name: np.array([past])})
                for past in (False, True)
            )
        ends = {n for p in caches(model, sized=False).pairs for n in (p.past.name, p.present)}
        model = with_narrow_ends(with_layer_calls(model), ends)
        first = None if first is None else with_narrow_ends(with_layer_calls(first), ends)
        self.model, self.first = model, first or model
        self.caches = roles = caches(model)
        self.embedding = Embedding(embed) if embed is not None else None
        self.pairs = {p.past.name: cached.buffer_of(p) for p in roles.pairs}
        for value in roles.others if first else ():  # outputs of the first call that a step only reads
            present = namesake(value.name, {v.name: v for v in self.first.outputs})
            if present is not None and isinstance(value.type, TensorType):
                axis = next((i for i, d in enumerate(value.shape or ()) if i and not isinstance(d, int)), None)
                self.pairs[value.name] = cached.Cross(value, present, axis)
        _check_decoder(self)
        self._logits = next(v for v in model.outputs if v.name == roles.logits)
        last = self._logits.shape[-1] if self._logits.shape else None
        self.vocabulary = last if isinstance(last, int) else None
        self.others = tuple(v.name for v in self.first.inputs if v.name not in self._filled_inputs(self.first))
        self.others += self.embedding.others if self.embedding else ()

    @property
    def params(self) -> dict[str, Any]:
        """``model.params``, those of a prefill file that differ (``first/``), and an embedding's (``embed/``)."""
        values = {prefix: part.params for prefix, part in self._parts.items()}
        return {prefix + n: values[prefix][n] for prefix, names in self._names.items() for n in names}

    @cached_property
    def weights(self) -> DeviceParams:
        """The parameters on their devices."""
        weights, parts = self.model.weights, self._parts
        for prefix, names in self._names.items():
            if prefix and names:
                weights = weights.merged(prefix, parts[prefix].weights, names)
        return weights

    @property
    def _parts(self) -> dict[str, Model]:
        """The models of which these are the parameters, by the prefix of their names."""
        lookup = None if self.embedding is None else self.embedding.lookup
        parts = {"": self.model, FIRST: self.first if self._two_files else None, PREFIX: lookup}
        return {prefix: part for prefix, part in parts.items() if part is not None}

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """The parameters of each part; of a prefill file those not identical to the step file's of the same name."""
        names = {prefix: list(part.types) for prefix, part in self._parts.items()}
        if self._two_files:
            ours, theirs = self.model.params, self.first.params
            names[FIRST] = [n for n, v in theirs.items() if n not in ours or not identical(v, ours[n])]
        return names

    @cached_property
    def quantises_activations(self) -> bool:
        """Whether the model quantises activations or caches to 8 bits, which can amplify the smallest difference."""
        nodes = (node for graph in self.model.graph.walk() for node in graph.nodes)
        rounded = re.compile("(Dynamic)?Quantize|QLinear|QAttention|QGemm|MatMulInteger")
        return any(rounded.match(n.op_type) for n in nodes) or any(p.dtype.itemsize == 1 for p in self.pairs.values())

    @property
    def masks_padding(self) -> bool:
        """Whether the model masks padding: it has a mask input, and no recurrent state that padding would change."""
        return bool(self._roles_read & {"mask", "lengths"}) and not self._has("state")

    @property
    def supports_padding(self) -> bool:
        """Whether prompts may be padded on the right."""
        hides = (self._masks_softmax and self._in_place_model is not None) or (
            "places" in self._roles_read and not self._has("state")
        )
        return (self.masks_padding or hides) and not self._last_logits_only

    @cached_property
    def shares_slots(self) -> bool:
        """Whether sequences of different lengths may share cache slots: padding is masked, positions are inputs."""
        return (
            self.masks_padding
            and not self._shifts_positions
            and not (self._has("fixed") and "positions" not in self._roles_read)
        )

    @property
    def fixed_length(self) -> int | None:
        """The cache length that the file declares, or None."""
        lengths = (b.declared_length for b in self.pairs.values() if b.kind != "cross")
        return next((n for n in lengths if n is not None), None)

    def empty_cache(self, batch: int, length: int, *, aligned: bool = False, apart: bool = False) -> Cache:
        """An empty cache for ``batch`` sequences of at most ``length`` tokens.

        Args:
            batch, length: number of sequences, and of tokens in each.
            aligned: right-align tokens in their buffers, which copies the cache for every token; for models that append
                to their caches and have a sliding window measured in slots. ``generate`` detects this.
            apart: run each sequence separately, which is slower; for sequences of different lengths in models that do
                not mask padding or have no position input (``shares_slots`` is False).

        Raises:
            InputValueError: ``batch`` or ``length`` is below 1, or the cache would be both aligned and apart.
            UnsupportedError: the file declares another cache length, or does not determine the shape of a cache.
        """
        if aligned and apart:
            raise InputValueError("aligned=True and apart=True exclude each other: a cache has one layout, not both")
        batch, length = whole_number("batch", batch), whole_number("length", length)
        with compat.enable_x64():
            values = {n: buffer.empty(batch, length) for n, buffer in self.pairs.items()}
            return Cache(values, jnp.zeros((batch, length), bool), jnp.zeros((), np.int32), aligned, apart)

    def prefill(
        self, params: Mapping[str, Any], cache: Cache, tokens: Any, lengths: Any = None, **others: Any
    ) -> tuple[jax.Array, Cache]:
        """Runs full prompts and fills an empty cache. A pure function.

        Args:
            params: the parameters, ``decoder.params``.
            cache: an empty cache from ``empty_cache``; donate it.
            tokens: int[batch, count], padded on the right; or embeddings [batch, count, size] if the model takes these.
            lengths: int[batch], the number of tokens of each prompt; defaults to ``count``.
            **others: further inputs of the model, such as the outputs of an encoder.

        Returns:
            The logits of each prompt's last token, [batch, vocabulary], and the updated cache. Logits are NaN for the
            shorter prompts if the next step would be wrong: such a cache must be created with ``apart=True``.

        Raises:
            InputShapeError: more tokens than the cache has room for.
        """
        with compat.enable_x64():
            tokens, params, others = self._prepared(params, cache, tokens, others)
            batch, count = tokens.shape[:2]
            misplaces = lengths is not None and not (self.shares_slots or cache.apart)
            lengths = jnp.full(batch, count, np.int32) if lengths is None else jnp.asarray(lengths, np.int32)
            state = cached.with_lengths(cache, lengths, jnp.max(lengths))
            mask = state.live if self._has("fixed") else state.live[:, :count]
            slots = jnp.arange(count, dtype=np.int32)
            feeds = self._feeds(self._prefill_model, tokens, jnp.broadcast_to(slots, (batch, count)), mask, slots)
            sizes = _sizes(self.first, others)
            past = {n: self.pairs[n].first_input(v, batch, sizes) for n, v in cache.values.items()}
            last = jnp.maximum(lengths - 1, 0)
            rewrites = {in_place.SHIFT: state.end - mask.shape[1], LAST: last}
            logits, new = self._run(self._prefill_model, params, rewrites | feeds | past, others)
            values = cache.values | {n: self.pairs[n].filled(cache.values[n], v) for n, v in new.items()}
            if cache.aligned:
                values |= {
                    n: cached.right_align(values[n], lengths, b.axis, b.batch) for n, b in self._appended.items()
                }
                state = replace(state, live=state.live[:, ::-1])
            if logits.shape[1] > 1:
                logits = select_last(logits, last)
            if misplaces:
                logits = jnp.where((lengths == state.end)[:, None, None], logits, jnp.asarray(np.nan, logits.dtype))
            return logits[:, -1], replace(state, values=values)

    def step(self, params: Mapping[str, Any], cache: Cache, tokens: Any, **others: Any) -> tuple[jax.Array, Cache]:
        """Appends one token to each sequence: ``extend`` with a count of 1. A pure function.

        Args:
            params: the parameters.
            cache: the cache returned by the previous call; donate it.
            tokens: int[batch], or embeddings [batch, size].
            **others: as for ``prefill``.

        Returns:
            The logits of the token, [batch, vocabulary], and the updated cache. Logits are NaN if the cache is full.

        Raises:
            InputTypeError: the tokens are of another rank.
        """
        with compat.enable_x64():
            tokens = jnp.asarray(tokens)
            if tokens.ndim != 1 and jnp.issubdtype(tokens.dtype, np.integer):
                raise InputTypeError(f"tokens is {tokens.dtype} {tokens.shape}, not one for each sequence, (batch,)")
            logits, cache = self.extend(params, cache, tokens[:, None], **others)
            return logits[:, -1], cache

    def extend(self, params: Mapping[str, Any], cache: Cache, tokens: Any, **others: Any) -> tuple[jax.Array, Cache]:
        """Appends several tokens to each sequence, without padding. A pure function.

        Args:
            params: the parameters.
            cache: the cache returned by the previous call; donate it.
            tokens: int[batch, count], or embeddings [batch, count, size].
            **others: as for ``prefill``.

        Returns:
            The logits of each token, [batch, count, vocabulary], and the updated cache. Logits are NaN if the cache is
            full.

        Raises:
            InputShapeError: more tokens than the cache has room for.
        """
        with compat.enable_x64():
            tokens, params, others = self._prepared(params, cache, tokens, others)
            if cache.apart:
                return self._extend_apart(params, cache, tokens, others)
            batch, count = tokens.shape[:2]
            positions = cache.lengths[:, None] + jnp.arange(count, dtype=np.int32)
            start = cache.length - count if cache.aligned else cache.end
            rewritten = not cache.aligned and (count == 1 or self._shifts_positions or self._masks_softmax)
            writes = rewritten and self._in_place_model is not None
            model = self.model if cache.aligned else self._in_place_model if writes else self._full_cache_model
            assert model is not None
            state = cached.advance(cache, count, side_by_side=self._has("shared"))
            mask, past, whole = state.live, cache.values, writes or cache.aligned
            if whole:
                past = {n: self.pairs[n].input(v, cache.length - count) for n, v in past.items()}
            elif self._appended:
                mask = jnp.concatenate([cache.live, jnp.ones((batch, count), bool)], axis=1)
            feeds = self._feeds(model, tokens, positions, mask, start + jnp.arange(count, dtype=np.int32))
            shift, buffers = cache.end + count - cache.length, {in_place.BUFFER + n: v for n, v in cache.values.items()}
            rewrites = {in_place.START: cache.end, in_place.SHIFT: shift, in_place.LIVE: state.live, **buffers}
            logits, new = self._run(model, params, rewrites | feeds | past, others)
            updates = {n: self.pairs[n].extended(cache.values[n], v, cache.end, count) for n, v in new.items()}
            values, fits = cache.values | updates, cache.end + count <= cache.length
            return jnp.where(fits, logits, jnp.asarray(np.nan, logits.dtype)), replace(state, values=values)

    def _prepared(
        self, params: Mapping[str, Any], cache: Cache, tokens: Any, others: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any], dict[str, Any]]:
        """Tokens or, if the model takes these, their embeddings; the model's own parameters and further inputs.

        Raises:
            InputTypeError, InputNameError: the tokens are of another type, or the model takes embeddings alone.
            InputShapeError: there are more than the cache has room for.
        """
        tokens, embedding = jnp.asarray(tokens), self.embedding
        integers = jnp.issubdtype(tokens.dtype, np.integer)
        if tokens.ndim < 2 or not (integers or ("embeddings" in self.caches.roles and tokens.ndim == 3)):
            raise InputTypeError(f"tokens is {tokens.dtype} {tokens.shape}, not integers (batch, count), or embeddings")
        if "tokens" not in self.caches.roles and integers:
            if embedding is None:
                name = self.caches.roles["embeddings"].name
                raise InputNameError(
                    f"the decoder takes {name!r} rather than tokens: decoder(..., embed=model) computes them from "
                    "tokens, by an embedding model or a function; prefill and extend also take embeddings"
                )
            tokens = embedding(params, tokens)
        if (count := tokens.shape[1]) > cache.length:
            raise InputShapeError(
                f"there are {count} tokens, and the cache has room for {cache.length}: empty_cache(batch, "
                f"length={count})"
            )
        if embedding is None:
            return tokens, params, dict(others)
        params = {n: v for n, v in params.items() if not n.startswith(PREFIX)}
        return tokens, params, {n: v for n, v in others.items() if n not in embedding.others}

    def _extend_apart(
        self, params: Mapping[str, Any], cache: Cache, tokens: Any, others: Mapping[str, Any]
    ) -> tuple[jax.Array, Cache]:
        """``extend`` for each sequence separately, by ``vmap``."""
        batch, count = tokens.shape[:2]
        axes = {n: self.pairs[n].batch or 0 for n in cache.values}
        axes_of_others = {n: 0 if np.ndim(v) and v.shape[0] == batch else None for n, v in others.items()}

        def alone(values: Any, live: Any, tokens: Any, others: Any) -> tuple[Any, Any, Any]:
            values = {n: jnp.expand_dims(v, axes[n]) for n, v in values.items()}
            others = {n: v if axes_of_others[n] is None else v[None] for n, v in others.items()}
            before = Cache(values, live[None], jnp.sum(live, dtype=np.int32))
            logits, after = self.extend(params, before, tokens[None], **others)
            return logits[0], {n: jnp.squeeze(v, axes[n]) for n, v in after.values.items()}, after.live[0]

        every = jax.vmap(alone, (axes, 0, 0, axes_of_others), (0, axes, 0))
        logits, values, live = every(cache.values, cache.live, tokens, dict(others))
        return logits, replace(cache, values=values, live=live, end=cache.end + count)

    def _filled_inputs(self, model: Model) -> set[str]:
        """The inputs that a caller does not pass."""
        return {v.name for v in self.caches.roles.values()} | self.pairs.keys() | model.static.keys()

    def _run(
        self, model: Model, params: Mapping[str, Any], feeds: Mapping[str, Any], others: Mapping[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The logits, and the outputs that update caches, by the names of these. Reads those feeds that it needs."""
        names, feeds = [v.name for v in model.inputs], {**feeds, **others}
        if unknown := sorted(others.keys() - {v.name for v in self.first.inputs} - {*names} - self.pairs.keys()):
            valid = [n for n in names if not n.startswith("\0")]
            raise InputNameError(f"the decoder has no input {', '.join(map(repr, unknown))}; it has {valid}")
        if absent := [n for n in names if n not in feeds]:
            raise InputNameError(f"input {absent[0]!r} of the decoder is missing: pass {absent[0]}=array")
        if self._two_files:  # each file has some of the parameters
            prefix = FIRST if model in (self.first, self._prefill_model) else ""
            types = model.spec.types  # model.params would read their values
            params = {n: params.get(prefix + n, params.get(n)) for n in types if {prefix + n, n} & params.keys()}
        elif model not in (self.model, self.first):  # a merged table is no longer a parameter
            gone = self.model.spec.types.keys() - model.spec.types
            params = {n: v for n, v in params.items() if n not in gone}
        results = model.apply(params, **{n: feeds[n] for n in names})
        results = results if isinstance(results, tuple) else (results,)
        outputs = dict(zip((v.name for v in model.outputs), results, strict=True))
        presents = {n: outputs[b.present] for n, b in self.pairs.items() if b.present in outputs}
        return outputs[self._logits.name], presents


def _sizes(model: Model, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The extents of these inputs, by the model's dimension names."""
    shapes = [(v.shape or (), np.shape(feeds[v.name])) for v in model.inputs if v.name in feeds]
    return {d: n for dims, shape in shapes for d, n in zip(dims, shape, strict=False) if isinstance(d, str)}


def _check_decoder(steps: Steps) -> None:
    """Checks that the model is a decoder with KV caches.

    Raises:
        UnsupportedError: it has no token input, no logits, or no caches.
    """
    model = steps.model
    if model.spec.groups is not None:
        raise UnsupportedError(
            f"model {model.graph.name!r} was converted with rebatch=, and a group of samples has no KV cache of its "
            "own: decoder(model.with_options(rebatch=False))"
        )
    if not steps.caches.roles.keys() & {"tokens", "embeddings"}:
        raise UnsupportedError(
            f"model {model.graph.name!r} has no token input: a decoder has input_ids, and this model has "
            f"{[v.name for v in model.inputs]}"
        )
    if steps.caches.logits is None:
        raise UnsupportedError(f"model {model.graph.name!r} has no output of rank 3 for logits")
    if not steps.pairs:
        producers = ", ".join(sorted({o for _, o in BY_OPERATOR}))
        raise UnsupportedError(
            f"model {model.graph.name!r} has no KV cache: no input leads to an output of its type by Concat or "
            f"{producers}; export the decoder with KV caches (optimum: --task text-generation-with-past)"
        )
