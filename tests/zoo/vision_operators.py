"""torchvision where its compiled operators do not load, as beside a torch without CUDA: those that detectors need."""

from __future__ import annotations

import sys
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    *(f"{name}(Tensor _) -> Tensor" for name in ("qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")),
    *(f"_{name}_backward(Tensor _) -> Tensor" for name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool")),
    "_deform_conv2d_backward(Tensor _) -> Tensor",
)
_kept: list[Any] = []


def torchvision() -> Any:
    """The module, with its operators declared and three of them written in torch where they are missing."""
    import torch

    if not _kept and not _loads():
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        library.impl("nms", _nms, "CPU")
        library.impl("roi_align", _roi_align, "CPU")
        library.impl("deform_conv2d", _deform_conv2d, "CPU")
        library.impl("deform_conv2d", lambda x, w, at, *_: x.new_empty(len(x), len(w), *at.shape[2:]), "Meta")
        _kept.append(library)  # what it defines goes when it goes
        import torchvision
        from torchvision import extension, ops

        modules = (extension, ops.boxes, ops._register_onnx_ops)
        for module in (*modules, *(sys.modules[f"torchvision.ops.{name}"] for name in ("roi_align", "deform_conv"))):
            for name, function in {"_has_ops": _has_ops, "_assert_has_ops": _assert_has_ops}.items():
                if hasattr(module, name):
                    setattr(module, name, function)
        return torchvision
    import torchvision

    return torchvision


def _has_ops() -> bool:
    return True


def _assert_has_ops() -> None:
    """Named functions with types, for the script exporter compiles some callers of theirs."""


def _loads() -> bool:
    import importlib.util
    from pathlib import Path

    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return True  # importing it says what is missing
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except (ImportError, OSError):
        return False
    return True


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Greedy suppression: indices of the boxes [n, 4] kept, by falling score."""
    import torch
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlap = box_iou(boxes, boxes)
    kept: list[int] = []
    for i in order.tolist():
        if not kept or overlap[i, kept].max() <= iou_threshold:
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def _roi_align(x: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool) -> Any:
    from torchvision.ops.roi_align import _roi_align as in_torch

    return in_torch.__wrapped__(x, rois, scale, height, width, ratio, aligned)


def _deform_conv2d(
    x: Any, w: Any, offset: Any, mask: Any, bias: Any, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int,
    groups: int, offset_groups: int, use_mask: bool,
) -> Any:  # fmt: skip
    """A convolution whose taps are each shifted by an offset and sampled between the pixels."""
    import torch

    n, _, height, width = x.shape
    o, _, kh, kw = w.shape
    oh, ow = offset.shape[2:]
    down, right = torch.meshgrid(torch.arange(kh) * dh, torch.arange(kw) * dw, indexing="ij")
    shifts = offset.reshape(n, offset_groups, kh * kw, 2, oh, ow)
    py = (torch.arange(oh) * sh - ph)[:, None] + down.reshape(-1, 1, 1) + shifts[:, :, :, 0]
    px = (torch.arange(ow) * sw - pw) + right.reshape(-1, 1, 1) + shifts[:, :, :, 1]
    grid = torch.stack((2 * px / (width - 1) - 1, 2 * py / (height - 1) - 1), -1)
    samples = torch.nn.functional.grid_sample(
        x.reshape(n * offset_groups, -1, height, width),
        grid.reshape(n * offset_groups, -1, ow, 2),
        align_corners=True,
    ).reshape(n, offset_groups, -1, kh * kw, oh, ow)
    if use_mask:
        samples = samples * mask.reshape(n, offset_groups, 1, kh * kw, oh, ow)
    columns = samples.reshape(n, groups, -1, oh * ow)
    y = torch.einsum("ngkp,gok->ngop", columns, w.reshape(groups, o // groups, -1))
    return y.reshape(n, o, oh, ow) + bias[:, None, None]
