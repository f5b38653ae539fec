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
    """The module, with its operators declared and the two of detectors written in torch where they are missing."""
    from torch.library import Library

    if not _kept and not _loads():
        library = Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        library.impl("nms", _nms, "CPU")
        library.impl("roi_align", _roi_align, "CPU")
        _kept.append(library)  # what it defines goes when it goes
        import torchvision
        from torchvision import extension, ops

        for module in (extension, ops.boxes, ops._register_onnx_ops, sys.modules["torchvision.ops.roi_align"]):
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
        if not (overlap[i, kept] > iou_threshold).any():  # of boxes without an area: not a number
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def _roi_align(x: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool) -> Any:
    from torchvision.ops.roi_align import _roi_align as in_torch

    return in_torch.__wrapped__(x, rois, scale, height, width, ratio, aligned)
