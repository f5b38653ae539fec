"""Shared helpers: runs one operator as a one-node graph; meshes over the eight virtual devices of conftest.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_vjp

from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.eval.interpreter import Context, evaluate
from onnx2jax.ir import binding
from onnx2jax.ir.graph import Graph, Node
from onnx2jax.ops.arrays import is_traced
from onnx2jax.proto.messages import normal_domain
from onnx2jax.proto.types import ValueInfo
from onnx2jax.runtime.params import DeviceParams

ON_PURPOSE = (OnnxError, ValueError, NotImplementedError, TypeError, OverflowError, MemoryError)
"""Errors by which operators, NumPy and JAX reject operands."""
ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


def run_op(
    name: str,
    *inputs: Any,
    opset: int | None = None,
    domain: str = "",
    n_outputs: int = 1,
    rng: Any = None,
    jit: bool = False,
    eager: bool = False,
    **attributes: Any,
) -> Any:
    """The outputs of one operator: NumPy inputs are constants, JAX arrays are not.

    ``jit=True`` traces all inputs. None is an absent input. A single output is returned directly, several as a tuple.
    A call that does not fold is compiled as one program; ``eager=True`` compiles each JAX operation alone.
    """
    domain = normal_domain(domain)
    opset = opset or binding.NEWEST.get(domain, 1)
    names = tuple("" if x is None else f"in{i}" for i, x in enumerate(inputs))
    outputs = tuple(f"out{i}" for i in range(n_outputs))
    node = Node(name, name, domain, opset, names, outputs, attributes, None)
    operator = binding.find(node)
    assert operator is not None, f"{domain}.{name} is unsupported at opset {opset}"
    binding.check(node, operator)
    node = Node(name, name, domain, opset, names, outputs, binding.convert_attributes(operator, attributes), operator)
    graph = Graph("", "", tuple(ValueInfo(n) for n in names if n), tuple(map(ValueInfo, outputs)), {}, (node,))

    def call(values: dict[str, Any]) -> tuple[Any, ...]:
        with np.errstate(all="ignore"):
            return evaluate(graph, values, Context({}, rng))

    values = {n: x for n, x in zip(names, inputs, strict=True) if n}
    with compat.enable_x64():
        if eager or is_traced(values, jnp.zeros(())):  # inside a trace it is traced too
            results = (jax.jit(call) if jit else call)(values)
        else:
            results = compiled(call, values, values if jit else ())
    return results[0] if n_outputs == 1 else results


def compiled(call: Callable[[dict[str, Any]], Any], values: Mapping[str, Any], traced: Collection[str] = ()) -> Any:
    """A call compiled as one program of the JAX arrays among the values, and of those named; folded without any."""
    free = {n: x for n, x in values.items() if n in traced or isinstance(x, jax.Array)}
    folded: list[Any] = []

    def run(free: dict[str, Any]) -> Any:
        results = call({**values, **free})
        if not is_traced(results):
            folded.append(results)
            return None
        return results

    program = jax.jit(run).trace(free)
    return folded[0] if folded else program.lower().compile()(free)


def check_gradients(name: str, inputs: Sequence[Any], free: Mapping[int, np.ndarray], **how: Any) -> None:
    """Compare gradients of one operator with respect to inputs, by position, with finite differences.

    ``how`` are the keywords of ``run_op``.
    """

    @jax.jit
    def call(free: Mapping[int, Any]) -> Any:
        return run_op(name, *(free.get(i, x) for i, x in enumerate(inputs)), **how)

    with compat.enable_x64():
        check_vjp(call, functools.partial(jax.vjp, call), (free,), rtol=1e-5, atol=1e-5)


def assert_on_purpose(error: OnnxError) -> None:
    """Assert that an error is a deliberate rejection; a KeyError or AttributeError as its cause would be our bug."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    assert all(isinstance(cause, (*ON_PURPOSE, jax.errors.JaxRuntimeError)) for cause in causes), causes


def mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh over the first virtual devices: ``mesh(data=8)``, ``mesh(data=4, model=2)``."""
    devices = jax.devices("cpu")[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


def as_weights(values: Sequence[Any]) -> tuple[list[str], DeviceParams]:
    """Arrays as a model's parameters: names, and arrays by name."""
    named = {str(i): jnp.asarray(v) for i, v in enumerate(values)}
    types = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in named.items()}
    return list(named), DeviceParams(types, named.__getitem__, lambda _, value: value)


def bytes_per_device(tree: Any) -> dict[jax.Device, int]:
    """Device -> bytes of the shards of a pytree's arrays on it."""
    total: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    return total
