"""Whether onnxruntime is exact in products of 8-bit integers on this processor."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime


@functools.cache
def saturates() -> bool:
    """Whether onnxruntime adds two products of uint8 by int8 in 16 bits, as it does on processors without VNNI."""
    header = '<ir_version: 8, opset_import: ["" : 17]>'
    graph = "g (uint8[1, 4] a, int8[4, 1] b) => (int32[1, 1] y) {y = MatMulInteger(a, b)}"
    session = onnxruntime.InferenceSession(onnx.parser.parse_model(f"{header} {graph}").SerializeToString())
    (total,) = session.run(None, {"a": np.full((1, 4), 255, np.uint8), "b": np.full((4, 1), 127, np.int8)})
    return int(total[0, 0]) != 4 * 255 * 127
