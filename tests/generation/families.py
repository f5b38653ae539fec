"""Tiny decoders of many families and precisions, as exporters write them, built with onnx.helper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.decoders import CONTEXT, HEADS, HIDDEN, KV_HEADS, MS, SIZE, VOCABULARY, File, Net, in_four_bits
from tests.support.models import value

INNER: Final = 64
BLOCK: Final = 32
ROOM: Final = 32
"""Length of sliding-window caches, which their operator requires from the first call on."""
ATTENTION_SCALE: Final = SIZE**-0.5

PRECISIONS: Final = ("float32", "float16", "int8", "int8 QDQ", "int4", "int4 asymmetric", "int4 QDQ")
"""Weight precisions: packed int4 and int8 for MatMulNBits, or DequantizeLinear before MatMul (QDQ)."""


@dataclass(frozen=True)
class Family:
    """Architecture of a family's decoder; the defaults are llama's.

    Attributes:
        attention: "group" for GroupQueryAttention; "multi" for MultiHeadAttention after Concat; "parts" for operators
            of ai.onnx after Concat.
        norm: "rms"; "layer" with a bias; "plain", LayerNormalization without weights.
        activation: "silu", "gelu", "tanh" (its approximation), or "relu2", the square of relu.
        gated: whether the feed-forward network has a gate (three matrices).
        windows: attention windows of the layers, cyclically; 0 for unlimited. With ``slides``, the caches are sliding
            windows too.
        rotary: number of rotated elements of a head; 0 for learned positions.
        tied: whether the output projection is the embedding; ``scales`` apply to embedding, branches, and logits.
        parallel: whether attention and feed-forward network read the same input.
        convolutions: layers, cyclically, that are short convolutions with a state instead of attention.
        long: number of tokens from which on other rotary tables apply; 0 for never.
    """

    attention: str = "group"
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    qk_norm: bool = False
    kv_heads: int = KV_HEADS
    windows: tuple[int, ...] = (0,)
    slides: bool = False
    softcap: float = 0.0
    last_softcap: float = 0.0
    rotary: int = SIZE
    interleaved: bool = False
    after_norms: bool = False
    tied: bool = False
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    parallel: bool = False
    experts: int = 0
    sinks: bool = False
    convolutions: tuple[bool, ...] = (False,)
    long: int = 0


GEMMA: Final = Family(activation="tanh", tied=True, scales=(HIDDEN**0.5, 1, 1), kv_heads=1)
FAMILIES: Final = {
    "llama": Family(),
    "mistral": Family(windows=(8,)),
    "mixtral": Family(windows=(8,), experts=4),
    "qwen2": Family(bias=True, tied=True),
    "qwen3": Family(qk_norm=True),
    "qwen3 with experts": Family(qk_norm=True, experts=4),
    "gemma": GEMMA,
    "gemma2": replace(
        GEMMA, kv_heads=2, windows=(8, 0), slides=True, softcap=5.0, last_softcap=8.0, after_norms=True
    ),
    "gemma3": replace(GEMMA, kv_heads=2, windows=(8, 0), slides=True, qk_norm=True, after_norms=True),
    "phi3": Family(long=12),
    "gpt-oss": Family(bias=True, windows=(8, 0), slides=True, sinks=True, experts=4),
    "olmo": Family(attention="multi", norm="plain"),
    "granite": Family(scales=(3.0, 0.4, 0.5)),
    "nemotron": Family(attention="multi", norm="layer", activation="relu2", gated=False, rotary=SIZE // 2),
    "lfm2": Family(qk_norm=True, convolutions=(True, False)),
    "gpt2": Family(
        attention="parts", norm="layer", activation="tanh", gated=False, bias=True, rotary=0, kv_heads=HEADS, tied=True
    ),
    "gpt-neox": Family(
        attention="parts", norm="layer", activation="gelu", gated=False, bias=True, rotary=SIZE // 2, kv_heads=HEADS,
        parallel=True,
    ),
    "chatglm": Family(bias=True, interleaved=True),
}  # fmt: skip


def decoder(family: str, precision: str = "float32", layers: int = 2) -> File:
    """A decoder file with input_ids, attention_mask and caches, and position_ids unless GroupQueryAttention counts."""
    return Builder.of(FAMILIES[family], precision, layers).build()


@dataclass
class Builder(Net):
    """Builds a decoder's graph."""

    family: Family = Family()
    precision: str = "float32"

    @classmethod
    def of(cls, family: Family, precision: str, layers: int) -> Builder:
        return cls(
            np.float16 if precision == "float16" else np.float32, family=family, precision=precision, layers=layers
        )

    def build(self, embeddings: bool = False) -> File:
        """The file; with ``embeddings`` it takes inputs_embeds rather than tokens."""
        f = self.family
        width = ["batch_size", "sequence_length"]
        x = self.give("inputs_embeds", self.dtype, *width, HIDDEN) if embeddings else self.embedded(width)
        self.mask = self.give("attention_mask", np.int64, "batch_size", "total_sequence_length")
        ones = self("ReduceSum", self.mask, np.array([1]), keepdims=0)
        self.lengths = self("Cast", self("Sub", ones, np.int64(1)), to=6)
        self.total = self("Cast", self("Squeeze", self.extent(self.mask, 1)), to=6)
        self.positions = "" if f.attention == "group" else self.give("position_ids", np.int64, *width)
        if not f.rotary:
            x = self("Add", x, self("Gather", self.weights_of("positions", CONTEXT, HIDDEN), self.positions))
        if f.attention != "group":
            self.bias_of_mask = self.added(
                self.causal(self.extent(self.positions, 1), self.extent(self.mask, 1), self.mask)
            )
        for i in range(self.layers):
            x = self.layer(x, i)
        x = self.scaled(self.head(self.normed(x, "norm")), f.scales[2])
        if f.last_softcap:
            cap = self.dtype(f.last_softcap)
            x = self("Mul", self("Tanh", self("Div", x, cap)), cap)
        self("Identity", x, out="logits")
        self.outputs.insert(0, value("logits", self.dtype, [*width, VOCABULARY]))
        return self.file(22)

    def embedded(self, width: list[Any]) -> str:
        ids = self.give("input_ids", np.int64, *width)
        if self.family.tied and self.precision == "int4":
            packed, scales, _ = in_four_bits(self.weight("embedding", VOCABULARY, HIDDEN), asymmetric=False)
            table = self("Reshape", self.constant(packed, "head.packed"), np.array([VOCABULARY, HIDDEN // 2]))
            x = self(
                "GatherBlockQuantized", table, ids, self.constant(scales, "head.scales"), domain=MS, bits=4,
                block_size=BLOCK, gather_axis=0, quantize_axis=1,
            )  # fmt: skip
        else:
            x = self("Gather", self.weights_of("embedding", VOCABULARY, HIDDEN), ids)
        return self.scaled(x, self.family.scales[0])

    def head(self, x: str) -> str:
        if not self.family.tied:
            return self.linear(x, "head", HIDDEN, VOCABULARY)
        if self.precision == "int4":
            return self.packed(x, "head.packed", "head.scales", HIDDEN, VOCABULARY, 4)
        return self("MatMul", x, self("Transpose", self.weights_of("embedding", VOCABULARY, HIDDEN), perm=[1, 0]))

    def layer(self, x: str, i: int) -> str:
        f = self.family
        h = self.normed(x, f"{i}.norm")
        mixed = self.convolved(h, i) if f.convolutions[i % len(f.convolutions)] else self.attended(h, i)
        mixed = self.normed(mixed, f"{i}.norm.after") if f.after_norms else mixed
        mixed = self.scaled(mixed, f.scales[1])
        if f.parallel:
            return self("Add", x, self("Add", mixed, self.fed(self.normed(x, f"{i}.norm2"), i)))
        x, h = self.skipped(x, mixed, f"{i}.norm2")
        y = self.experts(h, i) if f.experts else self.fed(h, i)
        y = self.normed(y, f"{i}.norm2.after") if f.after_norms else y
        return self("Add", x, self.scaled(y, f.scales[1]))

    # Weights.

    def weights_of(self, name: str, *shape: int) -> str:
        return name if name in self.weights else self.constant(self.weight(name, *shape).astype(self.dtype), name)

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weight, kind = self.weight(name, rows, columns), self.precision
        if kind.startswith("float"):
            return self("MatMul", x, self.constant(weight.astype(self.dtype), name))
        if kind == "int8 QDQ":  # a scale for each column
            scale = np.abs(weight).max(0) / 127
            return self("MatMul", x, self("DequantizeLinear", np.round(weight / scale).astype(np.int8), scale, axis=1))
        if kind == "int4 QDQ":  # a scale for each block of a column
            scale = np.abs(weight.reshape(-1, BLOCK, columns)).max(1) / 7
            q = np.round(weight / np.repeat(scale, BLOCK, axis=0)).astype(ml_dtypes.int4)
            return self("MatMul", x, self("DequantizeLinear", q, scale, axis=0, block_size=BLOCK))
        bits = 8 if kind == "int8" else 4
        if bits == 8:
            packed, scales = in_eight_bits(weight.T)
            zeros = None
        else:
            packed, scales, zeros = in_four_bits(weight.T, asymmetric=kind == "int4 asymmetric")
        self.constant(packed, f"{name}.packed"), self.constant(scales, f"{name}.scales")
        more = [] if zeros is None else [self.constant(zeros, f"{name}.zeros")]
        return self.packed(x, f"{name}.packed", f"{name}.scales", rows, columns, bits, *more)

    def packed(self, x: str, weight: str, scales: str, rows: int, columns: int, bits: int, *zeros: str) -> str:
        sizes = {"K": rows, "N": columns, "bits": bits, "block_size": BLOCK}
        return self("MatMulNBits", x, weight, scales, *zeros, domain=MS, **sizes)

    def biased(self, x: str, name: str, size: int) -> str:
        return self("Add", x, self.weights_of(f"{name}.bias", size)) if self.family.bias else x

    def scaled(self, x: str, by: float) -> str:
        return x if by == 1 else self("Mul", x, self.dtype(by))

    # Norms.

    def gain(self, name: str, size: int) -> str:
        plain = np.ones(size) if self.family.norm == "plain" else 1 + 0.1 * self.weight(name, size)
        return self.constant(plain.astype(self.dtype), name)

    def normed(self, x: str, name: str, size: int = HIDDEN) -> str:
        gain = self.gain(name, size)
        if self.family.norm == "rms":
            return self("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=1e-6)
        more = [self.weights_of(f"{name}.bias", size)] if self.family.norm == "layer" else []
        return self("LayerNormalization", x, gain, *more, axis=-1, epsilon=1e-6)

    def skipped(self, x: str, more: str, name: str) -> tuple[str, str]:
        """A sum and its norm, fused into one operator if there is one."""
        if self.family.norm != "rms":
            x = self("Add", x, more)
            return x, self.normed(x, name)
        h, total = f"{name}.normed", f"{name}.sum"
        operands = [x, more, self.gain(name, HIDDEN)]
        self.nodes.append(
            helper.make_node("SkipSimplifiedLayerNormalization", operands, [h, "", "", total], domain=MS, epsilon=1e-6)
        )
        return total, h

    # Attention.

    def attended(self, h: str, i: int) -> str:
        f = self.family
        sizes = [HEADS * SIZE, f.kv_heads * SIZE, f.kv_heads * SIZE]
        joined = self.biased(self.linear(h, f"{i}.qkv", HIDDEN, sum(sizes)), f"{i}.qkv", sum(sizes))
        if f.attention == "group" and not f.qk_norm:
            parts = [joined, "", ""]
        else:
            parts = self("Split", joined, np.array(sizes), n=3, axis=-1)
        if f.qk_norm:
            parts = [self.normed_heads(x, f"{i}.{n}.norm") for x, n in zip(parts[:2], "qk", strict=True)] + [parts[2]]
        y = {"group": self.grouped, "multi": self.multi, "parts": self.in_parts}[f.attention](i, *parts)
        return self.biased(self.linear(y, f"{i}.o", HEADS * SIZE, HIDDEN), f"{i}.o", HIDDEN)

    def normed_heads(self, x: str, name: str) -> str:
        rows = self.normed(self("Reshape", x, np.array([0, -1, SIZE])), name, SIZE)
        return self("Reshape", rows, self("Shape", x))

    def tables(self, i: int) -> list[str]:
        """Rotary tables of a layer; layers with a window have other tables, and some depend on the text length."""
        f = self.family
        base = 10 if f.qk_norm and f.windows[i % len(f.windows)] else 100
        names = [f"{n}_{base}" for n in ("cos", "sin")]
        if names[0] in self.weights or (f.long and i):
            return names
        tables = rotations(base, f.rotary)
        if not f.long:
            return [self.constant(t.astype(self.dtype), n) for n, t in zip(names, tables, strict=True)]
        branches = {}
        for branch, factor, rows in (("then_branch", 2.0, CONTEXT), ("else_branch", 1.0, f.long)):
            tensors = rotations(base, f.rotary, factor)
            ends = [f"{n}_{branch}" for n in names]
            own = [numpy_helper.from_array(t[:rows].astype(self.dtype), n) for t, n in zip(tensors, ends, strict=True)]
            nodes = [helper.make_node("Constant", [], [n], value=t) for n, t in zip(ends, own, strict=True)]
            branches[branch] = helper.make_graph(nodes, branch, [], [value(n, self.dtype, None) for n in ends])
        beyond = self("Greater", self.total, np.int32(f.long))
        self.nodes.append(helper.make_node("If", [beyond], names, **branches))
        return names

    def grouped(self, i: int, q: str, k: str, v: str) -> str:
        f = self.family
        window = f.windows[i % len(f.windows)]
        room = "past_sliding_length" if f.slides and window else "past_sequence_length"
        (past_k, new_k), (past_v, new_v) = (self.key_value(i, n, f.kv_heads, room) for n in ("key", "value"))
        if f.slides:  # onnxruntime requires their full length from the first call on
            for past in (past_k, past_v):
                self.caches[past] = (self.caches[past][0], (1, f.kv_heads, ROOM, SIZE), self.dtype)
        sinks = self.weights_of(f"{i}.sinks", HEADS) if f.sinks else ""
        y = f"{i}.attention"
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, past_k, past_v, self.lengths, self.total, *self.tables(i), "", "", sinks],
                [y, new_k, new_v],
                domain=MS,
                num_heads=HEADS,
                kv_num_heads=f.kv_heads,
                scale=ATTENTION_SCALE,
                local_window_size=window or -1,
                softcap=f.softcap,
                do_rotary=1,
                rotary_interleaved=int(f.interleaved),
                **({"sliding_window_cache": 1} if f.slides and window else {}),
            )
        )
        return y

    def joined(self, i: int, part: str, new: str) -> str:
        past, present = self.key_value(i, part, self.family.kv_heads)
        return self("Concat", past, new, axis=2, out=present)

    def multi(self, i: int, q: str, k: str, v: str) -> str:
        f, tables = self.family, self.tables(i)
        q, k = (
            self(
                "RotaryEmbedding", x, self.positions, *tables, domain=MS, num_heads=n if f.rotary < SIZE else 0,
                rotary_embedding_dim=f.rotary % SIZE,
            )
            for x, n in ((q, HEADS), (k, f.kv_heads))
        )  # fmt: skip
        k, v = (self.joined(i, n, self.heads(x, f.kv_heads)) for n, x in (("key", k), ("value", v)))
        k, v = (
            self("Reshape", self("Transpose", self.repeated(x), perm=[0, 2, 1, 3]), np.array([0, 0, -1]))
            for x in (k, v)
        )
        return self(
            "MultiHeadAttention", q, k, v, "", "", self.bias_of_mask, domain=MS, num_heads=HEADS, scale=ATTENTION_SCALE
        )

    def in_parts(self, i: int, q: str, k: str, v: str) -> str:
        q, k, v = (self.heads(x, HEADS) for x in (q, k, v))
        if size := self.family.rotary:
            q, k = (self.rotated_in_parts(x, size) for x in (q, k))
        k, v = self.joined(i, "key", k), self.joined(i, "value", v)
        scores = self("MatMul", q, self("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self("Add", self("Div", scores, self.dtype(SIZE**0.5)), self.bias_of_mask)
        y = self("MatMul", self("Softmax", scores, axis=-1), v)
        return self("Reshape", self("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, -1]))

    def rotated_in_parts(self, x: str, size: int) -> str:
        """The first ``size`` elements of each head rotated, by cosines and sines computed in the graph."""
        head, rest = self("Split", x, np.array([size, SIZE - size]), n=2, axis=-1)
        frequencies = self.dtype(100.0 ** -(np.arange(size // 2) / (size // 2)))
        at = self("Unsqueeze", self("Cast", self.positions, to=1 if self.dtype == np.float32 else 10), np.array([1, 3]))
        angles = self("Mul", at, frequencies)
        angles = self("Concat", angles, angles, axis=-1)
        left, right = self("Split", head, n=2, axis=-1, num_outputs=2)
        half = self("Concat", self("Neg", right), left, axis=-1)
        rotated = self("Add", self("Mul", head, self("Cos", angles)), self("Mul", half, self("Sin", angles)))
        return self("Concat", rotated, rest, axis=-1)

    def convolved(self, h: str, i: int) -> str:
        """A gated short convolution with a state."""
        b, c, x = self("Split", self.linear(h, f"{i}.in", HIDDEN, 3 * HIDDEN), n=3, axis=-1, num_outputs=3)
        names, self.names = self.names, ("past_conv.{}", "present_conv.{}")
        past, present = self.cache(i, "", ["batch_size", HIDDEN, 2], ["batch_size", HIDDEN, 2])
        self.names = names
        x = self("Transpose", self("Mul", b, x), perm=[0, 2, 1])
        taps = self.constant((self.weight(f"{i}.taps", HIDDEN, 1, 3) * 3).astype(self.dtype))
        y = f"{i}.convolution"
        self.nodes.append(helper.make_node("CausalConvWithState", [x, taps, "", past], [y, present], domain=MS))
        return self.linear(self("Mul", c, self("Transpose", y, perm=[0, 2, 1])), f"{i}.out", HIDDEN, HIDDEN)

    # Feed-forward networks.

    def activated(self, x: str) -> str:
        match self.family.activation:
            case "silu":
                return self("Mul", x, self("Sigmoid", x))
            case "relu2":
                y = self("Relu", x)
                return self("Mul", y, y)
            case name:
                return self("Gelu", x, approximate="tanh" if name == "tanh" else "none")

    def fed(self, h: str, i: int) -> str:
        up = self.biased(self.linear(h, f"{i}.up", HIDDEN, INNER), f"{i}.up", INNER)
        if self.family.gated:
            y = self("Mul", self.activated(self.linear(h, f"{i}.gate", HIDDEN, INNER)), up)
        else:
            y = self.activated(up)
        return self.biased(self.linear(y, f"{i}.down", INNER, HIDDEN), f"{i}.down", HIDDEN)

    def experts(self, h: str, i: int) -> str:
        """Mixture of experts, two for each token; gates and values are interleaved in the first matrix."""
        count = self.family.experts
        router = self("Reshape", self.linear(h, f"{i}.router", HIDDEN, count), np.array([-1, count]))
        options: dict[str, Any] = {
            "k": 2,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
        }
        if self.family.sinks:
            options |= {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}
        first, second = (
            [np.ascontiguousarray(self.weight(f"{i}.{n}.{e}", rows, columns).T) for e in range(count)]
            for n, rows, columns in (("up", HIDDEN, 2 * INNER), ("down", INNER, HIDDEN))
        )
        biases = [self.weights_of(f"{i}.{n}.biases", count, size) for n, size in (("up", 2 * INNER), ("down", HIDDEN))]
        if "QDQ" in self.precision or self.precision.startswith("float"):
            operands = [self.constant(np.stack(w).astype(self.dtype)) for w in (first, second)]
            return self("MoE", h, router, operands[0], biases[0], operands[1], biases[1], domain=MS, **options)
        bits = 8 if self.precision == "int8" else 4
        operands = []
        zeros = []
        for matrices in (first, second):
            each = [
                (*in_eight_bits(m), None) if bits == 8 else in_four_bits(m, asymmetric="asym" in self.precision)
                for m in matrices
            ]
            packed = np.stack([p.reshape(len(p), -1) for p, _, _ in each])
            operands.append([self.constant(packed), self.constant(np.stack([s for _, s, _ in each]))])
            zeros.append("" if each[0][2] is None else self.constant(np.stack([z for _, _, z in each])))
        (w1, s1), (w2, s2) = operands
        return self(
            "QMoE", h, router, w1, s1, biases[0], w2, s2, biases[1], "", "", "", *zeros, domain=MS,
            expert_weight_bits=bits, block_size=BLOCK, **options,
        )  # fmt: skip


def rotations(base: float, size: int, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Tables of cosines and sines, [CONTEXT, size / 2]."""
    angles = np.arange(CONTEXT)[:, None] / factor / base ** (np.arange(size // 2) / (size // 2))
    return np.cos(angles), np.sin(angles)


def in_eight_bits(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [n, k] as MatMulNBits stores them: uint8[n, blocks, BLOCK] with zero point 128, scales [n, blocks]."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scales = np.abs(blocks).max(-1) / 127
    return (np.round(blocks / scales[..., None]) + 128).astype(np.uint8), scales.astype(np.float32)


IMAGE: Final = VOCABULARY - 1
"""The placeholder token for image features."""


def vision_language(family: str = "llama") -> tuple[onnx.ModelProto, onnx.ModelProto, File]:
    """The three files of a vision-language model: image encoder, embedding, decoder."""
    net = Builder.of(FAMILIES[family], "float32", 1)
    pixels = net.give("pixel_values", np.float32, "patches", 12)
    net("Gelu", net("MatMul", pixels, net.weights_of("patch", 12, HIDDEN)), out="image_features")
    net.outputs.append(value("image_features", np.float32, ["patches", HIDDEN]))
    vision = net.file(22).proto

    net = Builder.of(FAMILIES[family], "float32", 1)
    ids = net.give("input_ids", np.int64, "batch_size", "sequence_length")
    features = net.give("image_features", np.float32, "patches", HIDDEN)
    places = net("Transpose", net("NonZero", net("Equal", ids, np.int64(IMAGE))), perm=[1, 0])
    net(
        "ScatterND",
        net("Gather", net.weights_of("embedding", VOCABULARY, HIDDEN), ids),
        places,
        features,
        out="inputs_embeds",
    )
    net.outputs.append(value("inputs_embeds", np.float32, ["batch_size", "sequence_length", HIDDEN]))
    return vision, net.file(22).proto, Builder.of(FAMILIES[family], "float32", 1).build(embeddings=True)
