"""Encoder-decoders without mask or position inputs, as optimum exports t5, bart and whisper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import helper, numpy_helper

from tests.generation.families import Builder, Family
from tests.support.decoders import HEADS, HIDDEN, KV_HEADS, MS, SIZE, VOCABULARY, File, cross
from tests.support.models import model, value

SOURCE: Final = "encoder_hidden_states"
FAMILIES: Final = {
    "t5": Family(attention="parts", activation="gelu", rotary=0, kv_heads=2, scales=(1, 1, HIDDEN**-0.5)),
    "bart": Family(
        attention="parts", norm="layer", activation="gelu", gated=False, bias=True, rotary=0, kv_heads=2, tied=True
    ),
    "whisper": Family(attention="parts", norm="layer", activation="gelu", gated=False, bias=True, rotary=0, kv_heads=2),
}


def decoder(family: str, precision: str = "float32", *, first: bool, layers: int = 2) -> File:
    """decoder_model.onnx if ``first``, else decoder_with_past_model.onnx."""
    return net(family, precision, layers, first=first).write()


def net(family: str, precision: str, layers: int, *, first: bool) -> Encoded:
    made = Encoded.of(FAMILIES[family], precision, layers)
    made.first, made.relative, made.masked = first, family == "t5", family != "whisper"
    return made


@dataclass
class Encoded(Builder):
    """Builds one of the two files; positions and attention mask follow from extents alone."""

    first: bool = False
    relative: bool = False
    masked: bool = False
    """Whether encoder outputs may be padded."""
    source_bias: str = ""

    def write(self) -> File:
        width = ["batch_size", "sequence_length"]
        x = self.embedded(width)
        new = self.extent("input_ids", 1)
        past: Any = np.array([0])
        if not self.first:
            past = self("Shape", self.names[0].format(0, "decoder.key"), start=2, end=3)
        else:
            self.give(SOURCE, self.dtype, "batch_size", "encoder_sequence_length", HIDDEN)
        if self.masked:
            mask = self.give("encoder_attention_mask", np.int64, "batch_size", "encoder_sequence_length")
            self.source_bias = self.added(self("Unsqueeze", self("Cast", mask, to=9), np.array([1, 2])))
        total = self("Add", new, past)
        last = self.range(0 if self.first else past, total)
        at, to = self("Unsqueeze", last, np.array([1])), self("Unsqueeze", self.range(0, total), np.array([0]))
        self.bias_of_mask = self.added(self("Unsqueeze", self("LessOrEqual", to, at), np.array([0, 1])))
        if self.relative:
            distance = self("Clip", self("Sub", at, to), np.int64(0), np.int64(31))
            bias = self("Gather", self.weights_of("distances", 32, HEADS), distance)
            bias = self("Unsqueeze", self("Transpose", bias, perm=[2, 0, 1]), np.array([0]))
            self.bias_of_mask = self("Add", self.bias_of_mask, bias)
        else:
            x = self("Add", x, self("Gather", self.weights_of("positions", 128, HIDDEN), last))
        for i in range(self.layers):
            x = self.layer(x, i)
        self("Identity", self.scaled(self.head(self.normed(x, "norm")), self.family.scales[2]), out="logits")
        self.outputs.insert(0, value("logits", self.dtype, [*width, VOCABULARY]))
        return self.file(22)

    def skipped(self, x: str, more: str, name: str) -> tuple[str, str]:
        """The sum and its norm, with cross-attention between them."""
        x = self("Add", x, more)
        x = cross(SOURCE, first=self.first)(self, int(name.split(".")[0]), x, "", "")
        return x, self.normed(x, name)

    def attention(self, q: str, k: str, v: str, bias: str = "") -> str:
        return super().attention(q, k, v, bias or self.source_bias)

    def norm(self, x: str, name: str) -> str:
        return self.normed(x, name)

    def joined(self, i: int, part: str, new: str) -> str:
        if self.first:
            return self("Identity", new, out=self.present(i, f"decoder.{part}"))
        return super().joined(i, f"decoder.{part}", new)

    def in_parts(self, i: int, q: str, k: str, v: str) -> str:
        k, v = (self.joined(i, n, self.heads(x, 2)) for n, x in (("key", k), ("value", v)))
        return self.attention(self.heads(q, HEADS), k, v, self.bias_of_mask)


def merged(family: str, precision: str = "float32", layers: int = 2) -> File:
    """Both graphs in one file, as optimum merges them; a step returns empty cross-attention caches."""
    first, later = (net(family, precision, layers, first=f) for f in (True, False))
    files = [first.write(), later.write()]
    shared = {n: w for n, w in first.weights.items() if n in later.weights and not n.startswith("constant")}
    outputs = [v.name for v in first.outputs]
    for name in (n for n in outputs if ".encoder." in n):
        later("Constant", out=name, value=numpy_helper.from_array(np.zeros((0, KV_HEADS, 1, SIZE), np.float32)))
    branches = {}
    for branch, made in (("then_branch", later), ("else_branch", first)):
        own = [numpy_helper.from_array(w, n) for n, w in made.weights.items() if n not in shared]
        ends = [helper.make_empty_tensor_value_info(n) for n in outputs]
        branches[branch] = helper.make_graph(made.nodes, branch, [], ends, own)
    inputs = {v.name: v for v in (*first.inputs, *later.inputs)}
    ends = [value("logits", np.float32, ["batch_size", "sequence_length", VOCABULARY])]
    ends += [value(n, np.float32, ["batch_size", KV_HEADS, f"{n}.length", SIZE]) for n in outputs[1:]]
    node = helper.make_node("If", ["use_cache_branch"], outputs, **branches)
    flag = value("use_cache_branch", bool, [1])
    return File(model([node], [*inputs.values(), flag], ends, shared, 22, {MS: 1}), files[1].caches)
