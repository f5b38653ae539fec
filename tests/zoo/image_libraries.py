"""Networks on images of libraries on torch: segmentation_models_pytorch, monai, open_clip, ultralytics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from .case import Case
from .torch_exports import EXPORTERS, SCRIPT
from .torch_libraries import Sizes, library_cases
from .vision import calibrated, lively
from .vision_operators import torchvision


def _segmentation(kind: str, options: Mapping[str, Any], side: int, other: int) -> tuple[Any, Sizes]:
    """On ResNet-18, or the encoder among the options; on two heights."""
    import torch

    torchvision()
    import segmentation_models_pytorch as smp

    net = getattr(smp, kind)(**{"encoder_name": "resnet18", "encoder_weights": None, "classes": 3, **options})
    sizes: Sizes = [(torch.randn(batch, 3, height, side),) for batch, height in ((2, side), (3, other))]
    return calibrated(lively(net), side), sizes


_SHALLOW: Final = {"encoder_depth": 3}
_SMALL: Final = {**_SHALLOW, "decoder_channels": (32, 16, 8)}
SEGMENTATION: Final[Mapping[str, tuple[str, Mapping[str, Any], int, int]]] = {
    "Unet": ("Unet", _SMALL, 32, 48),
    "Unet, attention": (
        "Unet",
        {**_SHALLOW, "decoder_channels": (32, 16, 16), "decoder_attention_type": "scse"},
        32,
        48,
    ),
    "Unet, MobileNet v2": ("Unet", {**_SMALL, "encoder_name": "mobilenet_v2"}, 32, 48),
    "UnetPlusPlus": ("UnetPlusPlus", _SMALL, 32, 48),
    "MAnet": ("MAnet", _SMALL, 32, 48),
    "Linknet": ("Linknet", _SHALLOW, 32, 48),
    "FPN": ("FPN", {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32}, 64, 96),
    # pools to squares of 1, 2, 3 and 6, which the exporter writes where they divide a known height
    "PSPNet": ("PSPNet", {**_SHALLOW, "psp_out_channels": 32}, 48, 48),
    "PAN": ("PAN", {**_SHALLOW, "decoder_channels": 16}, 64, 96),
    "DeepLab v3": ("DeepLabV3", {"decoder_channels": 16}, 64, 96),
    "DeepLab v3 Plus": ("DeepLabV3Plus", {"decoder_channels": 16}, 64, 96),
    "Segformer": ("Segformer", {"decoder_segmentation_channels": 32}, 64, 96),
}


def _monai(kind: str, options: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Any, Sizes]:
    import torch

    torchvision()
    net = getattr(import_module("monai.networks.nets"), kind)(**options)
    return net, [(torch.randn(batch, *shape),) for batch in (2, 3)]


_FLAT: Final = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_SOLID: Final = {**_FLAT, "spatial_dims": 3}
_STEPS: Final = {"channels": (4, 8, 16), "strides": (2, 2)}
_KERNELS: Final = {
    "kernel_size": [3, 3, 3],
    "strides": [1, 2, 2],
    "upsample_kernel_size": [2, 2],
    "filters": [4, 8, 16],
}
_VIT: Final = {"hidden_size": 24, "mlp_dim": 32, "num_heads": 2}
MONAI: Final[Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]]] = {
    "UNet": ("UNet", {**_FLAT, **_STEPS, "num_res_units": 1}, (1, 32, 32)),
    "UNet, volumes": ("UNet", {**_SOLID, **_STEPS, "num_res_units": 1}, (1, 16, 16, 16)),
    "BasicUNet": ("BasicUNet", {**_FLAT, "features": (4, 4, 8, 8, 16, 4)}, (1, 32, 32)),
    "AttentionUnet": ("AttentionUnet", {**_FLAT, **_STEPS}, (1, 32, 32)),
    "DynUNet": ("DynUNet", {**_SOLID, **_KERNELS}, (1, 16, 16, 16)),
    "SegResNet": (
        "SegResNet",
        {**_SOLID, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        (1, 16, 16, 16),
    ),
    "VNet": ("VNet", _FLAT, (1, 32, 32)),
    "AutoEncoder": ("AutoEncoder", {**_FLAT, "channels": (4, 8), "strides": (2, 2)}, (1, 32, 32)),
    "DenseNet": ("DenseNet", {**_SOLID, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)}, (1, 16, 16, 16)),
    "HighResNet": ("HighResNet", _SOLID, (1, 8, 8, 8)),
    "UNETR": (
        "UNETR",
        {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 4, **_VIT},
        (1, 32, 32, 32),
    ),
    "ViT": (
        "ViT",
        {"in_channels": 1, "img_size": (16, 16), "patch_size": 8, "spatial_dims": 2, "num_layers": 2, **_VIT},
        (1, 16, 16),
    ),
}


def _clip(kind: str, part: str, vision: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[Any, Sizes]:
    import torch

    torchvision()
    import open_clip.model as clip

    net = getattr(clip, kind)(
        32,
        {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2, **vision},
        {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2, **text},
    )

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *inputs: Any) -> Any:
            if part == "both":
                return self.net(*inputs)
            return getattr(self.net, f"encode_{part}")(*inputs)

    def drawn(batch: int) -> tuple[Any, ...]:
        images, words = torch.randn(batch, 3, 32, 32), torch.randint(1, 49, (batch, 12))
        return {"image": (images,), "text": (words,)}.get(part, (images, words))

    return Part(), [drawn(2), drawn(3)]


_RESNET: Final = {"layers": (1, 1, 1, 1), "width": 16, "patch_size": None, "head_width": 16}
CLIP: Final[Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]] = {
    "images": ("CLIP", "image", {}, {}),
    "text": ("CLIP", "text", {}, {}),
    "both": ("CLIP", "both", {}, {}),
    "ResNet": ("CLIP", "image", _RESNET, {}),
    "images, mean of tokens": ("CLIP", "image", {"pool_type": "avg"}, {}),
    "images, layer scale": ("CLIP", "image", {"ls_init_value": 0.1}, {}),
    "text, last token": ("CLIP", "text", {}, {"pool_type": "last"}),
    "text, no mask": ("CLIP", "text", {}, {"no_causal_mask": True}),
    "custom text": ("CustomTextCLIP", "both", {}, {}),
}


def _yolo(config: str) -> tuple[Any, Sizes]:
    """A network of ultralytics in the form that its exporter gives to torch's."""
    import torch

    torchvision()
    from ultralytics import YOLO

    net = YOLO(config, verbose=False).model.float().eval()
    for layer in net.modules():
        if hasattr(layer, "export"):
            layer.export, layer.format, layer.dynamic = True, "onnx", False
        if type(layer).__name__ == "C2f":
            layer.forward = layer.forward_split
    return net, [(torch.rand(batch, 3, 64, 64),) for batch in (1, 2)]


YOLO: Final = ("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-cls", "yolov9t", "yolo11n-cls")

REFUSED: Final = {
    "segmentation_models_pytorch: UPerNet / torch.onnx script": "SymbolicValueError: adaptive_avg_pool2d, output size "
    "that are not factor of input size",
}
KINKS: Final = "rounding at a kink: torch's own in float32 are 2e-2 away from its own in float64, these 2e-6"
SCALE: Final = (
    "rounding: by a scale that an instance normalisation undoes, 2e-4 from torch's in float64, torch's own 6e-5"
)
NOTHING: Final = "rounding: those by biases before an instance normalisation are 0, and noise here and in torch"
KNOWN: Final = {
    f"{name} / {SCRIPT}": {"grad": why}
    for name, why in {
        "monai: DynUNet": KINKS,
        "monai: AttentionUnet": NOTHING,
        "monai: UNETR": SCALE,
    }.items()
}

_SEGMENTATION: Final = {name: partial(_segmentation, *row) for name, row in SEGMENTATION.items()}
_MONAI: Final = {name: partial(_monai, *row) for name, row in MONAI.items()}
_CLIP: Final = {name: partial(_clip, *row) for name, row in CLIP.items()}
_YOLO: Final = {name: partial(_yolo, f"{name}.yaml") for name in YOLO}
CASES: Final[tuple[Case, ...]] = (
    # at a kink of one of a million ReLUs, gradients in float32, torch's own as well, are 1e-2 from those in float64
    *library_cases("segmentation_models_pytorch", _SEGMENTATION, KNOWN, REFUSED, (SCRIPT,), slope=5e-2),
    *library_cases("monai", _MONAI, KNOWN, REFUSED, (SCRIPT,), needs=("einops",)),
    *library_cases("open_clip", _CLIP, KNOWN, REFUSED, EXPORTERS),
    *library_cases("ultralytics", _YOLO, KNOWN, REFUSED, (SCRIPT,)),
)
