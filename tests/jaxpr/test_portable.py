"""Functions for other readers of jaxprs: JAX's own primitives, the same numbers."""

from __future__ import annotations

import jax
import numpy as np
import onnx

import onnx2jax

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 1, 4, 4] x, float[2, 1, 3, 3] w) => (float[N, K] y, int64[N, 1] i) {
  t = Conv (x, w)
  y = Flatten (t)
  i = ArgMax <axis = 1> (y)
}"""  # a convolution has a branch by platform, a place is a 64-bit integer


def test_portable_functions_have_the_same_numbers_and_none_of_the_models_own_primitives() -> None:
    model = onnx2jax.convert(onnx.parser.parse_model(TEXT))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 1, 4, 4), (2, 1, 3, 3)))
    names = [
        {e.primitive.name for e in jax.make_jaxpr(function)(x, w).eqns}
        for function in (lambda *xs: model(*xs), onnx2jax.portable(model))
    ]
    assert "in_64_bits" in names[0]  # else this says nothing
    assert {"conv_general_dilated", "argmax"} <= names[1]
    assert not names[1] & {"in_64_bits", "platform_index", "cond", "jit"}
    expected, (y, i) = model(x, w), jax.jit(onnx2jax.portable(model))(x, w)
    np.testing.assert_allclose(y, expected.y, rtol=1e-5)
    np.testing.assert_array_equal(i, expected.i)
