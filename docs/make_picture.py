"""Draw docs/picture.png: what goes in, what comes out, and what the demo's model makes of digits.

python -m docs.make_picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from onnx2jax import demo

PICTURE = Path(__file__).with_name("picture.png")
INK, BLUE, PALE = "#1a237e", "#3f51b5", "#eef1fb"
USES = ("jit", "grad", "vmap", "sharding", "export", "training")


def main() -> None:
    """Compute and draw, with letters that a phone's width of 390 pixels leaves legible."""
    found = demo.compute()
    figure = Figure(figsize=(8, 6.2), facecolor="white")
    _flow(figure.add_axes((0.01, 0.4, 0.98, 0.59)))
    _digits(figure, found)
    figure.savefig(PICTURE, dpi=150)


def _flow(axes: Any) -> None:
    axes.set(xlim=(0, 78), ylim=(0, 36))
    axes.axis("off")
    _box(axes, (1, 10, 21, 22), "model.onnx", "from PyTorch,\nTensorFlow,\nscikit-learn, ...", PALE, INK)
    _box(axes, (33, 10, 20, 22), "onnx2jax", "each node\nbecomes JAX;\nXLA compiles", BLUE, "white")
    for k, use in enumerate(USES):
        y = 33 - 6 * k
        _box(axes, (63, y - 2, 14, 4), use, "", PALE, INK)
        _arrow(axes, (53.6, 21), (62.6, y), BLUE)
    _arrow(axes, (22.6, 24), (32.6, 24), BLUE)
    axes.text(27.5, 25.2, "convert", ha="center", fontsize=13, color=INK)
    _arrow(axes, (32.6, 18), (22.6, 18), BLUE)
    axes.text(27.5, 14.8, "save", ha="center", fontsize=13, color=INK)
    axes.text(27, 5.5, "a pure function of weights and inputs,", ha="center", fontsize=14, color=INK)
    axes.text(27, 2, "on CPU, GPU and TPU", ha="center", fontsize=14, color=INK)


def _box(axes: Any, place: tuple[float, float, float, float], name: str, what: str, fill: str, ink: str) -> None:
    x, y, width, height = place
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.3", facecolor=fill, edgecolor=BLUE))
    middle = y + height / 2 + (6 if what else 0)
    axes.text(x + width / 2, middle, name, ha="center", va="center", fontsize=15, weight="bold", color=ink)
    axes.text(x + width / 2, middle - 9, what, ha="center", va="center", fontsize=13, color=ink)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=colour, linewidth=1.5))


def _digits(figure: Figure, found: demo.Findings) -> None:
    title = "what the demo's model reads, and the pixels that support it"
    figure.text(0.5, 0.355, title, ha="center", fontsize=14, color=INK)
    for k in range(8):
        left = 0.02 + 0.1215 * k
        digit = figure.add_axes((left, 0.155, 0.11, 0.142))
        heat = figure.add_axes((left, 0.005, 0.11, 0.142))
        digit.imshow(found.samples.images[k, 0], cmap="gray_r")
        digit.set_title(str(found.predictions[k]), fontsize=14, color=INK, pad=3)
        bound = abs(found.saliency[k]).max()
        heat.imshow(found.saliency[k, 0], cmap="RdBu_r", vmin=-bound, vmax=bound)
        for axis in (digit, heat):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color("lightgray")


if __name__ == "__main__":
    main()
