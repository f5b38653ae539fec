"""RNN, GRU and LSTM: three cells and one scan over time; of com.microsoft an LSTM with Bahdanau attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import RECURRENT_UNROLL
from .activation import sigmoid
from .arrays import accumulator, check_shape, check_shapes, is_known, widen, xp
from .linalg import product
from .registry import op, taking

CLIP = "clip bounds the input of each activation, in LSTM also the cell state before h, as specified"


REQUIRED = "required"

LAYER: dict[str, Any] = dict.fromkeys(("activation_alpha", "activation_beta", "activations", "clip", "hidden_size"))
LAYER |= {"direction": "forward", "layout": 0}

# name -> (function of x and its parameters, ONNX's default alpha, default beta)
ACTIVATIONS = {
    "Relu": (lambda x: xp.maximum(x, xp.zeros_like(x)),),
    "Tanh": (xp.tanh,),
    "Sigmoid": (sigmoid,),
    "Affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "LeakyRelu": (lambda x, a: xp.where(x >= 0, x, a * x), 0.01),
    "ThresholdedRelu": (lambda x, a: xp.where(x >= a, x, 0), 1.0),
    "ScaledTanh": (lambda x, a, b: a * xp.tanh(b * x), REQUIRED, REQUIRED),
    "HardSigmoid": (lambda x, a, b: xp.clip(a * x + b, 0, 1), 0.2, 0.5),
    "Elu": (lambda x, a: xp.where(x >= 0, x, a * xp.expm1(xp.minimum(x, 0))), 1.0),
    "Softsign": (lambda x: x / (1 + abs(x)),),
    "Softplus": (lambda x: xp.logaddexp(x, 0),),
}
BY_NAME = {name.lower(): row for name, row in ACTIVATIONS.items()}


def reversals(direction):
    """Per direction of the layer, whether it runs backwards (GRU-1 spells its default "foward")."""
    known = {"forward": (False,), "foward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    if direction not in known:
        raise ValueError(f"direction is {direction!r}; it must be forward, reverse or bidirectional")
    return known[direction]


def activation_functions(names, count, alphas, betas, clip, direction):
    """The ``count`` activations of each direction; alphas and betas are consumed in order by those that take them."""
    total = count * len(reversals(direction))
    if len(names) < total:
        raise ValueError(f"activations has {len(names)} entries {tuple(names)}, but this node needs {total}")
    sources = iter(alphas or ()), iter(betas or ())

    def bind(name):
        if name.lower() not in BY_NAME:
            raise ValueError(f"activation {name!r} is unknown; ONNX defines {', '.join(ACTIVATIONS)}")
        function, *defaults = BY_NAME[name.lower()]
        values = [next(source, default) for source, default in zip(sources, defaults, strict=False)]
        if REQUIRED in values:
            raise ValueError(f"{name} has no defaults: set activation_alpha and activation_beta")
        return lambda x: function(x if clip is None else xp.clip(x, -clip, clip), *values)

    functions = [bind(name) for name in names[:total]]
    return [functions[start : start + count] for start in range(0, total, count)]


def rnn_cell(_, recur, __, f):
    """RNN: a step (input projection per gate, hidden state as products read it, states) -> new states."""
    projection = recur()
    return lambda gates, hidden, _: (f(gates[0] + projection(hidden)),)


def gru_cell(linear_before_reset, _, recur, bias, f, g):
    """GRU with gates z, r, h; ``bias`` is the recurrent bias of gate h, which the reset gate may multiply."""
    first, last = (recur(), None) if linear_before_reset else (recur(0, 2), recur(2))

    def step(gates, hidden, states):
        (h,) = states
        z, r, *new = xp.split(first(hidden), 3 if last is None else 2, axis=-1)
        z, r = f(gates[0] + z), f(gates[1] + r)
        new = r * (new[0] + bias) if last is None else last(r * h) + bias
        return ((1 - z) * g(gates[2] + new) + z * h,)

    return step


def lstm_cell(P, input_forget, d, recur, _, f, g, h):
    """LSTM with gates i, o, f, c and optional peepholes P [directions, 3 * size] from the cell state to i, o and f."""
    projection = recur()

    def step(gates, hidden, states):
        cell = states[1]
        p = None if P is None else widen(P)[d].reshape(3, cell.shape[1])
        i, o, forget, c = (x + y for x, y in zip(gates, xp.split(projection(hidden), 4, axis=-1), strict=True))
        i, forget = (i, forget) if p is None else (i + p[0] * cell, forget + p[2] * cell)
        i, forget = f(i), f(forget)
        cell = (1 - i if input_forget else forget) * cell + i * g(c)
        return f(o if p is None else o + p[1] * cell) * h(cell), cell

    return step


def scan(cell, recur, rest, n_gates, sequence_lens, reverse, dtype, on_cpu, states, projections):
    """(Final states, outputs) of one direction, whose ``rest`` are the separate bias and the activations.

    On CPUs the input projections are split by gate outside the loop: XLA:CPU does not vectorize a loop that slices one
    array several times per step. With batch 8 a GRU of size 256 takes 41 us per step instead of 68 (batch 1: 8.4
    instead of 11.9), an LSTM with peepholes 60 instead of 85, and an LSTM without them the same. Elsewhere each step
    splits its own: another copy of all projections would nearly double the temporary memory. There, too, what products
    of half precision read and write is stored in their ``dtype``: projections, outputs, and a copy of the hidden state.
    """
    step = cell(recur(on_cpu), *rest)
    narrow = not on_cpu and dtype != projections.dtype
    projections = projections.astype(dtype) if narrow else projections

    def carried(states):
        return (*states, states[0].astype(dtype)) if narrow else states

    def body(states, xs):
        t, gates = xs
        *states, hidden = states if narrow else (*states, states[0])
        new = step(gates if on_cpu else [widen(g) for g in jnp.split(gates, n_gates, axis=-1)], hidden, states)
        if sequence_lens is None:
            return carried(new), new[0].astype(dtype)
        active = (t < sequence_lens)[:, None]
        new = tuple(xp.where(active, a, b) for a, b in zip(new, states, strict=True))
        return carried(new), xp.where(active, new[0], 0).astype(dtype)

    count = projections.shape[0]
    if is_known((states, projections, sequence_lens)) and count:
        gates = np.split(projections, n_gates, axis=-1)
        if is_known(step([gate[0] for gate in gates], states[0], states)):
            return _steps(body, states, gates, reverse)
    xs = jnp.arange(count, dtype=np.int32), jnp.split(projections, n_gates, axis=-1) if on_cpu else projections
    unroll = isinstance(count, int) and 0 < count <= RECURRENT_UNROLL
    states, outputs = lax.scan(body, carried(states), xs, reverse=reverse, unroll=unroll)
    return ((states[-1].astype(np.float32), *states[1:-1]) if narrow else states), outputs


def _steps(body, states, gates, reverse):
    """The scan over NumPy arrays: (final states, outputs)."""
    times = range(len(gates[0]))
    outputs = np.empty((len(times), *states[0].shape), states[0].dtype)
    for t in reversed(times) if reverse else times:
        states, outputs[t] = body(states, (t, [gate[t] for gate in gates]))
    return states, outputs


def layer(
    cell, names, n_gates, project, X, W, R, B, sequence_lens, initial,
    *, activation_alpha, activation_beta, activations, clip, direction, hidden_size, layout, separate=0,
):  # fmt: skip
    """(Y, final states...) of a recurrent layer; beyond its length a sequence keeps its state and outputs zeros.

    Half precision is multiplied as it is; gates are computed and states kept in float32, and results are rounded once.
    ``cell(direction, recurrent projection, separate bias, *activations)`` returns a step; ``names`` are the default
    activations of one direction; ``project`` is ``projections`` or its equivalent for other weights.
    """
    names = activations or names * 2, len(names)
    functions = activation_functions(*names, activation_alpha, activation_beta, clip, direction)
    gates, *rows = project(X, W, R, B, direction, layout, hidden_size, n_gates, separate)
    directions = reversals(direction)
    size = gates.shape[-1] // n_gates
    initial = [s if s is None else widen(xp.swapaxes(s, 0, 1) if layout else s) for s in initial]
    check_shape("sequence_lens", sequence_lens, gates.shape[1])
    for state in initial[:2]:  # further states have shapes of their own
        check_shape("an initial state", state, len(directions), gates.shape[1], size)
    results = []
    dtype = X.dtype if X.dtype == W.dtype else gates.dtype  # quantized weights have products of their own
    for d, (recur, bias, chosen, reverse) in enumerate(zip(*rows, functions, directions, strict=True)):
        zeros = xp(gates).zeros
        states = tuple(zeros((gates.shape[1], size), gates.dtype) if s is None else s[d] for s in initial)
        operands = functools.partial(cell, d), recur, (bias, *chosen), n_gates, sequence_lens, reverse, dtype
        on_cpu, default = (functools.partial(scan, *operands, flag) for flag in (True, False))
        on_device = functools.partial(compat.platform_dependent, cpu=on_cpu, default=default)
        results.append((on_cpu if is_known((states, gates)) else on_device)(states, gates[:, :, d]))
    ends, outputs = zip(*results, strict=True)
    Y = xp.swapaxes(xp.stack(outputs, 2), 0, 1) if layout else xp.stack(outputs, 1)
    results = Y, *(xp.stack(s, 1 if layout else 0) for s in zip(*ends, strict=True))
    return tuple(r.astype(X.dtype) for r in results)


def linear(x, w):
    """``x @ w``, contracting the last dimension of x: multiplied in the dtype of w, accumulated in float32."""
    return product(x.astype(w.dtype), w, accumulator(w.dtype))


def _rounded_linear(x, w):
    """``linear`` in float32; from half precision, accelerators round inside the unit, as ``linalg.rounded`` does."""
    if w.dtype == accumulator(w.dtype) or is_known((x, w)):
        return linear(x, w)
    x = x.astype(w.dtype)
    return compat.platform_dependent(x, w, cpu=linear, default=lambda x, w: widen(product(x, w, w.dtype)))


def recurrent_projection(R, batch):
    """From whether it is for a CPU to ``recur(first, last)``: the projection of gates [first, last), a function of h.

    XLA:CPU is fastest with R as stored for batch 1, with its transpose for larger batches. The slice and the transpose
    are computed outside the loop (a GRU of size 256 takes 9 us per step instead of 29). Others read R as it is stored,
    where h is rounded to the dtype of R; CPUs widen R to float32 outside the loop, too.
    """
    return lambda on_cpu: functools.partial(_recurrent_projection, widen(R) if on_cpu else R, batch == 1 or not on_cpu)


def _recurrent_projection(R, as_stored, first=0, last=None):
    size = R.shape[1]
    gates = R[first * size : None if last is None else last * size]
    if as_stored and not is_known(gates):
        contraction, dtype = (((1,), (1,)), ((), ())), accumulator(gates.dtype)
        return lambda h: lax.dot_general(h.astype(gates.dtype), gates, contraction, preferred_element_type=dtype)
    transposed = gates.T
    return lambda h: linear(h, transposed)


def projections(X, W, R, B, direction, layout, hidden_size, n_gates, separate):
    """(input projections, recurrent projections, separate biases) of a layer.

    The input projections [seq, batch, directions, gates] of all steps are one product and include the biases, except
    the recurrent biases of the last ``separate`` gates, which are returned. There is one recurrent projection per
    direction.
    """
    directions, size = len(reversals(direction)), hidden_size or (R.shape or (0,))[-1]
    gates = n_gates * size
    check_shape(f"R of {direction=} and {hidden_size=}", R, directions, gates, size)
    check_shape("W", W, directions, gates, "input_size")
    check_shape("X", X, "steps", "batch", W.shape[2])
    check_shape("B", B, directions, 2 * gates)
    X, W, R = (xp(X, W, R).asarray(v) for v in (X, W, R))
    X = xp.swapaxes(X, 0, 1) if layout else X
    y = _rounded_linear(X, W.reshape(directions * gates, W.shape[-1]).T).reshape(*X.shape[:2], directions, gates)
    bias = xp(y).zeros((directions, separate * size), y.dtype)
    if B is not None:
        B, split = xp(y).asarray(widen(B)), gates - separate * size
        bias = B[:, gates + split :]
        y = y + B[:, :gates] + xp.concatenate([B[:, gates : gates + split], xp.zeros_like(bias)], axis=-1)
    return y, [recurrent_projection(R[d], X.shape[1]) for d in range(directions)], bias


@op("RNN", product=True, unsharded=True, limits=CLIP)
@taking(**LAYER | {"activations": ("Tanh", "Tanh")})
def rnn(X, W, R, B=None, sequence_lens=None, initial_h=None, **attributes):
    """A simple recurrent layer."""
    return layer(rnn_cell, ("Tanh",), 1, projections, X, W, R, B, sequence_lens, [initial_h], **attributes)


@op("GRU", product=True, unsharded=True, limits=CLIP)
@taking(**LAYER)
def gru(X, W, R, B=None, sequence_lens=None, initial_h=None, *, linear_before_reset=0, **attributes):
    """A layer of gated recurrent units (GRU)."""
    names, cell, states = ("Sigmoid", "Tanh"), functools.partial(gru_cell, linear_before_reset), [initial_h]
    return layer(cell, names, 3, projections, X, W, R, B, sequence_lens, states, separate=1, **attributes)


def lstm_layer(project, X, W, R, B, sequence_lens, initial_h, initial_c, P, *, input_forget, **attributes):
    check_shape("P", P, len(reversals(attributes["direction"])), "3 * hidden_size")
    names, states = ("Sigmoid", "Tanh", "Tanh"), [initial_h, initial_c]
    cell = functools.partial(lstm_cell, P, input_forget)
    return layer(cell, names, 4, project, X, W, R, B, sequence_lens, states, **attributes)


@op("LSTM", product=True, unsharded=True, limits=CLIP)
@taking(**LAYER, input_forget=0)
def lstm(X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, **attributes):
    """A long short-term memory (LSTM) layer."""
    return lstm_layer(projections, X, W, R, B, sequence_lens, initial_h, initial_c, P, **attributes)


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


@op("AttnLSTM", domain="com.microsoft", product=True, half="float32", limits=_LIMITS)
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
