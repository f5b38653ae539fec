"""Vision: torchvision's and timm's architectures by both of torch's exporters, as small as keeps their structure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from .case import Case, Export
from .torch_exports import DYNAMO, EXPORTERS, SCRIPT, export
from .vision_operators import torchvision

Build = Callable[[Any], Any]


def images(make: Build, side: int, other: int, exporter: str, folder: Path, **options: Any) -> Export:
    """A net of ``torchvision.models`` exported on images: the batch is dynamic, and the height where ``other`` differs.

    Inception's and others' preprocessing aside, images are normalised: standard normal is their range.
    """
    import torch

    torch.manual_seed(0)
    net = make(torchvision().models)
    sizes = [(torch.randn(batch, 3, height, side),) for batch, height in ((2, side), (3, other))]
    return export(net, sizes, folder, exporter, **options)


def lively(net: Any) -> Any:
    """A net whose weights keep the size of numbers: initial ones are often so small that the layers hardly matter."""
    import torch

    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim > 1:
                weight.normal_(0, (weight.numel() / len(weight)) ** -0.5)
    return net


def _narrow(net: Any) -> Any:
    """AlexNet and VGG with a classifier of 32 rather than 4096 numbers a layer."""
    from torch.nn import Linear

    last = [m for m in net.classifier if isinstance(m, Linear)][-1]
    for i, layer in enumerate(net.classifier):
        if isinstance(layer, Linear):
            inner = layer.in_features if layer.in_features != 4096 else 32
            net.classifier[i] = Linear(inner, layer.out_features if layer is last else 32)
    return net


def _mobilenet_v3(m: Any) -> Any:
    rows = ((16, 3, 16, 16, True, "RE", 2, 1), (16, 3, 64, 24, False, "RE", 2, 1), (24, 5, 96, 24, True, "HS", 1, 2))
    settings = [m.mobilenetv3.InvertedResidualConfig(*row, 1.0) for row in rows]
    return m.MobileNetV3(settings, last_channel=64, num_classes=10)


def _efficientnet(m: Any) -> Any:
    part = m.efficientnet.MBConvConfig
    settings = [part(1, 3, 1, 32, 16, 1, 1.0, 1.0), part(6, 3, 2, 16, 24, 2, 1.0, 1.0)]
    return m.EfficientNet(settings, dropout=0.2, last_channel=64, num_classes=10)


def _efficientnet_v2(m: Any) -> Any:
    part, fused = m.efficientnet.MBConvConfig, m.efficientnet.FusedMBConvConfig
    settings = [fused(1, 3, 1, 24, 24, 1), fused(4, 3, 2, 24, 32, 2), part(4, 3, 2, 32, 48, 2)]
    return m.EfficientNet(settings, dropout=0.2, last_channel=64, num_classes=10)


def _whole(make: Callable[..., Any]) -> Any:
    """GoogLeNet and Inception v3, without the classifiers on the side that training has."""
    return lively(make(num_classes=10, aux_logits=False, init_weights=False))


def _regnet(m: Any, se_ratio: float | None) -> Any:
    depth, w_0, w_a, w_m, group = 4, 24, 36.97, 2.5, 8
    parts = m.regnet.BlockParams.from_init_params(depth, w_0, w_a, w_m, group, se_ratio=se_ratio)
    return m.RegNet(parts, num_classes=10)


def _swin_v2(m: Any) -> Any:
    swin = m.swin_transformer
    options = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    # Random scales of attention, too: of parameters with equal values the script exporter writes one.
    return lively(m.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=10, **options))


def _vit(m: Any) -> Any:
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # the script exporter does not know its operator
    return lively(m.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10))


def _convnext(m: Any) -> Any:
    return m.ConvNeXt([m.convnext.CNBlockConfig(16, 32, 1), m.convnext.CNBlockConfig(32, None, 1)], num_classes=10)


CLASSIFICATION: Final[Mapping[str, tuple[Build, int, int]]] = {
    # The classifiers of these two follow an adaptive pool: exporters write it where it divides the feature map.
    "alexnet": (lambda m: _narrow(m.alexnet(num_classes=10)), 224, 224),
    "vgg, batch normalisation": (
        lambda m: _narrow(m.VGG(m.vgg.make_layers([8, "M", 16, "M", 16, "M", 512, "M"], True), num_classes=10)),
        112,
        112,
    ),
    "resnet": (lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), 64, 96),
    "resnext": (
        lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=32, width_per_group=4),
        64,
        96,
    ),
    "densenet": (lambda m: m.DenseNet(8, (2, 2, 2), 16, num_classes=10), 64, 96),
    "mobilenet v2": (
        lambda m: m.MobileNetV2(10, 0.5, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]),
        64,
        96,
    ),
    "mobilenet v3": (_mobilenet_v3, 64, 96),
    "mnasnet": (lambda m: m.MNASNet(0.35, num_classes=10), 64, 96),
    "shufflenet v2": (lambda m: m.ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 64], num_classes=10), 64, 96),
    "squeezenet": (lambda m: m.squeezenet1_1(num_classes=10), 64, 96),
    "efficientnet": (_efficientnet, 64, 96),
    "efficientnet v2": (_efficientnet_v2, 64, 96),
    "googlenet": (lambda m: _whole(m.googlenet), 64, 96),
    "inception v3": (lambda m: _whole(m.inception_v3), 75, 107),
    "regnet x": (partial(_regnet, se_ratio=None), 64, 96),
    "regnet y": (partial(_regnet, se_ratio=0.25), 64, 96),
    "convnext": (_convnext, 64, 96),
    "vit": (_vit, 32, 32),
    "swin": (lambda m: m.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=10), 64, 64),
    "swin v2": (_swin_v2, 64, 64),
    "maxvit": (
        lambda m: m.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10),
        64,
        64,
    ),
}


def calibrated(net: Any, side: int) -> Any:
    """Its batch normalisations with the statistics of a batch, so that numbers neither explode nor vanish."""
    import torch

    for layer in net.eval().modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layer.momentum = None  # the mean of all batches, of one here
            layer.train()
    with torch.no_grad():
        net(torch.randn(8, 3, side, side))
    return net


def _timm(variant: str, options: Mapping[str, Any], side: int, cut: str, _: Any) -> Any:
    """A net of timm: an entry of its registry, or a class after its module; ``cut`` shortens what has no argument."""
    import timm
    import torch

    if "." in variant:
        module, _, name = variant.partition(".")
        net = getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=10, **options)
    else:
        net = timm.create_model(variant, num_classes=10, **options)
    if cut:
        parts = getattr(net, cut)
        if isinstance(parts[0], torch.nn.Sequential):  # stages, of which the first blocks change width and size
            for i, stage in enumerate(parts):
                parts[i] = stage[:1]
        else:
            setattr(net, cut, parts[:2])
    return calibrated(lively(net), side)


_VIT: Final = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_DIMS: Final = (16, 16, 32, 32)
_FOUR: Final = {"depths": (1, 1, 1, 1), "embed_dims": _DIMS}
_LAYERS: Final = {"layers": (1, 1, 1, 1)}
_HEADS: Final = {"num_heads": (1, 1, 2, 2)}
_AT_64: Final = {"img_size": 64}

TIMM: Final[Mapping[str, tuple[str, Mapping[str, Any], int, int, str]]] = {
    "beit": ("beit_base_patch16_224", _VIT, 32, 32, ""),
    "eva02": ("eva02_tiny_patch14_224", _VIT, 32, 32, ""),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", _VIT, 32, 32, ""),
    "cait": ("cait_xxs24_224", {**_VIT, "depth_token_only": 1}, 32, 32, ""),
    "xcit": ("xcit_nano_12_p8_224", _VIT, 32, 32, ""),
    "convmixer": ("convmixer.ConvMixer", {"dim": 32, "depth": 2}, 64, 96, ""),
    "poolformer": ("metaformer.MetaFormer", {"depths": (1, 1, 1, 1), "dims": _DIMS}, 64, 96, ""),
    "mixer": ("mixer_s32_224", _AT_64, 64, 64, "blocks"),
    "gmlp": ("gmlp_ti16_224", _AT_64, 64, 64, "blocks"),
    "resmlp": ("resmlp_12_224", _AT_64, 64, 64, "blocks"),
    "pvt v2": ("pvt_v2_b0", {**_FOUR, **_HEADS}, 64, 64, ""),
    "repvgg": ("repvgg_a0", {}, 64, 96, "stages"),
    "res2net": ("res2net50_26w_4s", _LAYERS, 64, 96, ""),
    "sknet": ("skresnet18", _LAYERS, 64, 96, ""),
    "tresnet": ("tresnet_m", _LAYERS, 64, 64, ""),
    "levit": (
        "levit_128s",
        {"img_size": 64, "embed_dim": (32, 48, 64), "depth": (1, 1, 1), "num_heads": (2, 3, 4), "key_dim": 8},
        64,
        64,
        "",
    ),
    "hiera": ("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)}, 64, 64, ""),
    "focalnet": ("focalnet.FocalNet", {"depths": (1, 1, 1, 1), "embed_dim": 16}, 64, 96, ""),
    "swin v2": (
        "swinv2_tiny_window8_256",
        {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2)},
        64,
        64,
        "",
    ),
    "twins": (
        "twins_svt_small",
        {"img_size": 64, "depths": (1, 1, 2, 2), "embed_dims": _DIMS, **_HEADS},
        64,
        64,
        "",
    ),
    "crossvit": (
        "crossvit_tiny_240",
        {
            "img_size": 48,
            "img_scale": (1.0, 1.0),
            "patch_size": (12, 16),
            "embed_dim": (32, 48),
            "depth": ((1, 2, 0),),
            "num_heads": (2, 2),
            "mlp_ratio": (2, 2, 1),
        },
        48,
        48,
        "",
    ),
    "coat": (
        "coat_tiny",
        {"img_size": 64, "embed_dims": (16,) * 4, "serial_depths": (1,) * 4, "parallel_depth": 1, "num_heads": 8},
        64,
        64,
        "",
    ),
    "tiny_vit": (
        "tiny_vit_5m_224",
        {"depths": (1,) * 4, "embed_dims": _DIMS, "num_heads": (1, 1, 2, 2), "window_sizes": (4, 4, 4, 2)},
        64,
        64,
        "",
    ),
    "edgenext": ("edgenext_xx_small", {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}, 64, 96, ""),
    "sequencer": ("sequencer2d_s", {**_LAYERS, "embed_dims": _DIMS, "hidden_sizes": (8, 8, 16, 16)}, 64, 64, ""),
    "davit": ("davit_tiny", {**_FOUR, **_HEADS}, 64, 64, ""),
    "nest": (
        "nest.Nest",
        {"img_size": 64, "depths": (1,) * 3, "embed_dims": _DIMS[1:], "num_heads": (1, 2, 2)},
        64,
        64,
        "",
    ),
    "mobilevit": ("mobilevit_xxs", {}, 64, 64, ""),
}


ONLY: Final[Mapping[str, str]] = {"eva02": DYNAMO, **dict.fromkeys(("hiera", "nest", "twins"), SCRIPT)}
"""Those of timm by one exporter, for the time that they take; or the other refuses them."""

REFUSED: Final = {
    "timm: eva02 / script": "TypeError: scaled_dot_product_attention(): argument 'is_causal' must be bool, not Tensor",
    "timm: volo / script": "TypeError: 'NoneType' object is not subscriptable, translating col2im",
    "timm: hiera, nest, twins / dynamo": "AssertionError: only 4D query, key, and value are supported",
}


KNOWN: Final[Mapping[tuple[str, str], Mapping[str, str]]] = {
    ("googlenet", SCRIPT): {
        "grad": "torch's own by the images in float32 is 2e-3 away from its own in float64, and this one 5e-7"
    },
    ("levit", DYNAMO): {"grad": "rounding: in float32 torch's own are 2e-4 away from its own in float64, these 3e-4"},
}


def _cases(family: str, rows: Mapping[str, tuple[Build, int, int]], *needs: str) -> Iterator[Case]:
    for name, row in rows.items():
        for exporter in EXPORTERS:
            if family != "timm" or ONLY.get(name, exporter) == exporter:
                yield Case(
                    family,
                    name,
                    exporter,
                    partial(images, *row, exporter),
                    needs,
                    known=KNOWN.get((name, exporter), {}),
                )


CASES: Final = (
    *_cases("torchvision: classification", CLASSIFICATION, "torchvision"),
    *_cases(
        "timm",
        {
            name: (partial(_timm, variant, options, side, cut), side, other)
            for name, (variant, options, side, other, cut) in TIMM.items()
        },
        "torchvision",
        "timm",
    ),
)
