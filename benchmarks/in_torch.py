"""The synthetic networks in PyTorch, eager and by torch.compile, if torch is installed.

Each node of the file is one call of ``torch.nn.functional``, with weights as in the file, like a module written by
hand. Networks with operators that are missing here, such as those in int8, have no such rival.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .harness import Call, cores
from .networks import Network
from .rivals import Mismatch, difference

EAGER: Final = "PyTorch eager"
COMPILED: Final = "torch.compile"


def rivals(network: Network) -> dict[str, Call]:
    """The PyTorch rivals that run here; empty without torch, or if an operator is missing.

    Raises:
        Mismatch: their results differ from the network's by hand.
    """
    if importlib.util.find_spec("torch") is None or network.by_hand is None:
        return {}
    import torch

    torch.set_num_threads(cores())
    made = function(network)
    if made is None:
        return {}
    eager, weights = made
    given = [torch.from_numpy(np.asarray(v)) for v in network.feeds.values()]
    expected = [np.asarray(y) for y in _leaves(network.by_hand(network.params, *network.feeds.values()))]
    found = {}
    for name, run in ((EAGER, eager), (COMPILED, torch.compile(eager))):
        call = _call(torch, run, weights, given)
        try:
            results = call()
        except Exception as e:
            if name == EAGER:
                raise
            print(f"{network.name}: torch.compile does not run here ({type(e).__name__})")
            continue
        found[name] = call
        if not (worst := difference(results, expected)) <= network.tolerance:
            raise Mismatch(f"{network.name}: {name} differs by {worst:.1e} of the largest number")
    return found


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _call(torch: Any, run: Callable[..., Any], weights: Mapping[str, Any], given: list[Any]) -> Call:
    def call() -> list[np.ndarray]:
        with torch.inference_mode():
            return [y.numpy() for y in run(weights, *given)]

    return call


def function(network: Network, dtype: str = "float32") -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """A function of weights and inputs, unrolled over the nodes, and its weights in float32; None if an operator is
    missing. Cast converts to ``dtype``, in which weights and inputs are given.
    """
    import torch

    table, graph = _table(torch, getattr(torch, dtype)), onnx.load(network.path).graph
    if any(node.op_type not in table for node in graph.node):
        return None
    arrays = {t.name: numpy_helper.to_array(t).copy() for t in graph.initializer}
    known = {n: v.tolist() for n, v in arrays.items() if v.dtype == np.int64}  # shapes, axes
    weights = {n: torch.tensor(v) for n, v in arrays.items()}
    inputs = [v.name for v in graph.input]
    outputs = [v.name for v in graph.output]
    steps = []
    for node in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        constant = [known.get(n) for n in node.input]
        steps.append((table[node.op_type], tuple(node.input), tuple(node.output), attributes, constant))

    def unrolled(weights: Mapping[str, Any], *given: Any) -> Any:
        values = dict(weights) | dict(zip(inputs, given, strict=True))
        for run, operands, results, attributes, constant in steps:
            y = run([values.get(n) for n in operands], attributes, constant)
            values.update(zip(results, y if isinstance(y, (list, tuple)) else (y,), strict=False))
        return [values[n] for n in outputs]

    return unrolled, weights


def _table(torch: Any, floating: Any) -> dict[str, Callable[[list[Any], dict[str, Any], list[Any]], Any]]:
    """Functions by operator, from operands, attributes and constant operands to results."""
    f = torch.nn.functional

    def conv(x: Any, a: Any, _: Any) -> Any:
        k = x[1].ndim - 2
        strides, pads = a.get("strides", [1] * k), a.get("pads", [0] * 2 * k)[:k]
        run = {1: f.conv1d, 2: f.conv2d}[k]
        return run(*x, stride=strides, padding=pads, groups=a.get("group", 1))

    def transposed(x: Any, a: Any, _: Any) -> Any:
        return f.conv_transpose2d(*x, stride=a["strides"], padding=a["pads"][:2], groups=a.get("group", 1))

    def reshape(x: Any, _: Any, known: Any) -> Any:
        return x[0].reshape([x[0].shape[i] if d == 0 else d for i, d in enumerate(known[1])])

    def unsqueeze(x: Any, _: Any, known: Any) -> Any:
        y = x[0]
        for axis in sorted(known[1]):
            y = y.unsqueeze(axis)
        return y

    def gather(x: Any, a: Any, known: Any) -> Any:
        if isinstance(known[1], int):
            return x[0].select(a.get("axis", 0), known[1])
        return f.embedding(x[1], x[0])

    def gemm(x: Any, a: Any, _: Any) -> Any:
        return f.linear(*x) if a.get("transB") else x[0] @ x[1] + x[2]

    def max_pool(x: Any, a: Any, _: Any) -> Any:
        return f.max_pool2d(x[0], a["kernel_shape"], a["strides"], a.get("pads", [0] * 4)[:2])

    return {
        "Conv": conv,
        "ConvTranspose": transposed,
        "BatchNormalization": lambda x, a, _: f.batch_norm(x[0], x[3], x[4], x[1], x[2], eps=a["epsilon"]),
        "LayerNormalization": lambda x, a, _: f.layer_norm(x[0], x[1].shape, x[1], x[2], a["epsilon"]),
        "Relu": lambda x, _a, _: f.relu(x[0]),
        "Clip": lambda x, _a, _: torch.clamp(x[0], x[1], x[2]),
        "Sigmoid": lambda x, _a, _: torch.sigmoid(x[0]),
        "Tanh": lambda x, _a, _: torch.tanh(x[0]),
        "Exp": lambda x, _a, _: torch.exp(x[0]),
        "Erf": lambda x, _a, _: torch.erf(x[0]),
        "Pow": lambda x, _a, _: torch.pow(x[0], x[1]),
        "Add": lambda x, _a, _: x[0] + x[1],
        "Sub": lambda x, _a, _: x[0] - x[1],
        "Mul": lambda x, _a, _: x[0] * x[1],
        "Div": lambda x, _a, _: x[0] / x[1],
        "MatMul": lambda x, _a, _: x[0] @ x[1],
        "Gemm": gemm,
        "Softmax": lambda x, a, _: torch.softmax(x[0], a["axis"]),
        "MaxPool": max_pool,
        "GlobalAveragePool": lambda x, _a, _: x[0].mean((2, 3), keepdim=True),
        "ReduceMean": lambda x, a, _: x[0].mean(a["axes"], keepdim=bool(a.get("keepdims", 1))),
        "Flatten": lambda x, _a, _: x[0].flatten(1),
        "Concat": lambda x, a, _: torch.cat(x, a["axis"]),
        "Split": lambda x, a, _: x[0].chunk(3, a["axis"]),
        "Transpose": lambda x, a, _: x[0].permute(a["perm"]).contiguous(),
        "Reshape": reshape,
        "Unsqueeze": unsqueeze,
        "Expand": lambda x, _a, known: x[0].expand(known[1]),
        "Gather": gather,
        "Cast": lambda x, _a, _: x[0].to(floating),
        "Einsum": lambda x, a, _: torch.einsum(a["equation"].decode(), *x),
    }
