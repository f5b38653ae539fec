"""Diffusion: the parts of diffusers' pipelines by both of torch's exporters, each in a tiny configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from .case import Case, Export
from .torch_exports import DYNAMO, EXPORTERS, SCRIPT, export
from .vision import lively
from .vision_operators import torchvision

SIZES: Final = {"B": (2, 3), "L": (5, 7), "S": (16, 24), "D": (32, 48), "T": (2, 3), "N": (64, 128)}
"""Axes that differ: batch, length of a text, side of an image, its double, frames, samples of sound."""


def _part(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, str], use: Callable[..., Any] | None = None
) -> Any:
    """A class of diffusers as a module with positional arguments, named by ``shapes``."""
    torchvision()  # which transformers imports, for diffusers
    import diffusers
    import torch

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = lively(getattr(diffusers, name)(**config))

        def forward(self, *arguments: Any) -> Any:
            if use is not None:
                return use(self.net, *arguments)
            return self.net(**dict(zip(shapes, arguments, strict=True)), return_dict=False)

    return Part()


def _drawn(kind: str, *axes: str, size: int) -> Any:
    """A tensor: "f" standard normal, "u" between 0 and 1, "t" time steps, "i" small indices."""
    import torch

    shape = [SIZES[a][size] if a in SIZES else int(a) for a in axes]
    if kind in "fu":
        return torch.randn(shape) if kind == "f" else torch.rand(shape)
    return torch.randint(0, 1000 if kind == "t" else 10, shape)


def _export(row: tuple[Any, ...], exporter: str, folder: Path) -> Export:
    import torch

    name, config, shapes, *use = row
    torch.manual_seed(0)
    part = _part(name, config, shapes, *use)
    sizes = [tuple(_drawn(*spec.split(), size=size) for spec in shapes.values()) for size in (0, 1)]
    options = {}
    if exporter == DYNAMO:  # one argument for it: all of ``*arguments``
        axes = [
            {i: torch.export.Dim.AUTO for i in range(a.ndim) if a.shape[i] != b.shape[i]}
            for a, b in zip(*sizes, strict=True)
        ]
        options["dynamic_shapes"] = (tuple(axes),)
    return export(part, sizes, folder, exporter, names=list(shapes), **options)


_BLOCKS: Final = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_CROSS: Final = {**_BLOCKS, "cross_attention_dim": 16, "attention_head_dim": 8}
_DOWN_CROSS: Final = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
_CODER: Final = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS: Final = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
_TEXT: Final = {"encoder_hidden_states": "f B L 16"}

PARTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "UNet2DModel": (
        "UNet2DModel",
        {
            **_BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": "f B 3 S S", "timestep": "t B"},
    ),
    "UNet1DModel": (
        "UNet1DModel",
        {
            "block_out_channels": (32, 32),
            "extra_in_channels": 64,  # of the embedded time step, twice the first block's
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        {"sample": "f B 2 N", "timestep": "t B"},
    ),
    "UNet2DConditionModel": (
        "UNet2DConditionModel",
        {**_CROSS, **_DOWN_CROSS, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {"sample": "f B 4 S S", "timestep": "t B", **_TEXT},
    ),
    "AutoencoderKL, encoder": (
        "AutoencoderKL",
        {**_BLOCKS, **_CODER},
        {"sample": "f B 3 S S"},
        lambda net, x: net.encode(x).latent_dist.parameters,
    ),
    "AutoencoderKL, decoder": (
        "AutoencoderKL",
        {**_BLOCKS, **_CODER},
        {"latents": "f B 4 S S"},
        lambda net, z: net.decode(z).sample,
    ),
    "VQModel": ("VQModel", {**_BLOCKS, **_CODER, "num_vq_embeddings": 16}, {"sample": "f B 3 S S"}),
    "DiTTransformer2DModel": (
        "DiTTransformer2DModel",
        {**_HEADS, "sample_size": 8},
        {"hidden_states": "f B 4 8 8", "timestep": "t B", "class_labels": "i B"},
    ),
    "SD3Transformer2DModel": (
        "SD3Transformer2DModel",
        {
            **_HEADS,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        {"hidden_states": "f B 4 S S", **_TEXT, "pooled_projections": "f B 8", "timestep": "t B"},
    ),
    "FluxTransformer2DModel": (
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (4, 4, 8),
        },
        {
            "hidden_states": "f B 6 4",
            **_TEXT,
            "pooled_projections": "f B 8",
            "timestep": "u B",
            "img_ids": "f 6 3",
            "txt_ids": "f L 3",
        },
    ),
    "ControlNetModel": (
        "ControlNetModel",
        {**_CROSS, **_DOWN_CROSS, "conditioning_embedding_out_channels": (8, 16)},
        {"sample": "f B 4 S S", "timestep": "t B", **_TEXT, "controlnet_cond": "f B 3 D D"},
    ),
    "T2IAdapter": (
        "T2IAdapter",
        {"channels": [8, 16, 16, 16], "num_res_blocks": 1, "downscale_factor": 4},
        {"x": "f B 3 D D"},
        lambda net, x: net(x),
    ),
    "ConsistencyDecoderVAE, decoder": (
        "ConsistencyDecoderVAE",
        {
            "encoder_block_out_channels": (8, 8),
            "encoder_norm_num_groups": 4,
            "encoder_layers_per_block": 1,
            "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
            "decoder_block_out_channels": (8, 16),
            "decoder_norm_num_groups": 4,
            "decoder_layers_per_block": 1,
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
        },
        {"sample": "f B 7 S S", "timestep": "t B"},
        lambda net, x, t: net.decoder_unet(x, t).sample,
    ),
    "AutoencoderTiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": "u B 3 S S"},
    ),
}

_DETACHED: Final = "torch's exporters write x + detach(y - x), how gradients pass a code book, without the detach"
KNOWN: Final[Mapping[str, Mapping[str, str]]] = {"VQModel": {"grad": _DETACHED}}

ONLY: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "AutoencoderKL, decoder",
            "AutoencoderTiny",
            "ConsistencyDecoderVAE, decoder",
            "ControlNetModel",
            "DiTTransformer2DModel",
            "SD3Transformer2DModel",
            "T2IAdapter",
            "VQModel",
        ),
        SCRIPT,
    ),
    **dict.fromkeys(("FluxTransformer2DModel", "UNet1DModel"), DYNAMO),
}
"""Those by one exporter, for the time that they take; or the other refuses them."""

REFUSED: Final = {
    "diffusers: FluxTransformer2DModel / script": "UnsupportedOperatorError: 'aten::rms_norm' to ONNX opset version 20",
    "diffusers: UNet1DModel / script": "SymbolicValueError: ONNX export of convolution for kernel of unknown shape",
}

CASES: Final = tuple(
    Case(
        "diffusers",
        name,
        exporter,
        partial(_export, row, exporter),
        ("torchvision", "diffusers"),
        known=KNOWN.get(name, {}),
    )
    for name, row in PARTS.items()
    for exporter in EXPORTERS
    if ONLY.get(name, exporter) == exporter
)
