"""Layers of torch over sequences: recurrences, packed too, and attention with each kind of mask."""

from __future__ import annotations

from typing import Any, Final

from .feature import F, Feature, cases, each, f, nn, of, torch, using
from .torch_exports import DYNAMO, SCRIPT


def _packed(layers: Any, x: Any, lengths: Any) -> Any:
    """A recurrence over sequences of different lengths, packed and padded again."""
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    y, state = layers[0](pack_padded_sequence(x, lengths, batch_first=True))
    return pad_packed_sequence(y, batch_first=True)[0], state


def _lengths(n: int) -> Any:
    return torch.tensor([5, 4, 2, 1][:n])


RECURRENCES: Final = (
    Feature("LSTM, bidirectional, 2 layers", lambda: nn.LSTM(5, 6, 2, bidirectional=True), lambda n: [f(5, n, 5)]),
    Feature(
        "LSTM with states",
        using(lambda: [nn.LSTM(5, 6, batch_first=True)], lambda layers, x, h, c: layers[0](x, (h, c))),
        lambda n: [f(n, 7, 5), f(1, n, 6), f(1, n, 6)],
    ),
    Feature("GRU, bidirectional, 2 layers", lambda: nn.GRU(5, 6, 2, bidirectional=True), lambda n: [f(5, n, 5)]),
    Feature("RNN, tanh, bidirectional", lambda: nn.RNN(5, 6, bidirectional=True), lambda n: [f(5, n, 5)]),
    Feature("RNN, relu", lambda: nn.RNN(5, 6, nonlinearity="relu"), lambda n: [f(5, n, 5), f(1, n, 6)]),
    Feature("LSTMCell, GRUCell", each(lambda: nn.LSTMCell(5, 6), lambda: nn.GRUCell(5, 6)), lambda n: [f(n, 5)]),
    Feature(
        "LSTM, GRU, RNN of any length",
        each(lambda: nn.LSTM(5, 6), lambda: nn.GRU(5, 6), lambda: nn.RNN(5, 6)),
        lambda n: [f(n + 2, n, 5)],
        exporters=(SCRIPT,),  # the other writes a step for each element of the first sequence
    ),
    *(
        Feature(
            f"{kind}, packed, bidirectional",
            using(lambda kind=kind: [getattr(nn, kind)(5, 6, batch_first=True, bidirectional=True)], _packed),
            lambda n: [f(n, 5, 5), _lengths(n)],
            exporters=(SCRIPT,),
        )
        for kind in ("LSTM", "GRU", "RNN")
    ),
)


def _causal(n: int) -> Any:
    return torch.triu(torch.ones(n, n, dtype=torch.bool), 1)


def _padding(n: int) -> Any:
    """The last tokens of some rows are padding."""
    return torch.arange(6)[None] >= torch.tensor([6, 4, 5, 3][:n])[:, None]


def _attend(**given: str) -> Any:
    """Multihead attention, whose masks are operands by position."""

    def call(layers: Any, x: Any, *masks: Any) -> Any:
        return layers[0](x, x, x, **dict(zip(given, masks, strict=True)))

    return using(lambda: [nn.MultiheadAttention(16, 4, batch_first=True)], call)


ATTENTION: Final = (
    Feature("MultiheadAttention", _attend(), lambda n: [f(n, 6, 16)]),
    Feature("MultiheadAttention, key padding", _attend(key_padding_mask="bool"), lambda n: [f(n, 6, 16), _padding(n)]),
    Feature("MultiheadAttention, bool mask", _attend(attn_mask="bool"), lambda n: [f(n, 6, 16), _causal(6)]),
    Feature("MultiheadAttention, float mask", _attend(attn_mask="float"), lambda n: [f(n, 6, 16), f(6, 6)]),
    Feature(
        "MultiheadAttention, other keys and values, bias_kv, zero_attn",
        using(
            lambda: [nn.MultiheadAttention(16, 4, kdim=7, vdim=9, add_bias_kv=True, add_zero_attn=True)],
            lambda layers, q, k, v: layers[0](q, k, v, need_weights=False)[0],
        ),
        lambda n: [f(5, n, 16), f(6, n, 7), f(6, n, 9)],
    ),
    Feature(
        "TransformerEncoderLayer, causal",
        using(
            lambda: [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)],
            lambda layers, x, mask: layers[0](x, src_mask=mask),
        ),
        lambda n: [f(n, 6, 16), _causal(6)],
    ),
    Feature(
        "Transformer",
        using(
            lambda: [nn.Transformer(16, 2, 1, 1, 32, batch_first=True)],
            lambda layers, source, target: layers[0](source, target),
        ),
        lambda n: [f(n, 6, 16), f(n, 5, 16)],
    ),
    Feature(
        "scaled_dot_product_attention",
        of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3)),
        lambda n: [f(2, 4, n + 2, 8), f(2, 4, 7, 8), f(2, 4, 7, 6)],
    ),
    Feature(
        "scaled_dot_product_attention, causal",
        of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        lambda n: [f(2, 4, n + 2, 8), f(2, 4, n + 2, 8), f(2, 4, n + 2, 8)],
    ),
    Feature(
        "scaled_dot_product_attention, masks of bool and float",
        of(
            lambda q, k, mask, bias: (
                F.scaled_dot_product_attention(q, k, k, attn_mask=mask),
                F.scaled_dot_product_attention(q, k, k, attn_mask=bias),
            )
        ),
        lambda n: [f(n, 4, 5, 8), f(n, 4, 6, 8), ~_padding(n)[:, None, None], f(n, 1, 5, 6)],
    ),
    Feature(
        "scaled_dot_product_attention, grouped queries",
        of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        lambda n: [f(n, 8, 5, 8), f(n, 2, 6, 8), f(n, 2, 6, 8)],
        exporters=(DYNAMO,),
    ),
)

TABLES: Final = {
    "torch: recurrences": RECURRENCES,
    "torch: attention": ATTENTION,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"LSTM with projections / {DYNAMO}": "writes an LSTM whose state and cell have different sizes, which ONNX has not",
    f"LSTM with projections / {SCRIPT}": "Unsupported: ONNX export of operator LSTM, LSTMs with projections",
    f"packed LSTM, GRU, RNN / {DYNAMO}": "TypeError: zeros(): type must be tuple of ints, but got FakeTensor",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""
