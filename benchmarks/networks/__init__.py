"""Synthetic networks with seeded random weights: an ONNX file, and the same written by hand in JAX.

Hand-written JAX is the limit of a compiler to XLA: if a file is slower, this compiler can be improved;
if both are slower than onnxruntime, XLA is the limit.
"""

from __future__ import annotations

from typing import Final

from . import convolutional, quantised, recurrent, transformers
from .network import Make, Network

__all__ = ["NETWORKS", "Make", "Network"]

NETWORKS: Final[dict[str, Make]] = {
    "mlp": convolutional.mlp,
    "resnet50": convolutional.resnet50,
    "mobilenet_v2": convolutional.mobilenet_v2,
    "efficientnet": convolutional.efficientnet,
    "unet": convolutional.unet,
    "vit": transformers.vit,
    "bert": transformers.bert,
    "gpt2": transformers.gpt2,
    "gpt2_step": transformers.gpt2_step,
    "lstm": recurrent.lstm,
    "gru": recurrent.gru,
    "int8_qdq": quantised.qdq,
    "int8_qlinear": quantised.qlinear,
    "int8_dynamic": quantised.dynamic,
}
