"""``convert(weights="packed")``: weights behind DequantizeLinear stay packed, and results do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from tests.support.models import model, value

RNG = np.random.default_rng(0)
K, N, F = 96, 10, np.float32
X = RNG.normal(size=(5, K)).astype(F)
CODES = {"int4": TensorProto.INT4, "uint4": TensorProto.UINT4}
RANGES = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}


def tensor(name: str, array: np.ndarray, kind: str) -> onnx.TensorProto:
    if kind in CODES:
        return helper.make_tensor(name, CODES[kind], array.shape, array.astype(np.int8).ravel())
    return numpy_helper.from_array(array.astype(kind), name)


def file(
    kind: str, scale: tuple[int, ...], *, turned: str = "", zeros: bool = False, bias: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """x [n, 96] -> y [n, 10], by an integer weight, stored transposed if ``turned``."""
    shape = (N, K) if turned else (K, N)
    stored = [tensor("w", RNG.integers(*RANGES[kind], shape), kind)]
    operands, product = ["w", "s"], "w.float"
    if zeros:
        stored.append(tensor("z", RNG.integers(*RANGES[kind], scale), kind))
        operands.append("z")
    nodes = [helper.make_node("DequantizeLinear", operands, [product], **attributes)]
    if turned == "Transpose":
        nodes.append(helper.make_node("Transpose", [product], ["w.turned"], perm=[1, 0]))
        product = "w.turned"
    inputs = ["x", product, *(["b"] if bias else [])]
    nodes.append(helper.make_node("Gemm" if bias or turned == "Gemm" else "MatMul", inputs, ["y"], name="/product"))
    if turned == "Gemm":
        nodes[-1].attribute.append(helper.make_attribute("transB", 1))
    weights = {"s": (0.01 + RNG.random(scale)).astype(F)} | ({"b": RNG.normal(size=N).astype(F)} if bias else {})
    proto = model(nodes, [value("x", F, ["n", K])], [value("y", F, ["n", N])], weights, opset=21)
    proto.graph.initializer.extend(stored)
    return proto


FILES = {
    "int4, blocks": file("int4", (3, N), axis=0, block_size=32),
    "uint4, blocks and zero points": file("uint4", (6, N), axis=0, block_size=16, zeros=True),
    "int8, columns": file("int8", (N,), axis=1),
    "uint8, columns and zero points": file("uint8", (N,), axis=1, zeros=True, bias=True),
    "int4, one scale": file("int4", ()),
    "int8, rows turned": file("int8", (N,), axis=0, turned="Transpose"),
    "int4, blocks, Gemm turned": file("int4", (N, 3), axis=1, block_size=32, turned="Gemm", bias=True, zeros=True),
}


@pytest.mark.parametrize("name", FILES)
def test_results_are_unchanged(name: str, tmp_path: Path) -> None:
    floating, packed = onnx2jax.convert(FILES[name]), onnx2jax.convert(FILES[name], weights="packed")
    assert [n.op_type for n in packed.graph.nodes] == ["MatMulNBits"]
    bits = 4 if "int4" in name else 8
    assert packed.params["w"].nbytes == N * 128 * bits // 8 or "blocks" in name
    wanted = np.asarray(floating(X))
    for rows in (X, X[:1]):
        np.testing.assert_allclose(packed(rows), wanted[: len(rows)], atol=1e-5 * np.abs(wanted).max())
    path = onnx2jax.save(packed, tmp_path / "same.onnx")  # saves the file unchanged, whatever the options of convert
    np.testing.assert_array_equal(onnx2jax.convert(path)(X), wanted)


def test_unsupported_matrices_are_not_packed() -> None:
    rows = file("int8", (K,), axis=0)  # a scale for each row of the product
    odd = file("int4", (12, N), axis=0, block_size=8)
    shared = file("int8", (N,), axis=1)
    shared.graph.node.append(helper.make_node("Identity", ["w.float"], ["v"]))
    shared.graph.output.append(value("v", F, [K, N]))
    for proto in (rows, odd, shared):
        kept = onnx2jax.convert(proto, weights="packed")
        assert [n.op_type for n in kept.graph.nodes] == [n.op_type for n in proto.graph.node]
        np.testing.assert_array_equal(kept.run(None, {"x": X})[0], onnx2jax.convert(proto).run(None, {"x": X})[0])


def test_names_of_packed_weights_do_not_clash() -> None:
    proto = file("int8", (N,), axis=1)
    proto.graph.node[-1].output[0] = "product"
    proto.graph.node.append(helper.make_node("Add", ["product", "w.scales"], ["y"]))
    proto.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(1, N)).astype(F), "w.scales"))
    packed = onnx2jax.convert(proto, weights="packed")
    assert packed.graph.nodes[0].op_type == "MatMulNBits"
    np.testing.assert_allclose(packed(X), onnx2jax.convert(proto)(X), rtol=1e-4, atol=1e-4)
