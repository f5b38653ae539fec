"""Vision beyond classification: torchvision's segmentation, detection and video, as small as they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from .case import Case, Export
from .torch_exports import DYNAMO, EXPORTERS, SCRIPT, export
from .vision import lively
from .vision_operators import torchvision

Row = tuple[Callable[[Any], Any], tuple[int, ...], tuple[int, ...]]


def _export(
    build: Callable[[Any], Any], shape: tuple[int, ...], other: tuple[int, ...], exporter: str, f: Path
) -> Export:
    import torch

    torch.manual_seed(0)
    net = build(torchvision().models)
    return export(net, [(torch.randn(shape),), (torch.randn(other),)], f, exporter)


def _resnet(m: Any, **layers: str) -> Any:
    """A narrow backbone that returns what ``layers`` names."""
    net = m.resnet.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1])
    return m._utils.IntermediateLayerGetter(net, layers)


def _lraspp(m: Any) -> Any:
    return m.segmentation.LRASPP(_resnet(m, layer1="low", layer3="high"), 64, 256, 5, inter_channels=16)


def _deeplab(m: Any) -> Any:
    head = m.segmentation.deeplabv3.DeepLabHead(128, 5, atrous_rates=(2, 4))
    return m.segmentation.DeepLabV3(_resnet(m, layer2="out"), head)


SEGMENTATION: Final[Mapping[str, Row]] = {
    "fcn": (
        lambda m: m.segmentation.FCN(_resnet(m, layer2="out"), m.segmentation.fcn.FCNHead(128, 5)),
        (2, 3, 64, 64),
        (3, 3, 96, 64),
    ),
    "deeplab v3": (_deeplab, (2, 3, 64, 64), (3, 3, 96, 64)),
    "lraspp": (_lraspp, (2, 3, 64, 64), (3, 3, 96, 64)),
}


def _video_resnet(m: Any, kind: str) -> Any:
    v = m.video.resnet
    plain, mixed, factored = v.Conv3DSimple, [v.Conv3DSimple] + [v.Conv3DNoTemporal] * 3, v.Conv2Plus1D
    convolutions = {"r3d": [plain] * 4, "mc3": mixed, "r2plus1d": [factored] * 4}[kind]
    stem = v.R2Plus1dStem if kind == "r2plus1d" else v.BasicStem
    return m.video.VideoResNet(v.BasicBlock, convolutions, [1, 1, 1, 1], stem, num_classes=10)


def _mvit(m: Any) -> Any:
    part = m.video.mvit.MSBlockConfig
    blocks = [
        part(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        part(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return m.video.MViT((32, 32), 4, blocks, True, False, True, True, num_classes=10)


def _swin3d(m: Any) -> Any:
    return m.video.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 2], [2, 4, 4], num_classes=10)


def _s3d(m: Any) -> Any:
    """With a last pool for small images, and lively: as initialised its gradient by the images is 6e-9, of which
    float32 leaves torch an error of 2e-4 and JAX one of 1e-4, each against torch in float64.
    """
    net = lively(m.video.s3d(num_classes=10))
    net.avgpool.kernel_size = (2, 2, 2)
    return net


_CLIP: Final = ((2, 3, 4, 32, 32), (3, 3, 4, 32, 32))
VIDEO: Final[Mapping[str, Row]] = {
    **{kind: (partial(_video_resnet, kind=kind), *_CLIP) for kind in ("r3d", "mc3", "r2plus1d")},
    "mvit v2": (_mvit, *_CLIP),
    "swin3d": (_swin3d, *_CLIP),
    "s3d": (_s3d, (2, 3, 16, 64, 64), (3, 3, 16, 64, 64)),
}


def _detector(build: Callable[[Any, Any], Any], exporter: str, folder: Path) -> Export:
    """A detector of one image: detectors take lists of images, and how many boxes they return depends on the values."""
    import torch

    torch.manual_seed(0)
    models = torchvision().models

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = lively(build(models.detection, _pyramid(models)))  # or all scores are nearly the same

        def forward(self, image: Any) -> Any:
            found = self.net([image])
            return (found[1] if isinstance(found, tuple) else found)[0]

    return export(Detector(), [(torch.rand(3, 64, 64),), (torch.rand(3, 64, 64),)], folder, exporter)


def _pyramid(m: Any) -> Any:
    """A backbone of two levels, with 32 channels."""
    net = m.resnet.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1])
    return m.detection.backbone_utils.BackboneWithFPN(net, {"layer2": "0", "layer3": "1"}, [128, 256], 32)


_FEW: Final = {"detections_per_img": 20}
_IMAGES: Final = {"min_size": 64, "max_size": 64, "num_classes": 4, **_FEW}


def _boxes(d: Any, per_place: bool = True) -> Any:
    """Anchors of three levels: the pyramid has one more, pooled."""
    return d.anchor_utils.AnchorGenerator(((8,), (16,), (32,)), ((0.5, 1.0, 2.0) if per_place else (1.0,),) * 3)


def _two_stages(d: Any, backbone: Any, name: str) -> Any:
    few = {"rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 10, "box_score_thresh": 0.2}
    head = d.faster_rcnn.TwoMLPHead(32 * 49, 32)
    predictor = d.faster_rcnn.FastRCNNPredictor(32, 4)
    options = {"min_size": 64, "max_size": 64, **few, "box_head": head, "box_predictor": predictor}
    if name == "MaskRCNN":
        options["mask_head"] = d.mask_rcnn.MaskRCNNHeads(32, (16,), 1)
        options["mask_predictor"] = d.mask_rcnn.MaskRCNNPredictor(16, 16, 4)
    if name == "KeypointRCNN":
        options["keypoint_head"] = d.keypoint_rcnn.KeypointRCNNHeads(32, (16,))
        options["keypoint_predictor"] = d.keypoint_rcnn.KeypointRCNNPredictor(16, 5)
    return getattr(d, name)(backbone, rpn_anchor_generator=_boxes(d), **options)


def _ssd(d: Any, backbone: Any) -> Any:
    boxes = d.anchor_utils.DefaultBoxGenerator([[2], [2, 3], [2]])
    return d.ssd.SSD(
        backbone, boxes, (64, 64), 4, head=d.ssd.SSDHead([32] * 3, boxes.num_anchors_per_location(), 4), **_FEW
    )


def _ssdlite(d: Any, _: Any) -> Any:
    from torch.nn import BatchNorm2d

    from .vision import _mobilenet_v3

    models = torchvision().models
    net = _mobilenet_v3(models)
    backbone = d.ssdlite.SSDLiteFeatureExtractorMobileNet(net.features, 2, BatchNorm2d)
    boxes = d.anchor_utils.DefaultBoxGenerator([[2, 3]] * 6, min_ratio=0.2, max_ratio=0.95)
    widths = d._utils.retrieve_out_channels(backbone, (64, 64))
    head = d.ssdlite.SSDLiteHead(widths, boxes.num_anchors_per_location(), 4, BatchNorm2d)
    return d.ssd.SSD(backbone, boxes, (64, 64), 4, head=head, **_FEW)


def _raft(f: Path, exporter: str) -> Export:
    """Optical flow between two images, refined twice."""
    import torch

    raft = torchvision().models.optical_flow.raft
    torch.manual_seed(0)
    net = raft._raft(
        feature_encoder_layers=(8, 8, 12, 16, 32),
        feature_encoder_block=raft.ResidualBlock,
        feature_encoder_norm_layer=torch.nn.InstanceNorm2d,
        context_encoder_layers=(8, 8, 12, 16, 40),
        context_encoder_block=raft.ResidualBlock,
        context_encoder_norm_layer=torch.nn.BatchNorm2d,
        corr_block_num_levels=2,
        corr_block_radius=2,
        motion_encoder_corr_layers=(24,),
        motion_encoder_flow_layers=(16, 8),
        motion_encoder_out_channels=24,
        recurrent_block_hidden_state_size=24,
        recurrent_block_kernel_size=(3,),
        recurrent_block_padding=(1,),
        flow_head_hidden_size=16,
        use_mask_predictor=False,
    )

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, before: Any, after: Any) -> Any:
            return self.net(before, after, num_flow_updates=2)

    images = [tuple(torch.randn(n, 3, 32, 32) for _ in range(2)) for n in (2, 3)]
    return export(Twice(), images, f, exporter)


DETECTION: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "faster rcnn": partial(_two_stages, name="FasterRCNN"),
    "mask rcnn": partial(_two_stages, name="MaskRCNN"),
    "keypoint rcnn": partial(_two_stages, name="KeypointRCNN"),
    "retinanet": lambda d, net: d.RetinaNet(net, anchor_generator=_boxes(d), score_thresh=0.01, **_IMAGES),
    "fcos": lambda d, net: d.FCOS(net, anchor_generator=_boxes(d, False), score_thresh=0.001, **_IMAGES),
    "ssd": _ssd,
    "ssdlite": _ssdlite,
}


ONLY: Final[Mapping[str, str]] = {
    "s3d": DYNAMO,
    **dict.fromkeys(("faster rcnn", "fcos", "keypoint rcnn", "mask rcnn", "retinanet", "ssd", "ssdlite"), SCRIPT),
}
"""Those by one exporter, for the time that they take; or the other refuses them."""

_GUARD: Final = "GuardOnDataDependentSymNode: Could not guard on data-dependent expression (how many boxes there are)"
REFUSED: Final = {f"torchvision: {name} / dynamo": _GUARD for name in DETECTION}
REFUSED["torchvision: raft / dynamo"] = "RuntimeError: Error during constant folding for node 'node_split'"


def _cases() -> Iterator[Case]:
    for family, rows in {"segmentation": SEGMENTATION, "video": VIDEO, "detection": DETECTION}.items():
        # The gradient of a mask's bias is a sum of thousands of numbers between -1 and 1 that is nearly 0.
        slope = 1e-3 if family == "segmentation" else 1e-4
        for name, row in rows.items():
            for exporter in EXPORTERS:
                if ONLY.get(name, exporter) == exporter:
                    make = (
                        partial(_export, *row, exporter)
                        if isinstance(row, tuple)
                        else partial(_detector, row, exporter)
                    )
                    yield Case(f"torchvision: {family}", name, exporter, make, ("torchvision",), slope=slope)


CASES: Final = (
    *_cases(),
    Case(
        "torchvision: optical flow",
        "raft",
        SCRIPT,
        partial(_raft, exporter=SCRIPT),
        ("torchvision",),
        known={"grad": "torch's exporters drop the detach() that stops gradients between RAFT's steps"},
    ),
)
