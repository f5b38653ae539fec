"""The com.microsoft domain: an LSTM with Bahdanau attention over a memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import check_shape, check_shapes
from ..recurrent import LAYER, layer, linear, lstm_cell, projections, recurrent_projection, reversals
from ..registry import taking
from . import microsoft


def attention_cell(attends, clip, P, input_forget, d, recur, bias, f, g, h):
    """An LSTM step whose recurrent projection applies to the hidden state concatenated with the attention context."""
    if clip is not None:
        f, g = (lambda x, function=function: function(jnp.clip(x, -clip, clip)) for function in (f, g))
    step, attend = lstm_cell(P, input_forget, d, recur, bias, f, g, h), attends[d]

    def with_attention(gates, hidden, states):
        _, cell, attention = states
        hidden, cell = step(gates, jnp.concatenate([hidden, attention], axis=1), (None, cell))
        return hidden, cell, attend(hidden)

    return with_attention


def bahdanau(weights, memory, mask):
    """A function from a query [batch, hidden] to its attention over a masked memory [batch, steps, depth]."""
    (QW, MW, V, AW), memory = weights, jnp.where(mask[..., None], memory, 0)
    keys = linear(memory, MW)

    def attend(query):
        scores = jnp.sum(V * jnp.tanh(keys + linear(query, QW)[:, None]), axis=2)
        shares = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        context = jnp.einsum("bs,bsd->bd", shares, memory)
        return context if AW is None else linear(jnp.concatenate([query, context], axis=1), AW)

    return attend


_LIMITS = (
    "clip bounds the inputs of f and g but, as in onnxruntime, not the cell state before h; a memory_seq_lens of 0 "
    "yields a context of zeros, and one above the number of steps is clamped"
)


@microsoft("AttnLSTM", product=True, half="float32", limits=_LIMITS)
@taking(**{name: value for name, value in LAYER.items() if name != "layout"}, input_forget=0)
def attn_lstm(
    X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, QW=None, MW=None, V=None, M=None,
    memory_seq_lens=None, AW=None, *, clip, direction, input_forget, **attributes,
):  # fmt: skip
    """LSTM of X concatenated with the previous step's Bahdanau attention over the memory M."""
    if any(x is None for x in (QW, MW, V, M)):
        raise ValueError("QW, MW, V and M (attention weights and memory) must be given; without attention use LSTM")
    count, size = len(reversals(direction)), R.shape[-1]
    check_shape("P", P, count, "3 * hidden_size")
    check_shapes(
        {"directions": count, "batch": X.shape[1], "hidden": size}, M=(M, "batch steps depth"),
        memory_seq_lens=(memory_seq_lens, "batch"), QW=(QW, "directions hidden units"),
        MW=(MW, "directions depth units"), V=(V, "directions units"),
    )  # fmt: skip
    (batch, steps, depth), width = M.shape, M.shape[2] if AW is None else AW.shape[-1]
    check_shapes({"directions": count, "depth_and_hidden": depth + size}, AW=(AW, "directions depth_and_hidden width"))
    mask = jnp.arange(steps, dtype=np.int32) < (steps if memory_seq_lens is None else memory_seq_lens[:, None])
    mask = jnp.broadcast_to(mask, (batch, steps))
    weights = [[None if w is None else jnp.asarray(w)[d] for w in (QW, MW, V, AW)] for d in range(count)]
    attends = [bahdanau(w, jnp.asarray(M), mask) for w in weights]

    def project(X, W, R, *rest):
        check_shape("W", W, count, 4 * size, X.shape[2] + width)
        gates, _, bias = projections(X, W[..., : X.shape[2]], R, *rest)
        joined = jnp.concatenate([jnp.asarray(R), W[..., X.shape[2] :]], axis=2)
        return gates, [recurrent_projection(joined[d], batch) for d in range(count)], bias

    cell = functools.partial(attention_cell, attends, clip, P, input_forget)
    initial = [initial_h, initial_c, jnp.zeros((count, batch, width), X.dtype)]
    return layer(
        cell, ("Sigmoid", "Tanh", "Tanh"), 4, project, X, W, R, B, sequence_lens, initial,
        clip=None, direction=direction, layout=0, **attributes,
    )[:3]  # fmt: skip
