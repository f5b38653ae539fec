"""Train the demo model: a small convolutional network on scikit-learn's handwritten digits.

Writes ``onnx2jax/data/digits.onnx`` (opset 22, checked) and ``onnx2jax/data/digits_samples.npz`` (sixteen
test images, their labels, and onnxruntime's logits as the reference). Seeded; about a minute on two cores:

    python benchmarks/train_digits.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED: Final = 0
EPOCHS: Final = 60
BATCH: Final = 128
CHANNELS: Final = (16, 32, 64)
POOL_AFTER: Final = 2
"""The block (counted from 1) after which the image is halved."""
EPSILON: Final = 1e-5
DATA: Final = Path(__file__).resolve().parent.parent / "onnx2jax" / "data"

Arrays = dict[str, jax.Array]


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, test images, training labels, test labels; images are [n, 1, 8, 8] in 0..1."""
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[:, None]
    return tuple(train_test_split(images, data.target, test_size=360, random_state=SEED, stratify=data.target))


def initial(key: jax.Array) -> tuple[Arrays, Arrays]:
    """Trainable parameters and running statistics, by their names in the ONNX file."""
    params: Arrays = {}
    stats: Arrays = {}
    before = 1
    for i, channels in enumerate(CHANNELS, 1):
        key, sub = jax.random.split(key)
        weight = jax.random.normal(sub, (channels, before, 3, 3)) * np.sqrt(2 / (9 * before))
        params |= {f"conv{i}.weight": weight, f"bn{i}.scale": jnp.ones(channels), f"bn{i}.bias": jnp.zeros(channels)}
        stats |= {f"bn{i}.mean": jnp.zeros(channels), f"bn{i}.var": jnp.ones(channels)}
        before = channels
    features = before * 4 * 4
    params["fc.weight"] = jax.random.normal(key, (10, features)) / np.sqrt(features)
    params["fc.bias"] = jnp.zeros(10)
    return params, stats


def forward(params: Arrays, stats: Arrays, x: jax.Array, training: bool = False) -> tuple[jax.Array, Arrays]:
    """The logits, and the statistics that each normalisation used (those of the batch while training)."""
    used: Arrays = {}
    for i in range(1, len(CHANNELS) + 1):
        x = jax.lax.conv(x, params[f"conv{i}.weight"], (1, 1), "SAME")
        mean, var = stats[f"bn{i}.mean"], stats[f"bn{i}.var"]
        if training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        used |= {f"bn{i}.mean": mean, f"bn{i}.var": var}
        scale = params[f"bn{i}.scale"] * jax.lax.rsqrt(var + EPSILON)
        x = jax.nn.relu((x - mean[:, None, None]) * scale[:, None, None] + params[f"bn{i}.bias"][:, None, None])
        if i == POOL_AFTER:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ params["fc.weight"].T + params["fc.bias"], used


def shifted(key: jax.Array, x: jax.Array) -> jax.Array:
    """Each image shifted by up to one pixel in each direction."""
    corners = jax.random.randint(key, (len(x), 2), 0, 3)
    padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (0, *at), x.shape[1:]))(padded, corners)


def train(images: np.ndarray, labels: np.ndarray) -> tuple[Arrays, Arrays]:
    """The trained parameters and statistics."""
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-3)

    def loss(params: Arrays, stats: Arrays, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Arrays]:
        logits, used = forward(params, stats, x, training=True)
        targets = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.05)
        return optax.softmax_cross_entropy(logits, targets).mean(), used

    @jax.jit
    def step(params: Arrays, stats: Arrays, state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        grads, used = jax.grad(loss, has_aux=True)(params, stats, shifted(key, x), y)
        updates, state = optimizer.update(grads, state, params)
        stats = jax.tree.map(lambda old, new: 0.95 * old + 0.05 * new, stats, used)
        return optax.apply_updates(params, updates), stats, state

    key = jax.random.key(SEED)
    params, stats = initial(key)
    state = optimizer.init(params)
    rng = np.random.default_rng(SEED)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(images))
        for n, start in enumerate(range(0, len(images) - BATCH + 1, BATCH)):
            rows = order[start : start + BATCH]
            sub = jax.random.fold_in(key, epoch * len(images) + n)
            params, stats, state = step(params, stats, state, sub, images[rows], labels[rows])
    return params, stats


def export(tensors: Arrays, metadata: dict[str, str]) -> onnx.ModelProto:
    """The network as a checked ONNX model with a free batch dimension."""
    nodes, value = [], "image"

    def add(op_type: str, name: str, *weights: str, **attributes: Any) -> None:
        nonlocal value
        nodes.append(helper.make_node(op_type, [value, *weights], [f"{name}.out"], name=name, **attributes))
        value = f"{name}.out"

    for i in range(1, len(CHANNELS) + 1):
        add("Conv", f"conv{i}", f"conv{i}.weight", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        statistics = (f"bn{i}.{k}" for k in ("scale", "bias", "mean", "var"))
        add("BatchNormalization", f"bn{i}", *statistics, epsilon=EPSILON)
        add("Relu", f"relu{i}")
        if i == POOL_AFTER:
            add("MaxPool", "pool", kernel_shape=[2, 2], strides=[2, 2])
    add("Flatten", "flatten")
    add("Gemm", "fc", "fc.weight", "fc.bias", transB=1)
    nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.asarray(tensors[n]), n) for node in nodes for n in node.input if n in tensors],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10, producer_name="benchmarks/train_digits.py"
    )
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    train_images, test_images, train_labels, test_labels = digits()
    params, stats = train(train_images, train_labels)
    logits = jax.jit(partial(forward, params, stats))(test_images)[0]
    accuracy = float((logits.argmax(-1) == test_labels).mean())
    model = export(
        params | stats,
        {
            "task": "handwritten digits, 8x8 grey images scaled to 0..1",
            "data": "scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits, CC BY 4.0)",
            "classes": ",".join("0123456789"),
            "test_images": str(len(test_images)),
            "test_accuracy": f"{accuracy:.4f}",
        },
    )
    DATA.mkdir(exist_ok=True)
    onnx.save(model, DATA / "digits.onnx")

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, {"image": test_images})
    agreement = float(np.abs(reference - logits).max())
    # The first sixteen, so that the samples are not selected for accuracy.
    np.savez_compressed(
        DATA / "digits_samples.npz", images=test_images[:16], labels=test_labels[:16], logits=reference[:16]
    )
    size = (DATA / "digits.onnx").stat().st_size
    print(
        f"test accuracy {accuracy:.2%} on {len(test_images)} images, {size / 1000:.0f} kB, |jax - ort| {agreement:.1e}"
    )


if __name__ == "__main__":
    main()
