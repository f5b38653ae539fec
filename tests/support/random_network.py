"""Random networks of 5 to 25 nodes: convolutions, recurrences, attention, quantisers, and what exporters put between.

A network grows from values: onnxruntime evaluates each new node alone on a batch of three, and a block of nodes that it
rejects, or whose values leave the range of a healthy network, is taken back. No block mixes the rows of a batch, which
is the first axis of every value. Blocks are chosen by rank: ``[N, C, H, W]``, ``[N, T, D]`` and ``[N, D]``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from . import models

onnxruntime.set_default_logger_severity(4)
OPSETS = (13, 17, 20, 22)
FEWEST, MOST = 5, 25
SHAPES = ((3, 9, 9), (4, 8, 6), (2, 12, 12), (7, 6), (12, 8), (10,), (16,))
TINY = ((4,), (1,), (6,), (3, 4), (1, 5), (4, 4), (2, 3, 3), (1, 4, 4), (3, 1, 5))
LARGEST = 1500
"""Elements of a value for each row of the batch."""
Block = Callable[["Network", str], str]
BLOCKS: dict[int, list[Block]] = {2: [], 3: [], 4: []}
SPECIAL: list[Block] = []
"""Blocks with constants beyond the range of a network, for operands of every rank."""


class RejectedBlock(Exception):
    """onnxruntime rejects a node, or its values overflow or vanish."""


def block(*ranks: int, often: int = 1) -> Callable[[Block], Block]:
    """Registers a block for operands of these ranks, drawn ``often`` times as often as others."""

    def register(function: Block) -> Block:
        for rank in ranks:
            BLOCKS[rank].extend([function] * often)
        return function

    return register


def outputs_of(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime computes without its optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)


@dataclass
class Network:
    """A growing network; ``values`` are those of a batch of three."""

    rng: random.Random
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    grown: list[str] = field(default_factory=lambda: ["x"])
    """The input and the results of blocks."""
    may_round: bool = False
    rounds: bool = False
    """Whether last digits are amplified: by a quantiser, float16, or a step function."""
    special: bool = False
    """Whether blocks with special constants are drawn, for a third of the blocks."""
    bounded: bool = True
    """Whether values must stay in the range of a network."""

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.rng.getrandbits(32))

    # --- nodes and weights

    def add(self, op: str, *inputs: str, n: int = 1, captured: Sequence[str] = (), **attributes: Any) -> Any:
        """Adds and evaluates a node; returns the name of its output, or the names of several.

        ``captured`` are outer values that the graphs among its attributes read.
        """
        names = [f"{op.lower()}_{len(self.nodes)}" + ("" if n == 1 else f"_{i}") for i in range(n)]
        node = helper.make_node(op, inputs, names, name=names[0], **attributes)
        read = [i for i in (*inputs, *captured) if i]
        known = {i: self.values[i] if i in self.values else self.weights[i] for i in read}
        try:
            results = outputs_of(self._model([node], known, names), known)
        except Exception as error:
            raise RejectedBlock(f"{op}: {error}") from error
        for result in results:
            if self.bounded and result.dtype.kind == "f" and not (result.size and np.all(np.abs(result) < 100)):
                raise RejectedBlock(f"{op}: its values leave the range of a network")
        self.nodes.append(node)
        self.values.update(zip(names, results, strict=True))
        return names[0] if n == 1 else names

    def round(self) -> None:
        """Says that a block amplifies last digits, which leaves a comparison little to see: few networks may."""
        if not self.may_round:
            raise RejectedBlock("it rounds")
        self.rounds = True

    def tensor(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(value, dtype)
        return name

    def ints(self, *value: int) -> str:
        return self.tensor(value, np.int64)

    def weight(self, *shape: int, fan_in: int | None = None) -> str:
        """A parameter as exporters write it: mostly an initializer, sometimes computed from one."""
        scale = 1 / np.sqrt(fan_in or shape[-1])
        value = self.numbers.normal(size=shape).astype(np.float32) * np.float32(scale)
        match self.rng.randrange(8):
            case 0:
                return str(self.add("Mul", self.tensor(value), self.tensor(0.5)))
            case 1 if len(shape) > 1:
                order = list(range(len(shape)))[::-1]
                return str(self.add("Transpose", self.tensor(value.transpose(order)), perm=order))
            case 2:
                step = np.abs(value).max() / 127
                codes = self.tensor(np.round(value / step), np.int8)
                return str(self.add("DequantizeLinear", codes, self.tensor(step), self.tensor(0, np.int8)))
            case 3:
                return str(self.add("Cast", self.tensor(value, np.float16), to=TensorProto.FLOAT))
        return self.tensor(value)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def like(self, name: str) -> str:
        """Another value of the same shape, or this one."""
        same = [v for v in self.grown if self.shape(v) == self.shape(name) and v != name]
        return self.rng.choice(same or [name])

    # --- growth

    def grow(self, size: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """Adds blocks until there are ``size`` nodes or more, to an input of one of these shapes of a row."""
        shape = self.rng.choice(shapes)
        self.values["x"] = self.numbers.normal(size=(3, *shape)).astype(np.float32)
        newest = "x"
        for _ in range(10 * size):
            if len(self.nodes) >= size:
                break
            source = newest if self.rng.random() < 0.75 else self.rng.choice(self.grown)
            before = (len(self.nodes), len(self.weights), len(self.values), self.rounds)
            try:
                blocks = SPECIAL if self.special and self.rng.random() < 0.3 else BLOCKS[self.values[source].ndim]
                result = self.rng.choice(blocks)(self, source)
                value = self.values[result]
                if value.ndim not in BLOCKS or value[0].size > LARGEST or value.shape[0] != 3 or value.shape[1] > 64:
                    raise RejectedBlock("too large")
                if not (value.std() >= 1e-3 and np.abs(value).max() < 100):
                    raise RejectedBlock("nearly constant")
            except RejectedBlock:
                self._take_back(*before)
                continue
            self.grown.append(newest := result)

    def _take_back(self, nodes: int, weights: int, values: int, rounds: bool) -> None:
        del self.nodes[nodes:]
        for kept, count in ((self.weights, weights), (self.values, values)):
            for name in list(kept)[count:]:
                del kept[name]
        self.rounds = rounds

    def _model(self, nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], outputs: list[str]) -> onnx.ModelProto:
        declared = [models.value(k, v.dtype, v.shape) for k, v in inputs.items()]
        return models.model(nodes, declared, [onnx.ValueInfoProto(name=o) for o in outputs], opset=self.opset)

    def proto(self) -> onnx.ModelProto:
        """The model: input x with a free batch, the last value and one other as outputs."""
        ends = list(dict.fromkeys([self.grown[-1], self.rng.choice(self.grown[1:])]))
        x, *results = (models.value(n, np.float32, ["N", *self.shape(n)[1:]]) for n in ("x", *ends))
        return models.model(self.nodes, [x], results, self.weights, self.opset)
