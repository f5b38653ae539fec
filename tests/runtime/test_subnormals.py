"""Subnormal numbers, which a compiled program may count as zero and NumPy does not."""

from __future__ import annotations

import jax
import numpy as np

import onnx2jax
from tests.support.models import text_model

TINY = np.finfo(np.float32).tiny
STEPS = {
    "sum": "Add({x}, {x})",
    "difference": "Sub({x}, z)",
    "product": "Mul({x}, h)",
    "greatest": "Max({x}, z)",
    "relu": "Relu({x})",
    "total": "ReduceSum<keepdims = 0>({x})",
    "moved": "Identity({x})",
}
TERMS = {"sum": 2, "total": 4}


def test_ways_of_calling_differ_by_the_least_normal_number_a_term() -> None:
    """Of inputs and of constants: whether a program flushes them depends on the processor and on the operator."""
    x = np.float32([1e-40, -1e-40, TINY / 2, TINY])
    outputs = ", ".join(f"float[n] {name}_{of}" for name in STEPS for of in "xc")
    nodes = "\n".join(f"{name}_{of} = {step.format(x=of)}" for name, step in STEPS.items() for of in "xc")
    proto = text_model(f"agraph (float[4] x) => ({outputs}) {{ {nodes} }}", c=x, z=np.float32(0), h=np.float32(0.5))
    model = onnx2jax.convert(proto)
    lanes = [
        model.run(None, {"x": x}),
        model(x),
        jax.jit(model.apply)(model.params, x),
        onnx2jax.convert(proto, background_compile=True)(x),
    ]
    with np.errstate(all="ignore"):
        wanted = {"sum": x + x, "difference": x, "product": x / 2, "moved": x, "total": x.sum()}
    wanted["greatest"] = wanted["relu"] = np.maximum(x, 0)
    for results in lanes:
        for (name, of), y in zip(((n, of) for n in STEPS for of in "xc"), results, strict=True):
            error = np.abs(np.asarray(y, np.float64) - wanted[name].astype(np.float64))
            assert (error <= TERMS.get(name, 1) * TINY).all(), (name, of, y)
