"""``Model.verify`` finds faults planted in files: operators, attributes and weights of single nodes."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import numpy as np
import onnx
import pytest

from tests.support.faults import Fault, effective, faults, wrong_model

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[2, 3, 8, 8] x) => (float[2, 4] y)
<float[4, 3, 3, 3] k, float[4] s, float[4] b, float[4] m, float[4] v, float[4, 4] w, int64 one = {1}>
{ c = Conv<pads = [1, 1, 1, 1]>(x, k)
  n = BatchNormalization<epsilon = 0.01>(c, s, b, m, v)
  r = LeakyRelu<alpha = 0.1>(n)
  p = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(r)
  q = GlobalAveragePool(p)
  f = Flatten(q)
  g = Gemm<alpha = 0.5>(f, w, b)
  t = Tanh(g)
  d = Sub(g, t)
  e = Softmax<axis = 1>(d)
  h = CumSum(e, one)
  u = Transpose<perm = [1, 0]>(w)
  z = MatMul(h, u)
  y = Mul(z, s) }"""


def network() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    shapes = {"k": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "v": (4,), "w": (4, 4)}
    kept = [t for t in model.graph.initializer if t.name not in shapes]
    drawn = [
        onnx.numpy_helper.from_array(rng.uniform(0.2, 1, shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *drawn])
    return model


RIGHT = network()
FEEDS = {"x": np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)}


COUNT = 10


@functools.cache
def drawn() -> list[Fault]:
    """Faults that matter, first one of each node and then more."""
    found = [*faults(RIGHT)]
    random.Random(0).shuffle(found)
    seen: Counter[int] = Counter()
    turns = []
    for fault in found:
        turns.append(seen[fault.index])
        seen[fault.index] += 1
    ordered = [fault for _, fault in sorted(zip(turns, found, strict=True), key=lambda pair: pair[0])]
    return list(itertools.islice((f for f in ordered if effective(f, RIGHT, FEEDS)), COUNT))


@pytest.mark.parametrize("k", [*range(4), *(pytest.param(k, marks=pytest.mark.extended) for k in range(4, COUNT))])
def test_a_planted_fault_is_found_at_its_node(k: int) -> None:
    fault = drawn()[k]
    found = wrong_model(fault, RIGHT).verify(FEEDS, against="onnxruntime", each_node=True)
    assert found.first is not None and not found.first.accumulated, str(found)
    assert found.first.value in fault.values, fault.what


def test_the_kinds_of_faults() -> None:
    kinds = {f.what for f in faults(RIGHT)}
    assert {"Conv: pads is [0, 1, 2, 1]", "Tanh: computes Softsign", "Sub: its operands exchanged"} <= kinds
    assert {"Gemm: input 1 rolled", "BatchNormalization: epsilon is 1.0", "Softmax: axis is 0"} <= {
        k.replace("0.9999999776482582", "1.0") for k in kinds
    }
