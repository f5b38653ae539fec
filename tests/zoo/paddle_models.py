"""PaddlePaddle by paddle2onnx: layers and functions of tensors, in an environment of its own beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export, Inputs
from .other_frameworks import LOOP

PADDLE2ONNX: Final = "paddle2onnx"
Shape = tuple[int, ...]
WORDS: Final = 11


def _export(make: Callable[[Any], Any], shapes: Sequence[Shape], words: bool, folder: Path) -> Export:
    """What ``make(paddle)`` returns, a layer of one tensor, at two shapes; what differs is dynamic."""
    import paddle
    import paddle2onnx

    paddle.seed(0)
    layer = _stirred(make(paddle)).eval()
    dims = [a if a == b else None for a, b in zip(shapes[0], shapes[-1], strict=True)]
    rng = np.random.default_rng(0)
    if words:
        inputs = [{"x": rng.integers(0, WORDS, s)} for s in shapes]
    else:
        inputs = [{"x": rng.standard_normal(s).astype(np.float32)} for s in shapes]
    spec = [paddle.static.InputSpec(dims, "int64" if words else "float32", "x")]
    path = folder / "model.onnx"
    # without a tool behind it, which is a choice: the graph is the exporter's own
    paddle2onnx.dygraph2onnx(layer, str(path), spec, opset_version=17, optimize_tool="None")
    with paddle.no_grad():
        expected = [[v.numpy() for v in paddle.utils.flatten(layer(paddle.to_tensor(i["x"])))] for i in inputs]
    params = {p.name: p for p in layer.parameters()}

    def gradients(inputs: Inputs, cotangents: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        for part in layer.sublayers(include_self=True):
            if isinstance(part, paddle.nn.layer.rnn.RNNBase):
                part.train()  # without which it keeps nothing for its derivative
        x = paddle.to_tensor(inputs["x"], stop_gradient=words)
        outputs = [o for o in paddle.utils.flatten(layer(x)) if o.is_floating_point()]
        loss = sum((o * paddle.to_tensor(c)).sum() for o, c in zip(outputs, cotangents, strict=True))
        wanted = params if words else {"x": x, **params}
        slopes = paddle.grad(loss, list(wanted.values()), allow_unused=True)
        return {n: g.numpy() for n, g in zip(wanted, slopes, strict=True) if g is not None}

    return Export(path, inputs, expected, gradients, {n: p.numpy() for n, p in params.items()})


def _stirred(layer: Any) -> Any:
    """A layer as if it had been trained: its scales, shifts and statistics are not ones and zeros."""
    import paddle

    for value in [*layer.parameters(), *layer.buffers()]:
        if value.is_floating_point() and value.ndim == 1:  # above zero stays above, as variances must
            value.set_value(value * (0.5 + paddle.rand(value.shape)) + 0.1 * paddle.rand(value.shape))
    return layer


def _of(layers: Callable[[Any], Sequence[Any]], call: Callable[..., Any]) -> Callable[[Any], Any]:
    """A layer that computes ``call(paddle, x, *layers)``."""

    def make(paddle: Any) -> Any:
        class Of(paddle.nn.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layers = paddle.nn.LayerList(layers(paddle.nn))

            def forward(self, x: Any) -> Any:
                return call(paddle, x, *self.layers)

        return Of()

    return make


def _chain(layers: Callable[[Any], Sequence[Any]]) -> Callable[[Any], Any]:
    return lambda paddle: paddle.nn.Sequential(*layers(paddle.nn))


def _residual(paddle: Any, x: Any, *layers: Any) -> Any:
    first, norm, second, other, shortcut, last = layers
    y = paddle.nn.functional.relu(norm(first(x)))
    return last(paddle.nn.functional.relu(other(second(y)) + shortcut(x)).mean([2, 3]))


def _separable(nn: Any) -> list[Any]:
    layers = [nn.Conv2D(3, 8, 3, 2, padding=1, bias_attr=False), nn.BatchNorm2D(8), nn.Hardswish()]
    for stride in (1, 2):
        layers += [nn.Conv2D(8, 8, 3, stride, padding=1, groups=8), nn.BatchNorm2D(8), nn.ReLU6(), nn.Conv2D(8, 8, 1)]
    return [*layers, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(8, 4)]


def _upsampled(paddle: Any, x: Any, conv: Any) -> Any:
    resize = partial(paddle.nn.functional.interpolate, conv(x))
    return (
        resize(size=[28, 30], mode="nearest"), resize(size=[28, 21], mode="bilinear", align_corners=False),
        resize(size=[9, 21], mode="bilinear", align_corners=True), resize(size=[7, 9], mode="bicubic"),
    )  # fmt: skip


def _answers(paddle: Any, x: Any, linear: Any) -> Any:
    y = linear(x)
    best, where = paddle.topk(y, 3)
    return paddle.nn.functional.softmax(y), paddle.argmax(y, axis=1), best, where, paddle.argsort(y, descending=True)


def _branches(paddle: Any, x: Any, linear: Any) -> Any:
    return paddle.static.nn.cond(x.sum() > 0, lambda: linear(x), lambda: linear(-x) * 2)


def _repeated(shape: list[int], paddle: Any, x: Any, linear: Any) -> Any:
    def more(i: Any, _: Any) -> Any:
        return i < 3

    def step(i: Any, y: Any) -> Any:
        return [i + 1, paddle.tanh(linear(y)) + x]

    return paddle.static.nn.while_loop(more, step, [paddle.zeros(shape, "int64"), x])[1]


def _rearranged(paddle: Any, x: Any) -> Any:
    first, second = paddle.split(x, 2, axis=1)
    return (
        paddle.stack([first, second], axis=1), paddle.concat([x, first], axis=-1), paddle.flip(x, [1]), x[:, 1::2],
        paddle.nn.functional.pad(x, [1, 2]), paddle.gather(x, paddle.to_tensor([2, 0]), axis=1), paddle.cumsum(x, 1),
        paddle.where(x > 0, x, paddle.exp(x)), paddle.clip(x, -0.5, 0.5), paddle.einsum("ij,kj->ik", x, x),
    )  # fmt: skip


IMAGES: Final = (1, 3, 16, 16), (2, 3, 16, 16)
DIGITS: Final = (1, 1, 28, 28), (3, 1, 28, 28)
SERIES: Final = (1, 7, 8), (3, 9, 8)
ROWS: Final = (1, 8), (3, 8)
TEXTS: Final = (1, 6), (3, 9)

Row = tuple[Callable[[Any], Any], Sequence[Shape]]
MODELS: Final[dict[str, Row]] = {
    "dense": (
        _chain(lambda nn: [
            nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.Swish(), nn.Linear(16, 4), nn.Sigmoid(),
        ]), ROWS),
    "convolutions": (
        _chain(lambda nn: [
            nn.Conv2D(3, 8, 3, padding="SAME"), nn.BatchNorm2D(8), nn.ELU(), nn.MaxPool2D(2),
            nn.Conv2D(8, 8, 3, dilation=2, padding=[2, 1]), nn.PReLU(8), nn.AvgPool2D(2, ceil_mode=True),
        ]), IMAGES),
    "LeNet": (lambda paddle: paddle.vision.models.LeNet(), DIGITS),
    "residual block": (
        _of(lambda nn: [
            nn.Conv2D(3, 8, 3, 2, padding=1, bias_attr=False), nn.BatchNorm2D(8),
            nn.Conv2D(8, 8, 3, padding=1, bias_attr=False), nn.BatchNorm2D(8), nn.Conv2D(3, 8, 1, 2), nn.Linear(8, 4),
        ], _residual), IMAGES),
    "depthwise convolutions": (_chain(_separable), IMAGES),
    "transposed convolutions": (
        _chain(lambda nn: [
            nn.Conv2DTranspose(3, 6, 3, 2, padding=1, output_padding=1), nn.ReLU(),
            nn.Conv2DTranspose(6, 4, 2, groups=2),
        ]), IMAGES),
    "interpolations": (_of(lambda nn: [nn.Conv2D(3, 2, 3)], _upsampled), IMAGES),
    "LSTM, two layers": (_of(lambda nn: [nn.LSTM(8, 6, num_layers=2)], lambda _, x, net: net(x)[0]), SERIES),
    "LSTM, both ways": (_of(lambda nn: [nn.LSTM(8, 6, direction="bidirect")], lambda _, x, net: net(x)), SERIES),
    "GRU": (_of(lambda nn: [nn.GRU(8, 6)], lambda _, x, net: net(x)), SERIES),
    "encoder layer": (lambda paddle: paddle.nn.TransformerEncoderLayer(8, 2, 16), SERIES),
    "normalisations": (
        _of(lambda nn: [nn.LayerNorm(16), nn.GroupNorm(3, 3), nn.InstanceNorm2D(3)],
            lambda _, x, *layers: [layer(x) for layer in layers]), IMAGES),
    "embeddings and their mean": (
        _of(lambda nn: [nn.Embedding(WORDS, 8), nn.Linear(8, 4)],
            lambda _, x, table, linear: linear(table(x).mean(1))), TEXTS),
    "softmax, top k, argmax": (_of(lambda nn: [nn.Linear(8, 5)], _answers), ROWS),
    "slices, joins, pads, sums along": (_of(lambda _: [], _rearranged), ROWS),
    "branches": (_of(lambda nn: [nn.Linear(8, 8)], _branches), ROWS),
    "while loop": (_of(lambda nn: [nn.Linear(8, 8)], partial(_repeated, [1])), ROWS),
    # the exporter gives the counter an axis in the body: its first trip has another shape than the others
    "while loop, counter without axes": (_of(lambda nn: [nn.Linear(8, 8)], partial(_repeated, [])), ROWS),
}  # fmt: skip

KNOWN: Final = {"while loop": {"grad": LOOP}}
REFUSED: Final = {
    "GroupNorm of three axes / paddle2onnx": "ends the process",
    "interpolate by scale_factor / paddle2onnx": "(Unimplemented) the 0th elementwise MUST be ir::FloatAttribute",
    "LayerNorm over two axes / paddle2onnx": "writes its scale as a vector, which does not broadcast",
    "LeakyReLU / paddle2onnx": "writes alpha 0.0026 instead of 0.01",
    "states of an LSTM of two layers / paddle2onnx": "writes those of one layer",
}

CASES: Final = tuple(
    Case(
        "PaddlePaddle",
        name,
        PADDLE2ONNX,
        partial(_export, make, shapes, shapes is TEXTS),
        ("paddle", "paddle2onnx"),
        known=KNOWN.get(name, {}),
    )
    for name, (make, shapes) in MODELS.items()
)
