"""com.microsoft: weights of small numbers stay packed, in memory and in what runs; or are unpacked once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from tests.ops.test_microsoft import MICROSOFT
from tests.support.helpers import run_op
from tests.support.models import model, value

RNG = np.random.default_rng(5)
F32, ROWS = np.float32, 64
FP4, FP8, BNB4 = "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "MatMulBnb4"
INTEGERS = "MatMulNBits"


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F32)


def operands(kind: str, K: int, block: int, dtype: Any = F32, rows: int = ROWS) -> dict[str, np.ndarray]:
    """What stands behind A, by name: of a weight [rows, K]."""
    blocks, bias = -(-K // block), real(rows).astype(dtype)
    if kind == FP4:
        finite = codes(rows, blocks) % 120
        return {"w": codes(rows, K // 2), "s": finite, "g": np.array(0.3, F32), "none": bias, "bias": bias}
    if kind == FP8:
        numbers = (real(rows, K) * 30).astype(ml_dtypes.float8_e4m3fn)
        return {"w": numbers, "s": abs(real(rows, blocks)), "a": np.array(0.01, F32), "bias": bias}
    if kind == INTEGERS:  # columns of groups in any order, as GPTQ leaves them
        groups = RNG.permutation(np.arange(K) // block).astype(np.int32)
        zeros = codes(rows, (blocks + 1) // 2)
        return {"w": codes(rows, blocks, block // 2), "s": real(rows, blocks).astype(dtype), "z": zeros, "g": groups}
    return {"w": codes((rows * K + 1) // 2), "s": abs(real(-(-rows * K // block))).astype(dtype)}


def file(kind: str, K: int, block: int = 16, given: str = "", dtype: Any = F32, **attributes: Any) -> onnx.ModelProto:
    """x [n, K] -> y [n, 64]; ``given`` are the optional operands."""
    weights = operands(kind, K, block, dtype)
    names = [n if n in ("w", "s", "g", *given.split()) else "" for n in weights]
    if kind in (BNB4, INTEGERS):
        attributes |= {"K": K, "N": ROWS}
    node = helper.make_node(kind, ["x", *names], ["y"], domain=MICROSOFT, block_size=block, **attributes)
    sizes = (K, ROWS) if attributes.get("transB", 1) else (ROWS, K)
    x, y = (value(name, dtype, ["n", size]) for name, size in zip("xy", sizes, strict=True))
    return model([node], [x], [y], {n: weights[n] for n in names if n}, opsets={MICROSOFT: 1})


FILES = {
    "e2m1": file(FP4, 48),
    "e2m1, half a block": file(FP4, 40, given="bias"),
    "e2m1, blocks end within bytes": file(FP4, 40, 5),
    "e4m3, half a block": file(FP8, 40, given="bias"),
    "e4m3, blocks of 9 bytes": file(FP8, 40, 9),
    "e4m3, A rounded": file(FP8, 48, given="a bias"),
    "fp4 of bitsandbytes": file(BNB4, 64, quant_type=0),
    "nf4": file(BNB4, 64, 32, quant_type=1),
    "nf4, blocks over rows": file(BNB4, 65, quant_type=1),
    "nf4, not transposed": file(BNB4, 64, quant_type=1, transB=0),
    "columns by group": file(INTEGERS, 48),
    "columns by group, zero points, half a block": file(INTEGERS, 56, given="z"),
}


def held(m: onnx2jax.Model) -> list[Any]:
    """The arrays that stay in memory for a model's programs."""
    return [*m.weights._placed.values(), *m.weights.shared._values.values()]


@pytest.mark.parametrize("counts", [(1, 70), pytest.param((5,), marks=pytest.mark.extended)])
@pytest.mark.parametrize("name", FILES)
def test_packed_weights_match_float32_weights(name: str, counts: tuple[int, ...]) -> None:
    packed, floating = onnx2jax.convert(FILES[name]), onnx2jax.convert(FILES[name], weights="float32")
    assert {n.op_type for n in floating.graph.nodes}.isdisjoint({FP4, FP8, BNB4, INTEGERS})
    (shape,) = (v.shape for v in packed.inputs)
    assert shape is not None
    x = real(70, int(shape[1]))  # type: ignore[arg-type]
    want = np.asarray(floating(x))
    for rows in counts:  # row by row, in pieces; in panels
        np.testing.assert_allclose(packed(x[:rows]), want[:rows], rtol=0, atol=1e-6 * np.abs(want).max())
    whole = floating.params["w"].size
    assert max(v.nbytes for v in held(packed)) <= 1.2 * whole, "about a byte for each number of the weight, and no 4"
    assert any(v.dtype == F32 and v.size == whole for v in held(floating))


def test_g_idx_matches_onnxruntime() -> None:
    """Without zero points, which onnxruntime 1.32 leaves out beside g_idx."""
    x, proto = real(5, 48), FILES["columns by group"]
    (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(onnx2jax.convert(proto)(x), want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize(("kind", "more"), [(FP4, {}), (FP8, {}), (BNB4, {"quant_type": 1})])
def test_half_precision(kind: str, more: dict[str, Any]) -> None:
    proto = file(kind, 48, dtype=np.float16, **more)
    x = (real(3, 48) / 8).astype(np.float16)
    got = np.asarray(onnx2jax.convert(proto)(x))
    for kept, tolerance in (("float32", 2e-3), ("bfloat16", 2e-2)):
        floating = onnx2jax.convert(proto, weights=kept)
        assert str(floating.params["w"].dtype) == kept
        want = np.asarray(floating(x))
        assert got.dtype == want.dtype == np.float16
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("kind", [FP4, FP8, BNB4])
@pytest.mark.parametrize(("n", "K", "rows"), [(0, 32, 4), (3, 32, 0), (3, 0, 4)])
def test_empty_operands(kind: str, n: int, K: int, rows: int) -> None:
    given = [v for name, v in operands(kind, K, 16, rows=rows).items() if name in "wsg"]
    attributes = {"block_size": 16} | ({"K": K, "N": rows, "quant_type": 1} if kind == BNB4 else {})
    y = run_op(kind, real(n, K), *given, domain=MICROSOFT, jit=True, **attributes)
    np.testing.assert_array_equal(y, np.zeros((n, rows), F32))


def test_every_code_dequantizes_to_its_value() -> None:
    """As ml_dtypes has them, subnormal ones and NaN too."""
    every = np.arange(16, dtype=np.uint8)
    one = np.array([[0x38]], np.uint8)  # in E4M3
    packed, scale = (every[::2] | every[1::2] << 4)[None], np.array(1, F32)
    got = run_op(FP4, np.eye(16, dtype=F32), packed, one, scale, domain=MICROSOFT)
    np.testing.assert_array_equal(got[:, 0], every.view(ml_dtypes.float4_e2m1fn).astype(F32))
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    for rows in (1, 70):
        got = run_op(FP8, np.ones((rows, 1), F32), e4m3, np.ones((256, 1), F32), domain=MICROSOFT, jit=True)
        np.testing.assert_array_equal(got, np.broadcast_to(e4m3[:, 0].astype(F32), (rows, 256)))


def test_gradients_with_respect_to_activations() -> None:
    packed, floating = (onnx2jax.convert(FILES["e2m1, half a block"], weights=w) for w in (None, "float32"))
    x, by = real(3, 40), real(3, ROWS)
    got, want = jax.jit(lambda x: [jax.grad(lambda x, m=m: jnp.sum(by * m(x)))(x) for m in (packed, floating)])(x)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_an_odd_number_of_columns_is_rejected() -> None:
    given = [v for name, v in operands(FP4, 40, 16).items() if name in "wsg"]
    with pytest.raises(ValueError, match=r"A must have the shape \[rows, K=40\]"):
        run_op(FP4, real(2, 39), *given, domain=MICROSOFT)
