"""TensorFlow by tf2onnx: Keras models and functions of tensors, in an environment of its own beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export

TF2ONNX: Final = "tf2onnx"
Shape = tuple[int, ...]


def _export(make: Callable[[Any], Any], shapes: Sequence[Shape], folder: Path) -> Export:
    """What ``make(tf)`` returns, a function of one float tensor, at two shapes; what differs is dynamic."""
    import tensorflow as tf
    import tf2onnx

    tf.keras.utils.set_random_seed(0)
    function = make(tf)
    dims = [a if a == b else None for a, b in zip(shapes[0], shapes[-1], strict=True)]
    spec = [tf.TensorSpec(dims, tf.float32, name="x")]
    path = folder / "model.onnx"
    tf2onnx.convert.from_function(tf.function(function, spec), spec, opset=18, output_path=str(path))
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal(s).astype(np.float32)} for s in shapes]
    expected = [[np.asarray(v) for v in tf.nest.flatten(function(tf.constant(i["x"])))] for i in inputs]

    def gradients(inputs: Any, cotangents: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        x = tf.constant(inputs["x"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = [o for o in tf.nest.flatten(function(x)) if o.dtype.is_floating]
            loss = tf.add_n([tf.reduce_sum(o * c) for o, c in zip(outputs, cotangents, strict=True)])
        return {"x": np.asarray(tape.gradient(loss, x))}

    return Export(path, inputs, expected, gradients)


def _layers(*layers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keras layers one after the other; each is made by a function of ``keras.layers``."""
    return lambda tf: tf.keras.Sequential([layer(tf.keras.layers) for layer in layers])


IMAGES: Final = (1, 32, 32, 3), (2, 32, 32, 3)
WORDS: Final = (1, 7, 8), (2, 9, 8)
STEPS: Final = (1, 7, 8), (2, 7, 8)
ROWS: Final = (1, 8), (3, 8)


def _application(name: str, size: int, **options: Any) -> Callable[[Any], Any]:
    return lambda tf: getattr(tf.keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None, **options
    )


def _attention(tf: Any) -> Any:
    layer = tf.keras.layers.MultiHeadAttention(2, 4)
    return lambda x: layer(x, x, use_causal_mask=True)


def _while(tf: Any) -> Any:
    def function(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y) + x), [tf.constant(0), x])[1]

    return function


MODELS: Final[dict[str, tuple[Callable[[Any], Any], Sequence[Shape]]]] = {
    "dense, normalisation, dropout": (
        _layers(lambda k: k.Dense(16, "silu"), lambda k: k.LayerNormalization(), lambda k: k.Dropout(0.5),
                lambda k: k.BatchNormalization(), lambda k: k.Dense(4, "softmax")), ROWS),
    "convolutions": (
        _layers(lambda k: k.Conv2D(8, 3, padding="same", activation="relu"), lambda k: k.DepthwiseConv2D(3, 2),
                lambda k: k.SeparableConv2D(8, 3, dilation_rate=2, padding="same"), lambda k: k.BatchNormalization(),
                lambda k: k.MaxPooling2D(2, padding="same"), lambda k: k.Conv2DTranspose(4, 3, 2, padding="same"),
                lambda k: k.AveragePooling2D(2), lambda k: k.GlobalAveragePooling2D()), IMAGES),
    "causal and strided convolutions in one dimension": (
        _layers(lambda k: k.Conv1D(8, 3, padding="causal"), lambda k: k.Conv1D(8, 3, strides=2, padding="same"),
                lambda k: k.GlobalMaxPooling1D()), WORDS),
    "resizing and padding": (
        _layers(lambda k: k.UpSampling2D(2, interpolation="bilinear"), lambda k: k.ZeroPadding2D(((1, 2), (3, 0))),
                lambda k: k.Cropping2D(3), lambda k: k.Resizing(20, 12)), IMAGES),
    "LSTM, both ways": (
        _layers(lambda k: k.Bidirectional(k.LSTM(6, return_sequences=True)), lambda k: k.LSTM(4)), STEPS),
    "GRU, both ways": (
        _layers(lambda k: k.Bidirectional(k.GRU(6, return_sequences=True)), lambda k: k.GRU(4)), STEPS),
    "attention": (_attention, WORDS),
    "group and unit normalisation": (
        _layers(lambda k: k.GroupNormalization(1), lambda k: k.UnitNormalization(), lambda k: k.PReLU()), STEPS),
    "while loop": (_while, ROWS),
    "top k, one hot, gather, segment sums": (
        lambda tf: lambda x: (
            tf.math.top_k(x, 3).values, tf.one_hot(tf.argmax(x, 1), 8), tf.gather(x, [2, 0], axis=1),
            tf.math.unsorted_segment_sum(tf.transpose(x), tf.constant([0, 1, 0, 2, 1, 0, 2, 2]), 3)), ROWS),
    "slices, pads, reversals, sums along": (
        lambda tf: lambda x: (
            x[:, ::-2], tf.pad(x, [[0, 0], [2, 1]], "REFLECT"), tf.reverse(x, [1]), tf.cumsum(x, 1, exclusive=True),
            tf.roll(x, 3, 1), tf.linalg.band_part(tf.matmul(x, x, transpose_b=True), 0, -1)), ROWS),
    "einsum, where, clip, norms": (
        lambda tf: lambda x: (
            tf.einsum("ij,kj->ik", x, x), tf.where(x > 0, x, tf.exp(x)), tf.clip_by_value(x, -0.5, 0.5),
            tf.norm(x, axis=1), tf.nn.log_softmax(x), tf.math.reduce_logsumexp(x, 1)), ROWS),
    "MobileNetV2": (_application("MobileNetV2", 32, alpha=0.35), IMAGES),
    "DenseNet121": (_application("DenseNet121", 32), IMAGES[:1]),
}  # fmt: skip

LOOP: Final = "JAX has no reverse derivative of a loop that ends by a condition"
SCAN: Final = "tf2onnx writes a GRU as a loop that ends by a condition and collects outputs, whose number must be known"
KNOWN: Final = {"while loop": {"grad": LOOP}, "GRU, both ways": {"jit": SCAN, "grad": SCAN}}
REFUSED: Final = {
    "gelu / tf2onnx": "writes an operator Erfc, which ONNX does not have",
    "EfficientNetB0 / tf2onnx": "writes two constants of its normalisation as inputs without a value",
}

CASES: Final = tuple(
    Case(
        "TensorFlow",
        name,
        TF2ONNX,
        lambda folder, m=make, s=shapes: _export(m, s, folder),
        ("tensorflow", "tf2onnx"),
        known=KNOWN.get(name, {}),
    )
    for name, (make, shapes) in MODELS.items()
)
