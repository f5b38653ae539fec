"""Measures the trade-offs behind the thresholds in onnx2jax/limits.py on this machine.

python -m benchmarks.thresholds
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto, helper

import onnx2jax
from benchmarks import harness


def milliseconds(work: Callable[[], object], times: int = 9) -> float:
    """The median time of a call."""
    return harness.median(lambda: jax.block_until_ready(work()), times) * 1e3


def chain(nodes: int, *, host: bool) -> onnx2jax.Model:
    """A chain of light nodes, compiled as one program, or run on the host after a node with a data-dependent shape."""
    made = [helper.make_node("Abs", [f"v{i}"], [f"v{i + 1}"]) for i in range(nodes)]
    if host:
        made.append(helper.make_node("NonZero", [f"v{nodes}"], ["y"]))
    else:
        made.append(helper.make_node("Identity", [f"v{nodes}"], ["y"]))
    x = helper.make_tensor_value_info("v0", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.INT64 if host else TensorProto.FLOAT, None)
    return onnx2jax.convert(helper.make_model(helper.make_graph(made, "chain", [x], [y])))


def constant(size: int) -> tuple[float, float]:
    """Compile times of a product with a constant array: compiled in, and as an argument."""
    x = jnp.ones(size)

    def inside() -> object:
        c = np.random.default_rng(0).random(size, np.float32)
        return jax.jit(lambda x: jnp.sum(x * c))(x)

    def outside() -> object:
        c = np.random.default_rng(0).random(size, np.float32)
        return jax.jit(lambda x, c: jnp.sum(x * c))(x, c)

    return milliseconds(inside), milliseconds(outside)


def signature(size: int) -> float:
    """Microseconds to compare signatures with an array's bytes."""
    array = np.ones(size, np.uint8)
    return milliseconds(lambda: [hash(array.tobytes()) for _ in range(1000)])


def main() -> None:
    """Print the measurements."""
    sizes = iter(range(1, 10**6))
    fresh = chain(20, host=False)
    compiling = milliseconds(lambda: fresh(np.ones(next(sizes), np.float32)))
    print(f"MOST_SHAPES, MOST_VALUES: a program of 20 light nodes is compiled for a new shape in {compiling:.1f} ms")
    ones = np.ones(64, np.float32)  # larger than values that calls specialise on
    on_host, one = chain(200, host=True), chain(0, host=True)
    for _ in range(3):
        on_host(ones), one(ones)
    run = (milliseconds(lambda: on_host(ones)) - milliseconds(lambda: one(ones))) / 10
    print(f"the same nodes on the host: {run:.3f} ms a run, so compiling pays after {compiling / run:.0f} runs")
    print(f"HOST_TRIPS: 64 trips of them on the host: {64 * run:.0f} ms, compiling the trips: {compiling:.0f} ms")
    for size in (2**5, 2**12, 2**15, 2**20):
        inside, outside = constant(size)
        print(f"LARGEST_CONSTANT: {size} elements: compiled in {inside:.1f} ms, as an argument {outside:.1f} ms")
    for size in (2**8, 2**12, 2**16, 2**20):
        print(f"LARGEST_IN_SIGNATURE: {size} bytes: {signature(size):.2f} us to tell a call by them")


if __name__ == "__main__":
    main()
