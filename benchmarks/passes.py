"""What each pass gains: the time of a network with it, relative to the time without: ``python -m benchmarks.passes``.

Below 1 the pass pays. One that gains less than 3 % on the networks it was made for should go. Processor time is stable
on a busy machine; wall time shows what passes do for idle cores.

``--models`` names files: each is timed with all passes and with ``optimize=False``. One that passes slow down by more
than a tenth, in processor time and in wall time, fails the command: there a pass is chosen wrongly for the processor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import onnx
from jax.extend.core import jaxpr_as_fun
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from benchmarks.net import Net
from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.jaxpr import pipeline

from . import models, networks
from .harness import Call, Comparison, compare
from .networks import Network
from .networks.convolutional import mobilenet_v2, resnet50
from .networks.network import OPSET
from .networks.transformers import bert

WITH: Final = "with"
WITHOUT: Final = "without"
ROUNDS: Final = 15
SLOWER: Final = 1.1
"""The time with all passes over the time without, above which a file counts as slowed down."""


class Case(NamedTuple):
    """A network that a pass was made for."""

    name: str
    make: Callable[..., Any]
    batch: int = 1


def dequantised(folder: Path, batch: int, width: int = 384, layers: int = 12) -> Network:
    """Linear layers whose weights are int8 behind DequantizeLinear, for one row."""
    net = Net(OPSET, ir=8)
    x = net.input("x", [batch, width])
    rng = np.random.default_rng(0)
    for _ in range(layers):
        packed = net.array(rng.integers(-127, 128, (width, width)).astype(np.int8))
        scale = net.array(np.float32(1e-3))
        x = net("Relu", net("MatMul", x, net("DequantizeLinear", packed, scale)))
    feeds = {"x": rng.standard_normal((batch, width)).astype(np.float32)}
    return Network("linear layers, int8 weights", net.save(folder, x), feeds)


def packed(folder: Path, batch: int, width: int = 4096, layers: int = 6) -> Network:
    """Linear layers whose weights have 4 bits, for one row."""
    net = Net(OPSET, ir=8)
    x = net.input("x", [batch, width])
    rng = np.random.default_rng(0)
    for _ in range(layers):
        weight = net.array(rng.integers(0, 256, (width, width // 32, 16)).astype(np.uint8))
        scales = net.array(np.full(width * width // 32, 1e-3, np.float32))
        sizes = {"K": width, "N": width, "bits": 4, "block_size": 32}
        x = net("Relu", net("MatMulNBits", x, weight, scales, domain="com.microsoft", **sizes))
    feeds = {"x": rng.standard_normal((batch, width)).astype(np.float32)}
    return Network("linear layers, 4 bits", net.save(folder, x), feeds)


def scanned(folder: Path, batch: int, channels: int = 64, side: int = 28, steps: int = 8) -> Network:
    """The same convolution in each step of a Scan."""
    shape, rng = [batch, channels, side, side], np.random.default_rng(0)
    state, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("s", "t"))
    step = [
        helper.make_node("Conv", ["s", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Tanh", ["c"], ["t"]),
        helper.make_node("Identity", ["step"], ["unread"]),
    ]
    each, last = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("step", "unread"))
    body = helper.make_graph(step, "body", [state, each], [result, last])
    scan = helper.make_node("Scan", ["x", "steps"], ["y", "rows"], body=body, num_scan_inputs=1)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "y"))
    weight = rng.standard_normal((channels, channels, 3, 3)).astype(np.float32) / (3 * channels**0.5)
    arrays = {"w": weight, "steps": np.zeros((steps, 1), np.float32)}
    tensors = [numpy_helper.from_array(v, n) for n, v in arrays.items()]
    graph = helper.make_graph([scan], "scanned", [x], [y], tensors)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return Network("a convolution in a loop", path, {"x": rng.standard_normal(shape).astype(np.float32)})


CASES: Final[dict[str, tuple[Case, ...]]] = {
    "dequantize": (Case("ResNet-18 in int8, QDQ", networks.NETWORKS["int8_qdq"]),),
    "fold_batchnorm": (
        Case("MobileNetV2", networks.NETWORKS["mobilenet_v2"]),
        Case("ResNet-50", networks.NETWORKS["resnet50"]),
    ),
    "layout_assignment": (
        Case("ResNet-50", networks.NETWORKS["resnet50"]),
        Case("MobileNetV2", networks.NETWORKS["mobilenet_v2"]),
    ),
    "lower_convolutions": (Case("a convolution in a loop", scanned),),
    "dot_layout": (Case("GPT-2, a step", networks.NETWORKS["gpt2_step"]),),
    "onednn": (Case("ResNet-18 in int8, QDQ", networks.NETWORKS["int8_qdq"]),),
    "int8_in_float32": (Case("ResNet-18 in int8, QDQ", networks.NETWORKS["int8_qdq"]),),
    "hoist_params": (Case("linear layers, int8 weights", dequantised),),
    "unroll_loops": (Case("linear layers, 4 bits", packed),),
    "prevent_recompute": (Case("ResNet-50", networks.NETWORKS["resnet50"]),),
    "microbatch": (
        Case("MobileNetV2", networks.NETWORKS["mobilenet_v2"], 8),
        Case("ResNet-50", networks.NETWORKS["resnet50"], 8),
    ),
}
TRAINING: Final[dict[str, tuple[Case, ...]]] = {
    "layout_assignment": (
        Case("MobileNetV2 of 64 x 64", partial(mobilenet_v2, size=64), 8),
        Case("ResNet-50", networks.NETWORKS["resnet50"], 4),
        Case("ResNet-50 of 64 x 64", partial(resnet50, size=64), 8),
        Case("UNet", networks.NETWORKS["unet"]),
    ),
    "dot_transpose": (Case("BERT of 4 layers", partial(bert, length=128, layers=4, vocabulary=1000), 8),),
}


def calls(case: Case, skip: str, folder: Path) -> dict[str, Call]:
    """The network with all passes, and without one."""
    network = case.make(folder, case.batch)
    feeds = dict(network.feeds)
    found: dict[str, Call] = {}
    for name, optimize in ((WITH, True), (WITHOUT, {"skip": [skip]})):
        model = onnx2jax.convert(network.path, optimize=optimize)
        found[name] = partial(model.run, None, feeds)
    return found


def steps(case: Case, skip: str, folder: Path) -> dict[str, Call]:
    """A step of gradient descent with all training passes, and without one."""
    network = case.make(folder, case.batch)
    model = onnx2jax.convert(network.path)

    def loss(params: Any, feeds: Any) -> Any:
        return (model.apply(params, **feeds) ** 2).mean()

    def step(params: Any, feeds: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, feeds)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slopes)

    floating = {n: v for n, v in model.params.items() if v.dtype == np.float32}
    leaves, structure = jax.tree.flatten((floating, dict(network.feeds)))
    # As training does: in 32-bit mode the model is a call that no pass looks into.
    with jax.enable_x64(True), compat.on_platform("cpu", keeps_convolutions=True):
        closed = jax.make_jaxpr(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(structure, flat))))(*leaves)
    found: dict[str, Call] = {}
    for name, options in ((WITH, pipeline.Passes()), (WITHOUT, pipeline.Passes().skipping(skip))):
        run = jax.jit(jaxpr_as_fun(pipeline.run_training(closed, len(floating), options)))
        found[name] = partial(_settled, run, leaves)
    return found


def _settled(run: Callable[..., Any], leaves: list[Any]) -> Any:
    with jax.enable_x64(True):
        return jax.block_until_ready(run(*leaves))


def row(name: str, case: Case, found: dict[str, Call], rounds: int) -> str:
    """A row of the table: the pass, the network, and time with over time without."""
    work, wall = ratios(compare(found, rounds=rounds, discard=0.02))
    return f"| {name} | {case.name}, batch {case.batch} | {work:.2f} | {wall:.2f} |"


def ratios(compared: Comparison) -> tuple[float, float]:
    """Processor time and wall time with passes over those without."""
    return compared.work(WITHOUT, WITH), compared.paired(WITHOUT, WITH).median


def slowed_down(paths: Sequence[Path], rounds: int) -> list[str]:
    """The names of files that all passes together slow down; prints a row for each file."""
    slowed = []
    for name, path in models.found(paths):
        calls = {}
        try:
            for key, optimize in ((WITH, True), (WITHOUT, False)):
                model = onnx2jax.convert(path, optimize=optimize)
                calls[key] = partial(model.run, None, models.inputs(path, model))
            work, wall = ratios(compare(calls, rounds=rounds, discard=0.02))
        except OnnxError as error:  # drawn inputs that do not fit
            print(f"| all | {name} | not measured: {str(error).splitlines()[0][:80]} | |", flush=True)
            continue
        print(f"| all | {name} | {work:.2f} | {wall:.2f} |", flush=True)
        slowed += [name] if min(work, wall) > SLOWER else []
        jax.clear_caches()
    return slowed


def main(given: list[str] | None = None) -> None:
    """Print the table; exits with 1 where a file of ``--models`` is slowed down."""
    parser = argparse.ArgumentParser("python -m benchmarks.passes", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="pass", help=f"these alone: {', '.join(pipeline.NAMES)}")
    parser.add_argument("--models", nargs="+", type=Path, default=[], help="files, and folders with model.onnx in them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(given)
    print("| pass | network | processor time | wall time |\n|---|---|---|---|")
    if options.models:
        slowed = slowed_down(options.models, options.rounds)
        raise SystemExit(f"slower than with optimize=False: {', '.join(slowed)}" if slowed else 0)
    for name in options.names or pipeline.NAMES:
        for case in CASES.get(name, ()):
            with TemporaryDirectory() as folder:
                print(row(name, case, calls(case, name, Path(folder)), options.rounds), flush=True)
        for case in TRAINING.get(name, ()):
            with TemporaryDirectory() as folder:
                print(row(f"{name} (training)", case, steps(case, name, Path(folder)), options.rounds), flush=True)


if __name__ == "__main__":
    main()
