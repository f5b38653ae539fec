"""The time of a training step, compared with hand-written JAX and PyTorch: `python -m benchmarks.finetune`.

One convolutional network and one transformer as ONNX graphs; the same networks written by hand in JAX with the
same optimizer and donated buffers; and in PyTorch, eager and by torch.compile, if torch is installed. All start
from the same weights; the losses after a few steps are compared before timing.

The ratios are of wall time and of processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from onnx import helper, numpy_helper

import onnx2jax
from benchmarks.harness import compare

BLOCK = 0.2
ROUNDS = 21
RATE, MOMENTUM = 1e-3, 0.9
RNG = np.random.default_rng(0)


class Task(NamedTuple):
    """A network and its batch: the ONNX graph, and the forward pass in JAX and in PyTorch."""

    name: str
    proto: onnx.ModelProto
    batch: dict[str, Any]
    by_hand: Callable[[dict[str, Any], Any], Any]
    in_torch: Callable[[Any, dict[str, Any], Any], Any]


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal numbers, scaled by the square root of the fan-in."""
    return {
        n: (RNG.normal(size=s) / np.sqrt(max(np.prod(s) / max(s), 1))).astype(np.float32) for n, s in shapes.items()
    }


def model(nodes: Sequence[Any], shape: Sequence[Any], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model of opset 21 with input x and output y."""
    info = partial(helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    tensors = [numpy_helper.from_array(v, k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "step", [info("x", shape=shape)], [info("y", shape=None)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def convolutional(size: int = 16, classes: int = 10) -> Task:
    """Six 3x3 convolutions in three stages, each stage half the size, and a dense head."""
    widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": (b, a, 3, 3) for i, (a, b, _) in enumerate(widths)}
    shapes |= {f"b{i}": (b,) for i, (_, b, _) in enumerate(widths)}
    constants = weights(**shapes, head=(128, classes))
    nodes = []
    for i, (_, _, stride) in enumerate(widths):
        attributes: dict[str, Any] = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
        nodes.append(helper.make_node("Conv", ["x" if i == 0 else f"r{i}", f"w{i}", f"b{i}"], [f"c{i}"], **attributes))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i + 1}"]))
    nodes += [
        helper.make_node("GlobalAveragePool", [f"r{len(widths)}"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "head"], ["y"]),
    ]

    def by_hand(p: dict[str, Any], x: Any) -> Any:
        for i, (_, _, stride) in enumerate(widths):
            pads = [(1, 1), (1, 1)]
            x = jax.lax.conv_general_dilated(x, p[f"w{i}"], (stride, stride), pads) + p[f"b{i}"][:, None, None]
            x = jax.nn.relu(x)
        return x.mean((2, 3)) @ p["head"]

    def in_torch(torch: Any, p: dict[str, Any], x: Any) -> Any:
        for i, (_, _, stride) in enumerate(widths):
            x = torch.nn.functional.conv2d(x, p[f"w{i}"], p[f"b{i}"], stride=stride, padding=1).relu()
        return x.mean((2, 3)) @ p["head"]

    x = RNG.normal(size=(32, 3, size, size)).astype(np.float32)
    batch: dict[str, Any] = {"x": x, "label": RNG.integers(0, classes, 32)}
    return Task("six convolutions, batch 32", model(nodes, ["n", 3, size, size], constants), batch, by_hand, in_torch)


def transformer(layers: int = 4, length: int = 32, width: int = 128, heads: int = 4, classes: int = 10) -> Task:
    """Layers of attention and a feed-forward step, normalised, with residuals; the mean over the sequence."""
    each = width // heads
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        shapes |= {f"q{i}": (width, width), f"k{i}": (width, width), f"v{i}": (width, width), f"o{i}": (width, width)}
        shapes |= {f"u{i}": (width, 4 * width), f"d{i}": (4 * width, width), f"n{i}": (width,), f"m{i}": (width,)}
    constants = weights(**shapes, head=(width, classes))
    trained = set(constants)
    constants |= {"split": np.array([0, length, heads, each]), "join": np.array([0, length, width])}
    constants |= {"scale": np.array(each**-0.5, np.float32), "one": np.array([1])}
    nodes: list[Any] = []

    def node(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))

    for i in range(layers):
        h = "x" if i == 0 else f"h{i}"
        node("LayerNormalization", [h, f"n{i}"], f"ln{i}")
        for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            node("MatMul", [f"ln{i}", f"{n}{i}"], f"{n}p{i}")
            node("Reshape", [f"{n}p{i}", "split"], f"{n}r{i}")
            node("Transpose", [f"{n}r{i}"], f"{n}t{i}", perm=perm)
        node("MatMul", [f"qt{i}", f"kt{i}"], f"qk{i}")
        node("Mul", [f"qk{i}", "scale"], f"qs{i}")
        node("Softmax", [f"qs{i}"], f"p{i}")
        node("MatMul", [f"p{i}", f"vt{i}"], f"a{i}")
        node("Transpose", [f"a{i}"], f"at{i}", perm=[0, 2, 1, 3])
        node("Reshape", [f"at{i}", "join"], f"ar{i}")
        node("MatMul", [f"ar{i}", f"o{i}"], f"ao{i}")
        node("Add", [h, f"ao{i}"], f"s{i}")
        node("LayerNormalization", [f"s{i}", f"m{i}"], f"lm{i}")
        node("MatMul", [f"lm{i}", f"u{i}"], f"up{i}")
        node("Relu", [f"up{i}"], f"ur{i}")
        node("MatMul", [f"ur{i}", f"d{i}"], f"dn{i}")
        node("Add", [f"s{i}", f"dn{i}"], f"h{i + 1}")
    node("ReduceMean", [f"h{layers}", "one"], "mean", keepdims=0)
    node("MatMul", ["mean", "head"], "y")

    def normalized(x: Any, scale: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    def by_hand(p: dict[str, Any], x: Any) -> Any:
        for i in range(layers):
            h = normalized(x, p[f"n{i}"])
            q, k, v = ((h @ p[f"{n}{i}"]).reshape(*h.shape[:2], heads, each) for n in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * each**-0.5)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p[f"o{i}"]
            x = x + jax.nn.relu(normalized(x, p[f"m{i}"]) @ p[f"u{i}"]) @ p[f"d{i}"]
        return x.mean(1) @ p["head"]

    def in_torch(torch: Any, p: dict[str, Any], x: Any) -> Any:
        f = torch.nn.functional
        for i in range(layers):
            h = f.layer_norm(x, (width,), p[f"n{i}"])
            q, k, v = ((h @ p[f"{n}{i}"]).reshape(*h.shape[:2], heads, each).transpose(1, 2) for n in "qkv")
            x = x + f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape) @ p[f"o{i}"]
            x = x + (f.layer_norm(x, (width,), p[f"m{i}"]) @ p[f"u{i}"]).relu() @ p[f"d{i}"]
        return x.mean(1) @ p["head"]

    assert trained == set(shapes) | {"head"}
    x = RNG.normal(size=(16, length, width)).astype(np.float32)
    batch: dict[str, Any] = {"x": x, "label": RNG.integers(0, classes, 16)}
    return Task(
        f"{layers} layers of attention, batch 16",
        model(nodes, ["n", length, width], constants),
        batch,
        by_hand,
        in_torch,
    )


def entropy(logits: Any, batch: dict[str, Any]) -> Any:
    """The loss that all implementations use."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


Step = Callable[[], Any]


def here(task: Task) -> Step:
    """A step of finetune."""
    tuned = onnx2jax.finetune(onnx2jax.convert(task.proto), entropy, optax.sgd(RATE, MOMENTUM))
    state = tuned.init()

    def step() -> Any:
        nonlocal state
        state, metrics = tuned.step(state, task.batch)
        return metrics["loss"].block_until_ready()

    return step


def hand_written(task: Task) -> Step:
    """A step as a user of JAX would write it."""
    model = onnx2jax.convert(task.proto)
    params = {n: jnp.array(v) for n, v in model.params.items() if v.ndim}
    optimizer = optax.sgd(RATE, MOMENTUM)
    moments = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, moments: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: entropy(task.by_hand(p, batch["x"]), batch))(params)
        updates, moments = optimizer.update(grads, moments, params)
        norm = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), moments, {"loss": loss, "grad_norm": norm}

    def step() -> Any:
        nonlocal params, moments
        params, moments, metrics = update(params, moments, task.batch)
        return metrics["loss"].block_until_ready()

    return step


def in_pytorch(task: Task, torch: Any, compiled: bool) -> Step:
    """A step of PyTorch."""
    source = onnx2jax.convert(task.proto).params
    params = {n: torch.nn.Parameter(torch.from_numpy(np.array(v))) for n, v in source.items() if v.ndim}
    x, label = (torch.from_numpy(task.batch[n]) for n in ("x", "label"))
    optimizer = torch.optim.SGD(list(params.values()), RATE, MOMENTUM)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(task.in_torch(torch, params, x), label)

    run = torch.compile(loss) if compiled else loss

    def step() -> Any:
        optimizer.zero_grad()
        value = run()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def steps(task: Task) -> dict[str, Step]:
    """All implementations, after five steps to the same loss."""
    found = {"finetune": here(task), "JAX by hand": hand_written(task)}
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed; compared with JAX alone")
    else:
        for name, compiled in (("PyTorch eager", False), ("torch.compile", True)):
            step = in_pytorch(task, torch, compiled)
            try:
                step()
            except Exception as e:
                print(f"{name} does not run here: {type(e).__name__}")
            else:
                found[name] = in_pytorch(task, torch, compiled)
    losses = {name: [float(step()) for _ in range(5)][-1] for name, step in found.items()}
    for name, value in losses.items():
        assert np.isclose(value, losses["finetune"], rtol=1e-3), (name, losses)
    return found


def main() -> None:
    for task in (convolutional(), transformer()):
        found = steps(task)
        compared = compare(found, rounds=ROUNDS, block=BLOCK)
        print(f"\n{task.name}")
        for name, timing in compared.timings.items():
            wall, cpu = 1 / compared.paired("finetune", name).median, 1 / compared.work("finetune", name)
            ms = timing.median * 1e3
            print(f"  {name:14} {ms:8.2f} ms a step   finetune: {wall:5.3f} x the time, {cpu:5.3f} x the work")


if __name__ == "__main__":
    main()
