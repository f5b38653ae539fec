"""Detectors, segmentation and image to image of the ONNX model zoo by structure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from onnx import helper

from benchmarks.net import Net

from .case import Case, Export, export

DETECTION: Final = "ONNX model zoo: detection and segmentation"
IMAGES: Final = "ONNX model zoo: image to image"


def _axes(net: Net, x: str, axes: list[int], op: str = "Unsqueeze") -> str:
    return str(net(op, x, axes=axes))


def _backbone(net: Net, x: str, widths: tuple[int, ...] = (8, 16, 24, 32), act: str = "Relu") -> list[str]:
    """Feature maps, each of half the extent of the one before."""
    maps = []
    for channels in widths:
        x = net.block(x, channels, 3, 2, act=act)
        maps.append(x)
    return maps


def _upsampled(net: Net, x: str, scale: float = 2.0) -> str:
    """Nearest neighbours: Upsample of opset 9, Resize of opset 10 and of opset 11, by scales."""
    scales = net.array([1, 1, scale, scale], dtype=np.float32)
    if net.opset >= 11:
        modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        y = net("Resize", x, net.array([], dtype=np.float32), scales, **modes)
    else:
        y = net("Resize" if net.opset == 10 else "Upsample", x, scales, mode="nearest")
    return str(y)


def _tiny_yolo2(folder: Path) -> Export:
    """By CoreML's converter: an image scaled inside the graph, SAME_LOWER pooling at the end."""
    net = Net(8)
    x = net("Add", net("Mul", net.image(), net.array(1 / 255, dtype=np.float32)), net.weight(3, 1, 1))
    for channels in (8, 16, 32):
        x = net.pool(net.block(x, channels, act="LeakyRelu", same=True), auto_pad="SAME_UPPER")
    x = net.pool(net.block(x, 32, act="LeakyRelu", same=True), 2, 1, auto_pad="SAME_UPPER")
    return export(net, folder, net.images((1, 3, 64, 64)), net.conv(x, 125, 1, same=True))


def _suppressed(net: Net, boxes: str, scores: str) -> tuple[str, ...]:
    """NonMaxSuppression, and the boxes and scores that it chose, as YOLO v3 of Keras has them: [1, n, 4], [1, c, n]."""
    limits = net.constant([20]), net.constant([0.5], np.float32), net.constant([0.4], np.float32)
    chosen = net("NonMaxSuppression", boxes, scores, *limits)
    batch, box = (_axes(net, net("Slice", chosen, *(net.constant([v]) for v in (a, a + 1, 1))), [1], "Squeeze")
                  for a in (0, 2))  # fmt: skip
    pairs = net("Concat", _axes(net, batch, [1]), _axes(net, box, [1]), axis=1)
    found = net("GatherND", boxes, pairs) if net.opset > 10 else net("Gather", _axes(net, boxes, [0], "Squeeze"), box)
    return chosen, found


def _yolo3(folder: Path, opset: int, widths: tuple[int, ...]) -> Export:
    """By keras2onnx: two scales, boxes decoded by a grid, suppression inside the graph."""
    net = Net(opset)
    maps = _backbone(net, net.image(64), widths, "LeakyRelu")
    low = net.block(maps[-1], 16, 1, act="LeakyRelu")
    mixed = net.concat(_upsampled(net, low), maps[-2])
    net.channels[mixed] = 16 + widths[-2]
    boxes, scores = [], []
    for x, side in ((maps[-1], 64 >> len(widths)), (mixed, 128 >> len(widths))):
        raw = net("Transpose", net.conv(x, 3 * 9, 1), perm=[0, 2, 3, 1])
        raw = net("Reshape", raw, net.constant([1, side, side, 3, 9]))
        cuts = [2, 2, 1, 4]
        centre, extent, confidence, classes = net("Split", raw, n=4, axis=4, split=cuts)
        grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1)[None, :, :, None].astype(np.float32)
        centre = net("Div", net("Add", net("Sigmoid", centre), net.array(grid)), net.constant(side, np.float32))
        extent = net("Mul", net("Exp", extent), net.weight(1, 1, 1, 3, 2, around=0.2, scale=0.02))
        half = net("Div", extent, net.constant(2, np.float32))
        corners = net("Concat", net("Sub", centre, half), net("Add", centre, half), axis=4)
        boxes.append(net("Reshape", corners, net.constant([1, -1, 4])))
        product = net("Mul", net("Sigmoid", confidence), net("Sigmoid", classes))
        scores.append(net("Reshape", product, net.constant([1, -1, 4])))
    every = net("Concat", *boxes, axis=1)
    by_class = net("Transpose", net("Concat", *scores, axis=1), perm=[0, 2, 1])
    chosen, found = _suppressed(net, every, by_class)
    return export(net, folder, net.images((1, 3, 64, 64)), every, by_class, found, **{chosen: np.int64})


def _yolo4(folder: Path) -> Export:
    """By tf2onnx at opset 11: Mish of three nodes, three heads left as they are, NHWC outside."""
    net = Net(11)
    net.input("data", [1, 64, 64, 3])
    x = net("Transpose", "data", perm=[0, 3, 1, 2])
    net.channels[x] = 3

    def mish(x: str) -> str:
        return str(net("Mul", x, net("Tanh", net("Softplus", x))))

    maps = []
    for channels in (8, 16, 32):
        x = mish(net.block(x, channels, 3, 2, act=""))
        left, right = mish(net.block(x, channels // 2, 1, act="")), mish(net.block(x, channels // 2, 1, act=""))
        x = net.concat(left, mish(net.block(right, channels // 2, act="")))
        maps.append(x)
    pooled = [net.pool(x, k, 1, pads=[k // 2] * 4) for k in (5, 9, 13)]
    x = net.block(net.concat(*reversed(pooled), x), 16, 1, act="LeakyRelu")
    up = net.concat(net.block(maps[-2], 16, 1, act="LeakyRelu"), _upsampled(net, x))
    heads = [net("Transpose", net.conv(m, 27, 1), perm=[0, 2, 3, 1]) for m in (up, x)]
    shape = net("Concat", net("Slice", net("Shape", heads[0]), *(net.constant([v]) for v in (0, 3, 0))),
                net.constant([3, 9]), axis=0)  # fmt: skip
    return export(net, folder, net.images((1, 64, 64, 3)), net("Reshape", heads[0], shape), heads[1])


def _yolo5(folder: Path) -> Export:
    """By PyTorch at opset 12: Focus slices, SiLU, grids as constants, one output of all boxes."""
    net = Net(12)
    x = net.image(64)
    rows = [net("Slice", x, *(net.constant([v]) for v in (a, 2**31 - 1, 2, 2))) for a in (0, 1)]
    quarters = [net("Slice", r, *(net.constant([v]) for v in (a, 2**31 - 1, 3, 2))) for a in (0, 1) for r in rows]
    x = net.concat(*quarters)

    def silu(x: str, channels: int, kernel: int = 3, stride: int = 1) -> str:
        y = net.conv(x, channels, kernel, stride)
        return str(net("Mul", y, net("Sigmoid", y)))

    maps = []
    for channels in (16, 24, 32):
        x = silu(x, channels, 3, 2)
        half = silu(x, channels // 2, 1)
        bottleneck = net("Add", half, silu(silu(half, channels // 2, 1), channels // 2))
        x = silu(net.concat(bottleneck, silu(x, channels // 2, 1)), channels, 1)
        maps.append(x)
    up = silu(net.concat(_upsampled(net, silu(x, 24, 1)), maps[-2]), 24)
    outputs = []
    for head, side in ((up, 8), (x, 4)):
        raw = net("Reshape", net.conv(head, 27, 1), net.constant([1, 3, 9, side, side]))
        y = net("Sigmoid", net("Transpose", raw, perm=[0, 1, 3, 4, 2]))
        ends = [net("Slice", y, *(net.constant([v]) for v in (a, b, 4, 1))) for a, b in ((0, 2), (2, 4), (4, 9))]
        grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1)[None, None].astype(np.float32)
        twice = [net("Mul", e, net.constant(2, np.float32)) for e in ends[:2]]
        centre = net("Mul", net("Add", twice[0], net.array(grid - 0.5)), net.constant(64 / side, np.float32))
        extent = net("Mul", net("Pow", twice[1], net.constant(2, np.float32)), net.weight(1, 3, 1, 1, 2, around=9))
        outputs.append(net("Reshape", net("Concat", centre, extent, ends[2], axis=4), net.constant([1, -1, 9])))
    return export(net, folder, net.images((1, 3, 64, 64)), net("Concat", *outputs, axis=1))


def _ssd(folder: Path) -> Export:
    """SSD of MLPerf by PyTorch at opset 10: decoding by ranges of constants, suppression, the best by TopK."""
    net = Net(10)
    maps = _backbone(net, net.image(64))
    places, labels = [], []
    for x in maps[1:]:
        places.append(net("Reshape", net.conv(x, 4 * 4), net.constant([1, 4, -1])))
        labels.append(net("Reshape", net.conv(x, 4 * 5), net.constant([1, 5, -1])))
    n = 4 * (16 * 16 + 8 * 8 + 4 * 4)
    place = net("Transpose", net("Concat", *places, axis=2), perm=[0, 2, 1])
    scores = net("Softmax", net("Transpose", net("Concat", *labels, axis=2), perm=[0, 2, 1]), axis=2)
    centre, extent = (net("Slice", place, *(net.constant([v]) for v in (a, a + 2, 2))) for a in (0, 2))
    anchors = net.rng.uniform(0.1, 0.9, (1, n, 2)).astype(np.float32)
    centre = net("Add", net("Mul", centre, net.constant(0.1, np.float32)), net.array(anchors))
    extent = net("Mul", net("Exp", net("Mul", extent, net.constant(0.2, np.float32))), net.constant(0.1, np.float32))
    boxes = net("Concat", net("Sub", centre, extent), net("Add", centre, extent), axis=2)
    foreground = net("Slice", net("Transpose", scores, perm=[0, 2, 1]), *(net.constant([v]) for v in (1, 5, 1)))
    limits = net.constant([10]), net.constant([0.5], np.float32), net.constant([0.05], np.float32)
    chosen = net("NonMaxSuppression", boxes, foreground, *limits)
    box = net("Gather", chosen, net.constant(2), axis=1)
    label = net("Gather", chosen, net.constant(1), axis=1)
    flat = net("Add", net("Mul", label, net.constant(n)), box)
    score = net("Gather", net("Reshape", foreground, net.constant([-1])), flat)
    count = net("Reshape", net("Cast", net("Size", score), to=1), net.constant([1]))
    least = net("Cast", net("Min", count, net.constant([8], np.float32)), to=7)
    best, order = net("TopK", score, least, n=2, axis=0)
    found = net("Gather", _axes(net, boxes, [0], "Squeeze"), net("Gather", box, order), axis=0)
    named = net("Gather", label, order)
    return export(net, folder, net.images((1, 3, 64, 64)), found, best, **{named: np.int64})


def _retinanet(folder: Path) -> Export:
    net = Net(9)
    maps = _backbone(net, net.image(64))
    sides = [net.conv(m, 16, 1) for m in maps[2:]]
    pyramid = [net("Add", sides[0], _upsampled(net, sides[1])), sides[1]]
    outputs = []
    shared = [(net.weight(16, 16, 3, 3), net.weight(16)), (net.weight(36, 16, 3, 3), net.weight(36))]
    for x in pyramid:
        h = net("Relu", net("Conv", x, *shared[0], kernel_shape=[3, 3], pads=[1] * 4))
        outputs.append(net("Sigmoid", net("Conv", h, *shared[1], kernel_shape=[3, 3], pads=[1] * 4)))
    return export(net, folder, net.images((1, 3, 64, 64)), *outputs)


def _rcnn(folder: Path, masks: bool) -> Export:
    """Faster and Mask R-CNN by PyTorch at opset 10: proposals, levels by NonZero, RoiAlign, Scatter, heads."""
    net = Net(10)
    features = _backbone(net, net.image(64), (8, 16, 16))
    maps = {8: net.conv(features[2], 16, 1), 16: net.conv(features[1], 16, 1)}
    boxes, scores = [], []
    for side, x in maps.items():
        h = net("Relu", net.conv(x, 16))
        score = net("Reshape", net("Transpose", net.conv(h, 3, 1), perm=[0, 2, 3, 1]), net.constant([-1]))
        delta = net("Transpose", net("Reshape", net.conv(h, 12, 1), net.constant([3, 4, -1])), perm=[2, 0, 1])
        delta = net("Mul", net("Reshape", delta, net.constant([-1, 4])), net.constant(0.1, np.float32))
        middle = (np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 1, 2) + 0.5) * 64 / side
        sizes = np.array([[6, 6], [12, 6], [6, 12]]) * 16 / side
        anchors = np.concatenate([middle - sizes, middle + sizes], -1).reshape(-1, 4).astype(np.float32)
        best, order = net("TopK", net("Sigmoid", score), net.constant([30]), n=2, axis=0)
        corners = net("Add", net("Mul", net("Gather", delta, order), net.constant(10, np.float32)),
                      net("Gather", net.array(anchors), order))  # fmt: skip
        boxes.append(net("Clip", corners, min=0.0, max=63.0))
        scores.append(best)
    proposal, objectness = net("Concat", *boxes, axis=0), net("Concat", *scores, axis=0)
    limits = net.constant([20]), net.constant([0.7], np.float32)
    chosen = net("NonMaxSuppression", _axes(net, proposal, [0]), _axes(net, objectness, [0, 1]), *limits)
    rois = net("Gather", proposal, net("Gather", chosen, net.constant(2), axis=1))
    width, height = (
        net("Sub", net("Gather", rois, net.constant(b), axis=1), net("Gather", rois, net.constant(a), axis=1))
        for a, b in ((0, 2), (1, 3))
    )
    large = net("Greater", net("Mul", width, height), net.constant(300, np.float32))
    zeros = net("Gather", net("Mul", rois, net.constant(0, np.float32)), net.constant(0), axis=1)
    blank = net("Mul", _axes(net, zeros, [1, 2, 3]), net.constant(np.ones((1, 16, 5, 5)), np.float32))
    pooled = blank
    for mask, (side, x) in zip((large, net("Not", large)), maps.items(), strict=True):
        where = _axes(net, net("NonZero", mask), [0], "Squeeze")
        own = net("Gather", rois, where)
        first = net("Cast", net("Mul", net("Gather", own, net.constant(0), axis=1), net.constant(0, np.float32)), to=7)
        aligned = net("RoiAlign", x, own, first, output_height=5, output_width=5, sampling_ratio=2,
                      spatial_scale=side / 64)  # fmt: skip
        index = net("Expand", _axes(net, where, [1, 2, 3]), net("Shape", aligned))
        pooled = net("Scatter", pooled, index, aligned, axis=0)
    h = net("Relu", net.dense(net("Flatten", pooled), 400, 24))
    logits, deltas = net("Softmax", net.dense(h, 24, 5)), net.dense(h, 24, 20)
    outputs = [rois, logits, deltas]
    if masks:
        net.channels[pooled] = 16
        m = net.conv(net("Relu", net.conv(pooled, 16)), 16, 2, 2, transposed=True, pads=[0] * 4)
        outputs.append(net("Sigmoid", net.conv(net("Relu", m), 5, 1)))
    return export(net, folder, net.images((1, 3, 64, 64)), *outputs)


def _unet(folder: Path) -> Export:
    net = Net(10)
    x, skips = net.image(64, batch="n", channels=1), []
    for channels in (8, 16):
        x = net.block(net.block(x, channels), channels)
        skips.append(x)
        x = net.pool(x)
    x = net.block(x, 32)
    for channels, skip in ((16, skips[1]), (8, skips[0])):
        x = net.concat(skip, net.conv(x, channels, 2, 2, transposed=True, pads=[0] * 4))
        x = net.block(x, channels)
    return export(net, folder, net.images((1, 1, 64, 64), (2, 1, 64, 64)), net("Sigmoid", net.conv(x, 1, 1)))


def _fcn(folder: Path) -> Export:
    """By PyTorch at opset 11: dilated convolutions, Resize to the extent of the input, whose Shape is asked."""
    net = Net(11)
    x = net.input("data", ["n", 3, "h", "w"])
    h = net.block(net.block(x, 16, 3, 2), 16, 3, 2)
    h = net.block(h, 16, 3, dilations=[2, 2], pads=[2] * 4)
    h = net.conv(net("Dropout", net.block(h, 8), ratio=0.1), 5, 1)
    extent = net("Slice", net("Shape", x), *(net.constant([v]) for v in (2, 4, 0)))
    sizes = net("Concat", net("Slice", net("Shape", h), *(net.constant([v]) for v in (0, 2, 0))), extent, axis=0)
    none = net("Constant", value=helper.make_tensor("none", 1, [0], []))
    y = net("Resize", h, none, none, sizes, mode="linear", coordinate_transformation_mode="pytorch_half_pixel",
            cubic_coeff_a=-0.75, nearest_mode="floor")  # fmt: skip
    return export(net, folder, net.images((1, 3, 64, 48), (2, 3, 40, 64)), y)


def _super_resolution(folder: Path) -> Export:
    """By PyTorch at opset 10: pixels shuffled by Reshape, Transpose, Reshape."""
    net = Net(10)
    x = net("Relu", net.conv(net.image(32, batch="n", channels=1), 16, 5))
    x = net.conv(net("Relu", net.conv(x, 8)), 9)
    apart = net("Reshape", x, net.constant([-1, 1, 3, 3, 32, 32]))
    y = net("Reshape", net("Transpose", apart, perm=[0, 1, 4, 2, 5, 3]), net.constant([-1, 1, 96, 96]))
    return export(net, folder, net.images((1, 1, 32, 32), (3, 1, 32, 32)), y)


def _style(folder: Path) -> Export:
    """Fast neural style by PyTorch at opset 9: reflected pads, InstanceNormalization, Upsample by scales."""
    net = Net(9)

    def layer(x: str, channels: int, kernel: int, stride: int = 1) -> str:
        p = kernel // 2
        padded = net("Pad", x, mode="reflect", pads=[0, 0, p, p, 0, 0, p, p])
        y = net.conv(padded, channels, kernel, stride, pads=[0] * 4)
        return str(net("InstanceNormalization", y, net.weight(channels, around=1), net.weight(channels)))

    x = net("Relu", layer(net("Relu", layer(net.image(), 8, 9)), 16, 3, 2))
    x = net("Add", x, layer(net("Relu", layer(x, 16, 3)), 16, 3))
    x = net("Relu", layer(_upsampled(net, x), 8, 3))
    p = net("Pad", x, mode="reflect", pads=[0, 0, 4, 4, 0, 0, 4, 4])
    return export(net, folder, net.images((1, 3, 64, 64)), net.conv(p, 3, 9, pads=[0] * 4))


DETECTORS: Final[dict[str, Callable[[Path], Export]]] = {
    "Tiny YOLO v2, opset 8": _tiny_yolo2,
    "Tiny YOLO v3, opset 11": lambda f: _yolo3(f, 11, (8, 16, 32)),
    "YOLO v3, opset 10": lambda f: _yolo3(f, 10, (8, 8, 16, 16)),
    "YOLO v4, opset 11": _yolo4,
    "YOLO v5, opset 12": _yolo5,
    "SSD, opset 10": _ssd,
    "RetinaNet, opset 9": _retinanet,
    "Faster R-CNN, opset 10": lambda f: _rcnn(f, False),
    "Mask R-CNN, opset 10": lambda f: _rcnn(f, True),
    "UNet, opset 10": _unet,
    "FCN, opset 11": _fcn,
}
ARTISTS: Final = {"super-resolution, opset 10": _super_resolution, "fast neural style, opset 9": _style}
LIGHT: Final = {"super-resolution, opset 10"}

CASES: Final = tuple(
    Case(family, name, "by structure", make, light=name in LIGHT)
    for family, nets in ((DETECTION, DETECTORS), (IMAGES, ARTISTS))
    for name, make in nets.items()
)
