"""Small decoders in the styles of exporters, made with onnx.helper: one network, with caches in every style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from tests.support.models import NP, model, value

HIDDEN, HEADS, KV_HEADS, SIZE, VOCABULARY = 32, 4, 2, 16, 61
CONTEXT = 128
"""Rows of the rotary embedding tables."""
MS = "com.microsoft"

Attend = Callable[["Net", int, str, str, str], str]
"""A layer's attention: queries, keys and values [batch, new, heads * size] -> [batch, new, HEADS * SIZE]."""


@dataclass
class File:
    """A decoder's file, and its caches for running it by hand.

    Attributes:
        proto: the file.
        caches: input -> output, and the shape of the input for one sequence before the first token.
    """

    proto: onnx.ModelProto
    caches: dict[str, tuple[str, tuple[int, ...], Any]]

    @property
    def inputs(self) -> dict[str, int]:
        """The ranks of inputs by name."""
        return {v.name: len(v.type.tensor_type.shape.dim) for v in self.proto.graph.input}


@dataclass
class Net:
    """A graph builder."""

    dtype: Any = np.float32
    bits: str = ""
    """Format of weights: "" for float32, "symmetric" or "asymmetric" for 4 bits."""
    names: tuple[str, str] = ("past_key_values.{}.{}", "present.{}.{}")
    layers: int = 1
    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: NP = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    caches: dict[str, tuple[str, tuple[int, ...], Any]] = field(default_factory=dict)

    def __call__(self, op_type: str, *inputs: Any, out: str = "", n: int = 1, domain: str = "", **more: Any) -> Any:
        """Adds a node and returns its outputs; inputs are names or arrays."""
        names = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        outputs = (
            [out or f"{op_type}_{len(self.nodes)}"]
            if n == 1
            else [f"{op_type}_{len(self.nodes)}.{k}" for k in range(n)]
        )
        self.nodes.append(helper.make_node(op_type, names, outputs, domain=domain, **more))
        return outputs[0] if n == 1 else outputs

    def constant(self, array: Any, name: str = "") -> str:
        name = name or f"constant_{len(self.weights)}"
        self.weights[name] = np.asarray(array)
        return name

    def weight(self, name: str, *shape: int) -> np.ndarray:
        """A weight that depends on the name alone, so that all styles have equal weights."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        return (rng.normal(size=shape) * (1.5 / np.sqrt(shape[0]))).astype(np.float32)

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weight = self.weight(name, rows, columns)
        if not self.bits:
            return self("MatMul", x, self.constant(weight.astype(self.dtype), name))
        packed, scales, zeros = in_four_bits(weight.T, asymmetric=self.bits == "asymmetric")
        more = [self.constant(zeros, f"{name}.zeros")] if zeros is not None else []
        operands = [self.constant(packed, f"{name}.packed"), self.constant(scales.astype(self.dtype), f"{name}.scales")]
        return self("MatMulNBits", x, *operands, *more, domain=MS, K=rows, N=columns, bits=4, block_size=32)

    def norm(self, x: str, name: str) -> str:
        gain = 1 + 0.1 * self.weight(name, HIDDEN)
        return self("LayerNormalization", x, self.constant(gain.astype(self.dtype), name), axis=-1, epsilon=1e-5)

    def give(self, name: str, dtype: Any, *shape: Any) -> str:
        self.inputs.append(value(name, dtype, shape))
        return name

    def present(self, layer: int, part: str) -> str:
        """The output for a cache that the first call creates."""
        name = self.names[1].format(layer, part)
        self.outputs.append(value(name, self.dtype, ["batch_size", KV_HEADS, "sequence_length", SIZE]))
        return name

    def cache(self, layer: int, part: str, shape: Sequence[Any], after: Sequence[Any]) -> tuple[str, str]:
        """A cache's input and output."""
        past, present = (n.format(layer, part) for n in self.names)
        self.give(past, self.dtype, *shape)
        self.outputs.append(value(present, self.dtype, after))
        one = tuple(d if isinstance(d, int) else 1 if d == "batch_size" else 0 for d in shape)
        self.caches[past] = (present, one, self.dtype)
        return past, present

    def key_value(self, layer: int, part: str, heads: int = KV_HEADS, length: Any = "past_sequence_length") -> Any:
        after = length if isinstance(length, int) else "total_sequence_length"
        return self.cache(layer, part, ["batch_size", heads, length, SIZE], ["batch_size", heads, after, SIZE])

    def network(self, attend: Attend, after: Attend | None = None, x: str = "") -> None:
        """From input_ids to logits."""
        ids = x or self.give("input_ids", np.int64, "batch_size", "sequence_length")
        table = self.weight("embedding", VOCABULARY, HIDDEN).astype(self.dtype)
        x = self("Gather", self.constant(table, "embedding"), ids)
        for i in range(self.layers):
            h = self.norm(x, f"{i}.norm")
            q, k, v = (
                self.linear(h, f"{i}.{n}", HIDDEN, SIZE * m)
                for n, m in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
            )
            x = self("Add", x, self.linear(attend(self, i, q, k, v), f"{i}.o", HEADS * SIZE, HIDDEN))
            x = after(self, i, x, "", "") if after else x
            h = self("Relu", self.linear(self.norm(x, f"{i}.norm2"), f"{i}.up", HIDDEN, 64))
            x = self("Add", x, self.linear(h, f"{i}.down", 64, HIDDEN))
        x = self.linear(self.norm(x, "norm"), "head", HIDDEN, VOCABULARY)
        self("Identity", x, out="logits")
        self.outputs.insert(0, value("logits", self.dtype, ["batch_size", "sequence_length", VOCABULARY]))

    def file(self, opset: int = 21) -> File:
        return File(model(self.nodes, self.inputs, self.outputs, self.weights, opset, {MS: 1}), dict(self.caches))

    # Parts of attention.

    def heads(self, x: str, count: int) -> str:
        """[batch, new, count * size] -> [batch, count, new, size]."""
        return self("Transpose", self("Reshape", x, np.array([0, 0, count, SIZE])), perm=[0, 2, 1, 3])

    def extent(self, x: str, axis: int) -> str:
        """The extent of an axis, int64[1]."""
        return self("Shape", x, start=axis, end=axis + 1)

    def range(self, start: Any, end: Any) -> str:
        start, end = (self("Squeeze", n) if isinstance(n, str) else np.int64(n) for n in (start, end))
        return self("Range", start, end, np.int64(1))

    def rotated(self, x: str, positions: str) -> str:
        """Rotary embedding of [batch, heads, new, size], positions [batch or 1, new]."""
        cos, sin = (
            self("Unsqueeze", self("Gather", table.astype(self.dtype), positions), np.array([1]))
            for table in rotations()
        )
        left, right = self("Split", x, n=2, axis=-1, num_outputs=2)
        parts = [
            self(sign, self("Mul", a, cos), self("Mul", b, sin))
            for sign, a, b in (("Sub", left, right), ("Add", right, left))
        ]
        return self("Concat", *parts, axis=-1)

    def causal(self, new: str, total: str, mask: str = "", window: int = 0, places: str = "") -> str:
        """The causal mask, bool [batch or 1, 1, new, total], from token positions."""
        last = places or self.range(self("Sub", total, new), total)
        at, to = self("Unsqueeze", last, np.array([1])), self("Unsqueeze", self.range(0, total), np.array([0]))
        seen = self("LessOrEqual", to, at)
        if window:
            seen = self("And", seen, self("Greater", to, self("Sub", at, np.int64(window))))
        seen = self("Unsqueeze", seen, np.array([0, 1]))
        if mask:
            seen = self("And", seen, self("Unsqueeze", self("Cast", mask, to=9), np.array([1, 2])))
        return seen

    def added(self, seen: str) -> str:
        """A boolean mask as an additive one."""
        return self("Where", seen, self.dtype(0), self.dtype(np.finfo(self.dtype).min / 2))

    def repeated(self, x: str) -> str:
        """Keys or values repeated for each query head."""
        x = self("Tile", self("Unsqueeze", x, np.array([2])), np.array([1, 1, HEADS // KV_HEADS, 1, 1]))
        return self("Reshape", x, np.array([0, HEADS, -1, SIZE]))

    def attention(self, q: str, k: str, v: str, bias: str = "") -> str:
        """softmax(q k^T) v as [batch, new, heads * size]."""
        scores = self("MatMul", q, self("Transpose", self.repeated(k), perm=[0, 1, 3, 2]))
        scores = self("Mul", scores, self.dtype(SIZE**-0.5))
        weights = self("Softmax", self("Add", scores, bias) if bias else scores, axis=-1)
        return self(
            "Reshape",
            self("Transpose", self("MatMul", weights, self.repeated(v)), perm=[0, 2, 1, 3]),
            np.array([0, 0, -1]),
        )


def rotations() -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, [CONTEXT, SIZE / 2]."""
    angles = np.arange(CONTEXT)[:, None] / 100 ** (np.arange(SIZE // 2) / (SIZE // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def in_four_bits(weight: np.ndarray, *, asymmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """[n, k] quantised in blocks of 32 for MatMulNBits: packed [n, blocks, 16], scales [n, blocks], zero points."""
    blocks = weight.reshape(len(weight), -1, 32)
    low, high = blocks.min(-1), blocks.max(-1)
    scales = (high - low) / 15 if asymmetric else np.abs(blocks).max(-1) / 7
    zeros = np.round(-low / scales) if asymmetric else np.full_like(scales, 8)
    q = np.clip(np.round(blocks / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = q[..., ::2] | q[..., 1::2] << 4
    if not asymmetric:
        return packed, scales, None
    z = np.pad(zeros.astype(np.uint8), ((0, 0), (0, zeros.shape[1] % 2)))
    return packed, scales, z[:, ::2] | z[:, 1::2] << 4


def group_query(dtype: Any = np.float32, bits: str = "", layers: int = 1) -> File:
    """GroupQueryAttention with rotations, as the builder of onnxruntime-genai writes it."""
    net = Net(dtype, bits, layers=layers)
    mask = net.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
    lengths = net("Cast", net("Sub", net("ReduceSum", mask, np.array([1]), keepdims=0), np.int64(1)), to=6)
    total = net("Cast", net("Squeeze", net.extent(mask, 1)), to=6)
    tables = [net.constant(t.astype(dtype), f"{n}_cache") for n, t in zip(("cos", "sin"), rotations(), strict=True)]

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        (past_k, present_k), (past_v, present_v) = net.key_value(i, "key"), net.key_value(i, "value")
        y = f"{i}.attention"
        net.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, past_k, past_v, lengths, total, *tables],
                [y, present_k, present_v],
                domain=MS,
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=1,
            )
        )
        return y

    net.network(attend)
    return net.file()


def appending(*, positions: bool = True, window: int = 0, names: tuple[str, str] = Net.names, layers: int = 1) -> File:
    """Concat(past, new), as optimum exports it from PyTorch."""
    net = Net(names=names, layers=layers)
    mask = net.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
    where = net.give("position_ids", np.int64, "batch_size", "sequence_length") if positions else ""
    net.network(appended(mask, where, window))
    return net.file()


def appended(mask: str, where: str, window: int = 0, part: str = "", past: bool = True) -> Attend:
    """Attention that appends to its cache; positions default to the extent of the past."""

    def joined(net: Net, i: int, name: str, new: str) -> str:
        if not past:
            return net("Identity", new, out=net.present(i, name))
        before, present = net.key_value(i, name)
        return net("Concat", before, new, axis=2, out=present)

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        q, k, v = net.heads(q, HEADS), net.heads(k, KV_HEADS), net.heads(v, KV_HEADS)
        v = joined(net, i, f"{part}value", v)
        new, total = net.extent(q, 2), net.extent(v, 2)
        at = where or net("Unsqueeze", net.range(net("Sub", total, new), total), np.array([0]))
        q, k = net.rotated(q, at), joined(net, i, f"{part}key", net.rotated(k, at))
        return net.attention(q, k, v, net.added(net.causal(new, total, mask, window)))

    return attend


def static(length: int, *, writer: str = "ScatterElements", mask_rank: int = 2, positions: bool = True) -> File:
    """Caches of fixed length, written at cache_position."""
    net = Net()
    at = net.give("cache_position", np.int64, "sequence_length")
    where = net("Unsqueeze", at, np.array([0]))
    if positions:
        where = net.give("position_ids", np.int64, "batch_size", "sequence_length")
    if mask_rank == 4:
        bias = net.give("attention_mask", np.float32, "batch_size", 1, "sequence_length", length)
    else:
        mask = net.give("attention_mask", np.int64, "batch_size", length)
        bias = net.added(net.causal(net.extent(at, 0), net.constant(np.array([length])), mask, places=at))

    def written(past: str, new: str, present: str) -> str:
        if writer == "TensorScatter":
            start = net("Expand", net("Slice", at, np.array([0]), np.array([1])), net.extent(new, 0))
            return net("TensorScatter", past, new, start, axis=2, out=present)
        places = net("Expand", net("Reshape", at, np.array([1, 1, -1, 1])), net("Shape", new))
        return net("ScatterElements", past, places, new, axis=2, out=present)

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        pasts = net.key_value(i, "key", length=length), net.key_value(i, "value", length=length)
        q, k, v = net.heads(q, HEADS), net.heads(k, KV_HEADS), net.heads(v, KV_HEADS)
        q, k = net.rotated(q, where), net.rotated(k, where)
        k, v = (written(past, new, present) for (past, present), new in zip(pasts, (k, v), strict=True))
        return net.attention(q, k, v, bias)

    net.network(attend)
    return net.file(24 if writer == "TensorScatter" else 21)


def onnx_attention(opset: int = 23) -> File:
    """ai.onnx's Attention with past_key and past_value, rotations by its RotaryEmbedding."""
    net = Net()
    mask = net.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
    where = net.give("position_ids", np.int64, "batch_size", "sequence_length")
    seen = net.causal(net.extent("input_ids", 1), net.extent(mask, 1), mask)

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        (past_k, present_k), (past_v, present_v) = net.key_value(i, "key"), net.key_value(i, "value")
        q, k, v = net.heads(q, HEADS), net.heads(k, KV_HEADS), net.heads(v, KV_HEADS)
        q, k = (net("RotaryEmbedding", x, *rotations(), where) for x in (q, k))
        y = f"{i}.attention"
        net.nodes.append(helper.make_node("Attention", [q, k, v, seen, past_k, past_v], [y, present_k, present_v]))
        return net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, -1]))

    net.network(attend)
    return net.file(opset)


def multi_head() -> File:
    """com.microsoft's MultiHeadAttention with past_key and past_value; keys and values for each query head."""
    net = Net()
    mask = net.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
    where = net.give("position_ids", np.int64, "batch_size", "sequence_length")
    bias = net.added(net.causal(net.extent("input_ids", 1), net.extent(mask, 1), mask))

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        (past_k, present_k), (past_v, present_v) = (net.key_value(i, n, HEADS) for n in ("key", "value"))
        q, k = net.rotated(net.heads(q, HEADS), where), net.rotated(net.heads(k, KV_HEADS), where)
        k, v = net.repeated(k), net.repeated(net.heads(v, KV_HEADS))
        q, k, v = (net("Reshape", net("Transpose", x, perm=[0, 2, 1, 3]), np.array([0, 0, -1])) for x in (q, k, v))
        y = f"{i}.attention"
        net.nodes.append(
            helper.make_node(
                "MultiHeadAttention",
                [q, k, v, "", "", bias, past_k, past_v],
                [y, present_k, present_v],
                domain=MS,
                num_heads=HEADS,
            )
        )
        return y

    net.network(attend)
    return net.file()


def convolving() -> File:
    """Attention like ``appending``, then a short convolution with a state of fixed shape."""
    net = Net()
    mask = net.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
    where = net.give("position_ids", np.int64, "batch_size", "sequence_length")

    def convolution(net: Net, i: int, x: str, *_: str) -> str:
        names, net.names = net.names, ("past_conv.{}", "present_conv.{}")
        past, present = net.cache(i, "", ["batch_size", HIDDEN, 2], ["batch_size", HIDDEN, 2])
        net.names = names
        joined = net("Concat", past, net("Transpose", x, perm=[0, 2, 1]), axis=2)
        net("Slice", joined, np.array([-2]), np.array([2**31]), np.array([2]), out=present)
        y = net("Conv", joined, net.weight(f"{i}.conv", HIDDEN, 1, 3) * np.float32(3), group=HIDDEN)
        return net("Add", x, net("Transpose", y, perm=[0, 2, 1]))

    net.network(appended(mask, where), convolution)
    return net.file()


def cross(source: str, *, first: bool) -> Attend:
    """Cross-attention, whose keys and values the first call computes and later calls take as inputs."""

    def attend(net: Net, i: int, x: str, *_: str) -> str:
        q = net.heads(net.linear(net.norm(x, f"{i}.norm3"), f"{i}.cross.q", HIDDEN, HEADS * SIZE), HEADS)
        kv = []
        for part in ("key", "value"):
            past, present = (n.format(i, f"encoder.{part}") for n in net.names)
            if first:
                y = net.heads(net.linear(source, f"{i}.cross.{part}", HIDDEN, KV_HEADS * SIZE), KV_HEADS)
                kv.append(net("Identity", y, out=net.present(i, f"encoder.{part}")))
            else:
                kv.append(net.give(past, np.float32, "batch_size", KV_HEADS, "encoder_sequence_length", SIZE))
                net.caches[past] = (present, (1, KV_HEADS, 0, SIZE), np.float32)
        y = net.linear(net.attention(q, *kv), f"{i}.cross.o", HEADS * SIZE, HIDDEN)
        return net("Add", x, y)

    return attend


def after_an_encoder(*, first: bool, layers: int = 1) -> Net:
    """A decoder in optimum's style: ``first`` for decoder_model.onnx, else decoder_with_past_model.onnx."""
    net = Net(layers=layers)
    mask = net.give("decoder_attention_mask", np.int64, "batch_size", "total_sequence_length")
    where = net.give("position_ids", np.int64, "batch_size", "sequence_length")
    source = "encoder_hidden_states"
    if first:
        net.give(source, np.float32, "batch_size", "encoder_sequence_length", HIDDEN)
    net.network(appended(mask, where, part="decoder.", past=not first), cross(source, first=first))
    return net


def merged() -> File:
    """Both as one file: If over use_cache_branch, as optimum merges them."""
    first, later = after_an_encoder(first=True), after_an_encoder(first=False)
    shared = {n: w for n, w in first.weights.items() if n in later.weights and not n.startswith("constant")}
    for name in [n for n in later.caches if ".encoder." in n]:  # the second branch returns its input
        later("Identity", name, out=later.caches[name][0])
    outputs = [o.name for o in first.outputs]
    branches: dict[str, Any] = {}
    for name, net in (("then_branch", later), ("else_branch", first)):
        own = [numpy_helper.from_array(w, n) for n, w in net.weights.items() if n not in shared]
        ends = [helper.make_empty_tensor_value_info(n) for n in outputs]
        branches[name] = helper.make_graph(net.nodes, name, [], ends, own)
    inputs = {v.name: v for v in (*first.inputs, *later.inputs)}
    ends = [value(o, np.float32, None) for o in outputs]
    node = helper.make_node("If", ["use_cache_branch"], outputs, **branches)
    flag = value("use_cache_branch", bool, [1])
    return File(model([node], [*inputs.values(), flag], ends, shared, 21, {MS: 1}), later.caches)


Run = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
"""A function from inputs by name to all outputs."""


def by_onnxruntime(file: File) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    # else it rounds activations of quantised products (DequantizeLinear, MatMul) to 8 bits
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(file.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def by_hand(
    file: File, prompt: Sequence[int], count: int, run: Run | None = None, *, first: File | None = None,
    first_run: Run | None = None, **others: np.ndarray,
) -> tuple[list[int], np.ndarray]:  # fmt: skip
    """Greedy tokens after one prompt, and their logits, by a loop with growing caches.

    Args:
        file: of a step.
        run: runs it; onnxruntime when left out.
        first, first_run: the file of the first call, where it is another.
        **others: inputs that are the same in every call.
    """
    run, first = run or by_onnxruntime(file), first or file
    first_run = first_run or (run if first is file else by_onnxruntime(first))
    past = {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in file.caches.items()}
    tokens, logits, new = [], [], list(prompt)
    seen = 0
    for _ in range(count):
        now, call = (file, run) if seen else (first, first_run)
        feeds = _feeds(now, new, seen) | past | others
        if "use_cache_branch" in now.inputs:
            feeds["use_cache_branch"] = np.array([seen > 0])
        results = call({n: v for n, v in feeds.items() if n in now.inputs})
        given = dict(zip((v.name for v in now.proto.graph.output), results, strict=True))
        kept = {n for n in past if seen and ".encoder." in n}
        past = {n: v if n in kept else given[file.caches[n][0]] for n, v in past.items()}
        logits.append(given["logits"][0, -1].astype(np.float32))
        tokens.append(int(np.argmax(logits[-1])))
        seen, new = seen + len(new), tokens[-1:]
    return tokens, np.stack(logits)


def _feeds(file: File, new: Sequence[int], seen: int) -> NP:
    """Masks, positions and lengths for one sequence's new tokens and the number of past tokens."""
    total = seen + len(new)
    places = np.arange(seen, total)
    room = next((shape[2] for _, shape, _ in file.caches.values() if len(shape) == 4 and shape[2]), total)
    mask: Any = (np.arange(room) < total).astype(np.int64)[None]
    if file.inputs.get("attention_mask") == 4:
        order = np.arange(room) <= places[:, None]
        mask = np.where(order, 0, np.finfo(np.float32).min / 2).astype(np.float32)[None, None]
    return {
        "input_ids": np.array([new]), "position_ids": places[None], "cache_position": places,
        "attention_mask": mask, "decoder_attention_mask": mask,
    }  # fmt: skip
