"""Attention: scaled dot-product, flexible and linear; rotary embedding and causal convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import ATTENTION_BLOCK, ATTENTION_PARTS, ATTENTION_QUERIES
from ..proto.types import to_dtype
from .activation import softmax
from .arrays import accumulator, check_shape, check_shapes, xp
from .indexing import BOUNDS, gather
from .linalg import rows_of_group
from .registry import op
from .traced import finite_or

Rows = Callable[[Any], Any]
"""Of an array that broadcasts to all scores, the part for a block of queries."""


def block_size(scores: Sequence[Any]) -> int | None:
    """The number of queries per block of scores [..., queries, keys]; None if they are computed at once.

    >>> block_size((1, 16, 8192, 8192)), block_size((8, 12, 512, 512))
    (256, None)
    """
    if not all(isinstance(n, int) for n in scores) or math.prod(scores) <= 2 * ATTENTION_BLOCK:
        return None
    queries = scores[-2]
    size = max(ATTENTION_QUERIES, 1 << (max(ATTENTION_BLOCK * queries // math.prod(scores), 1).bit_length() - 1))
    return size if 2 * size <= queries else None


def over_blocks(function: Callable[[Any, Rows], Any], x: Any, size: int) -> Any:
    """``function(x, rows)`` evaluated for ``size`` queries of x [..., queries, features] at a time.

    Gradients recompute each block. The last block starts early enough to be whole.
    """
    queries, count = x.shape[-2], -(-x.shape[-2] // size)
    last = queries - (count - 1) * size

    def block(operands: tuple[Any, Any]) -> Any:
        x, start = operands

        def rows(value: Any) -> Any:
            if np.ndim(value) < 2 or value.shape[-2] == 1:
                return value
            if value.shape[-2] != queries:
                raise ValueError(f"masks must broadcast to [..., {queries} queries, keys], not {value.shape}")
            return lax.dynamic_slice_in_dim(value, start, size, value.ndim - 2)

        return function(x, rows)

    if last < size:
        x = jnp.concatenate([x[..., : (count - 1) * size, :], x[..., queries - size :, :]], axis=-2)
    blocks = jnp.moveaxis(x.reshape(*x.shape[:-2], count, size, x.shape[-1]), -3, 0)
    starts = np.minimum(np.arange(count, dtype=np.int32) * size, queries - size)
    y = jnp.moveaxis(lax.map(jax.checkpoint(block, prevent_cse=False), (blocks, starts)), 0, -3)
    y = y.reshape(*y.shape[:-3], count * size, y.shape[-1])
    return y if last == size else jnp.concatenate([y[..., : (count - 1) * size, :], y[..., -last:, :]], axis=-2)


Precision = Literal[None, 1, 10, 11, 16]  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


def _group(q_heads, kv_heads):
    """The number of query heads per key/value head."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"query heads ({q_heads}) must be a multiple of key/value heads ({kv_heads})")
    return q_heads // kv_heads


def heads_of(x, heads, name):
    """[batch, sequence, heads * size] -> [batch, heads, sequence, size]; a rank-4 tensor is returned unchanged."""
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ValueError(f"{name} has {x.shape[1]} heads, the attribute says {heads}: leave it off for rank 4")
        return x
    if x.ndim != 3 or not heads:
        raise ValueError(f"{name} must have rank 4, or rank 3 with q_num_heads and kv_num_heads (rank {x.ndim})")
    if x.shape[2] % heads:
        raise ValueError(f"the last extent of {name} ({x.shape[2]}) must be a multiple of its heads ({heads})")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def merged(x):
    """[batch, heads, sequence, size] -> [batch, sequence, heads * size]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def check_paired(**operands):
    """Raise ValueError if some of the operands are given and others are not."""
    if len({value is None for value in operands.values()}) > 1:
        raise ValueError(f"{' and '.join(operands)} must be given together")


def check_update(update_rule, decay, beta):
    """Raise ValueError unless the operands of linear attention fit its rule."""
    for name, operand, wanted in (("decay", decay, "gated" in update_rule), ("beta", beta, "delta" in update_rule)):
        if (operand is not None) != wanted:
            raise ValueError(f"update_rule {update_rule!r} {'needs' if wanted else 'takes no'} input {name}")


def check_past(q, k, v, past_key, past_value, **others):
    """Raise ValueError unless attention operands [batch, heads, length, size] agree; ``others`` are (value, shape)."""
    check_paired(past_key=past_key, past_value=past_value)
    check_shapes(
        {}, query=(q, "batch q_heads queries size"), key=(k, "batch heads keys size"),
        value=(v, "batch heads keys value_size"), past_key=(past_key, "batch heads past size"),
        past_value=(past_value, "batch heads past value_size"), **others,
    )  # fmt: skip


def _scores(q, k, v, scale, dtype):
    """scale * Q K^T as [batch, heads, *rows_of_group, keys]; query heads of a group share keys without a copy."""
    check_past(q, k, v, None, None)
    (batch, heads, queries, size), kv_heads = q.shape, k.shape[1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if scale < 0:
        raise ValueError(f"scale ({scale}) must not be negative: its square root scales Q and K")
    if dtype == np.float16:  # the specification scales Q and K by sqrt(scale) each
        root, scale = np.float16(math.sqrt(scale)), 1
        q, k = q * root, k * root
    q = q.reshape(batch, kv_heads, *rows_of_group(_group(heads, kv_heads), queries), size)
    product = jnp.einsum("bh...d,bhkd->bh...k", q, k, preferred_element_type=accumulator(q.dtype))
    return (product * scale).astype(dtype)


def _grouped(term, group, queries):
    """[batch, query heads, queries, keys], or what broadcasts to it, with the axes of ``_scores``."""
    batch, heads, rows, keys = (1,) * (4 - term.ndim) + term.shape
    return term.reshape(batch, *((1, 1) if heads == 1 else (heads // group, group)), *(rows,)[queries == 1 :], keys)


ROWS: Final = 64
"""Rows of a cache that are selected at a time, where a product with all of them is not finite."""


@jax.custom_jvp
def _in_use(weights, v, ends):
    """weights [batch, heads, ..., keys] @ v [batch, heads, keys, size].

    From ``ends`` [batch, 1, 1, 1] on, weights are 0 and values are not read, whatever they are.
    """
    return compat.platform_dependent(weights, v, ends, cpu=_finite_or_selected, default=_of_selected)


@_in_use.defjvp
def _in_use_jvp(primals, tangents):
    weights, v, ends = primals
    by_weights, by_v, _ = tangents
    return _in_use(weights, v, ends), _of_selected(by_weights, v, ends) + _of_selected(weights, by_v, ends)


def _product(weights, v):
    return jnp.einsum("bh...k,bhkd->bh...d", weights, v, preferred_element_type=accumulator(weights.dtype))


def _of_selected(weights, v, ends, first=0):
    return _product(weights, jnp.where(first + lax.iota(np.int32, v.shape[2])[:, None] < ends, v, 0))


def _finite_or_selected(weights, v, ends):
    """The product with all rows; where that is not finite, with those in use, by a loop that otherwise has no trip.

    A selection of all rows takes as long as the product again, and of a condition XLA copies the cache.
    """
    y, keys = _product(weights, v), v.shape[2]
    finite = lax.is_finite(y).all()

    def add(i, total):
        start = jnp.minimum(i * ROWS, keys - ROWS)
        part = lax.dynamic_slice_in_dim(weights, start, ROWS, weights.ndim - 1)
        part = jnp.where(start + lax.iota(np.int32, ROWS) >= i * ROWS, part, 0)  # the last overlaps the one before
        return total + _of_selected(part, lax.dynamic_slice_in_dim(v, start, ROWS, 2), ends, start)

    return lax.fori_loop(0, jnp.where(finite, 0, -(-keys // ROWS)), add, jnp.where(finite, y, 0))


def _weigh(weights, v, read=None, ends=None):
    """weights [batch, heads, *rows_of_group, keys] @ V as [batch, heads, ..., size], in the dtype of the weights.

    ``read`` [batch or 1, 1, queries or 1, keys] is False for values that are not read, and from ``ends``
    [batch or 1, 1, 1, 1] on none is: the product would turn such NaN and infinities into NaN. Where queries read
    different values, terms are selected only if the product is not finite.
    """
    keys, work, v = weights.shape[-1], accumulator(weights.dtype), jnp.asarray(v, weights.dtype)
    if read is not None and read.shape[2] == 1:
        v = jnp.where(read[:, :, 0, :, None], v, 0)
    before_ends = _in_use if isinstance(keys, int) and keys > ROWS else _of_selected
    y = _product(weights, v) if ends is None else before_ends(weights, v, ends)

    @jax.checkpoint
    def selected(weights, v, read):
        terms = weights[..., None] * v[:, :, None, None]
        return jnp.sum(jnp.where(read[:, :, None, ..., None], terms, 0), axis=-2, dtype=work)

    if read is not None and read.shape[2] > 1:
        y = finite_or(y, selected, weights, v, read)
    return y.astype(weights.dtype)


def attend(q, k, v, *, biases=(), masks=(), read=None, ends=None, past=None, keep_scores=False, **options):
    """Softmax attention of q [batch, heads, queries, size] over k and v, which may have fewer heads (grouped query).

    ``masks`` are True for keys to attend to. A bias or mask is an array that broadcasts to the scores, or a function of
    ``rows``, which selects the queries and keys at hand from such an array. ``read`` [batch or 1, 1, queries or 1,
    keys] is True for values that are read at all, whatever the others are; from ``ends`` [batch or 1, 1, 1, 1] on none
    is. ``past`` is the number of keys before those of the queries, if it is known and ``masks`` hide later keys from
    each query. Returns the output and, if ``keep_scores``, the intermediate scores: scaled, capped, biased, masked,
    weights. Otherwise long sequences are computed by blocks of queries, and parts of them read no later keys.
    """
    terms = biases, masks, (read, ends)
    if keep_scores:
        return _attend(q, k, v, *terms, lambda x: x, **options)
    shape = q.shape[2], k.shape[2]
    if len(parts := _parts(*shape, past)) == 1:
        return _by_blocks(q, k, v, terms, lambda x: x, **options), (None,) * 5
    outputs = []
    for start, stop, keys in parts:
        part = partial(_part, shape, start, stop, keys)
        outputs.append(_by_blocks(q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys], terms, part, **options))
    return jnp.concatenate(outputs, axis=2), (None,) * 5


def _by_blocks(q, k, v, terms, part, **options):
    size = block_size((*q.shape[:3], k.shape[2]))
    if size is None:
        return _attend(q, k, v, *terms, part, **options)[0]
    return over_blocks(lambda q, rows: _attend(q, k, v, *terms, lambda x: rows(part(x)), **options)[0], q, size)


def _parts(queries, keys, past):
    """For each part of the queries of causal attention: its first, its end, and the number of keys that it reads.

    >>> _parts(300, 310, 10), _parts(300, 310, None)
    ([(0, 128, 138), (128, 256, 266), (256, 300, 310)], [(0, 300, 310)])
    """
    if past is None or not all(isinstance(n, int) for n in (queries, keys, past)) or queries <= ATTENTION_QUERIES:
        return [(0, queries, keys)]
    size = -(-queries // (ATTENTION_PARTS * ATTENTION_QUERIES)) * ATTENTION_QUERIES
    ends = [min(start + size, queries) for start in range(0, queries, size)]
    return [(start, end, min(past + end, keys)) for start, end in zip([0, *ends], ends, strict=False)]


def _part(shape, start, stop, keys, value):
    """Of an array that broadcasts to scores of ``shape``, the queries from ``start`` to ``stop`` and the first keys."""
    rows, columns = (1, 1, *value.shape)[-2:]
    if rows not in (1, shape[0]) or columns not in (1, shape[1]):
        raise ValueError(f"masks must broadcast to [..., queries, keys] {shape}, not {value.shape}")
    value = value[..., start:stop, :] if rows > 1 else value
    return value[..., :keys] if columns > 1 else value


def _attend(
    q, k, v, biases, masks, values, rows, *, scale=None, softcap=0.0, sink=None, dtype=None, precision=None, empty=True,
):  # fmt: skip
    """``attend`` for the queries that ``rows`` selects.

    All scores keep the axes of the product: after other axes, XLA's softmax on CUDA would read a masked copy.
    ``sink`` is an extra logit per head without a value. ``dtype`` is that of the scores, ``precision`` that of the
    softmax. ``empty`` is False if each query has a key: for the bounds of others XLA reads all scores again on a TPU.
    """
    dtype = dtype or accumulator(q.dtype)
    raw, shape = _scores(q, k, v, scale, dtype), (*q.shape[:3], k.shape[2])
    capped = jnp.tanh(raw / softcap) * softcap if softcap > 0 else raw
    biases, masks = ([m(rows) if callable(m) else rows(m) for m in terms if m is not None] for terms in (biases, masks))
    broadcast = jnp.broadcast_shapes(shape, *(np.shape(term) for term in (*biases, *masks)))
    if broadcast != shape:
        raise ValueError(f"masks must broadcast to [batch, heads, queries, keys] {shape}, not {broadcast}")
    grouped = partial(_grouped, group=shape[1] // k.shape[1], queries=shape[2])
    masked = biased = sum((grouped(jnp.asarray(b, dtype)) for b in biases), capped)
    for mask in masks:
        masked = jnp.where(grouped(mask), masked, -np.inf)
    logits = masked.astype(precision or dtype)
    if sink is not None:
        column = jnp.broadcast_to(grouped(sink), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column.astype(logits.dtype)], axis=-1)
    weights = softmax(logits, axes=(logits.ndim - 1,), empty=empty)[..., : shape[3]].astype(q.dtype)
    read, ends = values
    y = _weigh(weights, v, None if read is None else rows(read), ends).reshape(*shape[:3], v.shape[3])
    return y, tuple(scores.reshape(shape) for scores in (raw, capped, biased, masked, weights))


def window(queries, keys, offset, left, right):
    """Masks of the keys in [position - left, position + right] of each query; a negative side is unbounded."""
    offset = jnp.asarray(offset, np.int32)

    def distance(rows):
        query, key = (rows(lax.broadcasted_iota(np.int32, s, i)) for i, s in enumerate(((queries, 1), (1, keys))))
        return query - key + offset

    before = [lambda rows: distance(rows) <= left] if left >= 0 else []
    return before + ([lambda rows: distance(rows) >= -right] if right >= 0 else [])


def _bias_and_mask(mask, keys, may_end_early):
    """(additive bias or None, boolean mask) of an attn_mask; keys beyond its end are masked."""
    boolean = mask.dtype == bool
    if may_end_early and mask.shape[-1] != keys:  # otherwise an extent of 1 broadcasts
        widths = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
        mask = jnp.pad(mask, widths, constant_values=False if boolean else -np.inf)
    return (None, mask) if boolean else (mask, lambda rows: ~jnp.isneginf(rows(mask)))


@op("Attention", since=23, product=True, limits="always compiled; a fully masked query yields zeros")
def attention(
    Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *, is_causal=0, kv_num_heads=None,
    left_window_size=-1, q_num_heads=None, qk_matmul_output_mode: Literal[0, 1, 2, 3] = 0, right_window_size=-1,
    scale=None, softcap=0.0, softmax_precision: Precision = None, opset, n_outputs=1,
):  # fmt: skip
    """Scaled dot-product attention; a fully masked query yields zeros."""
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen is for a KV cache outside the node: remove past_key and past_value")
    if min(left_window_size, right_window_size) < -1:
        raise ValueError(f"window sizes ({left_window_size}, {right_window_size}) must be -1 or more")
    q = heads_of(Q, q_num_heads, "Q")
    k, v = heads_of(K, kv_num_heads, "K"), heads_of(V, kv_num_heads, "V")
    check_past(q, k, v, past_key, past_value, nonpad_kv_seqlen=(nonpad_kv_seqlen, "batch"))
    offset, masks, bias = 0, [], None
    if past_key is not None:
        k, v, offset = jnp.concatenate([past_key, k], 2), jnp.concatenate([past_value, v], 2), past_key.shape[2]
    queries, keys = q.shape[2], k.shape[2]
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.reshape(-1, 1, 1, 1).astype(np.int32)
        masks, offset = [lax.iota(np.int32, keys) < lengths], lengths - queries
    masks += window(queries, keys, offset, left_window_size, 0 if is_causal else right_window_size)
    if attn_mask is not None:
        bias, mask = _bias_and_mask(attn_mask, keys, may_end_early=opset >= 24)
        masks.append(mask)
    past = offset if is_causal and isinstance(offset, int) else None
    y, (raw, capped, _, scores, weights) = attend(
        q, k, v, scale=scale, softcap=softcap, biases=[bias], masks=masks, past=past, dtype=Q.dtype,
        precision=softmax_precision and to_dtype(softmax_precision, "softmax_precision"), keep_scores=n_outputs > 3,
    )  # fmt: skip
    return y if Q.ndim == 4 else merged(y), k, v, (raw, capped, scores, weights)[qk_matmul_output_mode]


def _modified(body, x, name):
    (result,) = (x,) if body is None else body(x)
    if result.shape != x.shape or result.dtype != x.dtype:
        types = f"input {x.dtype}{x.shape}, output {result.dtype}{result.shape}"
        raise ValueError(f"{name} must preserve shape and dtype ({types})")
    return result


@op("FlexAttention", domain="ai.onnx.preview", heavy=True)
def flex_attention(Q, K, V, *, prob_mod=None, scale=None, score_mod=None, softmax_precision: Precision = None):
    """Attention whose scores and probabilities are modified by the node's subgraphs."""
    precision = to_dtype(softmax_precision, "softmax_precision") if softmax_precision else accumulator(Q.dtype)
    scores = _scores(Q, K, V, scale, precision)
    modified = _modified(score_mod, scores.reshape(*Q.shape[:3], K.shape[2]), "score_mod")
    weights = jax.nn.softmax(jnp.asarray(modified, accumulator(precision)), axis=-1).astype(precision)
    y = _weigh(_modified(prob_mod, weights, "prob_mod").reshape(scores.shape), V)
    return y.reshape(*Q.shape[:3], V.shape[3]).astype(V.dtype)


def _state(past, shape, like):
    """The past state, or zeros in the dtype of ``like``."""
    check_shape("past_state", past, *shape)
    return xp(like).zeros(shape, like.dtype) if past is None else past


@op("LinearAttention", since=27, heavy=True)
def linear_attention(
    query, key, value, past_state=None, decay=None, beta=None, *, chunk_size=64, kv_num_heads, q_num_heads, scale=0.0,
    update_rule: Literal["linear", "gated", "delta", "gated_delta"] = "gated_delta",
):  # fmt: skip
    """Linear attention: a state of outer products k v^T, decayed, corrected and read once per token."""
    check_update(update_rule, decay, beta)
    for name, x in {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}.items():
        check_shape(name, x, "batch", "tokens", "features")
    group, wide = _group(q_num_heads, kv_num_heads), accumulator(query.dtype)

    def per_token(x, name, heads=kv_num_heads):
        """[batch, tokens, heads * size] -> [tokens, batch, heads, size] for the scan."""
        return jnp.moveaxis(heads_of(x, heads, name), 2, 0).astype(wide)

    q, k, v = per_token(query, "query", q_num_heads), per_token(key, "key"), per_token(value, "value")
    batch, _, d_k = q.shape[1:]
    if k.shape[3] != d_k:
        raise ValueError(f"query heads have size {d_k}, key heads {k.shape[3]}: they must agree")
    g = None if decay is None else jnp.exp(per_token(decay, "decay"))
    b = None if beta is None else per_token(beta, "beta", beta.shape[2])
    scale = 1 / math.sqrt(d_k) if scale == 0 else scale

    def step(state, token):
        q, k, v, g, b = token
        state = state if g is None else state * g[..., None]
        v = v if b is None else b * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[..., None, :]
        q = q.reshape(batch, kv_num_heads, group, d_k)
        return state, jnp.einsum("bhgk,bhkv->bhgv", q, state)

    past_state = _state(past_state, (batch, kv_num_heads, d_k, v.shape[3]), query)
    # A scan over tokens, unrolled a little unless the sequence length is symbolic.
    unroll = min(chunk_size, 4) if isinstance(q.shape[0], int) else 1
    state, read = lax.scan(step, past_state.astype(wide), (q, k, v, g, b), unroll=unroll)
    read = jnp.moveaxis(read, 0, 1).reshape(*query.shape[:2], q_num_heads * v.shape[3])
    return (read * scale).astype(query.dtype), state.astype(past_state.dtype)


@op("RotaryEmbedding", since=23, limits=BOUNDS)
def rotary_embedding(
    X, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=None, rotary_embedding_dim=0
):
    """Rotates each pair of a head's features by an angle that depends on its position."""
    if X.ndim != 4 and not (X.ndim == 3 and num_heads):
        raise ValueError(f"X must have rank 4, or rank 3 with the attribute num_heads ({X.shape})")
    x = X if X.ndim == 4 else X.reshape(*X.shape[:2], num_heads, X.shape[2] // num_heads)
    extents = {"batch": X.shape[0], "tokens": X.shape[-2], "angles": (rotary_embedding_dim or x.shape[3]) / 2}
    table = "batch tokens angles" if position_ids is None else "positions angles"
    tables = {"cos_cache": (cos_cache, table), "sin_cache": (sin_cache, table)}
    check_shapes(extents, **tables, position_ids=(position_ids, "batch tokens"))
    if position_ids is not None:
        cos_cache, sin_cache = (gather(cache, position_ids) for cache in (cos_cache, sin_cache))
    heads = 1 if X.ndim == 4 else 2
    return _rotated(x, *(xp.expand_dims(c, heads) for c in (cos_cache, sin_cache)), interleaved).reshape(X.shape)


def _rotated(x, cos, sin, interleaved):
    """``x`` with its leading features, two per angle, rotated in pairs; the remaining features are unchanged."""
    pairs, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else xp.split(pairs, 2, axis=-1)
    turned = [cos * a - sin * b, sin * a + cos * b]
    if interleaved or cos.shape[1] * cos.shape[2] == 1:  # of many tokens XLA copies on a TPU what is stacked
        turned = [xp.stack(turned, axis=-1 if interleaved else -2).reshape(pairs.shape)]
    return xp.concatenate([*turned, rest], axis=-1)


Swish = Literal["none", "silu", "swish"]


@op("CausalConvWithState", since=27, heavy=True)
def causal_conv_with_state(input, weight, bias=None, past_state=None, *, activation: Swish = "none"):
    """Causal depthwise convolution as shifted multiply-adds; the state is the last k - 1 inputs."""
    return causal_conv(input, weight, bias, past_state, activation, 1)


def causal_conv(input, weight, bias, past_state, activation, dilation):
    """CausalConvWithState with a dilation; the state is the last (k - 1) * dilation inputs."""
    if input.ndim != 3 or weight.ndim != 3 or weight.shape[:2] != (input.shape[1], 1):
        raise ValueError(f"input [batch, channels, length] {input.shape} needs weight [channels, 1, k] {weight.shape}")
    (batch, channels, length), taps, wide = input.shape, weight.shape[2], accumulator(input.dtype)
    line = xp.concatenate([_state(past_state, (batch, channels, (taps - 1) * dilation), input), input], axis=2)
    y = np.zeros((), wide) if bias is None else bias[:, None].astype(wide)
    for i in range(taps):
        y = y + line[:, :, i * dilation : i * dilation + length].astype(wide) * weight[:, :, i].astype(wide)
    return activated(y, activation, input.dtype), line[:, :, length:]


def activated(y, activation, dtype):
    """A convolution's result in ``dtype``, rounded before and after its activation."""
    if activation == "none":
        return y.astype(dtype)
    wide = y.astype(dtype).astype(y.dtype)
    return (wide / (1 + xp.exp(-wide))).astype(dtype)
