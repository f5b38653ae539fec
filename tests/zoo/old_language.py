"""Language models of the ONNX model zoo by structure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.net import Net

from .case import Case, Export, export

FAMILY: Final = "ONNX model zoo: language"
WIDTH, HEADS, WORDS = 16, 2, 50


class _Transformer:
    """Layers as exporters wrote them before LayerNormalization and Gelu were operators."""

    def __init__(self, opset: int) -> None:
        self.net = Net(opset)

    def f(self, value: float) -> str:
        return self.net.constant(value, np.float32)

    def linear(self, x: str, before: int, after: int) -> str:
        return str(self.net("Add", self.net("MatMul", x, self.net.weight(before, after, scale=0.2)),
                            self.net.weight(after, scale=0.1)))  # fmt: skip

    def normed(self, x: str) -> str:
        net = self.net
        apart = net("Sub", x, net("ReduceMean", x, axes=[-1]))
        variance = net("ReduceMean", net("Pow", apart, self.f(2)), axes=[-1])
        scaled = net("Div", apart, net("Sqrt", net("Add", variance, self.f(1e-5))))
        return str(net("Add", net("Mul", scaled, net.weight(WIDTH, around=1, scale=0.1)), net.weight(WIDTH)))

    def gelu(self, x: str) -> str:
        net = self.net
        gate = net("Add", net("Erf", net("Div", x, self.f(2**0.5))), self.f(1))
        return str(net("Mul", net("Mul", x, gate), self.f(0.5)))

    def tanh_gelu(self, x: str) -> str:
        net = self.net
        inner = net("Add", x, net("Mul", net("Pow", x, self.f(3)), self.f(0.044715)))
        gate = net("Add", net("Tanh", net("Mul", inner, self.f((2 / np.pi) ** 0.5))), self.f(1))
        return str(net("Mul", net("Mul", x, self.f(0.5)), gate))

    def extent(self, x: str, axis: int) -> str:
        """[1]: an extent by Shape, Gather, Unsqueeze, as PyTorch traced ``x.size(axis)``."""
        net = self.net
        return str(net("Unsqueeze", net("Gather", net("Shape", x), net.constant(axis), axis=0), axes=[0]))

    def heads(self, x: str, perm: tuple[int, ...] = (0, 2, 1, 3)) -> str:
        net = self.net
        shape = net("Concat", self.extent(x, 0), self.extent(x, 1), net.constant([HEADS]),
                    net.constant([WIDTH // HEADS]), axis=0)  # fmt: skip
        return str(net("Transpose", net("Reshape", x, shape), perm=perm))

    def merged(self, x: str) -> str:
        net = self.net
        y = net("Transpose", x, perm=[0, 2, 1, 3])
        shape = net("Concat", self.extent(y, 0), self.extent(y, 1), net.constant([WIDTH]), axis=0)
        return str(net("Reshape", y, shape))

    def attention(self, q: str, k: str, v: str, mask: str | None) -> str:
        """``k`` has its last two axes exchanged; ``mask`` is added."""
        net = self.net
        scores = net("Div", net("MatMul", q, k), self.f((WIDTH / HEADS) ** 0.5))
        scores = net("Add", scores, mask) if mask else scores
        weights = net("Softmax", scores, axis=3)
        return self.merged(net("MatMul", weights, v))

    def layer(self, x: str, mask: str | None) -> str:
        """Attention and a feed-forward part, each normalised afterwards."""
        net = self.net
        q, v = (self.heads(self.linear(x, WIDTH, WIDTH)) for _ in range(2))
        k = self.heads(self.linear(x, WIDTH, WIDTH), (0, 2, 3, 1))
        x = self.normed(net("Add", x, self.linear(self.attention(q, k, v, mask), WIDTH, WIDTH)))
        return self.normed(net("Add", x, self.linear(self.gelu(self.linear(x, WIDTH, 32)), 32, WIDTH)))


def _ids(net: Net, name: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    net.input(name, ["batch", "length"], np.int64)
    return [net.rng.integers(2, WORDS, s) for s in shapes]


def _roberta(folder: Path) -> Export:
    """Positions are the running count of what is not padding."""
    t = _Transformer(11)
    net = t.net
    ids = _ids(net, "input_ids", (1, 7), (2, 11))
    ids[1][1, 8:] = 1
    real = net("Cast", net("Not", net("Equal", "input_ids", net.constant(1))), to=6)
    counts = net("Mul", net("CumSum", real, net.constant(1, np.int32)), real)
    positions = net("Add", net("Cast", counts, to=7), net.constant(1))
    x = net("Add", net("Gather", net.weight(WORDS, WIDTH, scale=1), "input_ids"),
            net("Gather", net.weight(20, WIDTH, scale=1), positions))  # fmt: skip
    attended = net("Unsqueeze", net("Cast", real, to=1), axes=[1, 2])
    mask = net("Mul", net("Sub", t.f(1), attended), t.f(-10000))
    x = t.normed(x)
    for _ in range(2):
        x = t.layer(x, mask)
    pooled = net("Tanh", net("Gemm", net("Gather", x, net.constant(0), axis=1), net.weight(WIDTH, WIDTH),
                             net.weight(WIDTH), transB=1))  # fmt: skip
    return export(net, folder, [{"input_ids": i} for i in ids], x, pooled)


def _bert_squad(folder: Path) -> Export:
    """By tf2onnx at opset 10: segments by OneHot, fixed length, start and end by Split and Squeeze."""
    t = _Transformer(10)
    net = t.net
    ids = _ids(net, "input_ids", (1, 12), (2, 12))
    segments = [(np.arange(12) > 6).astype(np.int64) + np.zeros_like(i) for i in ids]
    masks = [np.ones_like(i) for i in ids]
    masks[1][1, 9:] = 0
    for name in ("segment_ids", "input_mask"):
        net.input(name, ["batch", 12], np.int64)
    hot = net("OneHot", net("Reshape", "segment_ids", net.constant([-1])), net.constant([2]),
              net.constant([0, 1], np.float32))  # fmt: skip
    kind = net("Reshape", net("MatMul", hot, net.weight(2, WIDTH)), net.constant([-1, 12, WIDTH]))
    place = net("Reshape", net("Slice", net.weight(20, WIDTH), *(net.constant([v]) for v in (0, 12, 0))),
                net.constant([1, 12, WIDTH]))  # fmt: skip
    x = t.normed(net("Add", net("Add", net("Gather", net.weight(WORDS, WIDTH, scale=1), "input_ids"), kind), place))
    mask = net("Unsqueeze", net("Cast", "input_mask", to=1), axes=[1, 2])
    mask = net("Mul", net("Sub", t.f(1), mask), t.f(-10000))
    for _ in range(2):
        x = t.layer(x, mask)
    logits = net("Transpose", t.linear(x, WIDTH, 2), perm=[2, 0, 1])
    start, end = (net("Squeeze", part, axes=[0]) for part in net("Split", logits, n=2, axis=0))
    inputs = [{"input_ids": i, "segment_ids": s, "input_mask": m} for i, s, m in zip(ids, segments, masks, strict=True)]
    return export(net, folder, inputs, start, end)


def _gpt2(folder: Path) -> Export:
    """By PyTorch at opset 10: a mask cut from a table of bytes, Split of q, k, v, caches as outputs."""
    t = _Transformer(10)
    net = t.net
    ids = _ids(net, "input1", (1, 6), (2, 9))
    length = t.extent("input1", 1)
    table = net.array(np.tril(np.ones((1, 1, 16, 16), np.uint8)))
    zero = net.constant([0])
    causal = net("Slice", net("Slice", table, zero, length, net.constant([2])), zero, length, net.constant([3]))
    places = net("Slice", net.weight(16, WIDTH), zero, length, zero)
    x = net("Add", net("Gather", net.weight(WORDS, WIDTH, scale=1), "input1"), places)
    caches = []
    for _ in range(2):
        q, k, v = net("Split", t.linear(t.normed(x), WIDTH, 3 * WIDTH), n=3, axis=2, split=[WIDTH] * 3)
        q, v, k = t.heads(q), t.heads(v), t.heads(k, (0, 2, 3, 1))
        caches += [net("Concat", *(net("Unsqueeze", c, axes=[0]) for c in (net("Transpose", k, perm=[0, 1, 3, 2]), v)),
                       axis=0)]  # fmt: skip
        scores = net("Div", net("MatMul", q, k), t.f((WIDTH / HEADS) ** 0.5))
        masked = net("Where", net("Cast", causal, to=9), scores, t.f(-10000))
        x = net("Add", x, t.linear(t.merged(net("MatMul", net("Softmax", masked, axis=3), v)), WIDTH, WIDTH))
        x = net("Add", x, t.linear(t.tanh_gelu(t.linear(t.normed(x), WIDTH, 32)), 32, WIDTH))
    logits = net("MatMul", t.normed(x), net.weight(WIDTH, WORDS))
    return export(net, folder, [{"input1": i} for i in ids], logits, *caches)


def _t5(folder: Path, decoder: bool) -> Export:
    """By PyTorch at opset 12: positions by buckets, a norm without mean, ReLU."""
    t = _Transformer(12)
    net = t.net
    ids = _ids(net, "input_ids", (1, 6), (2, 9))
    inputs = [{"input_ids": i} for i in ids]
    if decoder:
        net.input("encoded", ["batch", "source", WIDTH])
        for given, shape in zip(inputs, ((1, 5, WIDTH), (2, 8, WIDTH)), strict=True):
            given["encoded"] = net.rng.standard_normal(shape).astype(np.float32)

    def rms(x: str) -> str:
        mean = net("ReduceMean", net("Pow", x, t.f(2)), axes=[-1])
        return str(net("Mul", net("Div", x, net("Sqrt", net("Add", mean, t.f(1e-6)))), net.weight(WIDTH, around=1)))

    length = net("Gather", net("Shape", "input_ids"), net.constant(1), axis=0)
    steps = net("Range", net.constant(0), length, net.constant(1))
    apart = net("Sub", net("Unsqueeze", steps, axes=[0]), net("Unsqueeze", steps, axes=[1]))
    size = net("Abs", apart)
    far = net("Log", net("Div", net("Cast", net("Max", size, net.constant(1)), to=1), t.f(4)))
    far = net("Cast", net("Add", net("Mul", far, t.f(2)), t.f(4)), to=7)
    near = net("Where", net("Less", size, net.constant(4)), size, net("Min", far, net.constant(7)))
    bucket = net("Add", net("Mul", net("Cast", net("Greater", apart, net.constant(0)), to=7), net.constant(8)), near)
    bias = net("Gather", net.weight(16, HEADS), bucket)
    bias = net("Unsqueeze", net("Transpose", bias, perm=[2, 0, 1]), axes=[0])
    if decoder:
        later = net("Cast", net("Greater", apart, net.constant(0)), to=1)
        bias = net("Add", bias, net("Mul", later, t.f(-1e9)))
    x = net("Gather", net.weight(WORDS, WIDTH, scale=1), "input_ids")
    for _ in range(2):
        sources = [(rms(x), bias)] + ([("encoded", None)] if decoder else [])
        for source, mask in sources:
            q = t.heads(net("MatMul", rms(x), net.weight(WIDTH, WIDTH, scale=0.2)))
            k = t.heads(net("MatMul", source, net.weight(WIDTH, WIDTH, scale=0.2)), (0, 2, 3, 1))
            v = t.heads(net("MatMul", source, net.weight(WIDTH, WIDTH, scale=0.2)))
            x = net("Add", x, net("MatMul", t.attention(q, k, v, mask), net.weight(WIDTH, WIDTH, scale=0.2)))
        h = net("Relu", net("MatMul", rms(x), net.weight(WIDTH, 32, scale=0.2)))
        x = net("Add", x, net("MatMul", h, net.weight(32, WIDTH, scale=0.2)))
    y = rms(x)
    return export(net, folder, inputs, net("MatMul", y, net.weight(WIDTH, WORDS)) if decoder else y)


def _bidaf(folder: Path) -> Export:
    """By CNTK at opset 9: words and characters by CategoryMapper, bidirectional LSTMs, attention, the answer's ends."""
    net = Net(9, ml=1)
    words = ["the", "cat", "sat", "on", "a", "mat", "who"]
    embedded = {}
    for name in ("context", "query"):
        net.input(f"{name}_word", [name[0], 1], np.str_)
        net.input(f"{name}_char", [name[0], 1, 1, 5], np.str_)
        mapped = net("CategoryMapper", f"{name}_word", domain="ai.onnx.ml", cats_strings=words,
                     cats_int64s=[*range(1, 8)], default_int64=0)  # fmt: skip
        letters = net("CategoryMapper", f"{name}_char", domain="ai.onnx.ml", cats_strings=list("abcdehmnostuw"),
                      cats_int64s=[*range(1, 14)], default_int64=0)  # fmt: skip
        if name == "context":
            table, signs, kernel = net.weight(8, 6, scale=1), net.weight(14, 4, scale=1), net.weight(6, 4, 1, 3)
        by_word = net("Gather", table, mapped)
        chars = net("Transpose", net("Squeeze", net("Gather", signs, letters), axes=[1]), perm=[0, 3, 1, 2])
        by_char = net("ReduceMax", net("Relu", net("Conv", chars, kernel, kernel_shape=[1, 3])), axes=[2, 3])
        flat = net("Reshape", by_char, net.constant([-1, 6]))
        x = net("Concat", net("Squeeze", by_word, axes=[1]), flat, axis=1)
        embedded[name] = _both_ways(net, net("Unsqueeze", x, axes=[1]), 12, 4)
    c, q = embedded["context"], embedded["query"]
    scores = net("MatMul", c, net("Transpose", q, perm=[1, 0]))
    to_query = net("MatMul", net("Softmax", scores, axis=1), q)
    best = net("ReduceMax", scores, axes=[1], keepdims=1)
    to_context = net("ReduceSum", net("Mul", net("Softmax", best, axis=0), c), axes=[0], keepdims=1)
    g = net("Concat", c, to_query, net("Mul", c, to_query), net("Mul", c, to_context), axis=1)
    m = _both_ways(net, net("Unsqueeze", g, axes=[1]), 32, 4)
    ends = []
    for _ in range(2):
        logits = net("Squeeze", net("MatMul", net("Concat", g, m, axis=1), net.weight(40, 1)), axes=[1])
        hot = net("Hardmax", net("Unsqueeze", logits, axes=[0]))
        positions = net("NonZero", net("Squeeze", hot, axes=[0]))
        ends.append(net("Cast", net("Squeeze", positions, axes=[0]), to=6))
        m = _both_ways(net, net("Unsqueeze", m, axes=[1]), 8, 4)
    text = [("the cat sat on a mat", "who sat"), ("a cat", "who on the mat")]
    inputs = [
        {f"{n}_{k}": v for n, t in (("context", a), ("query", b)) for k, v in _tokens(t).items()} for a, b in text
    ]
    return export(net, folder, inputs, **dict.fromkeys(ends, np.int32))


def _both_ways(net: Net, x: str, before: int, after: int) -> str:
    """[length, 2 * after]: a bidirectional LSTM over [length, 1, before]."""
    weights = (net.weight(2, 4 * after, before, scale=0.4), net.weight(2, 4 * after, after, scale=0.4))
    y = net("LSTM", x, *weights, net.weight(2, 8 * after), hidden_size=after, direction="bidirectional")
    return str(net("Reshape", y, net.constant([-1, 2 * after])))


def _tokens(text: str) -> dict[str, np.ndarray]:
    words = text.split()
    letters = np.array([list(w.ljust(5)[:5]) for w in words], dtype=object)
    return {"word": np.array(words, dtype=object)[:, None], "char": letters.reshape(-1, 1, 1, 5)}


NETS: Final[dict[str, Callable[[Path], Export]]] = {
    "RoBERTa, opset 11": _roberta,
    "BERT-Squad, opset 10": _bert_squad,
    "GPT-2, opset 10": _gpt2,
    "T5 encoder, opset 12": lambda f: _t5(f, False),
    "T5 decoder, opset 12": lambda f: _t5(f, True),
    "BiDAF, opset 9": _bidaf,
}
LIGHT: Final = {"BiDAF, opset 9"}

CASES: Final = tuple(Case(FAMILY, name, "by structure", make, light=name in LIGHT) for name, make in NETS.items())
